"""What a pool tells about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class PoolState(StrEnum):
    """Life of a pool; a broken one never becomes ready again, it is rebuilt."""

    STARTING = "starting"
    READY = "ready"
    BROKEN = "broken"


@dataclass(frozen=True)
class RankStatus:
    """One rank: process id, Ray node, log file (on that node), seconds since it last answered, its own progress."""

    rank: int
    pid: int | None
    node: str
    log: str
    silent_s: float
    progress: dict[str, Any]


@dataclass(frozen=True)
class OperationStatus:
    """The running operation; `cancelled` says why it is being stopped, or is empty."""

    op: str
    op_id: str
    seconds: float
    cancelled: str


@dataclass(frozen=True)
class PoolStatus:
    """Snapshot of a pool.

    Attributes:
        reason: why it is broken, else empty.
        epoch: identifies this life of the pool.
        weight_version: None while no (known) weights are loaded.
        run, holder: of the current lease, else None.
        lease_seconds_left: 0.0 when the lease has expired or there is none.
    """

    name: str
    state: PoolState
    reason: str
    epoch: str
    world_size: int
    device: str
    worker: str
    weight_version: int | None
    run: str | None
    holder: str | None
    lease_seconds_left: float
    operation: OperationStatus | None
    ranks: list[RankStatus]
    supervisor_pid: int

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain JSON-compatible values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PoolStatus:
        """Inverse of `to_dict`."""
        operation = values["operation"]
        return cls(
            **{
                **values,
                "state": PoolState(values["state"]),
                "operation": OperationStatus(**operation) if operation else None,
                "ranks": [RankStatus(**rank) for rank in values["ranks"]],
            }
        )
