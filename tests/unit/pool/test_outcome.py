"""Merging what the ranks replied, the wire format of errors, and the words for a death."""

from __future__ import annotations

from typing import Any

import pytest

from engine.pool.death import cause_of_death
from engine.pool.errors import (
    OperationCancelled,
    OperationFailed,
    OperationTimeout,
    PoolBroken,
    PoolError,
    VersionMismatch,
    from_wire,
    to_wire,
)
from engine.pool.operations import Operation, Request
from engine.pool.outcome import merge


def operation(read_only: bool, cancelled: str = "") -> Operation:
    request = Request("op", "id", {}, "digest", 1, "epoch", None, limit_s=5, patience_s=60)
    return Operation(request, 1, read_only, started_at=0, polled_at=0, cancelled=cancelled)


def done(**outcome: Any) -> dict[str, Any]:
    return {"outcome": outcome}


def failed(message: str) -> dict[str, Any]:
    return {"failure": {"message": message, "traceback": f"Traceback of {message}"}}


def test_a_read_only_operation_keeps_the_version() -> None:
    assert merge(operation(True), [done(n=1), done(n=2)], False, held=7) == (
        {"ranks": [{"n": 1}, {"n": 2}], "weight_version": 7},
        7,
    )


def test_a_change_of_the_weights_must_end_in_one_version() -> None:
    replies = [done(weight_version=8), done(weight_version=8)]
    assert merge(operation(False), replies, False, held=7)[1] == 8
    with pytest.raises(PoolBroken, match=r"different weight versions: \[8, 7\]"):
        merge(operation(False), [done(weight_version=8), done(weight_version=7)], False, held=7)


def test_a_change_of_the_weights_that_names_no_version_leaves_it_unknown() -> None:
    assert merge(operation(False), [done(), done()], False, held=7)[1] is None


def test_a_failure_names_the_ranks_and_keeps_the_traceback() -> None:
    with pytest.raises(OperationFailed, match="op \\(id\\) failed on rank 1: boom") as error:
        merge(operation(True), [done(), failed("boom")], False, held=7)
    assert (error.value.rank, error.value.remote_traceback) == (1, "Traceback of boom")
    with pytest.raises(OperationFailed, match="on ranks \\[0, 1\\]"):
        merge(operation(True), [failed("a"), failed("b")], False, held=7)


def test_why_it_was_stopped_decides_about_the_error() -> None:
    with pytest.raises(OperationCancelled, match="the user asked"):
        merge(operation(True, cancelled="the user asked"), [failed("stop")], False, held=7)
    with pytest.raises(OperationTimeout, match="limit of 5 s"):
        merge(operation(True), [failed("stop")], True, held=7)


def test_finishing_although_stopped_counts_as_done() -> None:
    assert merge(operation(True, cancelled="the user asked"), [done()], True, held=7)[1] == 7


@pytest.mark.parametrize(
    "error",
    [
        PoolError("plain"),
        PoolBroken("gone", rank=3, exit="exit code 1"),
        VersionMismatch("no", expected=1, held=None),
        OperationFailed("no", rank=0, remote_traceback="Traceback"),
    ],
)
def test_errors_survive_the_wire(error: PoolError) -> None:
    again = from_wire(to_wire(error))
    assert type(again) is type(error)
    assert to_wire(again) == to_wire(error)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("The actor is dead. Worker exits unexpectedly. Worker exits with an exit code 4.", "exit code 4"),
        ("Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.", "SIGKILL"),
        ("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: killed", "memory was nearly full"),
        ("error raised in its creation task, ray::Rank()\nPermissionError: '/logs'", "PermissionError: '/logs'"),
        ("The actor is dead because it was killed by `ray.kill`.", "on purpose"),
        ("", "unknown"),
    ],
)
def test_a_death_is_told_in_one_line(message: str, words: str) -> None:
    assert words in cause_of_death(message)
    assert "\n" not in cause_of_death(message)
