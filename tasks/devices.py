"""The groups of devices that hold a run's models, and asking one or several of them for work at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Progress = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class Pool(Protocol):
    """The part of `engine.pool.client.PoolClient` that stages use."""

    def call(
        self,
        op: str,
        op_id: str,
        args: dict[str, Any],
        lease: Any,
        expect_version: int | None,
        timeout_s: float,
        on_progress: Progress | None = None,
    ) -> dict[str, Any]: ...

    def cancel(self, op_id: str) -> Any: ...


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that share some of a run's models: each has a part of every one, in one layout.

    Attributes:
        roles: of the models; "actor" and those colocated with it, or those that are placed apart.
        pool, lease: who does the work, and the right to ask for it.
        spec: what the ranks build; see engine.model_session.ModelSession.
    """

    name: str
    roles: frozenset[str]
    pool: Pool
    lease: Any
    spec: dict[str, Any]

    @property
    def trained(self) -> bool:
        """Whether one of its models learns. Such groups have the run's weight version; the others' weights never change."""
        return not self.roles.isdisjoint({"actor", "critic"})


class Devices:
    """All groups of a run.

    Args:
        groups: every role is in exactly one.
        operation_timeout_s: longest time one operation may take.
    """

    def __init__(self, groups: Sequence[DeviceGroup], operation_timeout_s: float) -> None:
        self.groups = tuple(groups)
        self.on_progress: Progress | None = None
        self._operation_timeout_s = operation_timeout_s
        self._running: dict[str, str] = {}

    @property
    def trained(self) -> tuple[DeviceGroup, ...]:
        """Groups with a model that learns."""
        return tuple(group for group in self.groups if group.trained)

    def with_role(self, role: str) -> DeviceGroup:
        """The group that holds the model of this role. Raises LookupError if there is none."""
        for group in self.groups:
            if role in group.roles:
                return group
        raise LookupError(f"no group of devices holds the {role}")

    def call(
        self, group: DeviceGroup, op: str, op_id: str, args: dict[str, Any], expect_version: int | None = None
    ) -> dict[str, Any]:
        """Run one operation on a group and wait for it; a repeated `op_id` joins it or returns what it returned.

        Args:
            expect_version: that the group must hold; not looked at where nothing is trained.
        """
        self._running[group.name] = op_id
        expected = expect_version if group.trained else None
        result = group.pool.call(
            op,
            op_id,
            args,
            group.lease,
            expected,
            timeout_s=self._operation_timeout_s,
            on_progress=self.on_progress if "actor" in group.roles else None,
        )
        del self._running[group.name]  # not in a finally: after an exception the flow cancels what may still be running
        return result

    def cancel(self) -> None:
        """Ask the operations that may still be running to stop."""
        for group in self.groups:
            if (op_id := self._running.get(group.name)) is not None:
                group.pool.cancel(op_id)


def at_once(work: Callable[[DeviceGroup], T], groups: Sequence[DeviceGroup]) -> list[T]:
    """Do something with each group, with all at the same time. Raises the first error, while others may still be at work."""
    if len(groups) == 1:
        return [work(groups[0])]
    threads = ThreadPoolExecutor(len(groups), thread_name_prefix="group")
    try:
        return [future.result() for future in [threads.submit(work, group) for group in groups]]
    finally:
        threads.shutdown(wait=False)  # a cancelled flow must not wait for what it is about to cancel


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of one operation on several groups as if it had been one: all ranks, and the version that all have.

    Raises:
        RuntimeError: they have different versions.
    """
    versions = {result["weight_version"] for result in results}
    if len(versions) > 1:
        raise RuntimeError(f"the groups of devices hold different weight versions: {sorted(versions, key=str)}")
    return {"ranks": [rank for result in results for rank in result["ranks"]], "weight_version": versions.pop()}
