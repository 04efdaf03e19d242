"""A number for every response, from the prompt's ground truth and the configured reward function."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from storage.datasets import REWARD, read, write_part
from storage.manifest import Manifest
from tasks.context import StageContext
from tasks.rewards import RewardConfig, Sample, Scored, bind, score_samples
from tasks.stage import StageOutput, Work, flat, stage


def reward_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides a response's reward."""
    return flat(reward=ctx.reward)


@stage("reward", settings=reward_settings)
def reward(work: Work, prompts: Manifest, rollouts: Manifest) -> StageOutput:
    """Score the step's rollouts."""
    return score(work, prompts, rollouts)


def score(work: Work, prompts: Manifest, rollouts: Manifest) -> StageOutput:
    """Write one row a sample (schema REWARD), training and evaluation alike.

    Raises:
        ScoringFailed: more samples failed than the configuration tolerates.
    """
    config = work.ctx.reward
    samples, group_ids = _samples(work, prompts, rollouts)
    scored = score_samples(bind(config.function), samples, config)
    rows = [{**asdict(row), "group_id": group} for row, group in zip(scored, group_ids, strict=True)]
    entry = write_part(work.store, work.path, 0, pa.Table.from_pylist(rows, schema=REWARD), REWARD)
    metrics = {**reward_metrics(scored, config), **_response_metrics(samples)}
    return StageOutput(weight_version=rollouts.weight_version, files=[entry], metrics=metrics)


def _samples(work: Work, prompts: Manifest, rollouts: Manifest) -> tuple[list[Sample], list[str]]:
    """The rollouts with their prompts, matched by group id, and those ids; in the rollouts' order."""
    asked = {row["group_id"]: row for row in read(work.store, prompts).to_pylist()}
    columns = ["sample_id", "group_id", "text", "response_tokens", "finish_reason"]
    rows = read(work.store, rollouts, columns=columns).to_pylist()
    samples = [
        Sample(
            sample_id=row["sample_id"],
            response=row["text"],
            answer=asked[row["group_id"]]["answer"],
            prompt=asked[row["group_id"]]["prompt_text"],
            extra=json.loads(asked[row["group_id"]]["extra"]),
            response_tokens=row["response_tokens"],
            finish_reason=row["finish_reason"],
        )
        for row in rows
    ]
    return samples, [row["group_id"] for row in rows]


def reward_metrics(scored: list[Scored], config: RewardConfig) -> dict[str, float]:
    """Mean reward, share of successes and mean of each numeric component over the samples that have them; count of failures.

    A metric without any sample is left out, rather than reported as a number.
    """
    rewards = np.array([row.reward for row in scored if row.reward is not None], dtype=np.float64)
    metrics = {"failed": float(sum(row.error is not None for row in scored))}
    if len(rewards):
        metrics["reward"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std())
        metrics["success"] = float((rewards >= config.success_threshold).mean())
    components: dict[str, list[float]] = defaultdict(list)
    for row in scored:
        for name, value in json.loads(row.components).items():
            if isinstance(value, int | float):
                components[f"component/{name}"].append(float(value))
    return {**metrics, **{name: float(np.mean(values)) for name, values in components.items()}}


def _response_metrics(samples: list[Sample]) -> dict[str, float]:
    if not samples:
        return {}
    return {
        "response_tokens": float(np.mean([len(sample.response_tokens) for sample in samples])),
        "truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }
