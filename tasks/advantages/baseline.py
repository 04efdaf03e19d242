"""Estimators with a baseline chosen for little variance, or measured by one more rollout."""

from __future__ import annotations

import numpy as np

from tasks.advantages.batch import Batch, Floats
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.registry import Estimate, estimator, required
from tasks.advantages.token import discounted_sums, reward_to_go


@estimator("remax", needs=("greedy_rewards",), source="arXiv 2310.10505")
def remax(batch: Batch, config: AlgorithmConfig) -> Estimate:
    """The reward to go, not discounted, minus the reward of the greedy answer to the same prompt.

    Samples whose prompt has no greedy reward (scoring failed) are left out.
    """
    return Estimate(reward_to_go(batch, 1.0) - batch.spread(required(batch, "greedy_rewards")))


@estimator("opo", group=True, source="arXiv 2505.23585")
def opo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - sum(length * r) / sum(length) within the group, lengths in trained tokens: long samples have larger gradients.

    [1, 0] with lengths [1, 3] gives [.75, -.25].
    """
    weighted = batch.group_sums(batch.token_counts * batch.rewards)
    lengths = batch.group_sums(batch.token_counts.astype(np.float64))
    baseline = np.where(lengths > 0, weighted / np.maximum(lengths, 1.0), batch.group_means())
    constant = batch.constant_groups()[batch.groups]
    return np.where(constant | ~batch.scored, 0.0, batch.rewards - baseline[batch.groups])


@estimator(
    "optimal_token_baseline",
    group=True,
    needs=("rollout_logprobs", "sum_pi_squared"),
    source="arXiv 2602.07078",
)
def optimal_token_baseline(batch: Batch, config: AlgorithmConfig) -> Estimate:
    """The reward to go minus, at each place, its mean over the group weighted by the gradient's size so far.

    A_t = G_t - sum_group(G_t W_t) / sum_group(W_t), W_t = sum over k <= t of (1 - 2 pi_k + sum over the vocabulary of pi^2): the
    squared norm of the gradient with respect to the logits of the first t tokens. t counts trained tokens, so that turns of
    different tools are comparable. At a place that only one sample reaches A is 0.
    """
    counts, owners = batch.token_counts, batch.sample_of_token[batch.mask]
    to_go = reward_to_go(batch, config.gamma)[batch.mask]
    chosen = np.exp(required(batch, "rollout_logprobs")[batch.mask])
    norms = np.maximum(1.0 - 2.0 * chosen + required(batch, "sum_pi_squared")[batch.mask], 0.0)
    weights = discounted_sums(norms[::-1], counts[::-1], 1.0)[::-1]  # from the first token to each one
    weights = np.where(batch.scored[owners], weights, 0.0)
    place = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    _, cell = np.unique(batch.groups[owners] * (int(counts.max(initial=0)) + 1) + place, return_inverse=True)
    cell = cell.reshape(-1)
    total = np.bincount(cell, weights=weights)
    # Where the policy is certain in every sample all weights are 0, and so is the gradient: any baseline will do.
    baseline = np.bincount(cell, weights=weights * to_go) / np.where(total > 0, total, 1.0)
    result = np.zeros(len(batch.mask))
    constant = batch.constant_groups()[batch.groups[owners]]
    result[batch.mask] = np.where(constant, 0.0, to_go - baseline[cell])
    return Estimate(result)
