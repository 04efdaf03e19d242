"""Carry out a plan on one rank: copies on the rank, and messages in buckets between ranks.

At most one bucket of memory is used beside the two layouts: two halves, so that one is being filled from the network while the
other is copied to its place. The buckets are cut from the plan alone, so every rank cuts them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.reshard.assignment import Assignment
from engine.reshard.plan import Member, Plan, WeightClass
from engine.reshard.slices import Cell, cell_views, split

BUCKET_BYTES = 1 << 28


@dataclass
class Messages:
    """What one rank copies, sends and receives in one round of one bucket; views, by peer, in the plan's order."""

    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sends: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def numbers(self) -> int:
        """Elements sent and received."""
        return sum(view.numel() for end in (self.sends, self.receives) for views in end.values() for view in views)


class Execution:
    """A plan bound to the tensors of this rank. The tensors' storage may come and go; their views stay valid.

    Args:
        plan: the same on every rank.
        rank: this one.
        source, target: weight map name to this rank's tensor before and after.
        bucket_bytes: memory for messages in flight.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._plan, self._rank, self._source, self._target = plan, rank, source, target
        self._half = bucket_bytes // 2
        buckets = [self._bucket(items) for items in _buckets(plan, self._half)]
        self.phases = list(_interleaved(buckets))
        tensors = [*source.values(), *target.values()]
        self._like = tensors[0] if tensors else torch.empty(0)
        self._staging: list[Tensor] = []

    def run(self) -> None:
        """Do it. Every rank must call it; the target's tensors then hold their shards."""
        size = max((phase.numbers for phase in self.phases), default=0)
        self._staging = [self._buffer(size) for _ in range(2)]
        previous: Flight | None = None
        with torch.no_grad():
            for number, messages in enumerate(self.phases):
                flight = Flight(messages, self._staging[number % 2])
                for there, here in messages.copies:
                    there.copy_(here)
                if previous is not None:
                    previous.land()
                previous = flight
            if previous is not None:
                previous.land()
        self._staging = []

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._like.dtype, device=self._like.device)

    def _bucket(self, items: list[Item]) -> tuple[Messages, Messages]:
        rounds = Messages(), Messages()
        for item in items:
            self._add(item, rounds)
        return rounds

    def _add(self, item: Item, rounds: tuple[Messages, Messages]) -> None:
        name, transfers = item.member.weight.megatron, item.part.transfers
        if name not in self._source and name not in self._target:
            return
        mine = (transfers["source"] == self._rank) | (transfers["target"] == self._rank)
        for transfer in transfers[mine].tolist():
            source, target, *cell, round_ = transfer
            messages = rounds[round_]
            if target == self._rank:
                here = self._views(self._target, self._plan.target, item, Cell(*cell))
            if source == self._rank:
                side = self._plan.target if round_ else self._plan.source
                there = self._views(self._target if round_ else self._source, side, item, Cell(*cell))
            if source == target:
                messages.copies += zip(here, there, strict=True)
            elif target == self._rank:
                messages.receives[source] += here
            else:
                messages.sends[target] += there

    def _views(self, tensors: Mapping[str, Tensor], side: Assignment, item: Item, cell: Cell) -> list[Tensor]:
        weight = item.member.weight
        shard = weight.shard(side.layout, side.coordinates(self._rank))
        views = cell_views(tensors[weight.megatron], item.member, shard, item.part, cell)
        return [split(view, item.splits, item.split) for view in views]


class Flight:
    """One round of one bucket under way: sent from, and received into, a staging buffer."""

    def __init__(self, messages: Messages, staging: Tensor) -> None:
        self._receives: list[tuple[Tensor, list[Tensor]]] = []
        operations, start = [], 0
        for ends, operation in ((messages.sends, dist.isend), (messages.receives, dist.irecv)):
            for peer, views in sorted(ends.items()):
                stop = start + sum(view.numel() for view in views)
                flat = staging[start:stop]
                if operation is dist.isend:
                    torch.cat([view.reshape(-1) for view in views], out=flat)
                else:
                    self._receives.append((flat, views))
                operations.append(dist.P2POp(operation, flat, peer))
                start = stop
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def land(self) -> None:
        """Wait, and copy what came to its place."""
        for work in self._works:
            work.wait()
        for flat, views in self._receives:
            for view, values in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(values.view(view.shape))


@dataclass(frozen=True)
class Item:
    """One weight of a class, or one of several slices of a weight whose traffic would not fit a bucket."""

    part: WeightClass
    member: Member
    splits: int = 1
    split: int = 0


def _buckets(plan: Plan, limit: int) -> Iterator[list[Item]]:
    """Items in the plan's order, cut where the busiest rank would exceed `limit` bytes of messages in a round."""
    bucket: list[Item] = []
    load = np.zeros(plan.world_size)
    for part in plan.classes:
        if part.division in plan.resident:
            continue
        share = _traffic(part, plan.world_size) / part.numbers
        for member in part.members:
            traffic = share * member.numbers * plan.bytes_per_number
            splits = max(1, int(np.ceil(traffic.max() / limit)))
            for number in range(splits):
                if bucket and (load + traffic / splits).max() > limit:
                    yield bucket
                    bucket, load = [], np.zeros(plan.world_size)
                bucket.append(Item(part, member, splits, number))
                load = load + traffic / splits
    if bucket:
        yield bucket


def _traffic(part: WeightClass, world_size: int) -> np.ndarray:
    """[world] elements sent and received by each rank in the busier round."""
    transfers = part.transfers
    rounds = np.zeros((2, world_size))
    for round_ in (0, 1):
        chosen = (transfers["source"] != transfers["target"]) & (transfers["round"] == round_)
        for end in ("source", "target"):
            rounds[round_] += np.bincount(transfers[end][chosen], part.sizes[chosen], world_size)
    return rounds.max(0)


def _interleaved(buckets: list[tuple[Messages, Messages]]) -> Iterator[Messages]:
    """Rounds in an order in which a bucket's second round is sent only after its first has landed.

    A round lands while the next one in this order is under way, so the second round of a bucket comes after the first of the
    following one. Rounds without messages are left out on all ranks alike only where no rank has any, hence kept.
    """
    for number, (first, _) in enumerate(buckets):
        yield first
        if number:
            yield buckets[number - 1][1]
    if buckets:
        yield Messages()  # lets the last first round land
        yield buckets[-1][1]
