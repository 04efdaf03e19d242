"""Weights and optimizer state of a version (samplers are seeded from run and step), written by the ranks straight to storage."""

from __future__ import annotations

from typing import Any

from tasks.context import StageContext
from tasks.rollout import files_of
from tasks.stage import StageOutput, Work, flat, stage


def checkpoint_settings(ctx: StageContext, version: int) -> dict[str, Any]:
    """A checkpoint is of these weights, in files of this layout."""
    return {"weights": ctx.weights(version), **flat(parallel=ctx.parallel)}


@stage("checkpoint", settings=checkpoint_settings)
def checkpoint(work: Work) -> StageOutput:
    """Save weight version `step` (safetensors, one file or more a rank)."""
    result = work.call("save", {"store": work.ctx.store_uri, "out": work.path}, expect_version=work.step)
    files = files_of(result)
    return StageOutput(
        weight_version=work.step, files=files, metrics={"bytes": float(sum(entry.bytes for entry in files))}
    )
