"""Losses without a clip: policy gradient, DRO, and the likelihood of demonstrations."""

from __future__ import annotations

from engine.losses.batch import TokenBatch, TokenLoss
from engine.losses.config import LossConfig


def reinforce_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-A log pi (Williams 1992, eq. 11; GPG, arXiv 2504.02546, whose scaling is in the advantages). No ratio.

    For samples of another policy `config.correction` weights it.
    """
    return TokenLoss(-batch.advantages * batch.logprobs)


def dro_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-(A log pi - beta / 2 (log pi - log pi_old)^2) (DRO, arXiv 2405.19107, section 3; arXiv 2501.12599, section 2.3)."""
    gap = batch.logprobs - batch.old_logprobs
    return TokenLoss(-(batch.advantages * batch.logprobs - 0.5 * config.dro_beta * gap * gap))


def sft_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """-log pi of the demonstrated tokens."""
    return TokenLoss(-batch.logprobs)
