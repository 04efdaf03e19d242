"""What must travel, from whom to whom, so that every rank has its generation shard (or its training shard again).

Made from metadata only, the same on every rank. Weights that are divided alike are planned together: a transfer is a range of
the divided axis, and of the experts, as a fraction, for all weights of its class.

- *alias*: the shard is the same before and after: nothing is copied.
- *regroup*: the rank keeps what it has and receives the rest (HybridFlow's case).
- *move*: part of what it has is needed elsewhere and not here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.layout import Layout
from engine.reshard.assignment import Assignment, Ints, generation, training
from engine.weights.architecture import Architecture
from engine.weights.map import Weight, weight_map

RANKS_PER_NODE = 8

TRANSFER = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("start", np.int32),
        ("stop", np.int32),
        ("first_expert", np.int32),
        ("last_expert", np.int32),
        ("round", np.int8),
    ]
)
"""start, stop: in units of the class's axis grain; experts likewise. round 1 is sent on by a rank that received in round 0."""


class Division(NamedTuple):
    """How the weights of a class are divided.

    Attributes:
        kind: "dense" (over tensor parallel ranks), "experts" (over expert ranks too) or "whole".
        units: the most parts (key and value heads), 0: no limit.
        source_stages, target_stages: pipeline stages that hold them before and after.
    """

    kind: str
    units: int
    source_stages: tuple[int, ...]
    target_stages: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """Pieces of one weight that belong to a class: all, or for queries, keys and values some."""

    weight: Weight
    pieces: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """Elements of these pieces, whole, of all experts."""
        row = self.weight.pieces[0]
        return sum(self.weight.numbers(row[number]) for number in self.pieces) * len(self.weight.pieces)


@dataclass
class WeightClass:
    """Weights divided alike, and what travels of them.

    Attributes:
        grain, expert_grain: parts of the axis, and of the experts, in which transfers are counted.
        numbers: elements of all members together, whole.
        transfers: [n] TRANSFER, those with source == target being copies on the rank.
    """

    division: Division
    members: list[Member]
    numbers: int
    grain: int
    expert_grain: int
    transfers: NDArray[Any]

    @cached_property
    def sizes(self) -> Ints:
        """Elements of each transfer."""
        t = self.transfers
        part = (t["stop"] - t["start"]).astype(np.int64) * (t["last_expert"] - t["first_expert"])
        return part * (self.numbers // (self.grain * self.expert_grain))


@dataclass(frozen=True)
class Plan:
    """Every transfer of one direction.

    Attributes:
        source, target: assignments before and after.
        classes: weights by the way they are divided.
        ranks_per_node: consecutive ranks that share a node.
        bytes_per_number: 2 for bfloat16, 4 for float32.
        seconds: that planning took.
    """

    source: Assignment
    target: Assignment
    classes: list[WeightClass]
    ranks_per_node: int
    bytes_per_number: int
    seconds: float

    @property
    def world_size(self) -> int:
        return self.source.layout.world_size

    def received(self) -> Ints:
        """[world] bytes that each rank receives from others."""
        return self.traffic["received_node"] + self.traffic["received_network"]

    @cached_property
    def traffic(self) -> dict[str, Ints]:
        """[world] bytes of each rank: received and sent inside its node and over the network, and copied on the device."""
        names = ("received_node", "received_network", "sent_node", "sent_network", "local")
        total = {name: np.zeros(self.world_size, dtype=np.int64) for name in names}
        for part in self.classes:
            source, target = part.transfers["source"], part.transfers["target"]
            sizes = part.sizes * self.bytes_per_number

            def add(name: str, end: NDArray[Any], chosen: NDArray[np.bool_], sizes: Ints = sizes) -> None:
                total[name] += np.bincount(end[chosen], sizes[chosen], self.world_size).astype(np.int64)

            across = source // self.ranks_per_node != target // self.ranks_per_node
            for link, chosen in (("node", ~across & (source != target)), ("network", across)):
                add(f"received_{link}", target, chosen)
                add(f"sent_{link}", source, chosen)
            if part.division not in self.resident:
                add("local", target, source == target)
        return total

    def held(self, which: Assignment, only: frozenset[Division] | None = None) -> Ints:
        """[world] bytes of weights that each rank holds under the source or the target assignment; of some classes if asked."""
        total = np.zeros(self.world_size, dtype=np.int64)
        for part in self.classes:
            if only is not None and part.division not in only:
                continue
            box, stages = (
                boxes(part.division, which, part.grain, part.expert_grain),
                _stages(part.division, which, self),
            )
            size = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) * np.isin(which.columns["pp"], stages)
            total += size * (part.numbers // (part.grain * part.expert_grain))
        return total * self.bytes_per_number

    def lower_bound(self) -> Ints:
        """[world] bytes of the target shard that a rank does not hold before: nobody can receive less."""
        kept = np.zeros(self.world_size, dtype=np.int64)
        for part in self.classes:
            kept += _kept(part.division, part.grain, part.expert_grain, self.source, self.target) * (
                part.numbers // (part.grain * part.expert_grain)
            )
        return self.held(self.target) - kept * self.bytes_per_number

    @cached_property
    def resident(self) -> frozenset[Division]:
        """Classes whose memory is used by both sides, so that nothing of them is copied.

        Megatron keeps dense weights in one stretch of memory and, under expert parallelism, experts in another; a stretch is
        shared when all that is in it is the same shard on every rank before and after.
        """
        apart = max(self.source.layout.ep, self.target.layout.ep) > 1
        stretches: dict[bool, list[WeightClass]] = {}
        for part in self.classes:
            stretches.setdefault(apart and part.division.kind == "experts", []).append(part)
        shared = [parts for parts in stretches.values() if all(self.aliased(part) for part in parts)]
        return frozenset(part.division for parts in shared for part in parts)

    def aliased(self, part: WeightClass) -> bool:
        """On every rank the shard is the same before and after."""
        if part.division.source_stages != part.division.target_stages:
            return False
        before, after = (
            boxes(part.division, side, part.grain, part.expert_grain) for side in (self.source, self.target)
        )
        return np.array_equal(before, after) and np.array_equal(self.source.columns["pp"], self.target.columns["pp"])

    def regime(self, part: WeightClass) -> str:
        """alias, regroup (all that a rank has stays where it is) or move."""
        if self.aliased(part):
            return "alias"
        before = boxes(part.division, self.source, part.grain, part.expert_grain)
        size = (before[:, 1] - before[:, 0]) * (before[:, 3] - before[:, 2])
        size = size * np.isin(self.source.columns["pp"], part.division.source_stages)
        kept = _kept(part.division, part.grain, part.expert_grain, self.source, self.target)
        return "regroup" if np.array_equal(kept, size) else "move"


def plan_generation(
    arch: Architecture, train: Layout, generate: Layout, *, bytes_per_number: int, ranks_per_node: int = RANKS_PER_NODE
) -> Plan:
    """The way from training to generation; `reversed_plan` is the way back.

    Raises:
        ValueError: the layouts have different world sizes.
    """
    began = time.perf_counter()
    before = training(train)
    weights = weight_map(arch)
    members = _members(weights, arch, train, generate)

    def overlap(candidate: Assignment) -> int:
        total = 0
        for division, (numbers, _) in members.items():
            grain, expert_grain = _grains(division, train, generate)
            kept = _kept(division, grain, expert_grain, before, candidate)
            total += int(kept.sum()) * (numbers // (grain * expert_grain))
        return total

    after = generation(generate, before, overlap, ranks_per_node)
    return _plan(members, before, after, ranks_per_node, bytes_per_number, began)


def reversed_plan(plan: Plan) -> Plan:
    """The way back: the same classes, from the target assignment to the source assignment."""
    began = time.perf_counter()
    members = {
        part.division._replace(source_stages=part.division.target_stages, target_stages=part.division.source_stages): (
            part.numbers,
            part.members,
        )
        for part in plan.classes
    }
    return _plan(members, plan.target, plan.source, plan.ranks_per_node, plan.bytes_per_number, began)


def _plan(
    members: dict[Division, tuple[int, list[Member]]],
    source: Assignment,
    target: Assignment,
    ranks_per_node: int,
    bytes_per_number: int,
    began: float,
) -> Plan:
    classes = []
    for division, (numbers, weights) in members.items():
        grain, expert_grain = _grains(division, source.layout, target.layout)
        transfers = _transfers(division, source, target, grain, expert_grain, ranks_per_node)
        classes.append(WeightClass(division, weights, numbers, grain, expert_grain, transfers))
    return Plan(source, target, classes, ranks_per_node, bytes_per_number, time.perf_counter() - began)


def _members(
    weights: Iterable[Weight], arch: Architecture, source: Layout, target: Layout
) -> dict[Division, tuple[int, list[Member]]]:
    """Division to (elements of all members, members), in the weight map's order."""
    found: dict[Division, tuple[int, list[Member]]] = {}
    layers = [side.stage_of_layer(arch.layers) for side in (source, target)]
    for weight in weights:
        stages = [weight.stages(side, stage) for side, stage in zip((source, target), layers, strict=True)]
        kind = "experts" if weight.stacked else "whole" if weight.axis is None else "dense"
        row = weight.pieces[0]
        for units in dict.fromkeys(piece.units for piece in row):
            chosen = tuple(number for number, piece in enumerate(row) if piece.units == units)
            division = Division(kind, units, stages[0], stages[1])
            numbers, list_ = found.get(division, (0, []))
            member = Member(weight, chosen)
            found[division] = numbers + member.numbers, [*list_, member]
    return found


def _parts(division: Division, layout: Layout) -> tuple[int, int]:
    """In how many different parts a layout divides the axis, and the experts."""
    if division.kind == "whole":
        return 1, 1
    if division.kind == "experts":
        return layout.expert_tp, layout.ep
    return (min(layout.tp, division.units) if division.units else layout.tp), 1


def _grains(division: Division, source: Layout, target: Layout) -> tuple[int, int]:
    (a, ea), (b, eb) = _parts(division, source), _parts(division, target)
    return math.lcm(a, b), math.lcm(ea, eb)


def boxes(division: Division, side: Assignment, grain: int, expert_grain: int) -> Ints:
    """[world, 4] start, stop, first and last expert of the shard of each rank whose stage holds the class."""
    parts, expert_parts = _parts(division, side.layout)
    at = side.columns
    if division.kind == "whole":
        part = expert = np.zeros_like(at["tp"])
    elif division.kind == "experts":
        part, expert = at["etp"], at["ep"]
    else:
        part, expert = at["tp"] * parts // side.layout.tp, np.zeros_like(at["tp"])
    share, expert_share = grain // parts, expert_grain // expert_parts
    return np.stack((part * share, (part + 1) * share, expert * expert_share, (expert + 1) * expert_share), 1)


def _stages(division: Division, side: Assignment, plan: Plan) -> tuple[int, ...]:
    return division.source_stages if side is plan.source else division.target_stages


def _kept(division: Division, grain: int, expert_grain: int, source: Assignment, target: Assignment) -> Ints:
    """[world] grains of the target shard that each rank holds before."""
    before, after = (boxes(division, side, grain, expert_grain) for side in (source, target))
    both = np.isin(source.columns["pp"], division.source_stages) & np.isin(target.columns["pp"], division.target_stages)
    length = np.minimum(before[:, 1], after[:, 1]) - np.maximum(before[:, 0], after[:, 0])
    experts = np.minimum(before[:, 3], after[:, 3]) - np.maximum(before[:, 2], after[:, 2])
    return np.maximum(length, 0) * np.maximum(experts, 0) * both


def _transfers(
    division: Division, source: Assignment, target: Assignment, grain: int, expert_grain: int, ranks_per_node: int
) -> NDArray[Any]:
    """Every cell of every rank's target shard once: from the rank itself where it has it, else from the nearest holder."""
    holders = _ranks_by_shard(division, source, division.source_stages)
    wanting = _ranks_by_shard(division, target, division.target_stages)
    edges = [_parts(division, side.layout) for side in (source, target)]
    starts, experts = (
        np.unique([n * part // parts for parts in pair for part in range(parts + 1)])
        for n, pair in ((grain, (edges[0][0], edges[1][0])), (expert_grain, (edges[0][1], edges[1][1])))
    )
    dp, found = source.columns["dp"], []
    for number, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for first, last in zip(experts[:-1], experts[1:], strict=True):
            keys = [(start * parts // grain, first * expert_parts // expert_grain) for parts, expert_parts in edges]
            cell = (int(start), int(stop), int(first), int(last))
            have, want = holders[keys[0]], wanting[keys[1]]
            found.append(_cell(cell, have, want, dp, ranks_per_node, number + int(first)))
    return np.concatenate(found)


def _ranks_by_shard(division: Division, side: Assignment, stages: tuple[int, ...]) -> dict[tuple[int, int], Ints]:
    """Part and expert part to the ranks of some stages that hold them, ascending."""
    parts, expert_parts = _parts(division, side.layout)
    ranks = np.flatnonzero(np.isin(side.columns["pp"], stages))
    box = boxes(division, side, parts, expert_parts)[ranks]
    number = box[:, 0] * expert_parts + box[:, 2]
    order = np.argsort(number, kind="stable")
    cuts = np.searchsorted(number[order], np.arange(parts * expert_parts + 1))
    groups = (ranks[order[a:b]] for a, b in zip(cuts[:-1], cuts[1:], strict=True))
    return {divmod(index, expert_parts): group for index, group in enumerate(groups)}


def _cell(
    cell: tuple[int, int, int, int], have: Ints, want: Ints, dp: Ints, ranks_per_node: int, turn: int
) -> NDArray[Any]:
    """Who gives a cell to whom.

    A rank that has it keeps it. Otherwise a holder of the same node gives it, if there is one the one of the same data
    parallel replica, then the nearest. To a node without a holder it travels once (round 0) and is passed on there (round 1).
    """
    out = np.zeros(len(want), TRANSFER)
    out["start"], out["stop"], out["first_expert"], out["last_expert"] = cell
    own = _among(want, have)
    rest = want[~own]
    near = _among(rest // ranks_per_node, have // ranks_per_node)
    far = rest[~near]
    leaders = _leaders(far, ranks_per_node, turn)
    followers = far[~_among(far, leaders)]
    direct = np.concatenate((rest[near], leaders))
    passed_on = _leader_of(followers, leaders, ranks_per_node)
    out["target"] = np.concatenate((want[own], direct, followers))
    out["source"] = np.concatenate((want[own], _nearest(direct, have, dp, ranks_per_node), passed_on))
    out["round"][len(want) - len(followers) :] = 1
    return out


def _among(values: Ints, ascending: Ints) -> NDArray[np.bool_]:
    """Which values are among some ascending ones."""
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return ascending[places] == values


def _nearest(receiving: Ints, have: Ints, dp: Ints, ranks_per_node: int) -> Ints:
    if not len(receiving):
        return receiving
    world = len(dp)
    far = receiving[:, None] // ranks_per_node != have[None] // ranks_per_node
    other = dp[receiving][:, None] != dp[have][None]
    distance = np.abs(receiving[:, None] - have[None])
    return have[np.argmin((far * 2 + other) * world + distance, 1)]


def _leaders(ranks: Ints, ranks_per_node: int, turn: int) -> Ints:
    """One rank of each node, another one for another cell, so that not always the same one receives for its node."""
    nodes, first, count = np.unique(ranks // ranks_per_node, return_index=True, return_counts=True)
    return ranks[first + turn % np.maximum(count, 1)] if len(nodes) else ranks


def _leader_of(followers: Ints, leaders: Ints, ranks_per_node: int) -> Ints:
    return (
        leaders[np.searchsorted(leaders // ranks_per_node, followers // ranks_per_node)]
        if len(followers)
        else followers
    )
