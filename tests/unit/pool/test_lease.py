"""Leases: who gets the pool, for how long, and who is fenced off."""

from __future__ import annotations

import pytest

from engine.pool.errors import PoolBusy, StaleLease
from engine.pool.lease import LeaseTable


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable("epoch-1", clock)


def test_another_run_waits_until_the_lease_is_released(table: LeaseTable) -> None:
    first = table.acquire("a", "flow-1", 60)
    with pytest.raises(PoolBusy, match="run 'a' \\(flow-1\\)") as busy:
        table.acquire("b", "flow-2", 60)
    assert (busy.value.run, busy.value.holder) == ("a", "flow-1")
    assert table.release(first.token, first.epoch)
    assert table.acquire("b", "flow-2", 60).token > first.token


def test_another_run_gets_the_pool_when_the_lease_expires(table: LeaseTable, clock: Clock) -> None:
    first = table.acquire("a", "flow-1", 60)
    clock.now += 59
    table.check(first.token, first.epoch)  # renews
    clock.now += 59
    with pytest.raises(PoolBusy):
        table.acquire("b", "flow-2", 60)
    clock.now += 2
    table.acquire("b", "flow-2", 60)
    with pytest.raises(StaleLease, match="run 'b'"):
        table.check(first.token, first.epoch)


def test_a_new_attempt_of_the_same_run_fences_the_old_one_off(table: LeaseTable) -> None:
    old = table.acquire("a", "attempt-1", 60)
    new = table.acquire("a", "attempt-2", 60)
    assert new.token > old.token
    with pytest.raises(StaleLease, match="attempt-2"):
        table.check(old.token, old.epoch)
    assert not table.release(old.token, old.epoch), "a stale release must not free the pool of its successor"
    assert table.check(new.token, new.epoch) == new


def test_an_expired_lease_works_while_nobody_took_the_pool(table: LeaseTable, clock: Clock) -> None:
    lease = table.acquire("a", "flow-1", 60)
    clock.now += 1000
    assert table.seconds_left == 0
    table.check(lease.token, lease.epoch)
    assert table.seconds_left == 60


def test_a_lease_of_an_earlier_life_is_stale_even_if_the_token_matches(table: LeaseTable) -> None:
    lease = table.acquire("a", "flow-1", 60)
    rebuilt = LeaseTable("epoch-2")
    rebuilt.acquire("a", "flow-1", 60)
    with pytest.raises(StaleLease, match="rebuilt"):
        rebuilt.check(lease.token, lease.epoch)
