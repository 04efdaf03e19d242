"""The light side of a pool: attach by name, take the lease, call operations.

    config = PoolConfig(name="default")
    pool = PoolClient.attach_or_start(config, ranks=2)
    lease = pool.lease(run="my-run", holder="flow-run-17", wait_s=600)
    try:
        outcome = pool.call("update", "my-run-000003-update", {...}, lease, expect_version=3)
    finally:
        pool.release(lease)

Importing this module imports neither Ray nor torch. Every wait has a limit, and its error says what was waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from engine.pool import cluster, connection, lifecycle
from engine.pool.config import Device, PoolConfig
from engine.pool.death import cause_of_death
from engine.pool.errors import (
    OperationTimeout,
    PoolAbsent,
    PoolBroken,
    PoolBusy,
    PoolError,
    PoolMismatch,
    from_wire,
)
from engine.pool.heartbeat import Heartbeat
from engine.pool.lease import Lease
from engine.pool.status import PoolState, PoolStatus

DEFAULT_WORKER = "engine.worker:Worker"

REPLY_LIMIT_S = 20.0
"""The supervisor answers in milliseconds; after this it counts as lost."""

POLL_S = 1.0

GRACE_S = 5.0
"""The supervisor knows better than the client why a start is late, so it gets to speak first."""

MARGIN_S = 60.0
"""The supervisor ends an operation at its limit and needs a while for that; only then the client gives up itself."""

Progress = Callable[[dict[str, Any]], None]


class PoolClient:
    """One attached pool. Make it with `attach`, `start` or `attach_or_start`; any number may exist, in any process."""

    def __init__(self, config: PoolConfig, supervisor: Any) -> None:
        self._config = config
        self._connection = connection.current()
        self._supervisor = supervisor
        self._heartbeats: dict[int, Heartbeat] = {}

    @classmethod
    def attach(cls, config: PoolConfig) -> PoolClient:
        """Attach to a pool that runs, waiting for it if it is just starting.

        A broken pool can be attached to (see `status`); its operations raise `PoolBroken`.

        Raises:
            PoolAbsent: no pool of this name runs.
            PoolError: the Ray cluster does not answer, or the pool is starting and does not come up in time.
        """
        connection.connect(connection.find_address(config), local=connection.given_address(config) is None)
        supervisor = lifecycle.find_supervisor(config.name)
        if supervisor is None:
            raise PoolAbsent(f"pool {config.name!r} is not running on the Ray cluster")
        client = cls(config, supervisor)
        if client.status().state is PoolState.STARTING:
            client._await_ready(time.monotonic() + config.startup_timeout_s)
        return client

    @classmethod
    def start(cls, config: PoolConfig, ranks: int, worker: str = DEFAULT_WORKER) -> PoolClient:
        """Make sure that the pool runs: attach to it, rebuild it if it is broken, start it (and a local Ray) if absent.

        Args:
            ranks: number of worker processes, one a GPU or CPU slot.
            worker: `module:Class` of the worker.

        Raises:
            PoolMismatch: it runs with other ranks, another device or another worker.
            PoolBroken: a rank died while starting.
            PoolError: Ray or the ranks did not start in time, a port is in use, there are too few GPUs.
        """
        deadline = time.monotonic() + config.startup_timeout_s
        local = connection.given_address(config) is None
        with cluster.lock(config.startup_timeout_s) if local else contextlib.nullcontext():
            if local:
                address = cluster.ensure_running(config.port, config.startup_timeout_s).address
            else:
                address = connection.find_address(config)
            connection.connect(address, local=local)
            client, created = cls._find_or_create(config, ranks, worker, deadline)
        try:
            client._await_ready(deadline + GRACE_S)
        except PoolError:
            if created:
                client._end()
            raise
        client._require_shape(ranks, worker)
        return client

    @classmethod
    def attach_or_start(cls, config: PoolConfig, ranks: int, worker: str = DEFAULT_WORKER) -> PoolClient:
        """Attach if the pool is up (fast, without taking any lock), else `start`. Raises what `start` raises."""
        with contextlib.suppress(PoolAbsent, PoolBroken):
            client = cls.attach(config)
            if client.status().state is PoolState.READY:
                client._require_shape(ranks, worker)
                return client
        return cls.start(config, ranks, worker)

    def status(self) -> PoolStatus:
        """Snapshot of the pool.

        Raises:
            PoolBroken: its supervisor is gone.
        """
        return PoolStatus.from_dict(self._ask("status"))

    def stop(self) -> None:
        """End the pool and, if it was the last one on the local Ray, that Ray too. No process is left.

        Raises:
            PoolError: processes do not end; the message lists them.
        """
        self._end()
        if connection.given_address(self._config) is None:
            with cluster.lock(self._config.startup_timeout_s):
                if not lifecycle.other_pools(self._config.name):
                    connection.disconnect()
                    cluster.stop()

    def lease(self, run: str, holder: str, wait_s: float) -> Lease:
        """Take the pool for a run and keep the lease alive in the background until `release`.

        A newer attempt of the same run takes over at once; the older one then gets `StaleLease`.

        Args:
            holder: who asks, for messages (for example the flow run id).
            wait_s: how long to wait for another run to finish; 0 asks once.

        Raises:
            PoolBusy: another run still holds the pool after `wait_s`.
            PoolBroken: the pool is broken.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                lease = Lease(**self._ask("acquire", run, holder, self._config.lease_seconds))
                break
            except PoolBusy as busy:
                if time.monotonic() >= deadline:
                    message = f"waited {wait_s:.0f} s for pool {self._config.name!r}: {busy}"
                    raise PoolBusy(message, run=busy.run, holder=busy.holder) from None
            time.sleep(min(0.5, max(0.01, deadline - time.monotonic())))
        self._heartbeats[lease.token] = Heartbeat(
            lambda: self._ask("renew", lease.token, lease.epoch), lease.seconds / 3
        )
        return lease

    def release(self, lease: Lease) -> None:
        """Give the pool back; a rollout that still runs for this lease is stopped. Stale leases are ignored."""
        if (heartbeat := self._heartbeats.pop(lease.token, None)) is not None:
            heartbeat.stop()
        with contextlib.suppress(PoolBroken):
            self._ask("release", lease.token, lease.epoch)

    def call(
        self,
        op: str,
        op_id: str,
        args: dict[str, Any],
        lease: Lease,
        expect_version: int | None = None,
        timeout_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Run an operation on all ranks and return `{"ranks": [outcome, ...], "weight_version": v}`.

        An id that is done returns the stored outcome, one that is running is joined, one that failed runs again.
        If this call is interrupted (Ctrl-C, a cancelled flow), a read-only operation is stopped.

        Args:
            op: operation of the worker.
            op_id: identifies the work, for example `RUN-000003-update`.
            args: JSON-compatible arguments.
            expect_version: weight version that the pool must hold.
            timeout_s: limit of the operation; the configuration's by default.
            on_progress: called about once a second with `{"op", "op_id", "seconds", "cancelled", "ranks": [...]}`.

        Raises:
            StaleLease, VersionMismatch, OperationConflict: refused, nothing was run.
            OperationFailed, OperationCancelled: it raised on a rank; the pool is sound.
            OperationTimeout: it took longer than its limit, or another operation did not end.
            PoolBroken: a rank or the supervisor was lost.
            TypeError: `args` is not JSON-compatible.
        """
        limit_s = timeout_s if timeout_s is not None else self._config.operation_timeout_s
        request = {
            "op": op,
            "op_id": op_id,
            "args": args,
            "digest": hashlib.sha256(json.dumps([op, args], sort_keys=True).encode()).hexdigest(),
            "token": lease.token,
            "epoch": lease.epoch,
            "expect_version": expect_version,
            "limit_s": limit_s,
            "patience_s": lease.seconds,
        }
        try:
            submitted = self._submit(request)
            outcome: dict[str, Any] | None = submitted["outcome"]
            return outcome or self._wait(request, submitted["attempt"], on_progress)
        except PoolError:
            raise
        except BaseException:
            with contextlib.suppress(PoolError):
                self.cancel(op_id)
            raise

    def cancel(self, op_id: str) -> bool:
        """Ask a running read-only operation to stop; False if it is not running or changes the weights."""
        return bool(self._ask("cancel", op_id, "it was cancelled"))

    def _submit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Hand the operation in, waiting while another one runs."""
        deadline = time.monotonic() + request["limit_s"]
        while (reply := self._ask("submit", request))["kind"] == "busy":
            if time.monotonic() > deadline:
                raise OperationTimeout(
                    f"waited {request['limit_s']:.0f} s to start {request['op_id']!r}: "
                    f"{reply['running']['op_id']!r} still runs, since {reply['running']['seconds']:.0f} s"
                )
            time.sleep(0.1)
        return reply

    def _wait(self, request: dict[str, Any], attempt: int, on_progress: Progress | None) -> dict[str, Any]:
        """Poll until the operation ends."""
        deadline = time.monotonic() + request["limit_s"] + MARGIN_S
        while True:
            reply = self._ask("wait", request["op_id"], attempt, request["token"], request["epoch"], POLL_S)
            outcome: dict[str, Any] | None = reply["outcome"]
            if outcome is not None:
                return outcome
            if time.monotonic() > deadline:
                raise OperationTimeout(
                    f"waited {request['limit_s'] + MARGIN_S:.0f} s for {request['op_id']!r}, which still runs"
                )
            if on_progress is not None:
                on_progress(reply["progress"])

    @classmethod
    def _find_or_create(cls, config: PoolConfig, ranks: int, worker: str, deadline: float) -> tuple[PoolClient, bool]:
        """Client of the pool's sound supervisor, and whether it was created here. A broken one is ended first."""
        while time.monotonic() < deadline:
            if (supervisor := lifecycle.find_supervisor(config.name)) is not None:
                client = cls(config, supervisor)
                with contextlib.suppress(PoolBroken):
                    if client.status().state is not PoolState.BROKEN:
                        return client, False
                client._end()
            if (supervisor := lifecycle.create_supervisor(config, ranks, worker)) is not None:
                client = cls(config, supervisor)
                client._ask("begin", max(1.0, deadline - time.monotonic()))
                return client, True
        raise PoolError(f"waited {config.startup_timeout_s:.0f} s to create pool {config.name!r}")

    def _await_ready(self, deadline: float) -> None:
        while not self._ask("await_ready", POLL_S):
            if time.monotonic() > deadline:
                raise PoolError(
                    f"pool {self._config.name!r} did not come up within {self._config.startup_timeout_s:.0f} s; "
                    f"logs: {[rank.log for rank in self.status().ranks]}"
                )

    def _require_shape(self, ranks: int, worker: str) -> None:
        status, device = self.status(), self._config.device
        wanted = (ranks, worker, status.device if device is Device.AUTO else device.value)
        running = (status.world_size, status.worker, status.device)
        if wanted != running:
            raise PoolMismatch(
                f"pool {status.name!r} runs as (ranks, worker, device) = {running}, but {wanted} is asked for; "
                "stop it first, or use another pool name"
            )

    def _end(self) -> None:
        """End ranks and supervisor, whatever state they are in."""
        for heartbeat in self._heartbeats.values():
            heartbeat.stop()
        self._heartbeats.clear()
        pids: list[int] = []
        with contextlib.suppress(PoolBroken):
            pids = self._ask("shutdown")
        on_this_machine = connection.given_address(self._config) is None
        lifecycle.end_supervisor(self._config.name, self._supervisor, pids if on_this_machine else [])

    def _ask(self, method: str, *args: Any) -> Any:
        """Call the supervisor; raise what it raised."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError

        deadline = time.monotonic() + REPLY_LIMIT_S
        name = self._config.name
        if self._connection != connection.current():
            raise PoolBroken(f"pool {name!r} was on a Ray cluster that this process has left; attach again")
        while True:
            try:
                reply = ray.get(getattr(self._supervisor, method).remote(*args), timeout=REPLY_LIMIT_S)
                break
            except ActorDiedError as error:
                raise PoolBroken(f"the supervisor of pool {name!r} is dead: {cause_of_death(str(error))}") from error
            except GetTimeoutError as error:
                raise PoolBroken(f"the supervisor of pool {name!r} did not answer {method!r} in time") from error
            except ActorUnavailableError as error:
                # Ray hopes that a lost connection comes back, and says the same when its node manager has died.
                ray_died = connection.given_address(self._config) is None and cluster.running() is None
                if ray_died or time.monotonic() > deadline:
                    raise PoolBroken(f"the supervisor of pool {name!r} cannot be reached: {error}") from error
                time.sleep(0.5)
            except RayError as error:
                raise PoolBroken(f"the supervisor of pool {name!r} cannot be asked for {method!r}: {error}") from error
        if "error" in reply:
            raise from_wire(reply["error"])
        return reply["value"]
