"""What can go wrong with a pool, as exceptions that also travel between processes as plain dicts.

Ray would pickle exceptions raised in an actor and wrap them in its own types. The supervisor therefore replies with
`to_wire(error)` and the client raises `from_wire(reply)`: one clean type on both sides.
"""

from __future__ import annotations

from typing import Any


class PoolError(RuntimeError):
    """Any failure of the pool or of the Ray cluster under it."""


class PoolAbsent(PoolError):
    """No pool of this name is running."""


class PoolMismatch(PoolError):
    """A pool of this name runs, but with another number of ranks, device or worker class than asked for."""


class PoolBusy(PoolError):
    """Another run holds the pool.

    Attributes:
        run: name of the run that holds it.
        holder: who took the lease for that run (for example a flow run id).
    """

    def __init__(self, message: str, *, run: str = "", holder: str = "") -> None:
        super().__init__(message)
        self.run = run
        self.holder = holder


class PoolBroken(PoolError):
    """The pool lost a rank or its supervisor; the weights it held are gone. `attach_or_start` rebuilds it.

    Attributes:
        rank: the rank that was lost first, or None if it was not a single rank.
        exit: how its process ended, in words.
    """

    def __init__(self, message: str, *, rank: int | None = None, exit: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.exit = exit


class StaleLease(PoolError):
    """The lease was released, taken over or belongs to an earlier life of the pool: this caller must stop."""


class VersionMismatch(PoolError):
    """The pool does not hold the weight version that the operation expects.

    Attributes:
        expected: version the caller asked for.
        held: version the pool holds; None when it holds no (known) weights.
    """

    def __init__(self, message: str, *, expected: int | None = None, held: int | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.held = held


class OperationConflict(PoolError):
    """An operation id was used again for another operation or other arguments."""


class OperationFailed(PoolError):
    """The operation raised on at least one rank; the pool itself is sound.

    Attributes:
        rank: lowest rank on which it raised.
        remote_traceback: traceback of that rank, as text.
    """

    def __init__(self, message: str, *, rank: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class OperationCancelled(OperationFailed):
    """The operation stopped because somebody cancelled it or because its client went away."""


class OperationTimeout(PoolError):
    """The operation did not end within its limit."""


_KINDS: dict[str, type[PoolError]] = {
    kind.__name__: kind
    for kind in (
        PoolError,
        PoolAbsent,
        PoolMismatch,
        PoolBusy,
        PoolBroken,
        StaleLease,
        VersionMismatch,
        OperationConflict,
        OperationFailed,
        OperationCancelled,
        OperationTimeout,
    )
}


def to_wire(error: PoolError) -> dict[str, Any]:
    """Describe `error` as a JSON-compatible dict that `from_wire` turns back into an exception."""
    details = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return {"kind": type(error).__name__, "message": str(error), "details": details}


def from_wire(wire: dict[str, Any]) -> PoolError:
    """Rebuild the exception described by `to_wire`; a remote traceback becomes a note, so that it is printed."""
    error = _KINDS[wire["kind"]](wire["message"], **wire["details"])
    if isinstance(error, OperationFailed) and error.remote_traceback:
        error.add_note(f"Traceback of rank {error.rank}:\n{error.remote_traceback}")
    return error
