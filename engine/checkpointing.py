"""A rank's checkpoints: state is copied to host memory while training stands still, and written while it goes on.

One checkpoint at a time is written by a background thread, which knows NumPy and the store only. The flow asks for the outcome
(`saved`) and writes the manifest when all ranks are done; without it there is no checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from engine.megatron import checkpoint
from engine.megatron.checkpoint import HostMemory, Snapshot
from engine.megatron.optimizer import STATE_NAMES
from engine.roles.model import Model
from engine.weights.small_files import small_files
from storage.checkpoints import index_entries, part_name, small_name
from storage.filesystem import Store
from storage.integrity import CorruptFile
from storage.manifest import FileEntry, Manifest
from storage.sharded import Abandoned, Index, ShardedReader, read_index, write_file, write_sharded

ATTEMPTS = 2
"""How often a checkpoint is written before it is given up: storage may be out of reach for a moment."""

RETRY_AFTER_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class TrainedModel:
    """A model that checkpoints hold.

    Attributes:
        awake: the model, on its device inside the block.
        folder: Hugging Face folder of its configuration and tokenizer, which are kept beside the weights.
    """

    awake: Callable[[], AbstractContextManager[Model]]
    folder: str


@dataclass
class _Writing:
    """One checkpoint on its way to the store. `problems` has one line for each attempt that failed."""

    out: str
    began: float
    stall_seconds: float = 0.0
    abandoned: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    files: list[FileEntry] | None = None
    problems: list[str] = field(default_factory=list)
    told: int = 0
    seconds: float = 0.0

    def run(self, write: Callable[[Callable[[], bool]], list[FileEntry]]) -> None:
        for attempt in range(ATTEMPTS):
            if attempt:
                self.abandoned.wait(RETRY_AFTER_S)
            try:
                self.files = write(self.abandoned.is_set)
                break
            except Abandoned:
                return
            except Exception as error:  # whatever it is, the flow must hear of it
                self.problems.append(f"{type(error).__name__}: {error}")
        self.seconds = time.monotonic() - self.began

    def outcome(self) -> dict[str, Any]:
        files = self.files or []
        size = float(sum(entry.bytes for entry in files))
        metrics = {"stall_seconds": self.stall_seconds, "seconds": self.seconds, "bytes": size}
        return {"files": [entry.model_dump() for entry in files], "metrics": metrics}


class Checkpointing:
    """Saves and restores the trained models of one rank. All ranks must make the same calls."""

    def __init__(self) -> None:
        self._memory: defaultdict[str, HostMemory] = defaultdict(HostMemory)
        self._writing: _Writing | None = None

    def save(self, store: str, out: str, models: Mapping[str, TrainedModel], began: float) -> dict[str, Any]:
        """Copy the models' state and begin to write it to the folder `out` of the store.

        Args:
            began: when training stopped for it, on the monotonic clock.
        """
        self._join()  # its memory is about to be used again
        rank, files = dist.get_rank(), Store.open(store)
        snapshots: dict[str, Snapshot] = {}
        small: dict[str, bytes] = {}
        for role, each in models.items():
            with each.awake() as model:
                snapshots[role] = checkpoint.take(model, self._memory[role])
            if rank == 0:
                about = snapshots[role].about
                found = small_files(Path(each.folder), dtype=about["dtype"], labels=about["labels"])
                small |= {small_name(role, name): data for name, data in found.items()}

        def write(abandoned: Callable[[], bool]) -> list[FileEntry]:
            return _write(files, out, rank, snapshots, small, abandoned)

        writing = self._writing = _Writing(out, began)
        writing.thread = threading.Thread(target=writing.run, args=(write,), name="checkpoint", daemon=True)
        writing.stall_seconds = time.monotonic() - began
        writing.thread.start()
        return {"metrics": {"stall_seconds": writing.stall_seconds}}

    def saved(self, out: str, wait: bool) -> dict[str, Any]:
        """How far the checkpoint at `out` is.

        Args:
            wait: until it is written or given up; a failure is then handed over, and forgotten here.

        Returns:
            {"state": "absent" | "running" | "failed" | "done", "problems": one line a failed attempt, "news": those that were not
            told before}; when it is done also "files" and "metrics" {"stall_seconds", "seconds", "bytes"}.
        """
        writing = self._writing
        if writing is None or writing.out != out or writing.abandoned.is_set():
            return {"state": "absent", "problems": [], "news": []}
        if wait:
            began = time.monotonic()
            self._join()
            writing.stall_seconds += time.monotonic() - began
        running, problems = _is_alive(writing), list(writing.problems)
        told = {"problems": problems, "news": problems[writing.told :]}
        writing.told = len(problems)
        if running:
            return {"state": "running", **told}
        if writing.files is None:
            if wait:
                self._writing = None
            return {"state": "failed", **told}
        return {"state": "done", **told, **writing.outcome()}

    def abandon(self) -> None:
        """Give up what is being written: other weights come, so nobody will commit it."""
        if self._writing is not None:
            self._writing.abandoned.set()
            self._join()
            self._writing = None

    def restore(self, store: str, manifest: Manifest, models: Mapping[str, TrainedModel]) -> None:
        """Bring the models to a checkpoint, whatever layout it was saved under; every rank reads its own part of it.

        Raises:
            CorruptFile: a file is not what was saved; the message names it. On all ranks, and models may be half restored.
            StorageError: the checkpoint cannot be read, or holds something else than the models have. On all ranks.
        """
        self.abandon()
        files, folder = Store.open(store), manifest.folder
        parts = _parts(files, manifest)
        for role, each in models.items():
            mine = [part for part in parts if part.owner == role]
            reader = ShardedReader(files, folder, mine)
            with each.awake() as model:
                room = together(partial(checkpoint.read, model, reader, self._memory[role]))
                checkpoint.put(model, room, mine[0].about["optimizer_steps"])

    def _join(self) -> None:
        if self._writing is not None and self._writing.thread is not None:
            self._writing.thread.join()


def _is_alive(writing: _Writing) -> bool:
    return writing.thread is not None and writing.thread.is_alive()


def _write(
    store: Store,
    out: str,
    rank: int,
    snapshots: Mapping[str, Snapshot],
    small: Mapping[str, bytes],
    abandoned: Callable[[], bool],
) -> list[FileEntry]:
    """In the background: this rank's part of every model; a rank that owns no numbers writes none."""
    entries = []
    for role, snapshot in snapshots.items():
        if snapshot.slices:
            entries += write_sharded(
                store,
                out,
                part_name(role, rank),
                snapshot.slices,
                snapshot.values,
                states=STATE_NAMES,
                shapes=snapshot.shapes,
                owner=role,
                about=snapshot.about,
                abandoned=abandoned,
            )
    return entries + [write_file(store, out, name, data) for name, data in small.items()]


def _parts(store: Store, manifest: Manifest) -> list[Index]:
    """The indexes of all files; each rank reads some of them and they tell each other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = index_entries(manifest)[rank::world]
    read = together(lambda: [read_index(store, manifest, entry) for entry in mine])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, read)
    return [part for parts in everyone for part in parts]


def together(work: Callable[[], T]) -> T:
    """Do something on every rank; where it fails on one, all raise: none may wait for the others in the next collective.

    Raises:
        CorruptFile: a rank met one.
        RuntimeError: another rank failed otherwise; the failing rank raises its own error.
    """
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem and (isinstance(problem, CorruptFile), str(problem)))
    for corrupt, message in sorted(filter(None, everyone), reverse=True):
        if corrupt:
            raise CorruptFile(message) from problem
        raise problem or RuntimeError(f"another rank failed: {message}")
    return result
