"""The whole loss of a micro-batch: policy term with its correction, entropy, KL, likelihood of good samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.losses.aggregate import Totals, aggregate
from engine.losses.batch import TokenBatch, TokenLoss
from engine.losses.config import LossConfig
from engine.losses.correction import Correction, correction, mean_weight
from engine.losses.covariance import select_tokens
from engine.losses.kl import kl_loss
from engine.losses.registry import loss_function


@dataclass(frozen=True)
class MiniBatch:
    """What a micro-batch must know of the mini-batch it belongs to; the same on all ranks.

    Attributes:
        totals: of the trained tokens.
        good: of those in samples that are imitated.
        selected: bool [tokens of the mini-batch], see `covariance.select_tokens`; None: the loss needs none.
        mean_weight: what correction weights are divided by.
    """

    totals: Totals
    good: Totals
    selected: Tensor | None = None
    mean_weight: float = 1.0


def with_statistics(whole: TokenBatch, config: LossConfig, totals: Totals, good: Totals, seed: int) -> MiniBatch:
    """What depends on all tokens of a mini-batch (`config.needs_statistics`), from a forward pass over all of them.

    Args:
        whole: the mini-batch in the order of its samples, not cut, the same on all ranks.
        seed: of the draw among clip_cov's candidates.
    """
    selected = select_tokens(whole, config, seed) if config.description.statistics else None
    mean = 1.0
    if config.correction.normalize and config.correction.weights != "none":
        mean = float(mean_weight(correction(whole.cleaned(), config.correction)))
    return MiniBatch(totals, good, selected, mean)


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch and what it was made of.

    Attributes:
        loss: with gradient; the sum over all micro-batches and ranks is the mini-batch's.
        terms: name to its parts, before their coefficients, as shares of the same kind.
        batch: what the losses were given (cleaned).
        tokens: the policy loss before correction.
        correction: None where there is none.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    batch: TokenBatch
    tokens: TokenLoss
    correction: Correction | None


def objective(given: TokenBatch, config: LossConfig, mini_batch: MiniBatch) -> Objective:
    """policy - entropy_coef H + kl.coef KL + nll_coef NLL, each aggregated as `config.aggregation` says.

    The correction's weights multiply the policy term only. NLL (VAPO, arXiv 2504.05118, section 4: positive-example LM loss)
    is aggregated over the good samples by their own counts.
    """
    batch = given.cleaned()

    def share(values: Tensor, mask: Tensor = batch.mask, totals: Totals = mini_batch.totals) -> Tensor:
        return aggregate(values, mask, batch.lengths, config.aggregation, totals)

    tokens = loss_function(config.name)(batch, config)
    found, policy = None, tokens.loss
    if config.correction.active:
        found = correction(batch, config.correction)
        policy = policy * (found.weights / mini_batch.mean_weight)
    terms = {"policy_loss": share(policy)}
    loss = terms["policy_loss"]
    if config.entropy_coef:
        terms["entropy_bonus"] = share(batch.entropies)
        loss = loss - config.entropy_coef * terms["entropy_bonus"]
    if config.kl.coef:
        terms["kl_loss"] = share(kl_loss(batch, config.kl))
        loss = loss + config.kl.coef * terms["kl_loss"]
    if config.nll_coef:
        if batch.positive is None:
            raise ValueError("the likelihood of good samples needs their rewards")
        terms["positive_nll"] = share(-batch.logprobs, batch.mask & batch.positive, mini_batch.good)
        loss = loss + config.nll_coef * terms["positive_nll"]
    return Objective(loss, terms, batch, tokens, found)


def term_names(config: LossConfig) -> list[str]:
    """The keys of `Objective.terms`."""
    coefficients = {
        "policy_loss": 1.0,
        "entropy_bonus": config.entropy_coef,
        "kl_loss": config.kl.coef,
        "positive_nll": config.nll_coef,
    }
    return [name for name, coefficient in coefficients.items() if coefficient]
