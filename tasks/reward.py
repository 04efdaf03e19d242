"""A number for every response, from the prompt's ground truth and the configured reward function."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from storage.datasets import REWARD, read, write_part
from storage.manifest import Manifest
from tasks.context import StageContext
from tasks.rewards import RewardConfig, Sample, Scored, bind, score_samples
from tasks.rewards.shaping import overlong_penalty, penalise_length, unshaped
from tasks.stage import StageOutput, Work, flat, stage


def reward_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides a response's reward."""
    return flat(reward=ctx.reward)


@stage("reward", settings=reward_settings)
def reward(work: Work, prompts: Manifest, rollouts: Manifest) -> StageOutput:
    """Score the step's rollouts."""
    return score(work, prompts, rollouts, penalised=True)


def score(work: Work, prompts: Manifest, rollouts: Manifest, penalised: bool = False) -> StageOutput:
    """Write one row a sample (schema REWARD), training and evaluation alike.

    Args:
        penalised: whether length counts too, where that is configured; in an evaluation it never does.

    Raises:
        ScoringFailed: more samples failed than the configuration tolerates.
    """
    config = work.ctx.reward
    samples, group_ids = _samples(work, prompts, rollouts)
    scored = score_samples(bind(config.function), samples, config)
    lengths = [len(sample.response_tokens) for sample in samples]
    if penalised and config.overlong_buffer is not None:
        longest = work.ctx.generation.max_response_tokens
        penalties = overlong_penalty(lengths, longest, config.overlong_buffer, config.overlong_factor)
        scored = penalise_length(scored, penalties.tolist())
    rows = [{**asdict(row), "group_id": group} for row, group in zip(scored, group_ids, strict=True)]
    entry = write_part(work.store, work.path, 0, pa.Table.from_pylist(rows, schema=REWARD), REWARD)
    truncated = [sample.finish_reason == "length" for sample in samples]
    metrics = {**reward_metrics(scored, config), **response_metrics(lengths, truncated)}
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


def reward_metrics(scored: Sequence[Scored], config: RewardConfig) -> dict[str, float]:
    """Rewards, share of successes and mean of each numeric component over the samples that have them; count of failures.

    A success is judged by what the reward function gave, before any penalty for length. A metric without any sample is left out,
    rather than reported as a number.
    """
    parts = [json.loads(row.components) for row in scored]
    rewards = np.array([row.reward for row in scored if row.reward is not None], dtype=np.float64)
    metrics = {"failed": float(sum(row.error is not None for row in scored))}
    if len(rewards):
        given = [unshaped(row.reward, part) for row, part in zip(scored, parts, strict=True) if row.reward is not None]
        metrics["reward"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std())
        metrics["reward_min"], metrics["reward_max"] = float(rewards.min()), float(rewards.max())
        metrics["success"] = float((np.array(given, dtype=np.float64) >= config.success_threshold).mean())
    components: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            if isinstance(value, int | float) and np.isfinite(value):
                components[f"component/{name}"].append(float(value))
    return {**metrics, **{name: float(np.mean(values)) for name, values in components.items()}}


def response_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """Mean and largest number of response tokens, and the share of responses cut at the longest length."""
    if not lengths:
        return {}
    return {
        "response_tokens": float(np.mean(lengths)),
        "response_tokens_max": float(np.max(lengths)),
        "truncated": float(np.mean(truncated)),
    }
