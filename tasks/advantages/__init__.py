"""Advantage estimators on ragged NumPy data. Register your own with `@estimator("name")`, or name it `module:function`."""

from tasks.advantages.batch import Batch, whiten
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.estimators import ESTIMATORS, Estimator, estimator

__all__ = ["ESTIMATORS", "AlgorithmConfig", "Batch", "Estimator", "estimator", "whiten"]
