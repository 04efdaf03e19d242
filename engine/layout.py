"""Arithmetic of ranks and shards: which part of the model and of the data a rank holds. Importable without torch."""

from __future__ import annotations

import heapq
import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to this multiple once, whatever the tensor parallel size, and then divides it; so do we."""


class Coordinates(NamedTuple):
    """A rank's place in a layout: its part of every dense matrix, of the layers, of the batch, and of the experts."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    etp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions.

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel sizes; their product is the number of ranks.
        ep: expert parallel size: the experts of a layer are divided over that many ranks of one pipeline stage.
        etp: tensor parallel size inside an expert; None: tp, or 1 when ep > 1.
        vpp: virtual pipeline size: consecutive chunks of layers that each stage holds.
        stage_layers: layers of each of the pp * vpp chunks in model order; None: as even as possible (`split_layers`).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    stage_layers: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From the form in which layouts are written and printed, as tp8,pp2,dp4; raises ValueError."""
        sizes: dict[str, Any] = {}
        for part in text.split(","):
            found = re.fullmatch(r"(tp|pp|dp|ep|etp|vpp)([1-9]\d*)", part.strip())
            if found is None or found[1] in sizes:
                raise ValueError(
                    f"{part!r} in {text!r}: write each of tp, pp, dp, ep, etp, vpp at most once, as tp8,pp2,dp4"
                )
            sizes[found[1]] = int(found[2])
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks over which one expert's matrices are divided."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a rank in Megatron's order: tensor parallel first, then data, then pipeline."""
        stage = rank % (self.tp * self.dp)
        return Coordinates(
            tp=rank % self.tp,
            pp=rank // (self.tp * self.dp),
            dp=rank // self.tp % self.dp,
            etp=stage % self.expert_tp,
            ep=stage // self.expert_tp % self.ep,
        )

    def chunks(self, layers: int) -> list[tuple[int, int]]:
        """Layers [start, stop) of each chunk in model order; chunk c belongs to stage c % pp."""
        sizes = self.stage_layers or split_layers(layers, self.pp * self.vpp)
        edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        return list(zip(edges[:-1], edges[1:], strict=True))

    def stage_of_layer(self, layers: int) -> list[int]:
        """Pipeline stage of every layer."""
        return [chunk % self.pp for chunk, (a, b) in enumerate(self.chunks(layers)) for _ in range(a, b)]

    def problems(self, layers: int) -> list[str]:
        """Why no model of that many layers can have this layout; empty when it can."""
        found = []
        chunks = self.pp * self.vpp
        if self.vpp > 1 and self.pp == 1:
            found.append("a virtual pipeline needs pipeline_parallel_size > 1")
        if self.tp * self.dp % (self.ep * self.expert_tp):
            found.append(
                f"expert_parallel_size {self.ep} x expert_tensor_parallel_size {self.expert_tp} does not divide the"
                f" {self.tp * self.dp} ranks of a pipeline stage"
            )
        if self.stage_layers is None:
            if layers < chunks:
                found.append(f"{layers} layers cannot be divided over {chunks} pipeline chunks")
        elif len(self.stage_layers) != chunks or sum(self.stage_layers) != layers or min(self.stage_layers) < 1:
            found.append(
                f"pipeline_layers {list(self.stage_layers)} must be {chunks} positive numbers that sum to {layers}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Layout:
        layers = values.get("stage_layers")
        return cls(**{**values, "stage_layers": None if layers is None else tuple(layers)})

    def divides_alike(self, other: Layout, layers: int) -> bool:
        """Whether each rank holds the same parts of a model of that many layers in the other layout."""

        def parts(layout: Layout) -> tuple[Any, ...]:
            sizes = (layout.tp, layout.pp, layout.dp, layout.ep, layout.expert_tp, layout.vpp)
            return *sizes, layout.chunks(layers)

        return parts(self) == parts(other)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "vpp": self.vpp}
        named = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "tp"]
        if self.ep > 1 or (self.etp is not None and self.etp != self.tp):
            named.append(f"etp{self.expert_tp}")
        return ",".join(named)


def split_layers(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part, as vLLM divides them: the remainder goes to the last parts but one, where no head is."""
    sizes = [layers // parts] * parts
    for extra in range(layers % parts):
        sizes[-2 - extra] += 1
    return tuple(sizes)


def padded_vocabulary(vocabulary: int) -> int:
    """Rows of the embedding in memory: `vocabulary` rounded up to a multiple of 64."""
    return -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def balanced_split(lengths: list[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` groups of nearly equal token sums: the differencing method of Karmarkar and Karp (1982).

    Every sample begins as a division of its own, in which one group has it and the others nothing. The two divisions whose groups
    differ most are put together, the fullest group of one with the emptiest of the other, until one division is left.
    Deterministic. Each group is returned in ascending order of index, the fullest group first; groups may differ in count (even
    be empty when there are fewer samples than parts).
    """
    divisions: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-length, index, [(length, [index]), *((0, []) for _ in range(parts - 1))])
        for index, length in enumerate(lengths)
    ]
    heapq.heapify(divisions)
    for number in range(len(lengths), 2 * len(lengths) - 1):  # breaks ties: an older division goes first
        (_, _, fullest), (_, _, other) = heapq.heappop(divisions), heapq.heappop(divisions)
        paired = zip(fullest, reversed(other), strict=True)
        groups = sorted(
            ((load + more, mine + theirs) for (load, mine), (more, theirs) in paired), key=lambda g: (-g[0], g[1])
        )
        heapq.heappush(divisions, (groups[-1][0] - groups[0][0], number, groups))
    return [sorted(members) for _, members in divisions[0][2]] if divisions else [[] for _ in range(parts)]


def pack_by_tokens(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches (indices of `lengths`) of at most `max_tokens` tokens each, first fit in descending length.

    A sample longer than `max_tokens` gets a micro-batch of its own rather than being cut.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, load in enumerate(loads) if load + lengths[index] <= max_tokens), None)
        if place is None:
            bins.append([index])
            loads.append(lengths[index])
        else:
            bins[place].append(index)
            loads[place] += lengths[index]
    return [sorted(members) for members in bins]


def replica_rows(
    lengths: list[int], indices: list[int], replicas: int, replica: int, max_tokens: int
) -> tuple[list[list[int]], int]:
    """One replica's micro-batches of the samples `indices`, and the highest number that any replica has.

    Samples are shared out by tokens (`balanced_split`), each share packed into rows (`pack_by_tokens`).
    """
    packs = []
    for share in balanced_split([lengths[i] for i in indices], replicas):
        members = [indices[i] for i in share]
        bins = pack_by_tokens([lengths[i] for i in members], max_tokens)
        packs.append([[members[i] for i in packed] for packed in bins])
    return packs[replica], max(map(len, packs))


def contiguous_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """`total` items in `parts` consecutive ranges [start, stop) that differ by at most one item."""
    edges = [total * part // parts for part in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
