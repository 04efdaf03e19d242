"""The one actor of a pool that flows talk to. It owns the ranks, the lease, the operations and the weight version.

It is detached and named, so it outlives the flows; it never restarts, because a new one would hold no weights. All
methods return at once or after a short wait, and reply `{"value": ...}` or `{"error": ...}` (see `engine.pool.errors`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import traceback
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from engine.pool.errors import OperationTimeout, PoolBroken, PoolError, to_wire
from engine.pool.lease import LeaseTable
from engine.pool.operations import Operation, OperationTable, Request
from engine.pool.outcome import merge
from engine.pool.ranks import GroupSpec, RankGroup, RanksStuck
from engine.pool.status import OperationStatus, PoolState, PoolStatus

TICK_S = 0.5


def replies(
    method: Callable[..., Awaitable[Any]],
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Let a method of the supervisor return its value or its `PoolError` as a plain dict."""

    @functools.wraps(method)
    async def wrapper(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"value": await method(*args, **kwargs)}
        except PoolError as error:
            return {"error": to_wire(error)}

    return wrapper


class Supervisor:
    """State of one life of a pool.

    Args:
        name: of the pool.
        spec: the ranks to start, as keyword arguments of `GroupSpec`.
    """

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self._name = name
        self._spec = GroupSpec(**spec)
        self._epoch = uuid.uuid4().hex[:12]
        self._leases = LeaseTable(self._epoch)
        self._operations = OperationTable(self._leases)
        self._ranks = RankGroup(self._spec, self._break)
        self._failure: PoolError | None = None
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._running: asyncio.Task[None] | None = None

    @replies
    async def begin(self, timeout_s: float) -> None:
        """Start the ranks in the background; `await_ready` tells when they are up."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._build(timeout_s)), asyncio.create_task(self._tick())]

    @replies
    async def await_ready(self, wait_s: float) -> bool:
        """Wait a little for the ranks; True when they are up.

        Raises:
            PoolError: the start failed or the pool broke.
        """
        if self._failure is None and not self._ready.is_set():
            await asyncio.wait([asyncio.ensure_future(self._ready.wait())], timeout=wait_s)
        if self._failure is not None:
            raise self._failure
        return self._ready.is_set()

    @replies
    async def status(self) -> dict[str, Any]:
        """Snapshot, as `PoolStatus.to_dict`."""
        lease, running = self._leases.current, self._operations.running
        return PoolStatus(
            name=self._name,
            state=self._state(),
            reason=str(self._failure or ""),
            epoch=self._epoch,
            world_size=self._spec.world_size,
            device=self._ranks.device,
            worker=self._spec.worker,
            weight_version=self._operations.weight_version,
            run=lease.run if lease else None,
            holder=lease.holder if lease else None,
            lease_seconds_left=self._leases.seconds_left,
            operation=self._operation_status(running) if running else None,
            ranks=self._ranks.status(),
            supervisor_pid=os.getpid(),
        ).to_dict()

    @replies
    async def acquire(self, run: str, holder: str, seconds: float) -> dict[str, Any]:
        """See `LeaseTable.acquire`."""
        self._require_ready()
        return asdict(self._leases.acquire(run, holder, seconds))

    @replies
    async def renew(self, token: int, epoch: str) -> None:
        """See `LeaseTable.check`."""
        self._leases.check(token, epoch)

    @replies
    async def release(self, token: int, epoch: str) -> bool:
        """Give the pool back and stop a read-only operation that still runs for this lease."""
        released = self._leases.release(token, epoch)
        if released and (running := self._operations.running) is not None:
            self._cancel(running.request.op_id, "its client released the pool")
        return released

    @replies
    async def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start, join or answer an operation (see `OperationTable.submit`)."""
        self._require_ready()
        decision = self._operations.submit(Request(**request))
        operation = decision.operation
        if decision.kind == "start":
            self._running = asyncio.create_task(self._run(operation))
        return {
            "kind": decision.kind,
            "attempt": operation.attempt,
            "outcome": operation.outcome,
            "running": asdict(self._operation_status(operation)),
        }

    @replies
    async def wait(self, op_id: str, attempt: int, token: int, epoch: str, wait_s: float) -> dict[str, Any]:
        """Wait a little for an operation; its outcome (None while it runs) and the ranks' progress.

        Raises:
            PoolError: what the operation failed with.
        """
        self._leases.check(token, epoch)
        operation = self._operations.find(op_id, attempt)
        if not operation.ended and self._running is not None:
            await asyncio.wait([self._running], timeout=wait_s)
        if operation.failure is not None:
            raise operation.failure
        progress = {
            **asdict(self._operation_status(operation)),
            "ranks": [rank.progress for rank in self._ranks.status()],
        }
        return {"outcome": operation.outcome, "progress": progress}

    @replies
    async def cancel(self, op_id: str, why: str) -> bool:
        """Ask a read-only operation to stop; False if it is not running or changes the weights."""
        return self._cancel(op_id, why)

    @replies
    async def shutdown(self) -> list[int]:
        """End the ranks; process ids of all of them and of the supervisor, which its caller ends."""
        pids = [rank.pid for rank in self._ranks.status() if rank.pid]
        self._break(PoolBroken(f"pool {self._name!r} was stopped"))
        return [*pids, os.getpid()]

    async def _build(self, timeout_s: float) -> None:
        try:
            self._operations.read_only = await self._ranks.start(timeout_s)
            self._ready.set()
        except PoolError as error:
            self._break(error)
        except Exception as error:
            self._break(PoolError(f"starting the ranks failed: {error}\n{traceback.format_exc()}"))

    async def _run(self, operation: Operation) -> None:
        """Run one operation to its end; whatever happens, it ends with an outcome or a failure."""
        request, table = operation.request, self._operations
        try:
            executed = await self._ranks.execute(request.op, request.args, request.limit_s, operation.read_only)
            outcome, version = merge(operation, executed.replies, executed.timed_out, table.weight_version)
            table.finish(operation, outcome, version)
        except RanksStuck as stuck:
            self._break(PoolBroken(str(stuck)))
            table.fail(operation, OperationTimeout(str(stuck)) if stuck.timed_out else PoolBroken(str(stuck)))
        except PoolBroken as error:
            self._break(error)
            # The rank that died first is the reason; the others died because they were killed after it.
            table.fail(operation, self._failure or error)
        except PoolError as error:
            table.fail(operation, error)
        except Exception as error:
            table.fail(operation, PoolError(f"running {request.op} failed: {error}\n{traceback.format_exc()}"))

    async def _tick(self) -> None:
        while self._failure is None:
            self._ranks.check_silence()
            if self._operations.abandoned() and (running := self._operations.running) is not None:
                silence = running.request.patience_s
                self._cancel(running.request.op_id, f"its client was not heard of for {silence:.0f} s")
            elif (running := self._operations.running) is not None and running.cancelled:
                self._ranks.cancel()  # again: the first request may have come before the rank had begun
            await asyncio.sleep(TICK_S)

    def _cancel(self, op_id: str, why: str) -> bool:
        cancelled = self._operations.cancel(op_id, why)
        if cancelled:
            self._ranks.cancel()
        return cancelled

    def _break(self, failure: PoolError) -> None:
        """The first failure counts; the ranks that are left hold memory and wait in collectives, so they are ended."""
        if self._failure is None:
            self._failure = failure
            self._operations.weight_version = None
            self._ready.set()
            self._ranks.kill()

    def _require_ready(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._ready.is_set():
            raise PoolError(f"pool {self._name!r} is still starting")

    def _state(self) -> PoolState:
        if self._failure is not None:
            return PoolState.BROKEN
        return PoolState.READY if self._ready.is_set() else PoolState.STARTING

    def _operation_status(self, operation: Operation) -> OperationStatus:
        return OperationStatus(
            op=operation.request.op,
            op_id=operation.request.op_id,
            seconds=round(self._operations.seconds(operation), 3),
            cancelled=operation.cancelled,
        )
