"""Configuration of a pool, as it appears in the form of a deployment."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Device(StrEnum):
    """Where the ranks run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class PoolConfig(BaseModel):
    """Which pool to use and how long to wait for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "default",
        title="Pool",
        description="Name of the worker pool. Runs that name the same pool take turns on it.",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$",
    )
    device: Device = Field(
        Device.AUTO,
        title="Device",
        description="auto: one GPU a rank where the Ray cluster has GPUs, else CPU.",
    )
    address: str | None = Field(
        None,
        title="Ray address",
        description="host:port of a running Ray cluster. Empty: RAY_ADDRESS if set, else a local Ray is started.",
        min_length=1,
        max_length=200,
    )
    port: int | None = Field(
        None,
        title="Port of the local Ray",
        description="Used only when a local Ray is started. Empty: a free port is chosen.",
        ge=1024,
        le=65535,
    )
    startup_timeout_s: float = Field(
        900.0,
        title="Start limit (s)",
        description="How long starting Ray and all ranks may take.",
        gt=0,
        le=7200,
    )
    operation_timeout_s: float = Field(
        3600.0,
        title="Operation limit (s)",
        description="How long one operation (a rollout, an update, a checkpoint) may take before it is stopped.",
        gt=0,
        le=7 * 86400,
    )
    lease_seconds: float = Field(
        60.0,
        title="Lease (s)",
        description="A flow that is not heard of for this long loses the pool, and a rollout it waited for is stopped.",
        ge=1,
        le=3600,
    )
