"""Group estimators: a sample is compared with the other samples of its prompt.

Each returns (samples,) float64. Entries that are not `batch.comparable` (scoring failed, or nothing to compare with) may hold
anything: those samples are left out of the training data instead of getting an advantage of 0, which would still count in the
loss's denominators. A group of equal rewards gets exactly 0, and stays.
"""

from __future__ import annotations

import numpy as np

from tasks.advantages.batch import Batch, Floats
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.registry import BadEstimate, estimator
from tasks.advantages.token import whiten

STD_EPS = 1e-6
"""Added to the group's deviation in GRPO; the value of the common implementations."""


@estimator("grpo", group=True, source="arXiv 2402.03300 section 4.1.2")
def grpo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """(r - mean) / (deviation + 1e-6) within the group; `normalize_by_std` says whose deviation.

    Deviations have ddof 1: [1, 0, 0, 0] gives [1.5, -.5, -.5, -.5] (to 1e-5). With `batch` the deviation is that of all rewards
    of the step.
    """
    if config.normalize_by_std == "none":
        return batch.centred()
    if config.normalize_by_std == "group":
        return standardised(batch)
    rewards = batch.rewards[batch.comparable]
    deviation = float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
    return batch.centred() / (deviation + STD_EPS)


@estimator("dr_grpo", group=True, source="arXiv 2503.20783")
def dr_grpo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - mean within the group, never divided by the deviation (combine with `seq-mean-token-sum-norm`)."""
    return batch.centred()


@estimator("grpo_passk", group=True, source="arXiv 2503.19595")
def grpo_passk(batch: Batch, config: AlgorithmConfig) -> Floats:
    """The best sample of a group gets (best - second best) / (deviation + 1e-6), all others 0: what it adds to the maximum.

    A tie of the best is 0 for all. [1, 0, 0, 0] gives [2, 0, 0, 0] (to 1e-5). `normalize_by_std: none` leaves out the division.
    """
    order = np.lexsort((np.where(batch.scored, batch.rewards, -np.inf), batch.groups))
    last = np.flatnonzero(np.diff(batch.groups[order], append=-1))  # the best of each group comes last
    best, second = order[last], order[np.maximum(last - 1, 0)]
    apart = batch.comparable[best] & ~batch.constant_groups()[batch.groups[best]]
    best, second = best[apart], second[apart]
    result = np.zeros(len(batch.rewards))
    result[best] = batch.rewards[best] - batch.rewards[second]
    if config.normalize_by_std != "none":
        result[best] /= batch.group_deviations()[batch.groups[best]] + STD_EPS
    return result


@estimator("rloo", group=True, source="arXiv 2402.14740")
def rloo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - mean of the other samples of the group, that is n / (n - 1) * (r - mean).

    [1, 0, 0, 1] gives [2/3, -2/3, -2/3, 2/3].
    """
    sizes = batch.group_sizes()[batch.groups]
    return batch.centred() * sizes / np.maximum(sizes - 1, 1)


@estimator("reinforce_plus_plus_baseline", group=True, source="arXiv 2501.03262")
def reinforce_plus_plus_baseline(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - mean within the group, then whitened over all trained tokens of the step (a long sample weighs more)."""
    return whiten(batch.centred(), np.where(batch.comparable, batch.token_counts, 0))


@estimator("gpg", group=True, source="arXiv 2504.02546")
def gpg(batch: Batch, config: AlgorithmConfig) -> Floats:
    """(r - mean) * B / (B - M): the M samples of groups without variance are no part of the B that the loss averages over.

    Two groups [1, 0] and [1, 1] give [1, -1, 0, 0].
    """
    samples = batch.comparable
    informative = int((samples & ~batch.constant_groups()[batch.groups]).sum())
    return batch.centred() * (int(samples.sum()) / max(informative, 1))


@estimator("maxrl", group=True, source="arXiv 2602.02710")
def maxrl(batch: Batch, config: AlgorithmConfig) -> Floats:
    """(r - mean) / mean within the group: follows the gradient of log(success rate), which weighs hard prompts more.

    [1, 0, 0, 0] gives [3, -1, -1, -1]; a group without any success gives 0.

    Raises:
        BadEstimate: a reward is negative, and a mean of such says nothing about a rate of success.
    """
    if (batch.rewards[batch.scored] < 0).any():
        raise BadEstimate(f"maxrl needs rewards from 0 up, the lowest is {batch.rewards[batch.scored].min():.4g}")
    means = batch.group_means()
    # A group of tiny equal rewards is constant; of others the mean is above 0.
    return batch.centred() / np.where(means > 0, means, 1.0)[batch.groups]


def standardised(batch: Batch) -> Floats:
    """(samples,) (r - mean) / (deviation + 1e-6) within the group, ddof 1; exactly 0 where the group is constant."""
    return batch.centred() / (batch.group_deviations()[batch.groups] + STD_EPS)
