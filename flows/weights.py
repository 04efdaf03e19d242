"""Bringing the pool to the weights that the next step needs, and saving them when it is time."""

from __future__ import annotations

import contextlib
from typing import Any

from engine.pool.errors import OperationConflict, VersionMismatch
from flows.run import RunContext
from storage.checkpoints import STAGE, best, latest, retain, set_aside
from storage.manifest import Manifest
from tasks.checkpoint import ABSENT, DONE, FAILED, RUNNING, CheckpointFailed, begin_checkpoint, checkpoint, progress_of
from tasks.devices import DeviceGroup, at_once, merged
from tasks.update import checked_version, update, update_arguments


def restore(run: RunContext) -> None:
    """Make the pool hold the version that the next step starts from, doing as little as possible.

    The pool may hold it still (the run was continued, or the flow died and the pool did not). Otherwise the newest checkpoint
    that is not damaged is loaded, whatever layout it was saved under, or the model itself, and the updates since then are
    replayed from their committed datasets: nothing is generated or scored a second time.
    """
    if run.is_complete():
        return
    _load_frozen(run)
    wanted = run.next_step()
    held = _held(run)
    if held == wanted + 1 and _commit_finished_update(run, wanted):
        return
    if held == wanted:
        run.progress.note(f"the pool still holds version {wanted} of this run")
        return
    with contextlib.suppress(CheckpointFailed):  # then an older one will do
        _commit_written(run, run.config.last_checkpoint_due(wanted), wait=True)
    version = _load_newest(run, wanted)
    for step in range(version, wanted):
        run.progress.begin(step, "replaying the update")
        _replay(run, step)
    source = f"the checkpoint of version {version}" if version else "the model"
    run.progress.note(f"loaded {source}" + (f" and replayed {wanted - version} updates" if wanted > version else ""))


def checkpoint_when_due(run: RunContext, version: int) -> None:
    """Begin to save `version` every `checkpoint_every` steps and at the end; commit the checkpoint before as soon as it is written.

    Raises:
        CheckpointFailed: it is time for another one, or for the end, and the one before could not be written.
    """
    due = run.config.checkpoint_due(version)
    _commit_written(run, run.config.last_checkpoint_due(max(version - 1, 0)), wait=due)
    if not due:
        return
    if not _is_committed(run, version) and progress_of(run, version)[0] in (ABSENT, FAILED):
        run.begin(version - 1, "checkpoint")
        begin_checkpoint(run, version)
    if version >= run.config.total_steps:
        _commit_written(run, version, wait=True)


def _commit_written(run: RunContext, version: int, *, wait: bool) -> None:
    """Commit a checkpoint that the pool has written, and drop those that it makes superfluous.

    Args:
        wait: also for one that is still being written; one that could not be written is then an error.
    """
    if version == 0 or _is_committed(run, version):
        return
    state, news = progress_of(run, version)
    for line in news:
        run.progress.note(f"writing the checkpoint of version {version} failed ({line})")
    if state == DONE or (wait and state in (RUNNING, FAILED)):
        checkpoint(run, version)
        _retain(run)


def _retain(run: RunContext) -> None:
    config, keep = run.config, []
    if config.keep_best is not None:
        metric = config.keep_best.removeprefix("-")
        evaluated = {step: run.ledger.get("evaluation-reward", step) for step in run.ledger.committed(STAGE)}
        scores = {step: found.metrics.get(metric) for step, found in evaluated.items() if found is not None}
        keep = [best(scores, lower_is_better=config.keep_best.startswith("-"))]
    kept = [step for step in keep if step is not None]
    retain(run.ledger, config.keep_last_checkpoints, config.keep_checkpoint_every, kept)


def _is_committed(run: RunContext, version: int) -> bool:
    return run.ledger.get(STAGE, version) is not None


def _load_newest(run: RunContext, wanted: int) -> int:
    """The newest checkpoint of version `wanted` or older that is as it was saved, or the model; returns its version."""
    while (found := latest(run.ledger, at_most=wanted)) is not None:
        damage = _load_checkpoint(run, found)
        if damage is None:
            return found.step
        set_aside(run.ledger, found, damage)
        run.progress.note(f"the checkpoint of version {found.step} is damaged and was set aside: {damage}")
    return _load_model(run)


def _load_frozen(run: RunContext) -> None:
    """Load what is placed where nothing is trained, unless it is there since an earlier attempt."""
    missing = [group for group in run.devices.groups if not group.trained and _state(run, group)["run"] != run.identity]
    if missing:
        at_once(lambda group: _load(run, group), missing)


def _held(run: RunContext) -> int | None:
    """Version of *this* run's weights that the devices hold; None if any hold another run's, or none, or parts of an update.

    Where one group has finished an update that another has not, it is the version that the update makes: `update` asks for it
    everywhere, by the name under which it is known where it is done.
    """
    versions = {_version_of(run, group) for group in run.devices.trained}
    if None in versions or len(versions) > 2:
        return None
    newest = max(version for version in versions if version is not None)
    return newest if versions <= {newest, newest - 1} else None


def _version_of(run: RunContext, group: DeviceGroup) -> int | None:
    state = _state(run, group)
    version: int | None = state["weight_version"] if state["vouched"] else None
    return version if state["run"] == run.identity else None


def _state(run: RunContext, group: DeviceGroup) -> dict[str, Any]:
    """What a group holds: "run", "weight_version", and whether ranks and pool agree ("vouched")."""
    result = run.devices.call(group, "describe", f"{run.ledger.run}/describe/{group.lease.token}", {})
    state = result["ranks"][0]
    # After an update that failed early the ranks may still hold a version that the pool no longer vouches for.
    return {**state, "vouched": result["weight_version"] == state["weight_version"]}


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
    return checked_version(merged(at_once(lambda group: _load(run, group), run.devices.trained)), 0)


def _load(run: RunContext, group: DeviceGroup) -> dict[str, Any]:
    args = {"run": run.identity, "spec": group.spec}
    return run.devices.call(group, "load", f"{run.ledger.run}/load/{group.lease.token}", args)


def _load_checkpoint(run: RunContext, found: Manifest) -> str | None:
    """None, or which file of the checkpoint is damaged and how; then the devices hold no weights."""
    args = {"run": run.identity, "store": run.store_uri, "manifest": found.model_dump(mode="json")}

    def load(group: DeviceGroup) -> dict[str, Any]:
        op_id = f"{run.ledger.run}/{found.step:06d}/restore/{group.lease.token}"
        return run.devices.call(group, "restore", op_id, {**args, "spec": group.spec})

    results = at_once(load, run.devices.trained)
    damages = [rank["damaged"] for result in results for rank in result["ranks"] if "damaged" in rank]
    if not damages:
        checked_version(merged(results), found.step)
    return damages[0] if damages else None


def _replay(run: RunContext, step: int) -> None:
    datasets = _datasets(run, step, run.update_inputs)
    if datasets is None:
        raise LookupError(f"step {step} of run {run.ledger.run!r} cannot be replayed: its {run.update_inputs} are gone")
    op_id = f"{run.ledger.run}/{step:06d}/replay/{run.attempt}"
    checked_version(run.call_trained("update", op_id, update_arguments(run, step, datasets), step), step + 1)


def _datasets(run: RunContext, step: int, stages: tuple[str, ...]) -> tuple[Manifest, ...] | None:
    manifests = [run.ledger.get(stage, step) for stage in stages]
    found = [manifest for manifest in manifests if manifest is not None]
    return tuple(found) if len(found) == len(stages) else None
