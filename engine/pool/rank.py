"""The actor around one worker object: builds it, runs its operations in one thread, answers questions in another.

The worker is given as `module:Class` and looks like this (all methods optional except `execute`):

    class Worker:
        READ_ONLY_OPS: frozenset[str]        operations that leave the weights as they are; may be cancelled
        def __init__(self, rank: int, world_size: int, device: str)
        def rendezvous(self) -> str          on rank 0: bind a store at a free port, return host:port
        def join(self, address: str)         on all ranks: become a process group
        def execute(self, op: str, args: dict) -> dict     {"weight_version": int, ...} if it changed the weights
        def progress(self) -> dict           from another thread, while `execute` runs
        def cancel(self)                     likewise: ask the running operation to stop by raising an exception
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import ray

CONTROL = "control"
"""Concurrency group of the questions, so that they are answered while an operation runs."""


class Rank:
    """One rank of a pool. Constructing it is cheap; `setup` imports and builds the worker.

    Everything about the worker but `progress` and `cancel` happens in one thread, because much of what torch knows
    (current device, gradient mode) belongs to a thread.
    """

    def __init__(self, rank: int, world_size: int, device: str, worker: str, python_path: list[str], log: str) -> None:
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._worker_path = worker
        self._worker: Any = None
        self._identity = {
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
        }
        _write_output_to(Path(log))
        sys.path[:0] = [folder for folder in python_path if folder not in sys.path]

    def setup(self) -> list[str]:
        """Build the worker; return its read-only operations."""
        module, _, name = self._worker_path.partition(":")
        self._worker = getattr(importlib.import_module(module), name)(self._rank, self._world_size, self._device)
        return sorted(getattr(self._worker, "READ_ONLY_OPS", ()))

    def rendezvous(self) -> str:
        """Address at which the ranks meet; empty when the worker needs no process group."""
        return self._worker.rendezvous() if hasattr(self._worker, "rendezvous") else ""

    def join(self, address: str) -> None:
        """Become a member of the process group."""
        if hasattr(self._worker, "join"):
            self._worker.join(address)

    def execute(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Run one operation; `{"outcome": ...}` or, if it raised, `{"failure": {"message", "traceback"}}`."""
        try:
            outcome = self._worker.execute(op, args)
            json.dumps(outcome)  # an outcome is a small plain object; tensors stay on the workers
            return {"outcome": outcome}
        except Exception as error:
            text = traceback.format_exc()
            print(f"operation {op} failed:\n{text}", file=sys.stderr, flush=True)
            return {"failure": {"message": f"{type(error).__name__}: {error}", "traceback": text}}

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def report(self) -> dict[str, Any]:
        """Process id, node and progress; also the sign of life."""
        progress: dict[str, Any] = {}
        if hasattr(self._worker, "progress"):
            try:
                progress = self._worker.progress()
            except Exception:  # a broken progress report must not look like a dead rank
                traceback.print_exc()
        return {**self._identity, "progress": progress}

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def cancel(self) -> None:
        """Ask the running operation to stop."""
        if hasattr(self._worker, "cancel"):
            self._worker.cancel()


def _write_output_to(log: Path) -> None:
    """Send this process's output, also that of native code and of crashes, to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2)
