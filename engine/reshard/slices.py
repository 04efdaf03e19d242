"""Where a planned transfer lies in the tensors of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.layout import contiguous_ranges, padded_vocabulary
from engine.reshard.plan import Member, WeightClass
from engine.weights.map import Shard, Weight


@dataclass(frozen=True)
class Cell:
    """A range of the divided axis and of the experts, in a class's grains."""

    start: int
    stop: int
    first_expert: int
    last_expert: int


def cell_views(tensor: Tensor, member: Member, shard: Shard, part: WeightClass, cell: Cell) -> Iterator[Tensor]:
    """The parts of one shard of a weight that a cell names: one view a piece (and all the cell's experts)."""
    weight = member.weight
    if weight.stacked:
        count = len(weight.pieces)
        first = cell.first_expert * count // part.expert_grain - weight.experts(shard).start
        tensor = tensor.narrow(0, first, (cell.last_expert - cell.first_expert) * count // part.expert_grain)
    if weight.axis is None:
        yield tensor
        return
    axis = weight.axis + weight.stacked
    for number in member.pieces:
        size = _size(weight, number)
        start, stop = size * cell.start // part.grain, size * cell.stop // part.grain
        yield tensor.narrow(axis, _offset(weight, shard, number) + start, stop - start)


def split(view: Tensor, parts: int, part: int) -> Tensor:
    """One of `parts` slices of a view along its longest axis; the same on sender and receiver, whose shapes agree."""
    if parts == 1:
        return view
    axis = max(range(view.ndim), key=lambda i: view.shape[i])
    start, stop = contiguous_ranges(view.shape[axis], parts)[part]
    return view.narrow(axis, start, stop - start)


def _size(weight: Weight, number: int) -> int:
    """Length of a piece along the divided axis, the vocabulary's padding counted."""
    assert weight.axis is not None
    shape = weight.pieces[0][number].shape
    return padded_vocabulary(shape[0]) if weight.vocabulary else shape[weight.axis]


def _offset(weight: Weight, shard: Shard, number: int) -> int:
    """What to add to a place in the whole piece to get the place in the shard."""
    ranges = [weight.bounds(piece, shard) for piece in weight.pieces[0][: number + 1]]
    before = sum(stop - start for start, stop in ranges[:-1])
    return before - ranges[-1][0]
