"""A penalty in the reward for leaving the reference model, and the controller of its coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from engine.losses.config import KLConfig
from tasks.advantages.batch import Batch, Floats
from tasks.advantages.config import AlgorithmConfig, KLForm
from tasks.advantages.registry import BadEstimate

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within +-20: exp(20) is a penalty of half a billion already."""


def token_kl(logprobs: Floats, reference: Floats, form: KLForm) -> Floats:
    """(tokens,) an estimate of KL(policy || reference) from samples of the policy, d = logprobs - reference.

    k1 is d (unbiased), abs |d|, k2 d^2 / 2, k3 exp(-d) - 1 + d (unbiased and never negative); see
    http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = np.clip(logprobs - reference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if form == "k1":
        return log_ratio
    if form == "abs":
        return np.abs(log_ratio)
    if form == "k2":
        return log_ratio**2 / 2
    return np.expm1(-log_ratio) + log_ratio


def penalised(batch: Batch, form: KLForm, coefficient: float) -> tuple[Batch, float]:
    """The batch with -coefficient * kl added to its token rewards, and the mean kl of a trained token of scored samples.

    Raises:
        BadEstimate: the batch has no log-probabilities of the reference.
    """
    if batch.rollout_logprobs is None or batch.reference_logprobs is None:
        raise BadEstimate("a KL penalty in the reward needs the log-probabilities of a reference model")
    kl = token_kl(batch.rollout_logprobs, batch.reference_logprobs, form)
    trained = batch.mask & batch.scored[batch.sample_of_token]
    before = np.zeros(len(kl)) if batch.token_rewards is None else batch.token_rewards
    mean = float(kl[trained].mean()) if trained.any() else 0.0
    return replace(batch, token_rewards=before - coefficient * kl), mean


def next_coefficient(config: AlgorithmConfig, before: Mapping[str, float] | None) -> float:
    """The coefficient of a step, from the metrics `kl`, `kl_coef` and `samples` of the step before; None for the first one.

    Fixed without `kl_target`, adapted as the loss's own KL is with it. It follows from what is committed alone, so it survives a
    resume.
    """
    if config.kl_target is None or before is None:
        return config.kl_coef
    control = KLConfig(target=config.kl_target, horizon=config.kl_horizon)
    return control.next_coef(before["kl_coef"], before["kl"], int(before["samples"]))
