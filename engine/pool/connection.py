"""Connects this process to the Ray cluster of a pool, at most once, without leaving traces in it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

from engine.pool import cluster
from engine.pool.config import PoolConfig
from engine.pool.environment import QUIET
from engine.pool.errors import PoolAbsent, PoolError

_connecting = threading.Lock()
_connected_to: str | None = None
_connections = 0


def given_address(config: PoolConfig) -> str | None:
    """Address of a cluster that somebody else runs, or None when the local Ray is to be used."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


def find_address(config: PoolConfig) -> str:
    """Address of the cluster that a running pool would be on.

    Raises:
        PoolAbsent: there is no such cluster.
    """
    if (address := given_address(config)) is not None:
        return address
    local = cluster.running()
    if local is None:
        raise PoolAbsent(f"pool {config.name!r} is not running: no local Ray (RAY_ADDRESS is not set either)")
    return local.address


def current() -> int:
    """Number of the connection that is open; 0 if this module opened none. Handles of actors end with theirs."""
    return _connections if _connected_to is not None else 0


def connect(address: str, *, local: bool) -> int:
    """Make this process a client of the Ray at `address`, if it is not yet; return `current()`.

    Args:
        local: the cluster was started by `cluster.ensure_running`, so its token applies.

    Raises:
        PoolError: the cluster does not answer, runs other versions, refuses the token, or this process already is
            connected to another cluster.
    """
    global _connected_to, _connections
    with _connecting:
        if local:
            _present_token()
        os.environ.update(QUIET)
        import ray
        from ray._private import auto_init_hook

        # Else a thread that calls an actor after a disconnect silently starts a Ray cluster in this process. The
        # variable for it (RAY_ENABLE_AUTO_CONNECT) is of no use when Ray was imported before.
        auto_init_hook.enable_auto_connect = False

        if ray.is_initialized():
            if _connected_to == address:
                return _connections
            if _connected_to is None and ray.get_runtime_context().gcs_address == address:
                return 0
            if _connected_to is None:
                raise PoolError(
                    f"this process is connected to the Ray at {ray.get_runtime_context().gcs_address}, "
                    f"but the pool is on {address}"
                )
            _connected_to = None
            ray.shutdown()  # our own connection, to a cluster that has been replaced since
        try:
            with _signal_handlers_kept():
                ray.init(
                    address,
                    namespace="onecopy",
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise PoolError(f"cannot connect to the Ray at {address}: {error}") from error
        _connected_to = address
        _connections += 1
        return _connections


def disconnect() -> None:
    """Close a connection that `connect` opened."""
    global _connected_to
    with _connecting:
        if _connected_to is not None:
            import ray

            _connected_to = None  # first, so that other threads stop using it
            ray.shutdown()


def _present_token() -> None:
    wanted = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(cluster.token_file())}
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    os.environ.update(wanted)
    if "ray" in sys.modules:
        # Ray reads these variables once, when it is imported. It has no public way to read them again.
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undo that `ray.init` replaces the SIGTERM handler: Prefect cancels flow runs through its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
