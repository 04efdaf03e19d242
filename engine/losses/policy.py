"""Policy losses: one number a response token, from log-probabilities and advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.losses.config import LossConfig

LOG_RATIO_BOUND = 20.0
"""exp() of more than this overflows in half precision and means nothing anyway."""


@dataclass(frozen=True)
class TokenLoss:
    """Per-token results [tokens]: the loss (with gradient) and flags for the metrics (without)."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old per token, with the logarithm held in [-20, 20] before exp, so that value and gradient stay finite."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """Clipped surrogate (PPO, arXiv 1707.06347, eq. 7) with asymmetric clip (DAPO) and dual clip (arXiv 1912.09729, eq. 5).

    Args:
        logprobs: [tokens] of the policy being trained.
        old_logprobs, advantages: [tokens], constants.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = torch.maximum(plain, held)
    clipped = (held > plain).detach()
    dual_clipped = torch.zeros_like(clipped)
    if config.clip_ratio_c is not None:
        bound = -advantages * config.clip_ratio_c
        dual_clipped = ((advantages < 0) & (loss > bound)).detach()
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return TokenLoss(loss, clipped, dual_clipped)


def sft_loss(logprobs: Tensor) -> TokenLoss:
    """Negative log-likelihood of the demonstrated tokens."""
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    return TokenLoss(-logprobs, nothing, nothing)


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated importance weights min(pi_old / pi_rollout, cap), and where the raw weight was above the cap; no gradient."""
    raw = ratio_of(old_logprobs.detach(), rollout_logprobs)
    return raw.clamp(max=cap), raw > cap


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Estimator of KL(policy || other) per token from the policy's samples (Schulman, "Approximating KL divergence", k3)."""
    log_ratio = (other - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.exp() - 1 - log_ratio
