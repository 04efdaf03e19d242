"""Turns what the ranks replied into one outcome, or into the error that the client gets; pure."""

from __future__ import annotations

from typing import Any

from engine.pool.errors import OperationCancelled, OperationFailed, OperationTimeout, PoolBroken
from engine.pool.operations import Operation


def merge(
    operation: Operation, replies: list[dict[str, Any]], timed_out: bool, held: int | None
) -> tuple[dict[str, Any], int | None]:
    """Combine the replies of all ranks (see `Rank.execute`).

    Args:
        timed_out: the operation had been asked to stop because its limit was over.
        held: weight version before the operation.

    Returns:
        The outcome `{"ranks": [...], "weight_version": v}` and the weight version that the pool holds now.

    Raises:
        OperationTimeout: it stopped because its limit was over.
        OperationCancelled: it stopped because it had been asked to.
        OperationFailed: it raised on at least one rank.
        PoolBroken: the ranks no longer hold the same weight version.
    """
    _raise_failure(operation, replies, timed_out)
    outcomes = [reply["outcome"] for reply in replies]
    version = held
    if not operation.read_only:
        versions = [outcome.get("weight_version") for outcome in outcomes]
        if len(set(versions)) > 1:
            raise PoolBroken(f"after {_name(operation)} the ranks hold different weight versions: {versions}")
        version = versions[0]
    return {"ranks": outcomes, "weight_version": version}, version


def _raise_failure(operation: Operation, replies: list[dict[str, Any]], timed_out: bool) -> None:
    failures = {rank: reply["failure"] for rank, reply in enumerate(replies) if "failure" in reply}
    if not failures:
        return
    rank = min(failures)
    message, text = failures[rank]["message"], failures[rank]["traceback"]
    if timed_out:
        raise OperationTimeout(f"{_name(operation)} was stopped at its limit of {operation.request.limit_s:.0f} s")
    if operation.cancelled:
        raise OperationCancelled(
            f"{_name(operation)} was stopped: {operation.cancelled}", rank=rank, remote_traceback=text
        )
    where = f"rank {rank}" if len(failures) == 1 else f"ranks {sorted(failures)}"
    raise OperationFailed(f"{_name(operation)} failed on {where}: {message}", rank=rank, remote_traceback=text)


def _name(operation: Operation) -> str:
    return f"operation {operation.request.op} ({operation.request.op_id})"
