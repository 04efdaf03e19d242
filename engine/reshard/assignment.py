"""Which part of the model each rank holds, in training and in generation.

In training Megatron decides. In generation there is a choice, and it decides how much must travel: HybridFlow (arXiv
2409.19256, section 5.3) takes the ranks of a generation tensor parallel group at interval t / t_g, so that what a rank trains
lies inside what it generates with. Here every assignment of that kind is tried and the one that moves least is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.layout import Coordinates, Layout

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Assignment:
    """A layout and the place of every rank in it.

    Attributes:
        layout: the sizes.
        order: ranks in the layout's own order; place v of the layout belongs to rank order[v].
        at: [world, 5] the coordinates of each rank, as in `Coordinates`.
    """

    layout: Layout
    order: Ints
    at: Ints

    @cached_property
    def columns(self) -> dict[str, Ints]:
        """tp, pp, dp, etp, ep of each rank, by name."""
        return {name: self.at[:, number] for number, name in enumerate(Coordinates._fields)}

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(*(int(x) for x in self.at[rank]))


def training(layout: Layout) -> Assignment:
    """Megatron's: tensor parallel ranks first, then data parallel, then pipeline stages."""
    at = np.array([layout.coordinates(rank) for rank in range(layout.world_size)], dtype=np.int64)
    return Assignment(layout, np.arange(layout.world_size), at)


def generation(
    layout: Layout, train: Assignment, overlap: Callable[[Assignment], int], ranks_per_node: int
) -> Assignment:
    """The assignment of a generation layout in which the ranks already hold the most.

    Among equals the one whose tensor parallel groups cross nodes least, then the one that keeps them closest together.

    Args:
        layout: generation sizes; its world size must be that of `train`.
        overlap: bytes that all ranks together hold already under an assignment.
        ranks_per_node: consecutive ranks that share a node.
    """
    if layout.world_size != train.layout.world_size:
        raise ValueError(f"generation uses {layout.world_size} ranks and training {train.layout.world_size}")
    best: tuple[tuple[int, int, int], Assignment] | None = None
    for order in _orders(train.layout, layout):
        candidate = _in_order(layout, order)
        groups = order.reshape(-1, layout.tp)
        nodes = groups // ranks_per_node
        crossings = int((nodes.max(1) - nodes.min(1)).sum())
        key = (-overlap(candidate), crossings, int((groups.max(1) - groups.min(1)).sum()))
        if best is None or key < best[0]:
            best = key, candidate
    assert best is not None
    return best[1]


def _in_order(layout: Layout, order: Ints) -> Assignment:
    """vLLM's places: tensor parallel first, then pipeline, then replicas; experts are divided over the tensor parallel group."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    tp, pp, dp = place % layout.tp, place // layout.tp % layout.pp, place // (layout.tp * layout.pp)
    etp, ep = tp % layout.expert_tp, tp // layout.expert_tp % layout.ep
    return Assignment(layout, order, np.stack((tp, pp, dp, etp, ep), 1))


def _orders(train: Layout, target: Layout) -> Iterator[Ints]:
    """Rank orders in which generation groups are made of factors of the training dimensions.

    Each training dimension is split in three factors: one that goes to the generation stages, one to the generation tensor
    parallel index, one to the replicas. Inside a group ranks ascend, because torch's process groups do.
    """
    ranks = np.arange(train.world_size)
    seen = set()
    factors = itertools.product(_triples(train.pp), _triples(train.dp), _triples(train.tp))
    for (p_stage, p_tensor, p_rest), (d_rest, d_stage, d_tensor), (t_tensor, t_stage, t_rest) in factors:
        if p_stage * d_stage * t_stage != target.pp or p_tensor * d_tensor * t_tensor != target.tp:
            continue
        digits = ranks.reshape(p_stage, p_tensor, p_rest, d_rest, d_stage, d_tensor, t_tensor, t_stage, t_rest)
        # replicas, then stages, then the tensor parallel index; each with the digits in the ranks' own order
        order = digits.transpose(2, 3, 8, 0, 4, 7, 1, 5, 6).reshape(-1)
        if (key := order.tobytes()) not in seen:
            seen.add(key)
            yield order


def _triples(size: int) -> list[tuple[int, int, int]]:
    """All ordered factorisations of a size in three."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [(a, b, size // a // b) for a in divisors for b in divisors if size % (a * b) == 0]
