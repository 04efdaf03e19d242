"""The group of rank actors of one pool: start them, run an operation on all, notice a death, kill them.

The ranks belong to the supervisor's process: if that dies, Ray ends them too, so no rank is left alone with a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from engine.pool.cluster import tail
from engine.pool.death import cause_of_death
from engine.pool.environment import rank_environment
from engine.pool.errors import PoolBroken, PoolError
from engine.pool.placement import choose_device, place
from engine.pool.rank import CONTROL, Rank
from engine.pool.status import RankStatus

REPORT_INTERVAL_S = 0.5

SILENCE_LIMIT_S = 180.0
"""A rank whose control thread does not answer for this long is stopped, or stuck with the interpreter lock held."""

GRACE_S = 20.0
"""How long ranks may take to return after another one failed, or after they were asked to stop."""


@dataclass(frozen=True)
class GroupSpec:
    """What the ranks of a pool are.

    Attributes:
        namespace: Ray namespace of the pool's actors.
        device: "auto", "cpu" or "cuda".
        worker: `module:Class`.
        python_path: folders the ranks need to import it.
        logs: folder of the ranks' logs.
    """

    namespace: str
    world_size: int
    device: str
    worker: str
    python_path: list[str]
    logs: str


@dataclass(frozen=True)
class Executed:
    """Replies of all ranks in rank order; `timed_out` if they had been asked to stop at the operation's limit."""

    replies: list[dict[str, Any]]
    timed_out: bool


class RanksStuck(PoolError):
    """Ranks did not return from an operation, so their collectives are out of step for good."""

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass
class _Member:
    rank: int
    handle: Any
    log: Path
    heard_at: float
    report: dict[str, Any] = field(default_factory=dict)


class RankGroup:
    """All ranks of a pool.

    Args:
        spec: what to start.
        on_lost: called with the reason whenever a rank is found dead or silent.
    """

    def __init__(self, spec: GroupSpec, on_lost: Callable[[PoolBroken], None]) -> None:
        self.device = spec.device
        self._spec = spec
        self._on_lost = on_lost
        self._members: list[_Member] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, timeout_s: float) -> frozenset[str]:
        """Start all ranks and let them meet; return the worker's read-only operations.

        Raises:
            PoolError: something did not happen in time or raised; the message says what, on which rank.
            PoolBroken: a rank's process died.
        """
        deadline = time.monotonic() + timeout_s
        spec = self._spec
        self.device = choose_device(spec.device, spec.world_size)
        placement = await place(self.device, spec.world_size, timeout_s)
        actor = ray.remote(concurrency_groups={CONTROL: 1})(Rank)
        environment = {"env_vars": rank_environment(placement.ranks_on_node)}
        for rank, options in enumerate(placement.options):
            log = Path(spec.logs) / f"rank-{rank}.log"
            handle = actor.options(
                name=f"rank-{rank}", namespace=spec.namespace, max_restarts=0, runtime_env=environment, **options
            ).remote(rank, spec.world_size, self.device, spec.worker, spec.python_path, str(log))
            self._members.append(_Member(rank, handle, log, time.monotonic()))
        self._watchers = [asyncio.create_task(self._watch(member)) for member in self._members]
        read_only = await self._phase("build the worker", self._members, "setup", (), deadline)
        address = await self._phase("open a meeting point", self._members[:1], "rendezvous", (), deadline)
        await self._phase("join the process group", self._members, "join", (address[0],), deadline)
        return frozenset(read_only[0])

    async def execute(self, op: str, args: dict[str, Any], limit_s: float, may_cancel: bool) -> Executed:
        """Run an operation on all ranks.

        Args:
            limit_s: after this the operation is asked to stop or, unless `may_cancel`, given up at once.

        Raises:
            PoolBroken: a rank died.
            RanksStuck: ranks did not return in time, or not within `GRACE_S` after another one failed.
        """
        tasks = [self._call(member, "execute", op, args) for member in self._members]
        pending = set(tasks)
        deadline, stopping, timed_out = time.monotonic() + limit_s, "", False
        try:
            while pending:
                wait_s = max(0.0, deadline - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                failed = [tasks.index(task) for task in done if "failure" in task.result()]
                if not pending or (done and not failed):
                    continue
                if not stopping:
                    timed_out = not failed
                    stopping = f"rank {failed[0]} failed" if failed else f"its limit of {limit_s:.0f} s was over"
                    # The others may wait for the failed rank in a collective, whose own limit is half an hour.
                    deadline = time.monotonic() + (GRACE_S if failed or may_cancel else 0.0)
                    if may_cancel:
                        self.cancel()
                elif not done:
                    stuck = sorted(tasks.index(task) for task in pending)
                    raise RanksStuck(f"ranks {stuck} did not return from {op} after {stopping}", timed_out=timed_out)
        finally:
            _forget(pending)
        return Executed([task.result() for task in tasks], timed_out)

    def cancel(self) -> None:
        """Ask the running operation to stop, on all ranks; returns at once."""
        for member in self._members:
            member.handle.cancel.remote()

    def status(self) -> list[RankStatus]:
        """What is known about each rank, without asking it."""
        now = time.monotonic()
        return [
            RankStatus(
                rank=member.rank,
                pid=member.report.get("pid"),
                node=member.report.get("node", ""),
                log=str(member.log),
                silent_s=round(now - member.heard_at, 3),
                progress=member.report.get("progress", {}),
            )
            for member in self._members
        ]

    def check_silence(self) -> None:
        """Report a rank that has not answered for `SILENCE_LIMIT_S`."""
        for member in self._members:
            if time.monotonic() - member.heard_at > SILENCE_LIMIT_S:
                exit = f"alive, but silent for {SILENCE_LIMIT_S:.0f} s"
                message = f"rank {member.rank} is {exit}; log: {member.log}"
                self._on_lost(PoolBroken(message, rank=member.rank, exit=exit))

    def kill(self) -> None:
        """End all ranks and their child processes, also those that are stopped or stuck in native code."""
        here = ray.get_runtime_context().get_node_id()
        for watcher in self._watchers:
            watcher.cancel()
        for member in self._members:
            ray.kill(member.handle)
            pid = member.report.get("pid")
            if pid and member.report["node_id"] == here:
                # Ray makes each worker the leader of a process group; its children may hold the GPU as well. The
                # check keeps us from ever signalling the group of Ray itself.
                with contextlib.suppress(ProcessLookupError):
                    if pid == os.getpgid(pid):
                        os.killpg(pid, signal.SIGKILL)

    async def _phase(
        self, what: str, members: Sequence[_Member], method: str, args: tuple[Any, ...], deadline: float
    ) -> list[Any]:
        """Call a method of several ranks during the start."""
        tasks = [self._call(member, method, *args) for member in members]
        wait_s = max(0.0, deadline - time.monotonic())
        done, pending = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
        _forget(pending)
        for member, task in zip(members, tasks, strict=True):
            if task not in done or (error := task.exception()) is None:
                continue
            if isinstance(error, PoolError):
                raise error
            cause = getattr(error, "cause", error)  # what the worker raised; Ray's own text holds the traceback
            raise PoolError(
                f"rank {member.rank} could not {what}: {type(cause).__name__}: {cause}; log: {member.log}\n{error}"
            ) from error
        if pending:
            late = [member.rank for member, task in zip(members, tasks, strict=True) if task in pending]
            raise PoolError(f"ranks {late} did not {what} in time; logs: {self._spec.logs}")
        return [task.result() for task in tasks]

    def _call(self, member: _Member, method: str, *args: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._reply(member, getattr(member.handle, method).remote(*args)))

    async def _reply(self, member: _Member, reference: Any) -> Any:
        try:
            return await reference
        except RayActorError as error:
            raise self._lost(member, error) from error

    async def _watch(self, member: _Member) -> None:
        """Notice a death also while no operation runs, and keep the progress fresh."""
        with contextlib.suppress(PoolBroken):
            while True:
                member.report = await self._reply(member, member.handle.report.remote())
                member.heard_at = time.monotonic()
                await asyncio.sleep(REPORT_INTERVAL_S)

    def _lost(self, member: _Member, error: RayError) -> PoolBroken:
        exit = cause_of_death(str(error))
        last_words = tail(member.log)
        message = f"rank {member.rank} (pid {member.report.get('pid')}) is dead: {exit}; log: {member.log}"
        broken = PoolBroken(message + (f"\n{last_words}" if last_words else ""), rank=member.rank, exit=exit)
        self._on_lost(broken)
        return broken


def _forget(tasks: set[asyncio.Task[Any]]) -> None:
    """Nobody waits for these any more; read their errors so that asyncio does not complain about them."""
    for task in tasks:
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
