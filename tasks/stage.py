"""Stages: Prefect tasks that do their work once, whatever happens to the process in between.

The ledger alone decides what is done. Prefect's result cache runs a task again when its storage cannot be reached, which for
an update would mean training twice; it is therefore off, and Prefect shows and schedules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Completed, State

from storage.filesystem import StorageError, Store
from storage.integrity import CorruptFile
from storage.ledger import StageConflict
from storage.manifest import FileEntry, Manifest, fingerprint, staged_name, utc_now
from tasks.context import StageContext


@dataclass
class StageOutput:
    """What a stage body hands back to be committed.

    Attributes:
        weight_version: of the weights that the stage used, or made.
        files: the parts it wrote under hidden names, as `storage.datasets.write_part` returned them.
        metrics: small numbers worth a curve.
    """

    weight_version: int
    files: list[FileEntry] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """One stage of one step, about to be done."""

    ctx: StageContext
    stage: str
    step: int
    fingerprint: str

    @property
    def store(self) -> Store:
        return self.ctx.ledger.store

    @property
    def path(self) -> str:
        """Folder of the stage, relative to the store."""
        return self.ctx.ledger.stage_path(self.stage, self.step)

    @property
    def op_id(self) -> str:
        """Names the work for the pool, so that doing it again after a crash joins it."""
        return f"{self.ctx.ledger.run}/{self.step:06d}/{self.stage}/{self.fingerprint}"

    def call(self, op: str, args: dict[str, Any], expect_version: int, role: str = "actor") -> dict[str, Any]:
        """Run the stage's operation on the devices that hold a role's model."""
        result = self.ctx.call(op, self.op_id, args, expect_version, role)
        if self._are_there(result):
            return result
        # The pool remembers the operation, but what it wrote has been removed since: do it again, under another id.
        return self.ctx.call(op, f"{self.op_id}/{time.monotonic_ns()}", args, expect_version, role)

    def _are_there(self, result: dict[str, Any]) -> bool:
        """Whether every file that the ranks say they wrote is in the stage's folder, published or not."""
        named = [entry["path"] for rank in result["ranks"] for entry in rank.get("files", [])]
        there = set(self.store.files(self.path)) if named else set()
        return all(name in there or staged_name(name) in there for name in named)


Body = Callable[..., StageOutput]
Settings = Callable[[StageContext, int], dict[str, Any]]


class StageTask:
    """A stage as the flows call it: `rollout(ctx, step, prompts)` returns the manifest, doing the work if need be.

    Attributes:
        task: the Prefect task around it.
    """

    def __init__(self, task: Task[..., Any]) -> None:
        self.task = task

    def __call__(self, ctx: StageContext, step: int, *upstream: Manifest) -> Manifest:
        """The stage's manifest; raises what the stage raises."""
        result = self.task(ctx, step, *upstream)
        # A task that returned a state, to have it shown by name, hands that very state to its caller.
        return cast(Manifest, result.result() if isinstance(result, State) else result)


def stage(name: str, settings: Settings) -> Callable[[Body], StageTask]:
    """Make `body(work, *upstream) -> StageOutput` an idempotent Prefect task called with `(ctx, step, *upstream)`.

    Args:
        name: of the stage: its folder, and the first half of its task runs' names.
        settings: what else than the upstream manifests the output depends on, as plain JSON values.

    The task raises StageConflict if the stage is committed but was made with other settings or from other data.
    """

    def decorate(body: Body) -> StageTask:
        # No functools.wraps here: Prefect would bind arguments by the body's signature.
        def run(ctx: StageContext, step: int, *upstream: Manifest) -> Any:
            inputs = _inputs(settings(ctx, step), upstream)
            mark = fingerprint(name, step, inputs)
            done = ctx.ledger.get(name, step)
            if done is None:
                return _perform(body, Work(ctx, name, step, mark), inputs, upstream)
            if done.fingerprint != mark:
                raise StageConflict(_difference(done, inputs))
            return Completed(
                name="Resumed", message=f"{name} of step {step} was finished at {done.finished_at}", data=done
            )

        run.__doc__ = body.__doc__
        decorated = task(
            name=name,
            task_run_name=name + "-{step:06d}",
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=2,
            retry_delay_seconds=[1, 5],
            retry_condition_fn=_is_hiccup,
        )(run)
        return StageTask(decorated)

    return decorate


def _perform(body: Body, work: Work, inputs: dict[str, str], upstream: Iterable[Manifest]) -> Manifest:
    started_at, start = utc_now(), time.monotonic()
    # Leftovers are not cleared first: the pool may have finished the operation, or still be at it, and its parts count.
    # Publishing drops whatever the manifest does not name.
    output = body(work, *upstream)
    return work.ctx.ledger.publish(
        Manifest(
            run=work.ctx.ledger.run,
            step=work.step,
            stage=work.stage,
            fingerprint=work.fingerprint,
            inputs=inputs,
            files=output.files,
            rows=sum(entry.rows for entry in output.files),
            weight_version=output.weight_version,
            metrics=output.metrics,
            seconds=time.monotonic() - start,
            started_at=started_at,
            finished_at=utc_now(),
            flow_run_id=flow_run.id,
        )
    )


def _inputs(settings: dict[str, Any], upstream: Iterable[Manifest]) -> dict[str, str]:
    digests = {manifest.stage: manifest.digest for manifest in upstream}
    return {**digests, "settings": json.dumps(settings, sort_keys=True)}


def _difference(done: Manifest, inputs: dict[str, str]) -> str:
    before, now = json.loads(done.inputs.get("settings", "{}")), json.loads(inputs["settings"])
    changes = [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    changes += [
        f"its input {key} is not the one it was made from"
        for key in sorted((done.inputs.keys() | inputs.keys()) - {"settings"})
        if done.inputs.get(key) != inputs.get(key)
    ]
    return (
        f"{done.stage} of step {done.step} in run {done.run!r} was finished from something else: {'; '.join(changes)};"
        " go on with what the run was started with, or start a run under another name"
    )


def flat(**parts: Any) -> dict[str, Any]:
    """Settings of several configuration parts as one flat mapping, so that a difference names the exact key."""
    result: dict[str, Any] = {}
    for name, part in parts.items():
        values = part.model_dump(mode="json") if hasattr(part, "model_dump") else part
        if isinstance(values, dict):
            result.update(flat(**{f"{name}.{key}": value for key, value in values.items()}))
        else:
            result[name] = values
    return result


def _is_hiccup(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a failed attempt is worth repeating: the storage was unreachable, not full, forbidden or corrupt."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StorageError) and not isinstance(error, CorruptFile) and not error.errno
