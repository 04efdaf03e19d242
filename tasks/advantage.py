"""How much better each response was than its siblings: an advantage for every response token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from storage.datasets import ADVANTAGE, join, read, write_part
from storage.manifest import Manifest
from tasks.advantages import ESTIMATORS, Batch
from tasks.context import StageContext
from tasks.stage import StageOutput, Work, flat, stage


class NothingToLearn(RuntimeError):
    """No sample of the step can be compared with another one."""


def advantage_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides the advantages."""
    return flat(estimator=ctx.algorithm.estimator, normalize_by_std=ctx.algorithm.normalize_by_std)


@stage("advantage", settings=advantage_settings)
def advantage(work: Work, rollouts: Manifest, rewards: Manifest) -> StageOutput:
    """Write one row for every sample that is trained on (schema ADVANTAGE).

    A sample without a reward, or alone in its group after such losses, is left out and counted: an advantage of 0 would still
    take part in the loss's denominators. Groups of equal rewards stay, with advantages of 0, and are counted too.

    Raises:
        NothingToLearn: no sample is left.
    """
    columns = ["sample_id", "group_id", "prompt_tokens", "response_mask"]
    table = join(
        read(work.store, rollouts, columns=columns), read(work.store, rewards, columns=["sample_id", "reward"])
    )
    masks = [np.asarray(mask, dtype=np.float32) for mask in table["response_mask"].to_pylist()]
    batch = Batch.of(table["reward"].to_pylist(), table["group_id"].to_pylist(), [int(mask.sum()) for mask in masks])
    kept = batch.comparable & (batch.token_counts > 0)
    if not kept.any():
        raise NothingToLearn(
            f"step {work.step}: none of the {len(kept)} samples can be compared with another one of its group;"
            " look at the errors with `onecopy rollouts show`"
        )
    values = ESTIMATORS.find(work.ctx.algorithm.estimator)(batch, work.ctx.algorithm)
    rows = _rows(table, masks, values, batch.rewards, np.flatnonzero(kept))
    entry = write_part(work.store, work.path, 0, pa.Table.from_pylist(rows, schema=ADVANTAGE), ADVANTAGE)
    return StageOutput(weight_version=rollouts.weight_version, files=[entry], metrics=_metrics(batch, kept, values))


def _rows(table: pa.Table, masks: list[Any], values: Any, rewards: Any, kept: Any) -> list[dict[str, Any]]:
    sample_ids, group_ids = table["sample_id"].to_pylist(), table["group_id"].to_pylist()
    prompt_lengths = [len(tokens) for tokens in table["prompt_tokens"].to_pylist()]
    return [
        {
            "sample_id": sample_ids[index],
            "group_id": group_ids[index],
            "advantages": np.where(masks[index] > 0, np.float32(values[index]), np.float32(0)),
            "length": prompt_lengths[index] + len(masks[index]),
            "reward": rewards[index],
        }
        for index in kept
    ]


def _metrics(batch: Batch, kept: Any, values: Any) -> dict[str, float]:
    sizes, constant = batch.group_sizes(), batch.constant_groups()
    return {
        "samples": float(kept.sum()),
        "left_out": float((~kept).sum()),
        "groups": float(len(sizes)),
        "zero_variance_groups": float((constant & (sizes > 1)).sum()),
        "advantage_abs": float(np.abs(values[kept]).mean()),
    }
