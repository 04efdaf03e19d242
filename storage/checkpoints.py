"""Checkpoints of a run: a stage like the others, whose files are the ranks' parts of the trained models (storage/sharded.py).

The checkpoint of step s holds weight version s. For every model ("actor", "critic") there are two files a rank, and the model
folder's small files. The newest complete one is never removed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping

from storage.integrity import verify_file
from storage.ledger import Ledger
from storage.manifest import MANIFEST_NAME, FileEntry, Manifest

STAGE = "checkpoint"
DAMAGED_NAME = "_damaged.json"
"""In place of the manifest of a checkpoint that was found damaged: why, and the manifest."""

_INDEX = re.compile(r"[a-z]+-\d{5}\.json")


def part_name(role: str, rank: int) -> str:
    """Name, without ending, of the two files with rank `rank`'s part of a model."""
    return f"{role}-{rank:05d}"


def small_name(role: str, name: str) -> str:
    """Under which name a file of the model's folder, its configuration for example, is kept."""
    return f"{role}.{name}"


def index_entries(manifest: Manifest) -> list[FileEntry]:
    """The files that say what the parts hold."""
    return [entry for entry in manifest.files if _INDEX.fullmatch(entry.path)]


def small_entries(manifest: Manifest, role: str) -> dict[str, FileEntry]:
    """Name in the model's folder to the file that is kept of it."""
    prefix = small_name(role, "")
    return {e.path.removeprefix(prefix): e for e in manifest.files if e.path.startswith(prefix)}


def latest(ledger: Ledger, at_most: int | None = None) -> Manifest | None:
    """The newest finished checkpoint, of version `at_most` or older; None if there is none."""
    steps = [step for step in ledger.committed(STAGE) if at_most is None or step <= at_most]
    return ledger.get(STAGE, steps[-1]) if steps else None


def verify(ledger: Ledger, manifest: Manifest) -> None:
    """Read every file of a checkpoint and compare it with the manifest. Raises CorruptFile naming the file."""
    for entry in manifest.files:
        verify_file(ledger.store, manifest.folder, entry)


def set_aside(ledger: Ledger, manifest: Manifest, why: str) -> None:
    """Take a damaged checkpoint out of those that are finished, so that no older one is removed for its sake.

    Its files stay to be looked at, until a newer checkpoint is complete.
    """
    path = ledger.stage_path(STAGE, manifest.step)
    record = {"why": why, "manifest": manifest.model_dump(mode="json")}
    ledger.store.write(f"{path}/{DAMAGED_NAME}", json.dumps(record, indent=2).encode())
    ledger.store.remove(f"{path}/{MANIFEST_NAME}")


def best(scores: Mapping[int, float | None], *, lower_is_better: bool = False) -> int | None:
    """The step with the best score; the newer one of equals. Steps without a finite one do not count."""
    sign = -1 if lower_is_better else 1
    known = [(sign * score, step) for step, score in scores.items() if score is not None and math.isfinite(score)]
    return max(known)[1] if known else None


def retain(ledger: Ledger, keep_last: int, keep_every: int = 0, keep: Collection[int] = ()) -> list[int]:
    """Remove old checkpoints and return their steps.

    Kept are the newest `keep_last` (at least 1) finished ones, those whose step is a multiple of `keep_every` (0: none), and
    those in `keep`. What an interrupted save or removal left below the newest finished one goes too; what is newer stays, it may
    be being written. Raises ValueError for `keep_last` below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least the newest checkpoint must be kept")
    finished = ledger.committed(STAGE)
    if not finished:
        return []
    kept = {*finished[-keep_last:], *(step for step in finished if step in keep)}
    if keep_every > 0:
        kept |= {step for step in finished if step % keep_every == 0}
    removed = [step for step in _folders(ledger) if step < finished[-1] and step not in kept]
    for step in removed:
        path = ledger.stage_path(STAGE, step)
        # Without its manifest it is no checkpoint: an interruption from here on leaves what the next call clears.
        ledger.store.remove(f"{path}/{MANIFEST_NAME}")
        ledger.store.remove_folder(path)
    return removed


def _folders(ledger: Ledger) -> list[int]:
    folders = {path.partition("/")[0] for path in ledger.store.files(f"{ledger.run}/{STAGE}")}
    values = (name.removeprefix("step=") for name in folders if name.startswith("step="))
    return sorted(int(value) for value in values if value.isdecimal())
