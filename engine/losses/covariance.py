"""Losses that spare the entropy: they treat tokens whose log-probability and advantage vary together in another way.

Which tokens is decided over the whole mini-batch: `select_tokens` is given all of its tokens, on every rank the same, in the
order of its samples. So the choice depends neither on ranks nor on micro-batches; where it is drawn at random, by a number a
token, from a seed and the token's place in the mini-batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.losses.batch import TokenBatch, TokenLoss, log_ratio_of
from engine.losses.clipped import ppo_loss
from engine.losses.config import LossConfig


def covariances(batch: TokenBatch) -> Tensor:
    """(log pi - mean) (A - mean) [tokens], means over tokens with mask 1 (arXiv 2505.22617, section 4); fp64, 0 at masked ones."""
    count = batch.mask.sum().clamp(min=1)
    parts = [torch.where(batch.mask, x.detach().double(), 0.0) for x in (batch.logprobs, batch.advantages)]
    logprobs, advantages = (x - x.sum() / count for x in parts)
    return torch.where(batch.mask, logprobs * advantages, 0.0)


def select_tokens(whole: TokenBatch, config: LossConfig, seed: int) -> Tensor:
    """bool [tokens] of a whole mini-batch: those which clip_cov stops and kl_cov penalises.

    Their number is `fraction` of the tokens with mask 1, at least one. kl_cov: those of highest covariance. clip_cov: drawn
    evenly from those with a covariance between the bounds, or all of them if they are fewer.
    """
    batch, settings = whole.cleaned(), config.covariance
    covariance, candidates = covariances(batch), batch.mask
    number = max(1, int(settings.fraction * int(batch.mask.sum())))
    if config.name == "clip_cov":
        candidates = candidates & (covariance > settings.low) & (covariance < settings.high)
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(len(covariance), generator=generator, dtype=torch.float64).to(covariance.device)
    else:
        order = -covariance
    places = candidates.nonzero()[:, 0]
    chosen = places[order[places].argsort(stable=True)[:number]]
    return torch.zeros_like(batch.mask).index_fill(0, chosen, True)


def clip_cov_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """PPO's loss, and 0 without gradient at the selected tokens (Clip-Cov, arXiv 2505.22617, section 4)."""
    result, selected = ppo_loss(batch, config), _selected(batch)
    clipped = selected if result.clipped is None else result.clipped | selected
    return replace(result, loss=result.loss.masked_fill(selected, 0.0), clipped=clipped)


def kl_cov_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-A r, plus coef |log r| at the selected tokens (KL-Cov, arXiv 2505.22617, section 4). No clip; flags: the selected."""
    log_ratio, selected = log_ratio_of(batch.logprobs, batch.old_logprobs), _selected(batch)
    penalty = torch.where(selected, config.covariance.coef * log_ratio.abs(), 0.0)
    return TokenLoss(-batch.advantages * log_ratio.exp() + penalty, selected)


def _selected(batch: TokenBatch) -> Tensor:
    if batch.selected is None:
        raise ValueError("clip_cov and kl_cov need the tokens that select_tokens chose over the whole mini-batch")
    return batch.selected
