"""How much better each response was than what was to be expected: an advantage for every response token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.datasets import ADVANTAGE, join, read, write_part
from storage.manifest import Manifest
from tasks.advantages import AlgorithmConfig, Batch, Estimate, find_estimator
from tasks.advantages.batch import PER_TOKEN, Bools, Floats, numbered
from tasks.advantages.kl_reward import next_coefficient, penalised
from tasks.context import StageContext
from tasks.stage import StageOutput, Work, flat, stage

SETTINGS = {"estimator", "normalize_by_std", "gamma", "lam", "gdpo_weights", "kl_form", "mask_truncated"}
"""Settings of the algorithm that decide the advantages, beside the KL coefficient."""

GREEDY = "greedy-reward"
"""Stage of the rewards of greedy answers, one a prompt."""


class NothingToLearn(RuntimeError):
    """No sample of the step can be trained on."""


def advantage_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides the advantages."""
    return flat(**ctx.algorithm.model_dump(include=SETTINGS), kl_coef=kl_coefficient(ctx, step))


def kl_coefficient(ctx: StageContext, step: int) -> float:
    """Of the KL penalty in this step's rewards; what the step before committed decides, never what a process remembers."""
    before = ctx.ledger.get("advantage", step - 1) if step > 0 and ctx.algorithm.kl_target is not None else None
    return next_coefficient(ctx.algorithm, before.metrics if before else None)


@stage("advantage", settings=advantage_settings)
def advantage(work: Work, rollouts: Manifest, rewards: Manifest, *others: Manifest) -> StageOutput:
    """Write one row for every sample that is trained on (schema ADVANTAGE).

    A sample without a reward, without a trained token, or alone in its group where groups are compared, is left out and counted:
    an advantage of 0 would still take part in the loss's denominators. Groups of equal rewards stay, with advantages of 0.

    Args:
        others: further datasets, one row a sample with columns named like attributes of `Batch`; and GREEDY, by group.

    Raises:
        NothingToLearn: no sample is left.
        BadEstimate: the estimator lacks something, or gives what is not a finite number.
    """
    algorithm = work.ctx.algorithm
    table = _joined(work, rollouts, rewards, others)
    batch = batch_of(
        table, algorithm, next((_by_group(work, other) for other in others if other.stage == GREEDY), None)
    )
    metrics: dict[str, float] = {}
    if algorithm.kl_coef > 0:
        metrics["kl_coef"] = kl_coefficient(work.ctx, work.step)
        batch, metrics["kl"] = penalised(batch, algorithm.kl_form, metrics["kl_coef"])
    estimator = find_estimator(algorithm.estimator)
    kept = estimator.usable(batch)
    if not kept.any():
        raise NothingToLearn(
            f"step {work.step}: none of the {len(kept)} samples can be compared with another one of its group, or has a reward"
            " and tokens to train on; look at the errors with `onecopy rollouts show`"
        )
    estimate = estimator.estimate(batch, algorithm)
    rows = advantage_rows(table, batch, estimate, kept)
    entry = write_part(work.store, work.path, 0, rows, ADVANTAGE)
    metrics |= advantage_metrics(batch, kept, estimate.advantages)
    return StageOutput(weight_version=rollouts.weight_version, files=[entry], metrics=metrics)


def batch_of(table: pa.Table, algorithm: AlgorithmConfig, greedy: dict[str, float | None] | None = None) -> Batch:
    """The joined rows of a step as an estimator sees them.

    Args:
        table: sample_id, group_id, response_mask, finish_reason, reward, components, and any columns named like per-token
            attributes of `Batch`.
        greedy: reward of the greedy answer by group id.
    """
    counts = pc.list_value_length(table["response_mask"]).to_numpy().astype(np.int64)
    mask = _flat(table["response_mask"]).astype(bool)
    if algorithm.mask_truncated:
        cut = np.array(table["finish_reason"].to_pylist(), dtype=object) == "length"
        mask &= ~np.repeat(cut, counts)
    group_ids = table["group_id"].to_pylist()
    return Batch(
        outcomes=_floats(table["reward"].to_pylist()),
        groups=numbered(group_ids),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        mask=mask,
        greedy_rewards=None if greedy is None else _floats([greedy.get(group) for group in group_ids]),
        components=_components(table, algorithm),
        **{name: _flat(table[name]).astype(np.float64) for name in PER_TOKEN if name in table.column_names},
    )


def advantage_rows(table: pa.Table, batch: Batch, estimate: Estimate, kept: Bools) -> pa.Table:
    """The rows of `kept` samples in the ADVANTAGE schema."""

    def ragged(numbers: Floats | None) -> pa.Array:
        if numbers is None:
            return pa.nulls(len(batch.groups), pa.list_(pa.float32()))
        return pa.ListArray.from_arrays(pa.array(batch.offsets, pa.int32()), pa.array(numbers, pa.float32()))

    prompts = pc.list_value_length(table["prompt_tokens"]).to_numpy()
    columns = {
        "sample_id": table["sample_id"],
        "group_id": table["group_id"],
        "advantages": ragged(estimate.advantages),
        "returns": ragged(estimate.returns),
        "length": pa.array(prompts + np.diff(batch.offsets), pa.int32()),
        "reward": pa.array(batch.outcomes),
    }
    return pa.table(columns).take(np.flatnonzero(kept))


def advantage_metrics(batch: Batch, kept: Bools, advantages: Floats) -> dict[str, float]:
    """How many samples and groups there are, and the advantages of the trained tokens, as the loss sees them."""
    sizes, constant = batch.group_sizes(), batch.constant_groups()
    compared = sizes > 1
    values = advantages[batch.mask & kept[batch.sample_of_token]]
    return {
        "samples": float(kept.sum()),
        "left_out": float((~kept).sum()),
        "groups": float(len(sizes)),
        "zero_variance_groups": float((constant & compared).sum()),
        "zero_variance_rate": float((constant & compared).sum() / max(int(compared.sum()), 1)),
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std()),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_abs": float(np.abs(values).mean()),
        "advantage_positive": float((values > 0).mean()),
    }


def _joined(work: Work, rollouts: Manifest, rewards: Manifest, others: Sequence[Manifest]) -> pa.Table:
    """Everything that is known of the samples, in the rollouts' order."""
    columns = ["sample_id", "group_id", "prompt_tokens", "response_mask", "rollout_logprobs", "finish_reason"]
    table = read(work.store, rollouts, columns=columns)
    table = join(table, read(work.store, rewards, columns=["sample_id", "reward", "components"]))
    for other in others:
        if other.stage != GREEDY:
            table = join(table, read(work.store, other))
    return table


def _by_group(work: Work, rewards: Manifest) -> dict[str, float | None]:
    table = read(work.store, rewards, columns=["group_id", "reward"])
    return dict(zip(table["group_id"].to_pylist(), table["reward"].to_pylist(), strict=True))


def _components(table: pa.Table, algorithm: AlgorithmConfig) -> dict[str, Floats]:
    """The numeric components of the rewards; read only if the algorithm weighs them."""
    if not algorithm.gdpo_weights:
        return {}
    rows = [json.loads(text) for text in table["components"].to_pylist()]
    names = sorted({name for row in rows for name, value in row.items() if isinstance(value, int | float)})
    return {name: _floats([number(row.get(name)) for row in rows]) for name in names}


def number(value: Any) -> float | None:
    """A component's value if it is one that can be compared."""
    return float(value) if isinstance(value, int | float) else None


def _flat(column: pa.ChunkedArray) -> Any:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
