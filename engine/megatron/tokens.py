"""Samples as the flat tensors that losses take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.losses.aggregate import Totals
from engine.losses.batch import TokenBatch
from engine.losses.config import LossConfig
from engine.samples import Samples


def missing_data(samples: Samples, config: LossConfig) -> str | None:
    """What the loss needs and the samples do not have; a made-up value would train on a guess."""
    if config.correction.needs_rollout and samples.rollout_logprobs is None:
        return "the rollout's log-probabilities"
    if config.needs_reference and samples.reference_logprobs is None:
        return "the reference policy's log-probabilities"
    if config.nll_coef and samples.rewards is None:
        return "rewards"
    return None


def good_samples(samples: Samples, config: LossConfig) -> list[bool]:
    """Which samples are imitated (`config.nll_coef`)."""
    return [reward > config.nll_above for reward in samples.rewards or []]


def totals_of(part: Samples, config: LossConfig, horizon: int) -> tuple[Totals, Totals]:
    """Counts of a mini-batch: of all trained tokens, and of those in samples that are imitated."""
    chosen = [i for i, good in enumerate(good_samples(part, config)) if good]
    return tuple(  # type: ignore[return-value]
        Totals(samples.trained_tokens, samples.trained_sequences, horizon) for samples in (part, part.select(chosen))
    )


def token_batch(
    part: Samples, config: LossConfig, logprobs: Tensor, entropies: Tensor, old_logprobs: Tensor
) -> TokenBatch:
    """The samples of a micro-batch or of a whole mini-batch, with what the policy says of their response tokens.

    Args:
        logprobs, entropies: [response tokens] of the policy that is trained.
        old_logprobs: [response tokens] of the one before the update; not used in bypass mode.
    """

    def flat(rows: Sequence[Sequence[float]] | None) -> Tensor | None:
        if rows is None:
            return None
        return torch.tensor([x for row in rows for x in row], dtype=logprobs.dtype, device=logprobs.device)

    rollout, lengths = flat(part.rollout_logprobs), [len(response) for response in part.responses]
    positive = None
    if config.nll_coef:
        good = torch.tensor(good_samples(part, config), dtype=torch.bool)
        positive = good.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(logprobs.device)
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs if rollout is None or not config.correction.bypass else rollout,
        advantages=flat(part.advantages),  # type: ignore[arg-type]
        mask=torch.tensor([m for row in part.masks for m in row], dtype=torch.bool, device=logprobs.device),
        lengths=lengths,
        entropies=entropies,
        rollout_logprobs=rollout,
        reference_logprobs=flat(part.reference_logprobs),
        positive=positive,
    )
