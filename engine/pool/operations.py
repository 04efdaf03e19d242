"""Which operations of a pool are done, running or allowed; pure logic without Ray.

The window this closes: the pool finishes an operation, but its client dies before it wrote that down. The next client
sends the same operation id and gets the stored outcome instead of a second update.

  * done     the stored outcome is returned
  * running  the caller joins it
  * failed   forgotten, so that a retry runs again (waiters still read the failure, by attempt number)

Stored outcomes are dropped as soon as an operation that changes the weights starts. This is what makes them safe: a
restored checkpoint may legitimately see the ids of the updates after it once more and has to run them again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.pool.errors import OperationConflict, PoolError, VersionMismatch
from engine.pool.lease import LeaseTable

KEEP_OUTCOMES = 256
"""Outcomes kept for operations that read the weights only (an evaluation of many parts, say)."""

KEEP_FAILURES = 16
"""Failures kept for clients that are between two polls."""


@dataclass(frozen=True)
class Request:
    """One call, as the client sends it.

    Attributes:
        op: name of the worker's operation.
        op_id: identifies the work; the same id always means the same work.
        args: JSON-compatible arguments, the same for all ranks.
        digest: hash of op and args.
        token, epoch: from the caller's lease.
        expect_version: weight version the pool must hold; None to accept any.
        limit_s: seconds the operation may take.
        patience_s: a read-only operation that no client asks about for this long is abandoned.
    """

    op: str
    op_id: str
    args: dict[str, Any]
    digest: str
    token: int
    epoch: str
    expect_version: int | None
    limit_s: float
    patience_s: float


@dataclass
class Operation:
    """One attempt at a request. `outcome` or `failure` is set when it has ended."""

    request: Request
    attempt: int
    read_only: bool
    started_at: float
    polled_at: float
    cancelled: str = ""
    outcome: dict[str, Any] | None = field(default=None)
    failure: PoolError | None = field(default=None)

    @property
    def ended(self) -> bool:
        """True once the operation has an outcome or a failure."""
        return self.outcome is not None or self.failure is not None


@dataclass(frozen=True)
class Decision:
    """What happens to a request: it starts, joins a running one, is answered from the store, or must ask again."""

    kind: Literal["start", "join", "stored", "busy"]
    operation: Operation


class OperationTable:
    """Operations of one pool, at most one of them running.

    Args:
        leases: decides whether a caller may use the pool.
        read_only: names of operations that leave the weights as they are; any other operation may change them.
        clock: seconds, monotonic.
    """

    def __init__(
        self, leases: LeaseTable, read_only: frozenset[str] = frozenset(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.read_only = read_only
        self.weight_version: int | None = None
        self.running: Operation | None = None
        self._leases = leases
        self._clock = clock
        self._attempts = 0
        self._done: OrderedDict[str, Operation] = OrderedDict()
        self._failed: OrderedDict[int, Operation] = OrderedDict()

    def submit(self, request: Request) -> Decision:
        """Decide about a request; on "start" the operation is recorded as running and the caller must run it.

        Raises:
            StaleLease: the caller's lease is not the newest.
            OperationConflict: the id is known with another operation or other arguments.
            VersionMismatch: it would have to start, but the pool holds another weight version.
        """
        self._leases.check(request.token, request.epoch)
        if (done := self._done.get(request.op_id)) is not None:
            _same_work(done.request, request)
            return Decision("stored", done)
        running = self.running
        if running is not None:
            if running.request.op_id == request.op_id and not running.cancelled:
                _same_work(running.request, request)
                running.polled_at = self._clock()
                return Decision("join", running)
            return Decision("busy", running)
        self._check_version(request)
        return Decision("start", self._begin(request))

    def find(self, op_id: str, attempt: int) -> Operation:
        """Return the attempt a client waits for and note that it is still being waited for.

        Raises:
            PoolError: it ended so long ago that its result has been dropped.
        """
        for operation in (self.running, self._done.get(op_id), self._failed.get(attempt)):
            if operation is not None and operation.attempt == attempt:
                operation.polled_at = self._clock()
                return operation
        raise PoolError(f"the result of operation {op_id!r} is gone: it ended long ago or other weights were loaded")

    def finish(self, operation: Operation, outcome: dict[str, Any], weight_version: int | None) -> None:
        """Store the outcome of the running operation and the weight version the pool holds now."""
        operation.outcome = outcome
        self.weight_version = weight_version
        self.running = None
        self._done[operation.request.op_id] = operation
        while len(self._done) > KEEP_OUTCOMES:
            self._done.popitem(last=False)

    def fail(self, operation: Operation, failure: PoolError) -> None:
        """End the running operation without an outcome; its id may be used again."""
        operation.failure = failure
        self.running = None
        if not operation.read_only:
            # Nobody knows how far it came. An unknown version makes the next expectation fail, so the flow restores.
            self.weight_version = None
        self._failed[operation.attempt] = operation
        while len(self._failed) > KEEP_FAILURES:
            self._failed.popitem(last=False)

    def abandoned(self) -> bool:
        """True when a read-only operation runs that no client has asked about for its patience."""
        running = self.running
        if running is None or not running.read_only or running.cancelled:
            return False
        return self._clock() - running.polled_at > running.request.patience_s

    def cancel(self, op_id: str, why: str) -> bool:
        """Mark the running operation as being stopped; False if it is not this one or changes the weights.

        An operation that changes the weights is finished: half an update is worse than a late one.
        """
        running = self.running
        if running is None or running.request.op_id != op_id or not running.read_only:
            return False
        running.cancelled = running.cancelled or why
        return True

    def seconds(self, operation: Operation) -> float:
        """Seconds since the operation started."""
        return self._clock() - operation.started_at

    def _check_version(self, request: Request) -> None:
        expected, held = request.expect_version, self.weight_version
        if expected is not None and expected != held:
            holds = "no known weights" if held is None else f"weight version {held}"
            raise VersionMismatch(
                f"operation {request.op_id!r} expects weight version {expected}, but the pool holds {holds}",
                expected=expected,
                held=held,
            )

    def _begin(self, request: Request) -> Operation:
        self._attempts += 1
        now = self._clock()
        read_only = request.op in self.read_only
        if not read_only:
            self._done.clear()
        self.running = Operation(request, self._attempts, read_only, started_at=now, polled_at=now)
        return self.running


def _same_work(known: Request, request: Request) -> None:
    if known.digest != request.digest:
        raise OperationConflict(
            f"operation id {request.op_id!r} was used for {known.op!r} with other arguments; "
            "an id must always mean the same work"
        )
