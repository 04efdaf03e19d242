"""The weight map: for every parameter of a model, its names in Hugging Face, Megatron and vLLM, and how it is divided.

The single source for loading, export, binding vLLM, resharding and checkpoints; made from the family's table
(families.py) and the model's sizes. Importable without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.layout import Coordinates, Layout, padded_vocabulary
from engine.weights.architecture import Architecture
from engine.weights.families import EMBEDDING, FINAL_NORM, HEAD, SCORE, Row
from engine.weights.lora import adapter_rows

Shape = tuple[int, ...]


class Shard(NamedTuple):
    """One of the equal parts of a parameter: `part` of `parts` along its axis, `expert_part` of `expert_parts` of the experts."""

    parts: int = 1
    part: int = 0
    expert_parts: int = 1
    expert_part: int = 0


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor: its name and its whole, undivided shape.

    Attributes:
        units: the most parts that it can be divided into (key and value heads); more ranks hold copies. 0: no limit.
    """

    name: str
    shape: Shape
    units: int = 0


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter, which is one vLLM parameter, made of one or more Hugging Face tensors.

    Attributes:
        megatron: the parameter's name in an undivided Megatron model.
        vllm: every name under which vLLM's model may list it (tied heads have two).
        pieces: Hugging Face tensors in fusion order along `axis`; with `stacked`, one row of pieces an expert.
        axis: the pieces' axis that is divided over tensor parallel ranks, each piece by itself; None: every rank has it whole.
        stacked: experts, stacked in front; divided over expert parallel ranks too.
        vocabulary: rows are token ids, padded with zeros to a multiple of 64 before they are divided.
        layer: the layer it belongs to; None: an end of the model.
        first, last: it belongs to the first or the last pipeline stage (a tied embedding to both).
    """

    megatron: str
    vllm: tuple[str, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    axis: int | None = None
    stacked: bool = False
    vocabulary: bool = False
    layer: int | None = None
    first: bool = False
    last: bool = False

    def all_pieces(self) -> Iterator[Piece]:
        for row in self.pieces:
            yield from row

    def shard(self, layout: Layout, at: Coordinates) -> Shard:
        """The part that a rank with these coordinates holds, if its pipeline stage holds the weight at all."""
        if self.stacked:
            return Shard(layout.expert_tp, at.etp, layout.ep, at.ep)
        return Shard(layout.tp, at.tp) if self.axis is not None else Shard()

    def stages(self, layout: Layout, stage_of_layer: list[int]) -> tuple[int, ...]:
        """Pipeline stages that hold it; `stage_of_layer` as `layout.stage_of_layer` gives it."""
        if self.layer is not None:
            return (stage_of_layer[self.layer],)
        ends = {0: self.first, layout.pp - 1: self.last}  # with one stage the two are the same
        return (0,) if layout.pp == 1 else tuple(stage for stage, here in ends.items() if here)

    def bounds(self, piece: Piece, shard: Shard) -> tuple[int, int]:
        """Start and stop of a shard's slice of a piece along `axis`, the vocabulary's padding counted as its rows."""
        assert self.axis is not None
        size = padded_vocabulary(piece.shape[0]) if self.vocabulary else piece.shape[self.axis]
        parts = min(shard.parts, piece.units) if piece.units else shard.parts
        share = size // parts
        part = shard.part * parts // shard.parts
        return part * share, (part + 1) * share

    def numbers(self, piece: Piece) -> int:
        """Elements of a piece in memory, the vocabulary's padding included."""
        return padded_vocabulary(piece.shape[0]) * piece.shape[1] if self.vocabulary else math.prod(piece.shape)

    def experts(self, shard: Shard) -> range:
        """Rows of `pieces` that a shard holds."""
        count = len(self.pieces) // shard.expert_parts
        return range(shard.expert_part * count, (shard.expert_part + 1) * count)

    def output_sizes(self, shard: Shard) -> list[int]:
        """Rows of each piece, one after another, in the parameter on a rank that holds that shard; of a matrix in a layer."""
        if self.axis != 0:
            return [piece.shape[0] for piece in self.pieces[0]]
        return [stop - start for start, stop in (self.bounds(piece, shard) for piece in self.pieces[0])]

    def shard_shape(self, shard: Shard) -> Shape:
        """Shape of the parameter on a rank that holds that shard."""
        row = self.pieces[0]
        shape = list(row[0].shape)
        if self.axis is not None:
            ranges = [self.bounds(piece, shard) for piece in row]
            shape[self.axis] = sum(stop - start for start, stop in ranges)
        return (len(self.experts(shard)), *shape) if self.stacked else tuple(shape)


class Adapter(NamedTuple):
    """A [rank, in] and B [out, rank] of one Hugging Face linear layer."""

    a: Weight
    b: Weight

    @property
    def name(self) -> str:
        """Last part of the layer's name, as q_proj."""
        return self.a.megatron.split(".")[-2]


@dataclass(frozen=True)
class AdaptedLinear:
    """A matrix of which at least one piece has an adapter.

    Attributes:
        adapters: one for each of its pieces; None where a piece has none.
    """

    base: Weight
    adapters: tuple[Adapter | None, ...]


def adapted_linears(arch: Architecture) -> tuple[AdaptedLinear, ...]:
    """The matrices that have adapters, in the order of the layers."""
    if arch.lora is None:
        return ()
    found = []
    for layer in range(arch.layers):
        for row in arch.family.rows:
            pairs = tuple(adapter_rows(row, arch.lora))
            if any(pairs):
                adapters = (pair and Adapter(*(_weight(arch, each, layer=layer) for each in pair)) for pair in pairs)
                found.append(AdaptedLinear(_weight(arch, row, layer=layer), tuple(adapters)))
    return tuple(found)


def weight_map(arch: Architecture) -> tuple[Weight, ...]:
    """All parameters of a model: in the order of its layers, then the adapters' in the same order."""
    adapters = (adapter for linear in adapted_linears(arch) for adapter in linear.adapters if adapter)
    return (*_base_map(arch), *(weight for adapter in adapters for weight in adapter))


def _base_map(arch: Architecture) -> tuple[Weight, ...]:
    embedding = _weight(arch, EMBEDDING, first=True, last=arch.tied_embeddings)
    if arch.tied_embeddings:
        embedding = _weight(arch, EMBEDDING, first=True, last=True, vllm=(*EMBEDDING.vllm, *HEAD.vllm))
    weights = [embedding]
    for layer in range(arch.layers):
        weights += [_weight(arch, row, layer=layer) for row in arch.family.rows]
    weights.append(_weight(arch, FINAL_NORM, last=True))
    if arch.labels:
        weights.append(_weight(arch, SCORE, last=True))
    elif not arch.tied_embeddings:
        weights.append(_weight(arch, HEAD, last=True))
    return tuple(weights)


def _weight(
    arch: Architecture,
    row: Row,
    *,
    layer: int | None = None,
    first: bool = False,
    last: bool = False,
    vllm: tuple[str, ...] | None = None,
) -> Weight:
    """A table's row for one layer of one model."""
    ours, theirs = ("", "") if layer is None else (f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    sizes = arch.sizes

    def pieces(expert: int) -> tuple[Piece, ...]:
        return tuple(
            Piece(
                theirs + name.replace("{expert}", str(expert)),
                tuple(sizes[dimension] for dimension in dimensions),
                units=arch.kv_heads if dimensions[0] == "key_value" else 0,
            )
            for name, dimensions in row.huggingface
        )

    return Weight(
        ours + row.megatron,
        tuple(theirs + name for name in vllm or row.vllm),
        tuple(pieces(expert) for expert in range(arch.experts if row.stacked else 1)),
        axis=row.axis,
        stacked=row.stacked,
        vocabulary=row.huggingface[0][1][0] == "vocabulary",
        layer=layer,
        first=first,
        last=last,
    )


class Place(NamedTuple):
    """Where a weight is in the Megatron model of a rank: its chunk of layers, and its name in that chunk."""

    chunk: int
    name: str


def megatron_places(weights: tuple[Weight, ...], layout: Layout, layers: int, pp: int) -> dict[str, Place]:
    """Where pipeline stage `pp` holds its weights, by the name in an undivided model.

    Megatron numbers the layers of a chunk from 0, and calls the copy of a tied embedding on the last stage `output_layer`.
    """
    chunks = [
        (c // layout.pp, first, stop) for c, (first, stop) in enumerate(layout.chunks(layers)) if c % layout.pp == pp
    ]
    at_layer = {layer: (chunk, layer - first) for chunk, first, stop in chunks for layer in range(first, stop)}
    places = {}
    for weight in weights:
        if weight.layer is not None:
            if weight.layer in at_layer:
                chunk, local = at_layer[weight.layer]
                name = weight.megatron.replace(f".{weight.layer}.", f".{local}.", 1)
                places[weight.megatron] = Place(chunk, name)
        elif weight.first and pp == 0:
            places[weight.megatron] = Place(0, weight.megatron)
        elif weight.last and pp == layout.pp - 1:
            places[weight.megatron] = Place(layout.vpp - 1, HEAD.megatron if weight.first else weight.megatron)
    return places
