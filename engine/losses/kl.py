"""Estimators of the divergence from a reference, as terms of the loss (Schulman, "Approximating KL divergence", 2020).

With p the trained policy, q the reference, x ~ p, d = log p(x) - log q(x), expectations over x are

    estimator   value     gradient by autograd          is the gradient of
    k1          d         grad log p                    0: its expectation vanishes, in the loss it is noise
    k2          d^2 / 2   d grad log p                  KL(p || q), unbiased
    k3          e^-d-1+d  (1 - e^-d) grad log p         KL(q || p), the other direction
    abs         |d|       sign(d) grad log p            sum_x |p - q|, twice the total variation
    k1+, k3+    as k1, k3 d grad log p                  KL(p || q): straight-through, k2's gradient

Weighted by p / p_old, samples of p_old estimate the expectations under p, and the weight's own gradient makes that of every
estimator the gradient of its expectation: k1 and k3 of KL(p || q) (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from torch import Tensor

from engine.losses.batch import TokenBatch, log_ratio_of, ratio_of
from engine.losses.config import Estimator, KLConfig


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(q - p) - 1 - (q - p) per token, never negative; the difference is held in [-20, 20] before exp."""
    log_ratio = log_ratio_of(other, logprobs)
    return log_ratio.expm1() - log_ratio


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Per token, of KL(policy || reference); the module's text says what its gradient is."""
    difference = logprobs - reference
    if estimator.endswith("+"):
        value = difference if estimator == "k1+" else k3(logprobs, reference)
        half_square = difference * difference / 2
        return value.detach() + (half_square - half_square.detach())
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference * difference / 2
    if estimator == "abs":
        return difference.abs()
    if estimator == "k3":
        return k3(logprobs, reference)
    raise ValueError(f"the KL estimator {estimator!r} needs the whole distribution of both policies")


def kl_loss(batch: TokenBatch, config: KLConfig) -> Tensor:
    """[tokens] the penalty before its coefficient. Raises ValueError without the reference's log-probabilities."""
    if batch.reference_logprobs is None:
        raise ValueError("the KL term needs the reference's log-probabilities")
    penalty = kl_estimate(batch.logprobs, batch.reference_logprobs, config.estimator)
    return penalty * ratio_of(batch.logprobs, batch.old_logprobs) if config.weighted else penalty
