"""Estimators over several rewards at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasks.advantages.batch import Batch, Floats
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.group import standardised
from tasks.advantages.registry import BadEstimate, estimator
from tasks.advantages.token import whiten


@estimator("gdpo", group=True, needs=("components",), source="arXiv 2601.05242")
def gdpo(batch: Batch, config: AlgorithmConfig) -> Floats:
    """Each reward component normalised within the group by itself, then summed by `gdpo_weights` and whitened over the tokens.

    A sum of rewards normalised as one makes different mixtures look alike; this keeps them apart. `reward` names the whole reward
    among the components. Where a sample lacks a component, or is alone in its group to have it, that component adds 0.

    Raises:
        BadEstimate: no sample of the step has a component that is named.
    """
    total = np.zeros(len(batch.rewards))
    for name, weight in config.gdpo_weights.items():
        part = replace(batch, outcomes=_component(batch, name), token_rewards=None)
        total += weight * np.where(part.comparable, standardised(part), 0.0)
    return whiten(total, np.where(batch.comparable, batch.token_counts, 0))


def _component(batch: Batch, name: str) -> Floats:
    values = batch.rewards if name == "reward" else batch.components.get(name)
    if values is None or not np.isfinite(values).any():
        has = ", ".join(sorted(batch.components)) or "none"
        raise BadEstimate(f"no sample has the component {name!r} of algorithm.gdpo_weights; the rewards have: {has}")
    return np.where(batch.scored, values, np.nan)
