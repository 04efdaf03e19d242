"""Losses with one ratio a sequence. A sequence lies whole in one micro-batch, so they depend on no cut."""

from __future__ import annotations

import torch

from engine.losses.aggregate import sequence_means
from engine.losses.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss, log_ratio_of
from engine.losses.config import LossConfig


def gspo_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """max(-A s_t, -A clip(s_t, 1 - low, 1 + high)) with s = exp(mean_t log r_t), for every token of the sequence.

    s_t = sg(s) pi / sg(pi) (GSPO-token, arXiv 2507.18071, eq. 13 and 14): the value of GSPO (eq. 5 and 7), and its gradient
    where a sequence has one advantage; otherwise each token's own counts. Means are over tokens with mask 1.
    """
    log_ratio = batch.logprobs.detach() - batch.old_logprobs
    sequence = sequence_means(log_ratio, batch.mask, batch.lengths)
    token = sequence + (batch.logprobs - batch.logprobs.detach())
    ratio = token.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain = -batch.advantages * ratio
    held = -batch.advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return TokenLoss(torch.maximum(plain, held), (held > plain).detach())


def gmpo_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-mean_t(A) exp(mean_t l_t), for every token of the sequence (arXiv 2507.20673, section 3).

    l_t is log r_t held below `high` where A > 0 and above -`low` where A < 0: as in PPO, only steps that the advantage asks
    for are limited, here in the logarithm and one token at a time. The paper's bounds are 0.4. Means are over tokens with
    mask 1 of one sequence, never over a micro-batch.
    """
    log_ratio, advantages = log_ratio_of(batch.logprobs, batch.old_logprobs), batch.advantages
    above, below = log_ratio.clamp(max=config.clip_ratio_high), log_ratio.clamp(min=-config.clip_ratio_low)
    held = torch.where(advantages > 0, above, torch.where(advantages < 0, below, log_ratio))
    ratio = sequence_means(held, batch.mask, batch.lengths).exp()
    return TokenLoss(-sequence_means(advantages, batch.mask, batch.lengths) * ratio, (held != log_ratio).detach())
