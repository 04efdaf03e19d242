"""Finding, creating and ending the supervisor of a pool, on behalf of the client. Imports Ray lazily."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from engine.pool.config import PoolConfig
from engine.pool.environment import QUIET, home
from engine.pool.errors import PoolError

NAMESPACE_PREFIX = "onecopy-"
SUPERVISOR = "supervisor"
END_LIMIT_S = 20.0


def find_supervisor(pool: str) -> Any | None:
    """Handle of the pool's supervisor, or None. Never creates one: a new supervisor would hold no weights."""
    import ray

    try:
        return ray.get_actor(SUPERVISOR, namespace=NAMESPACE_PREFIX + pool)
    except ValueError:
        return None


def create_supervisor(config: PoolConfig, ranks: int, worker: str) -> Any | None:
    """Create the pool's supervisor; None if another process was faster.

    Raises:
        PoolError: the worker's module cannot be found.
    """
    import ray

    from engine.pool.supervisor import Supervisor

    namespace = NAMESPACE_PREFIX + config.name
    spec = {
        "namespace": namespace,
        "world_size": ranks,
        "device": config.device.value,
        "worker": worker,
        "python_path": [_import_folder(worker)],
        "logs": str(home() / "logs" / config.name),
    }
    try:
        return (
            ray.remote(Supervisor)
            .options(
                name=SUPERVISOR,
                namespace=namespace,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                runtime_env={"env_vars": QUIET},
            )
            .remote(config.name, spec)
        )
    except ValueError:
        return None


def end_supervisor(pool: str, supervisor: Any, pids: list[int]) -> None:
    """End the supervisor and wait until its name is free and, on this machine, all of `pids` are gone.

    Raises:
        PoolError: it does not end.
    """
    import ray

    ray.kill(supervisor)
    deadline = time.monotonic() + END_LIMIT_S
    while find_supervisor(pool) is not None:
        if time.monotonic() > deadline:
            raise PoolError(f"waited {END_LIMIT_S:.0f} s for the supervisor of pool {pool!r} to end")
        time.sleep(0.05)
    _wait_gone(pids, deadline)


def other_pools(pool: str) -> list[str]:
    """Names of the other pools on the same Ray cluster."""
    from ray.util import list_named_actors

    namespaces = {actor["namespace"] for actor in list_named_actors(all_namespaces=True)}
    names = {name.removeprefix(NAMESPACE_PREFIX) for name in namespaces if name.startswith(NAMESPACE_PREFIX)}
    return sorted(names - {pool})


def _wait_gone(pids: list[int], deadline: float) -> None:
    """Wait for processes of this machine; near the deadline they are ended by force."""
    while left := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > deadline:
            raise PoolError(f"processes {left} of the pool do not end")
        if time.monotonic() > deadline - END_LIMIT_S / 4:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _import_folder(worker: str) -> str:
    """Folder that must be on the import path for `module:Class`, found without importing the module."""
    package = worker.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise PoolError(f"cannot find the module of worker {worker!r}")
    if spec.submodule_search_locations:
        return str(Path(next(iter(spec.submodule_search_locations))).resolve().parent)
    return str(Path(spec.origin or ".").resolve().parent)
