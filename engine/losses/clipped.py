"""Losses that hold the ratio of each token: PPO, CISPO, SAPO."""

from __future__ import annotations

import torch

from engine.losses.batch import TokenBatch, TokenLoss, ratio_of
from engine.losses.config import LossConfig


def ppo_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c.

    PPO (arXiv 1707.06347, eq. 7) with asymmetric clip (DAPO, arXiv 2503.14476, eq. 8) and dual clip (arXiv 1912.09729,
    eq. 5). r = pi / pi_old [tokens].
    """
    ratio, advantages = ratio_of(batch.logprobs, batch.old_logprobs), batch.advantages
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


def cispo_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): every token keeps a gradient."""
    ratio = ratio_of(batch.logprobs.detach(), batch.old_logprobs)
    weight = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return TokenLoss(-weight * batch.advantages * batch.logprobs, weight != ratio)


def sapo_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-A sigmoid(tau (r - 1)) 4 / tau, with one tau for A > 0 and another for the rest (arXiv 2511.20347, section 3).

    On policy (r = 1) the gradient is that of -A r, for every tau.
    """
    ratio, advantages = ratio_of(batch.logprobs, batch.old_logprobs), batch.advantages
    positive, negative = (ratio.new_tensor(x) for x in (config.sapo_tau_positive, config.sapo_tau_negative))
    tau = torch.where(advantages > 0, positive, negative)
    return TokenLoss(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)
