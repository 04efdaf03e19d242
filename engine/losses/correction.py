"""Importance weights of what the generation engine sampled, for the policy as the trainer computes it.

Token weights are Flash-RL's truncated importance sampling and its masked form, with a lower bound IcePop's (Ring-1T, arXiv
2510.18855); the weight of a sequence is the product over its tokens. A geometric mask drops responses by the mean log-ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.losses.aggregate import sequence_means, sequence_sums, to_tokens
from engine.losses.batch import LOG_RATIO_BOUND, TokenBatch
from engine.losses.config import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    """[tokens] each, without gradient.

    Attributes:
        weights: what the policy loss is multiplied by; 0 where a token or its sequence is dropped.
        outside: whether the raw weight (or the geometric mean) was beyond its bounds, before anything was cut.
        unit: 1 a token, or 1 / tokens of its sequence where a sequence has one weight: sums of unit * weights count weights.
    """

    weights: Tensor
    outside: Tensor
    unit: Tensor


def correction(batch: TokenBatch, config: CorrectionConfig) -> Correction:
    """Weights of a (cleaned) batch; not yet normalised.

    The numerator is the policy before the update; in bypass mode, where that is the rollout's, the policy as it is now.

    Raises:
        ValueError: there are no rollout log-probabilities; a weight of 1 would be a guess.
    """
    if batch.rollout_logprobs is None:
        raise ValueError("the train/rollout correction needs the rollout's log-probabilities")
    trainer = batch.logprobs.detach() if config.bypass else batch.old_logprobs
    gaps = trainer - batch.rollout_logprobs
    unit = batch.mask.to(gaps.dtype)
    if config.weights.startswith("sequence"):
        counts = sequence_sums(unit, batch.lengths)
        unit = unit * to_tokens(1 / counts.clamp(min=1), batch.lengths)
        logarithms = to_tokens(sequence_sums(gaps, batch.lengths), batch.lengths)
    else:
        logarithms = gaps
    raw = logarithms.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    weights, outside = _bounded(raw, config)
    means = sequence_means(gaps, batch.mask, batch.lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    dropped = _beyond(means, config.geometric_low, config.geometric_high)
    weights = torch.where(dropped | ~batch.mask, torch.zeros_like(weights), weights)
    return Correction(weights, (outside | dropped) & batch.mask, unit)


def mean_weight(found: Correction) -> Tensor:
    """Of one mini-batch's weights, over tokens or over sequences; 1 where there is nothing to divide by."""
    total, weight = found.unit.sum(), (found.unit * found.weights).sum()
    return torch.where(weight > 0, weight / total.clamp(min=1e-30), torch.ones_like(weight))


def _bounded(raw: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Truncated or masked weights, and where the raw ones were outside."""
    if config.weights == "none":
        return torch.ones_like(raw), torch.zeros_like(raw, dtype=torch.bool)
    outside = _beyond(raw, config.low, config.high)
    if config.weights.endswith("truncate"):
        return raw.clamp(max=config.high), outside
    return torch.where(outside, torch.zeros_like(raw), raw), outside


def _beyond(values: Tensor, low: float | None, high: float | None) -> Tensor:
    beyond = torch.zeros_like(values, dtype=torch.bool)
    if low is not None:
        beyond = beyond | (values < low)
    return beyond if high is None else beyond | (values > high)
