"""From token losses to one number, by counts of the whole mini-batch, never of one rank or micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.losses.config import Aggregation


@dataclass(frozen=True)
class Totals:
    """Counts over all ranks and micro-batches of one mini-batch.

    Attributes:
        tokens: response tokens with mask 1.
        sequences: responses with at least one such token.
        horizon: the configured longest response (the constant of Dr.GRPO, not the longest one that occurred).
    """

    tokens: int
    sequences: int
    horizon: int


def sequence_sums(values: Tensor, lengths: list[int]) -> Tensor:
    """[tokens], responses end to end, to [sequences]."""
    return torch.stack([part.sum() for part in values.split(lengths)]) if lengths else values[:0]


def to_tokens(values: Tensor, lengths: list[int]) -> Tensor:
    """[sequences] to [tokens]: every token gets its sequence's number."""
    return torch.repeat_interleave(values, torch.tensor(lengths, dtype=torch.int64, device=values.device))


def sequence_means(values: Tensor, mask: Tensor, lengths: list[int]) -> Tensor:
    """[tokens] to [tokens]: the mean over the sequence's tokens with mask 1; 0 where a sequence has none."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    counts = sequence_sums(mask.to(values.dtype), lengths).clamp(min=1)
    return to_tokens(sequence_sums(kept, lengths) / counts, lengths)


def aggregate(values: Tensor, mask: Tensor, lengths: list[int], mode: Aggregation, totals: Totals) -> Tensor:
    """This micro-batch's share of the mini-batch's loss; the shares of all micro-batches and ranks add up to it.

    Args:
        values: [tokens] one number a response token, responses end to end.
        mask: [tokens] 1 where the token counts; what stands at a 0 (even NaN) has no effect.
        lengths: response lengths in order; they sum to tokens.
        mode: token-mean (DAPO), token-sum, seq-mean-token-sum, seq-mean-token-mean (GRPO),
            seq-mean-token-sum-norm (Dr.GRPO, arXiv 2503.20783).
        totals: counts of the whole mini-batch.
    """
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    if mode == "token-sum":
        return kept.sum()
    if mode == "token-mean":
        return kept.sum() / max(1, totals.tokens)
    if mode == "seq-mean-token-mean":
        counts = sequence_sums(mask.to(values.dtype), lengths).clamp(min=1)
        return (kept * to_tokens(1 / counts, lengths)).sum() / max(1, totals.sequences)
    divisor = totals.horizon if mode == "seq-mean-token-sum-norm" else 1
    return kept.sum() / (max(1, totals.sequences) * divisor)
