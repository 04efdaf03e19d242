"""Weights and optimizer state of a version, written by the ranks straight to storage while the run goes on.

The ranks copy their state (`begin_checkpoint`), write it in the background, and are asked how far they are (`progress_of`); the
stage `checkpoint` waits for them and is what makes a checkpoint of the files. Nothing but the version need be remembered for
that: a flow that takes over finds what the pool has written for the one before.
"""

from __future__ import annotations

import time
from typing import Any

from storage.checkpoints import STAGE
from tasks.context import StageContext
from tasks.rollout import files_of
from tasks.stage import StageOutput, Work, stage

ABSENT, RUNNING, FAILED, DONE = "absent", "running", "failed", "done"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written. The run can be resumed: what is missing is replayed from the committed datasets."""


def begin_checkpoint(ctx: StageContext, version: int) -> None:
    """Have the ranks copy their state and begin to write it; training may go on when this returns."""
    args = {"store": ctx.store_uri, "out": _folder(ctx, version)}
    ctx.call_trained("save", _op_id(ctx, version, "save"), args, expect_version=version)


def progress_of(ctx: StageContext, version: int) -> tuple[str, list[str]]:
    """How far the pool is with a checkpoint: ABSENT, RUNNING, FAILED or DONE; and which attempts failed since the last time."""
    result = _saved(ctx, version, wait=False)
    state, news = _state(result, "news")
    if state == DONE:
        there = ctx.ledger.store.files(_folder(ctx, version))
        if not {entry.path for entry in files_of(result)} <= set(there):
            return ABSENT, news  # somebody has removed what was written
    return state, news


@stage(STAGE, settings=lambda ctx, version: {"weights": ctx.weights(version)})
def checkpoint(work: Work) -> StageOutput:
    """Wait until all ranks have written weight version `step`, which `begin_checkpoint` was called for.

    Raises:
        CheckpointFailed: it could not be written, or the pool has lost it.
    """
    result = _saved(work.ctx, work.step, wait=True)
    state, problems = _state(result, "problems")
    if state != DONE:
        reason = "; ".join(problems) or "the pool does not know of it"
        raise CheckpointFailed(
            f"the checkpoint of version {work.step} was not written: {reason}. Mend that and start the run again: "
            "it goes on from the checkpoint before, or from what the pool still holds"
        )
    files = files_of(result)
    figures = [rank["metrics"] for rank in result["ranks"]]
    return StageOutput(
        weight_version=work.step,
        files=files,
        metrics={
            "bytes": float(sum(entry.bytes for entry in files)),
            "seconds": max(each["seconds"] for each in figures),
            "stall_seconds": max(each["stall_seconds"] for each in figures),
        },
    )


def _saved(ctx: StageContext, version: int, *, wait: bool) -> dict[str, Any]:
    args = {"out": _folder(ctx, version), "wait": wait}
    return ctx.call_trained("saved", _op_id(ctx, version, "saved"), args)


def _state(result: dict[str, Any], told: str) -> tuple[str, list[str]]:
    """That of all ranks together, and what each tells of failed attempts."""
    ranks = result["ranks"]
    states = {rank["state"] for rank in ranks}
    problems = [f"rank {number}: {line}" for number, rank in enumerate(ranks) for line in rank[told]]
    # Two states at once: a rank that has failed will not finish for the others' sake, and one that lost it has none.
    return next((state for state in (ABSENT, FAILED, RUNNING) if state in states), DONE), problems


def _folder(ctx: StageContext, version: int) -> str:
    return ctx.ledger.stage_path(STAGE, version)


def _op_id(ctx: StageContext, version: int, op: str) -> str:
    """Asked again, an operation gets another id: what it finds depends on time."""
    return f"{ctx.ledger.run}/{version:06d}/{op}/{time.monotonic_ns()}"
