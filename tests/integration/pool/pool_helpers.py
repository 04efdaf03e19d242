"""What several tests of pools need."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from engine.pool import cluster

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WORKER = "pool_fake_worker:FakeWorker"


def ray_processes() -> list[psutil.Process]:
    """Live processes of the local Ray."""
    record = cluster._read_record()
    return cluster._processes(record) if record else []


def wait_until(condition: Callable[[], Any], limit_s: float = 15.0) -> None:
    """Wait for something that happens in another process."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)
