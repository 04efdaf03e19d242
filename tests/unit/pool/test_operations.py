"""Operation ids, weight versions and fencing, without Ray."""

from __future__ import annotations

import dataclasses

import pytest

from engine.pool import operations
from engine.pool.errors import OperationConflict, OperationFailed, PoolError, StaleLease, VersionMismatch
from engine.pool.lease import Lease, LeaseTable
from engine.pool.operations import Operation, OperationTable, Request


class Pool:
    """An operation table with a lease and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leases = LeaseTable("epoch", lambda: self.now)
        self.lease: Lease = self.leases.acquire("run", "flow-1", 60)
        self.table = OperationTable(self.leases, frozenset({"generate"}), lambda: self.now)

    def request(self, op: str, op_id: str, expect: int | None = None, digest: str = "d") -> Request:
        return Request(op, op_id, {}, digest, self.lease.token, self.lease.epoch, expect, limit_s=9, patience_s=60)

    def begin(self, op: str, op_id: str, expect: int | None = None) -> Operation:
        decision = self.table.submit(self.request(op, op_id, expect))
        assert decision.kind == "start"
        return decision.operation

    def complete(self, op: str, op_id: str, version: int | None, expect: int | None = None) -> Operation:
        operation = self.begin(op, op_id, expect)
        self.table.finish(operation, {"id": op_id}, version)
        return operation


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_done_returns_the_stored_outcome_without_a_version_check(pool: Pool) -> None:
    pool.complete("load", "load", version=0)
    pool.complete("update", "update-0", version=1, expect=0)
    again = pool.table.submit(pool.request("update", "update-0", expect=0))
    assert (again.kind, again.operation.outcome) == ("stored", {"id": "update-0"})
    assert pool.table.weight_version == 1


def test_running_is_joined_also_by_a_new_lease_holder(pool: Pool) -> None:
    operation = pool.begin("update", "update-0")
    pool.lease = pool.leases.acquire("run", "flow-2", 60)
    decision = pool.table.submit(pool.request("update", "update-0"))
    assert (decision.kind, decision.operation) == ("join", operation)


def test_another_operation_has_to_ask_again(pool: Pool) -> None:
    operation = pool.begin("generate", "generate-0")
    decision = pool.table.submit(pool.request("generate", "generate-1"))
    assert (decision.kind, decision.operation) == ("busy", operation)


def test_failed_is_forgotten_but_its_waiter_still_learns_why(pool: Pool) -> None:
    operation = pool.begin("generate", "generate-0")
    failure = OperationFailed("no luck", rank=1)
    pool.table.fail(operation, failure)
    assert pool.table.find("generate-0", operation.attempt).failure is failure
    assert pool.begin("generate", "generate-0").attempt == operation.attempt + 1


def test_a_failed_change_of_the_weights_makes_their_version_unknown(pool: Pool) -> None:
    pool.complete("load", "load", version=0)
    pool.table.fail(pool.begin("update", "update-0", expect=0), OperationFailed("no luck"))
    with pytest.raises(VersionMismatch, match="no known weights") as mismatch:
        pool.table.submit(pool.request("update", "update-0", expect=0))
    assert (mismatch.value.expected, mismatch.value.held) == (0, None)


def test_a_failed_read_only_operation_keeps_the_version(pool: Pool) -> None:
    pool.complete("load", "load", version=3)
    pool.table.fail(pool.begin("generate", "generate-3", expect=3), OperationFailed("no luck"))
    assert pool.table.weight_version == 3


def test_another_version_than_expected_is_refused(pool: Pool) -> None:
    pool.complete("load", "load", version=4)
    with pytest.raises(VersionMismatch, match="expects weight version 5, but the pool holds weight version 4"):
        pool.table.submit(pool.request("update", "update-5", expect=5))
    assert pool.table.running is None


def test_a_stale_lease_is_refused_whatever_it_asks_for(pool: Pool) -> None:
    pool.complete("update", "update-0", version=1)
    zombie = pool.request("update", "update-0")
    pool.lease = pool.leases.acquire("run", "flow-2", 60)
    for request in (zombie, dataclasses.replace(zombie, op_id="update-1")):
        with pytest.raises(StaleLease):
            pool.table.submit(request)


def test_an_id_cannot_mean_two_things(pool: Pool) -> None:
    pool.complete("update", "update-0", version=1)
    with pytest.raises(OperationConflict, match="update-0"):
        pool.table.submit(pool.request("update", "update-0", digest="other"))


def test_replaying_updates_after_a_restore_runs_them_again(pool: Pool) -> None:
    pool.complete("load", "load", version=0)
    pool.complete("update", "update-0", version=1, expect=0)
    pool.complete("restore", "restore-0", version=0)
    assert pool.begin("update", "update-0", expect=0)


def test_restoring_the_same_checkpoint_twice_runs_twice(pool: Pool) -> None:
    pool.complete("restore", "restore-5", version=5)
    pool.complete("update", "update-5", version=6, expect=5)
    assert pool.begin("restore", "restore-5")


def test_outcomes_of_read_only_operations_live_until_the_weights_change(pool: Pool) -> None:
    pool.complete("load", "load", version=0)
    pool.complete("generate", "generate-0", version=0)
    assert pool.table.submit(pool.request("generate", "generate-0")).kind == "stored"
    pool.complete("update", "update-0", version=1)
    assert pool.begin("generate", "generate-0")


def test_the_tables_stay_bounded(pool: Pool) -> None:
    for index in range(operations.KEEP_OUTCOMES + 10):
        pool.complete("generate", f"done-{index}", version=None)
        pool.table.fail(pool.begin("generate", f"failed-{index}"), OperationFailed("no luck"))
    assert pool.table.submit(pool.request("generate", "done-9")).kind == "start"
    with pytest.raises(PoolError, match="is gone"):
        pool.table.find("failed-0", 2)


def test_a_rollout_without_a_client_is_abandoned_an_update_is_not(pool: Pool) -> None:
    rollout = pool.begin("generate", "generate-0")
    pool.now += 59
    pool.table.find("generate-0", rollout.attempt)  # a poll
    pool.now += 59
    assert not pool.table.abandoned()
    pool.now += 2
    assert pool.table.abandoned()
    pool.table.fail(rollout, OperationFailed("stopped"))
    pool.begin("update", "update-0")
    pool.now += 1000
    assert not pool.table.abandoned()


def test_only_read_only_operations_can_be_cancelled(pool: Pool) -> None:
    assert not pool.table.cancel("generate-0", "why")
    rollout = pool.begin("generate", "generate-0")
    assert pool.table.cancel("generate-0", "the user asked")
    assert rollout.cancelled == "the user asked"
    # A retry must not join what is being stopped; it waits and then runs anew.
    assert pool.table.submit(pool.request("generate", "generate-0")).kind == "busy"
    pool.table.fail(rollout, OperationFailed("stopped"))
    pool.begin("update", "update-0")
    assert not pool.table.cancel("update-0", "the user asked")
