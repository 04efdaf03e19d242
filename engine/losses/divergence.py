"""DPPO: tokens stop where the policy's divergence from the old one, not the ratio, is too large (arXiv 2602.04879).

The divergence is that of two outcomes, the sampled token and any other: it needs no further probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.losses.batch import TokenBatch, TokenLoss, ratio_of
from engine.losses.config import LossConfig

_LEAST = 1e-12
"""Probabilities are held this far from 0 and 1 inside logarithms."""


def dppo_tv_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-A sg(min(r, c)) log pi, and 0 where |pi - pi_old| went past its bound in the direction of the advantage.

    Total variation of the two outcomes; `clip_ratio_high` bounds it for A > 0, `clip_ratio_low` for A < 0.
    """
    now, before = _probabilities(batch)
    return _stopped_loss(batch, config, (now - before).abs())


def dppo_kl_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """The same with the divergence KL(old || policy) of the two outcomes: q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""
    now, before = _probabilities(batch)
    p, q = now.clamp(_LEAST, 1 - _LEAST), before.clamp(_LEAST, 1 - _LEAST)
    return _stopped_loss(batch, config, q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log())


def _probabilities(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """pi and pi_old of the sampled tokens, fp64, no gradient: they decide only."""
    return tuple(x.detach().double().clamp(max=0).exp() for x in (batch.logprobs, batch.old_logprobs))  # type: ignore[return-value]


def _stopped_loss(batch: TokenBatch, config: LossConfig, divergence: Tensor) -> TokenLoss:
    now, before = _probabilities(batch)
    rises = (batch.advantages > 0) & (now > before) & (divergence > config.clip_ratio_high)
    falls = (batch.advantages < 0) & (now < before) & (divergence > config.clip_ratio_low)
    stopped = rises | falls
    weight = ratio_of(batch.logprobs.detach(), batch.old_logprobs)
    if config.clip_ratio_c is not None:
        weight = weight.clamp(max=config.clip_ratio_c)
    loss = -batch.advantages * weight * batch.logprobs
    return TokenLoss(torch.where(stopped, torch.zeros_like(loss), loss), stopped)
