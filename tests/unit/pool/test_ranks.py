"""How a group of ranks runs one operation, with futures in the place of Ray's actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from engine.pool import ranks
from engine.pool.errors import PoolBroken
from engine.pool.ranks import Executed, GroupSpec, RankGroup, RanksStuck


class Remote:
    """Stands for one remote method."""

    def __init__(self, behaviour: Any) -> None:
        self.behaviour = behaviour

    def remote(self, *args: Any) -> Any:
        return self.behaviour(*args)


class Actor:
    """A rank that replies after some seconds, fails, dies, or stops when it is cancelled."""

    def __init__(self, after_s: float = 0.0, fails: bool = False, dies: bool = False, obeys: bool = True) -> None:
        self.cancelled = asyncio.Event()
        self.after_s, self.fails, self.dies, self.obeys = after_s, fails, dies, obeys
        self.execute = Remote(lambda op, args: self._execute())
        self.cancel = Remote(self.cancelled.set)

    async def _execute(self) -> dict[str, Any]:
        waits = [asyncio.create_task(asyncio.sleep(self.after_s))]
        if self.obeys:
            waits.append(asyncio.create_task(self.cancelled.wait()))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.dies:
            raise ActorDiedError()
        if self.fails or self.cancelled.is_set():
            return {"failure": {"message": "ValueError: no luck", "traceback": ""}}
        return {"outcome": {}}


def execute(*actors: Actor, limit_s: float = 5.0, may_cancel: bool = True) -> Executed:
    lost: list[PoolBroken] = []
    group = RankGroup(GroupSpec("pool", len(actors), "cpu", "module:Class", [], "logs"), lost.append)
    group._members = [ranks._Member(i, actor, Path("none"), time.monotonic()) for i, actor in enumerate(actors)]

    async def main() -> Executed:
        return await group.execute("op", {}, limit_s, may_cancel)

    run: Coroutine[Any, Any, Executed] = main()
    return asyncio.run(run)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)


def test_replies_come_in_rank_order() -> None:
    executed = execute(Actor(0.1), Actor(0.0, fails=True), Actor(0.05))
    assert ["failure" in reply for reply in executed.replies] == [True, True, True], "the others were cancelled"
    assert not executed.timed_out
    assert execute(Actor(0.1), Actor()).replies == [{"outcome": {}}] * 2


def test_ranks_that_wait_for_a_failed_one_are_given_up() -> None:
    begin = time.monotonic()
    with pytest.raises(RanksStuck, match=r"ranks \[0\] did not return from op after rank 1 failed") as stuck:
        execute(Actor(60, obeys=False), Actor(fails=True), may_cancel=False)
    assert not stuck.value.timed_out
    assert time.monotonic() - begin < 2


def test_an_operation_at_its_limit_is_asked_to_stop() -> None:
    executed = execute(Actor(60), Actor(60), limit_s=0.1)
    assert executed.timed_out
    assert all("failure" in reply for reply in executed.replies)


def test_an_operation_that_does_not_stop_is_given_up() -> None:
    with pytest.raises(RanksStuck, match=r"ranks \[1\] did not return from op after its limit") as stuck:
        execute(Actor(), Actor(60, obeys=False), limit_s=0.1)
    assert stuck.value.timed_out


def test_a_change_of_the_weights_is_not_asked_to_stop() -> None:
    actor = Actor(60)
    with pytest.raises(RanksStuck):
        execute(actor, limit_s=0.1, may_cancel=False)
    assert not actor.cancelled.is_set()


def test_a_death_ends_the_operation_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(PoolBroken, match="rank 1 .* is dead") as broken:
        execute(Actor(60), Actor(dies=True))
    assert broken.value.rank == 1
    assert time.monotonic() - begin < 2
