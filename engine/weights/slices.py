"""Which rectangles of the Hugging Face tensors a rank's part of a parameter is. Pure arithmetic, importable without torch.

The optimizer of a rank owns `flat[start:stop]` of the shard of a parameter. Named as rectangles of whole tensors, which know
nothing of a layout, such parts can be saved under one layout and loaded under another.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.layout import Coordinates, Layout, padded_vocabulary
from engine.weights.map import Piece, Shard, Weight
from storage.boxes import Box, boxes_of_run
from storage.sharded import Slice


def matrix_shape(weight: Weight, piece: Piece) -> tuple[int, int]:
    """Rows and columns of a whole tensor; a vector has one column. The vocabulary's padding counts, as in memory."""
    rows = padded_vocabulary(piece.shape[0]) if weight.vocabulary else piece.shape[0]
    return rows, piece.shape[1] if len(piece.shape) > 1 else 1


def shapes(weight: Weight) -> dict[str, tuple[int, int]]:
    """`matrix_shape` of every tensor that a weight is made of."""
    return {piece.name: matrix_shape(weight, piece) for piece in weight.all_pieces()}


def slices(weight: Weight, shard: Shard, start: int, stop: int) -> Iterator[Slice]:
    """What `flat[start:stop]` of a shard is: rectangles whose numbers, row by row, follow one another without a gap."""
    base = 0
    for expert in weight.experts(shard):
        for piece in weight.pieces[expert]:
            whole = _box(weight, piece, shard)
            for box in boxes_of_run(max(start - base, 0), min(stop - base, whole.size), whole.columns):
                yield Slice(piece.name, box.moved(whole.row, whole.column))
            base += whole.size


def _box(weight: Weight, piece: Piece, shard: Shard) -> Box:
    """A shard's part of a piece. The map divides columns only of parameters of one piece, so a part is one run of the shard."""
    rows, columns = matrix_shape(weight, piece)
    if weight.axis is None:
        return Box(0, 0, rows, columns)
    first, last = weight.bounds(piece, shard)
    if weight.axis == 0:
        return Box(first, 0, last - first, columns)
    assert len(weight.pieces[0]) == 1, f"the columns of {weight.megatron} are divided and it has several pieces"
    return Box(0, first, rows, last - first)


def saves(weight: Weight, layout: Layout, at: Coordinates, stage_of_layer: list[int]) -> bool:
    """Whether a rank with these coordinates saves what it owns of a weight; others that own the same numbers do not.

    Data parallel ranks own different numbers each. Copies are what no tensor parallel rank divides, and a tied embedding on the
    last stage.
    """
    if at.pp != weight.stages(layout, stage_of_layer)[0]:
        return False
    return weight.axis is not None or at.tp == 0
