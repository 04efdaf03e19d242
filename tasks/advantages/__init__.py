"""Advantage estimators on ragged NumPy data. Register your own with `@estimator("name")`, or name it `module:function`."""

from tasks.advantages import baseline, group, multi, token
from tasks.advantages.batch import Batch
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.registry import ESTIMATORS, BadEstimate, Estimate, Estimator, estimator, find_estimator
from tasks.advantages.token import whiten

__all__ = [
    "ESTIMATORS",
    "AlgorithmConfig",
    "BadEstimate",
    "Batch",
    "Estimate",
    "Estimator",
    "baseline",
    "estimator",
    "find_estimator",
    "group",
    "multi",
    "token",
    "whiten",
]
