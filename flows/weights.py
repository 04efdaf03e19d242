"""Bringing the pool to the weights that the next step needs, and saving them when it is time."""

from __future__ import annotations

from engine.pool.errors import OperationConflict, VersionMismatch
from flows.run import RunContext
from storage.checkpoints import latest, retain
from storage.manifest import Manifest
from tasks.checkpoint import checkpoint
from tasks.update import checked_version, update, update_arguments


def restore(run: RunContext) -> None:
    """Make the pool hold the version that the next step starts from, doing as little as possible.

    The pool may hold it still (the run was continued, or the flow died and the pool did not). Otherwise the newest checkpoint
    is loaded, or the model itself, and the updates since then are replayed from their committed datasets: nothing is
    generated or scored a second time.
    """
    if run.is_complete():
        return
    wanted = run.next_step()
    held = _held(run)
    if held == wanted + 1 and _commit_finished_update(run, wanted):
        return
    if held == wanted:
        run.progress.note(f"the pool still holds version {wanted} of this run")
        return
    found = latest(run.ledger, at_most=wanted)
    version = _load_model(run) if found is None else _load_checkpoint(run, found)
    for step in range(version, wanted):
        run.progress.begin(step, "replaying the update")
        _replay(run, step)
    source = "the model" if found is None else f"the checkpoint of version {version}"
    run.progress.note(f"loaded {source}" + (f" and replayed {wanted - version} updates" if wanted > version else ""))


def checkpoint_when_due(run: RunContext, version: int) -> None:
    """Save `version` every `checkpoint_every` steps and at the end, and drop the oldest checkpoints beyond those to keep."""
    if run.config.checkpoint_due(version):
        run.begin(version - 1, "checkpoint")
        checkpoint(run, version)
        retain(run.ledger, keep_last=run.config.keep_last_checkpoints)


def _held(run: RunContext) -> int | None:
    """Version of *this* run's weights that the pool holds; None if it holds another run's, or none."""
    result = run.call("describe", f"{run.ledger.run}/describe/{run.lease.token}", {})
    state = result["ranks"][0]
    # Both must say so: after an update that failed early the ranks may still hold a version that the pool no longer vouches for.
    vouched = state["weight_version"] is not None and result["weight_version"] == state["weight_version"]
    return state["weight_version"] if vouched and state.get("run") == run.identity else None


def _commit_finished_update(run: RunContext, step: int) -> bool:
    """Commit an update that the pool finished for an attempt that died before writing so down."""
    datasets = _datasets(run, step, run.update_inputs)
    if datasets is None:
        return False
    try:
        update(run, step, *datasets)
    except (
        VersionMismatch,
        OperationConflict,
    ):  # forgotten, or done with another micro-batch size: start from a checkpoint
        return False
    return True


def _load_model(run: RunContext) -> int:
    args = {"run": run.identity, "spec": run.engine_spec}
    return checked_version(run.call("load", f"{run.ledger.run}/load/{run.lease.token}", args), 0)


def _load_checkpoint(run: RunContext, found: Manifest) -> int:
    args = {
        "run": run.identity,
        "spec": run.engine_spec,
        "store": run.store_uri,
        "manifest": found.model_dump(mode="json"),
    }
    op_id = f"{run.ledger.run}/{found.step:06d}/restore/{run.lease.token}"
    return checked_version(run.call("restore", op_id, args), found.step)


def _replay(run: RunContext, step: int) -> None:
    datasets = _datasets(run, step, run.update_inputs)
    if datasets is None:
        raise LookupError(f"step {step} of run {run.ledger.run!r} cannot be replayed: its {run.update_inputs} are gone")
    op_id = f"{run.ledger.run}/{step:06d}/replay/{run.lease.token}"
    checked_version(run.call("update", op_id, update_arguments(run, step, datasets), expect_version=step), step + 1)


def _datasets(run: RunContext, step: int, stages: tuple[str, ...]) -> tuple[Manifest, ...] | None:
    manifests = [run.ledger.get(stage, step) for stage in stages]
    found = [manifest for manifest in manifests if manifest is not None]
    return tuple(found) if len(found) == len(stages) else None
