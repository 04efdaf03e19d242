"""Arithmetic of ranks and shards: which part of the model and of the data a rank holds. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to this multiple once, whatever the tensor parallel size, and then divides it; so do we."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. Ranks are numbered tensor parallel first: rank = dp_rank * tp + tp_rank."""

    tp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp

    def __str__(self) -> str:
        return f"tp{self.tp},dp{self.dp}"


def padded_vocabulary(vocabulary: int) -> int:
    """Rows of the embedding in memory: `vocabulary` rounded up to a multiple of 64."""
    return -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def balanced_split(lengths: list[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` groups of nearly equal token sums, longest first into the lightest group.

    Deterministic: ties go to the lower group, then to the lower index. Each group is returned in ascending order of index.
    Groups may differ in count (even be empty when there are fewer samples than parts).
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = min(range(parts), key=lambda g: (loads[g], g))
        groups[lightest].append(index)
        loads[lightest] += lengths[index]
    return [sorted(group) for group in groups]


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


def contiguous_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """`total` items in `parts` consecutive ranges [start, stop) that differ by at most one item."""
    edges = [total * part // parts for part in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
