"""Group estimators: a sample is compared with the other samples of its prompt.

Each returns (samples,) float64. Entries that are not `batch.comparable` (scoring failed, or nothing to compare with) may hold
anything: the stage leaves those samples out of the training data instead of giving them an advantage of 0, which would still
count in the loss's denominators.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tasks.advantages.batch import Batch, Floats, whiten
from tasks.advantages.config import AlgorithmConfig
from tasks.plugins import Registry

Estimator = Callable[[Batch, AlgorithmConfig], Floats]

ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
estimator = ESTIMATORS.register

STD_EPS = 1e-6
"""Added to the group's deviation in GRPO; the value of the common implementations."""


@estimator("grpo")
def grpo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """(r - mean) / (std + 1e-6) within the group, std with ddof 1; without the division if `normalize_by_std` is off.

    A group of equal rewards gets exactly 0. [1, 0, 0, 0] gives [1.5, -.5, -.5, -.5] (to 1e-5).
    """
    centred = _centred(batch)
    if not config.normalize_by_std:
        return centred
    return centred / (batch.group_deviations()[batch.groups] + STD_EPS)


@estimator("dr_grpo")
def dr_grpo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - mean within the group, never divided by the deviation (combine with `seq-mean-token-sum-norm`)."""
    return _centred(batch)


@estimator("rloo")
def rloo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - mean of the *other* samples of the group. [1, 0, 0, 1] gives [2/3, -2/3, -2/3, 2/3]."""
    sizes = batch.group_sizes()[batch.groups]
    return _centred(batch) * sizes / np.maximum(sizes - 1, 1)


@estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: Batch, config: AlgorithmConfig) -> Floats:
    """r - mean within the group, then whitened over all trained tokens of the step (a long sample weighs more)."""
    weights = np.where(batch.comparable, batch.token_counts, 0)
    return whiten(_centred(batch), weights)


def _centred(batch: Batch) -> Floats:
    centred = batch.rewards - batch.group_means()[batch.groups]
    return np.where(batch.constant_groups()[batch.groups] | ~batch.scored, 0.0, centred)
