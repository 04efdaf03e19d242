"""Estimators with one number a token, and their tools: discounted sums over ragged rows, and whitening.

Tokens that are not trained (what a tool answered) are taken out before a recursion and put back as 0 after it, so that a
return is carried over them undiminished and nothing at their places has any influence.
"""

from __future__ import annotations

import numpy as np

from tasks.advantages.batch import Batch, Bools, Floats, Ints
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.registry import Estimate, estimator, required


@estimator("reinforce", source="Williams 1992")
def reinforce(batch: Batch, config: AlgorithmConfig) -> Estimate:
    """The discounted reward to go, without any baseline: A_t = sum over k >= t of gamma^(k - t) r_k.

    k counts trained tokens; the outcome is the reward of the last one.
    """
    return Estimate(reward_to_go(batch, config.gamma))


@estimator("reinforce_plus_plus", source="arXiv 2501.03262")
def reinforce_plus_plus(batch: Batch, config: AlgorithmConfig) -> Estimate:
    """The discounted reward to go, whitened over all trained tokens of the step."""
    return Estimate(whiten(reward_to_go(batch, config.gamma), _trained(batch)))


@estimator("gae", needs=("values",), source="arXiv 1506.02438 eq. 16")
def gae(batch: Batch, config: AlgorithmConfig) -> Estimate:
    """Generalised advantage estimation with a critic, whitened over all trained tokens of the step.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lambda A_(t+1), both 0 after the last trained token. The
    critic's returns are A + V, before A is whitened.
    """
    advantages = gae_advantages(batch, config.gamma, config.lam)
    return Estimate(whiten(advantages, _trained(batch)), advantages + required(batch, "values"))


def gae_advantages(batch: Batch, gamma: float, lam: float) -> Floats:
    """(tokens,) A_t of `gae` before whitening. r=[0, 1], v=0, gamma 1, lambda .95 gives [.95, 1]."""
    values, rewards = required(batch, "values")[batch.mask], batch.rewards_by_token()[batch.mask]
    counts = batch.token_counts
    following = np.append(values[1:], 0.0)
    following[np.cumsum(counts)[counts > 0] - 1] = 0.0
    return _back(batch, discounted_sums(rewards + gamma * following - values, counts, gamma * lam))


def reward_to_go(batch: Batch, gamma: float) -> Floats:
    """(tokens,) what a sample earns from a token on, discounted by gamma a trained token; 0 at the other tokens."""
    return _back(batch, discounted_sums(batch.rewards_by_token()[batch.mask], batch.token_counts, gamma))


def discounted_sums(values: Floats, counts: Ints, factor: float) -> Floats:
    """y_t = x_t + factor * y_(t+1) within each row, by doubling: O(n log(longest row)) and no loop over tokens.

    After k rounds y_t holds the first 2^k terms of its sum; a round adds the next 2^k, which stand 2^k places further on. A row's
    result does not depend on which other rows there are.

    Args:
        values: (n,) the rows, one after another.
        counts: (rows,) their lengths, sum n; a row may be empty.
    """
    sums = np.array(values, dtype=np.float64)
    left = np.repeat(np.cumsum(counts), counts) - np.arange(len(sums)) - 1  # places after this one in its row
    shift, weight = 1, float(factor)
    while shift <= left.max(initial=0) and weight != 0.0:
        sums[:-shift] += weight * np.where(left[:-shift] >= shift, sums[shift:], 0.0)
        shift, weight = shift * 2, weight * weight
    return sums


def whiten(values: Floats, weights: Ints | Floats | Bools, eps: float = 1e-8) -> Floats:
    """Shift to mean 0 and scale to deviation 1, weighted; entries of weight 0 have no influence and become 0.

    Args:
        values: (n,); anything, NaN included, where the weight is 0.
        weights: (n,) how often each value counts: trained tokens of a sample, or a mask. The variance divides by their sum - 1.
        eps: added to the variance, so that equal values give 0 and one value alone does not divide by zero.
    """
    total = float(weights.sum())
    if total == 0:
        return np.zeros_like(values)
    used = np.where(weights > 0, values, 0.0)
    mean = float((weights * used).sum()) / total
    variance = float((weights * (used - mean) ** 2).sum()) / max(total - 1.0, 1.0)
    return np.where(weights > 0, (used - mean) / np.sqrt(variance + eps), 0.0)


def _trained(batch: Batch) -> Bools:
    return batch.mask & batch.scored[batch.sample_of_token]


def _back(batch: Batch, trained: Floats) -> Floats:
    """(tokens,) numbers of the trained tokens at their places, 0 at the others."""
    result = np.zeros(len(batch.mask))
    result[batch.mask] = trained
    return result
