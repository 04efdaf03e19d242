"""Score the samples of a step, one failure never taking the others with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.rewards.config import OnError, RewardConfig
from tasks.rewards.registry import Sample, Score


class ScoringFailed(RuntimeError):
    """More samples could not be scored than the configuration tolerates; names the first one and its error."""


@dataclass(frozen=True)
class Scored:
    """One row of the reward stage. `reward` is None where the sample is masked, `error` says why."""

    sample_id: str
    reward: float | None
    components: str
    error: str | None


def score_samples(score: Callable[[Sample], Score], samples: Sequence[Sample], config: RewardConfig) -> list[Scored]:
    """Score every sample in order.

    Raises:
        ScoringFailed: a sample failed under `on_error: fail`, or more than `max_failed_fraction` of them did.
    """
    rows = [_score_one(score, sample, config) for sample in samples]
    failed = [row for row in rows if row.error is not None]
    if failed and (config.on_error == OnError.FAIL or len(failed) > config.max_failed_fraction * len(rows)):
        raise ScoringFailed(
            f"reward function {config.function!r} failed on {len(failed)} of {len(rows)} samples;"
            f" the first, {failed[0].sample_id}: {failed[0].error}"
        )
    return rows


def _score_one(score: Callable[[Sample], Score], sample: Sample, config: RewardConfig) -> Scored:
    try:
        result = score(sample)
        return Scored(sample.sample_id, result.reward, _to_json(result.components), None)
    except Exception as error:  # whatever a user's function raises is recorded with its sample
        worth = 0.0 if config.on_error == OnError.ZERO else None
        return Scored(sample.sample_id, worth, "{}", f"{type(error).__name__}: {error}")


def _to_json(components: dict[str, Any]) -> str:
    def plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else str(value)

    return json.dumps(components, default=plain)
