"""What an update reports about its losses: sums over tokens that add up over micro-batches and ranks, and their means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.losses.config import LossConfig
from engine.losses.kl import k3
from engine.losses.objective import Objective, term_names

GAP_EDGES = (1e-3, 1e-2, 0.1, 1.0)
"""Edges of the histogram of |trainer's - rollout's log-probability|."""

GAP_NAMES = ("below_1e-3", "1e-3_to_1e-2", "1e-2_to_0.1", "0.1_to_1", "from_1")

TOKEN_MEANS = ("entropy", "clip_fraction", "dual_clip_fraction", "approx_kl", "approx_kl_k1")
ROLLOUT_MEANS = ("rollout_kl", "rollout_kl_k1", "rollout_logprob_gap", *(f"rollout_gap/{name}" for name in GAP_NAMES))
REFERENCE_MEANS = ("reference_kl", "reference_kl_k1")
CORRECTION_SUMS = ("weight", "squared_weight", "unit")


@dataclass(frozen=True)
class MetricNames:
    """The sums that every rank must have, whether it sees a token or not.

    Attributes:
        means: divided by the trained tokens.
        terms: shares of each mini-batch's loss, divided by the optimizer steps.
        others: the rest.
    """

    means: tuple[str, ...]
    terms: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def all(self) -> list[str]:
        return [*self.means, *self.terms, *self.others]


def metric_names(config: LossConfig, *, rollout: bool, reference: bool) -> MetricNames:
    """The names that `token_sums` has for batches with rollout's and reference's log-probabilities, or without."""
    means: tuple[str, ...] = TOKEN_MEANS
    means += ROLLOUT_MEANS if rollout else ()
    means += REFERENCE_MEANS if reference else ()
    means += ("correction_outside", "correction_dropped") if config.correction.active else ()
    others = ("tokens", *(CORRECTION_SUMS if config.correction.active else ()))
    return MetricNames(means, ("loss", *term_names(config)), others)


def token_sums(result: Objective, config: LossConfig) -> dict[str, Tensor]:
    """Scalars without gradient: shares of the loss, and sums over the tokens with mask 1."""
    batch, found = result.batch, result.correction
    logprobs, old = batch.logprobs.detach(), batch.old_logprobs

    def total(values: Tensor | None) -> Tensor:
        if values is None:
            return torch.zeros((), dtype=torch.float64, device=logprobs.device)
        return torch.where(batch.mask, values.detach().double(), 0.0).sum()

    sums = {"loss": result.loss.detach(), **{name: term.detach() for name, term in result.terms.items()}}
    sums |= {
        "tokens": batch.mask.sum(),
        "entropy": total(batch.entropies),
        "clip_fraction": total(result.tokens.clipped),
        "dual_clip_fraction": total(result.tokens.dual_clipped),
        "approx_kl": total(k3(old, logprobs)),
        "approx_kl_k1": total(old - logprobs),
    }
    if batch.rollout_logprobs is not None:
        trainer = logprobs if config.correction.bypass else old
        sums |= _rollout_sums(batch.rollout_logprobs, trainer, total)
    if batch.reference_logprobs is not None:
        sums["reference_kl"] = total(k3(logprobs, batch.reference_logprobs))
        sums["reference_kl_k1"] = total(logprobs - batch.reference_logprobs)
    if found is not None:
        sums["correction_outside"] = total(found.outside)
        sums["correction_dropped"] = total(found.weights == 0)
        sums["weight"] = (found.unit * found.weights).sum()
        sums["squared_weight"] = (found.unit * found.weights**2).sum()
        sums["unit"] = found.unit.sum()
    return sums


def _rollout_sums(rollout: Tensor, trainer: Tensor, total: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    gap = (trainer - rollout).abs()
    edges = torch.tensor(GAP_EDGES, dtype=gap.dtype, device=gap.device)
    bucket = torch.bucketize(gap, edges, right=True)
    return {
        "rollout_kl": total(k3(rollout, trainer)),
        "rollout_kl_k1": total(rollout - trainer),
        "rollout_logprob_gap": total(gap),
        **{f"rollout_gap/{name}": total(bucket == number) for number, name in enumerate(GAP_NAMES)},
    }


def summary(sums: dict[str, float], names: MetricNames, steps: int) -> dict[str, float]:
    """Means of an update's sums. Without a trained token there is no mean, and none is reported.

    `correction_ess` is the effective sample size of the weights, (sum w)^2 / (n sum w^2): 1 where they are all equal.
    """
    metrics = {name: sums[name] / max(1, steps) for name in names.terms}
    if sums["tokens"] > 0:
        metrics |= {name: sums[name] / sums["tokens"] for name in names.means}
    if sums.get("unit"):
        metrics["correction_weight"] = sums["weight"] / sums["unit"]
        squares = sums["unit"] * sums["squared_weight"]
        metrics["correction_ess"] = sums["weight"] ** 2 / squares if squares else 0.0
    return metrics


def advantage_statistics(advantages: list[list[float]], masks: list[list[int]]) -> dict[str, float]:
    """Mean, deviation (ddof 0), minimum and maximum over the trained tokens; nothing where there are none."""
    kept = [a for row, mask in zip(advantages, masks, strict=True) for a, m in zip(row, mask, strict=True) if m]
    if not kept:
        return {}
    values = torch.tensor(kept, dtype=torch.float64)
    return {
        "advantage_mean": values.mean().item(),
        "advantage_std": values.std(correction=0).item(),
        "advantage_min": values.min().item(),
        "advantage_max": values.max().item(),
    }
