"""One local Ray for all tests of this folder, in a home of its own; pools come and go on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.pool import cluster, connection
from engine.pool.client import PoolClient
from engine.pool.config import PoolConfig
from engine.pool.errors import PoolBroken, PoolError

sys.path.insert(0, str(Path(__file__).parent))  # the pool must find its worker, whatever import mode pytest uses

from pool_helpers import ROOT, WORKER


@pytest.fixture(scope="session")
def ray_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ONECOPY_HOME of these tests; the Ray in it is ended afterwards."""
    folder = tmp_path_factory.mktemp("onecopy-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_HOME", str(folder))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield folder
        connection.disconnect()
        cluster.stop()


@pytest.fixture
def config(ray_home: Path) -> PoolConfig:
    return PoolConfig(name="shared", device="cpu", startup_timeout_s=90, operation_timeout_s=60, lease_seconds=4)


@pytest.fixture
def pool(config: PoolConfig) -> Iterator[PoolClient]:
    """A sound pool of two ranks; reused by the next test, or rebuilt if this one broke it."""
    client = PoolClient.attach_or_start(config, 2, WORKER)
    yield client
    for heartbeat in client._heartbeats.values():
        heartbeat.stop()  # the lease of a failed test must not keep the next test waiting
    with contextlib.suppress(PoolBroken):
        if (operation := client.status().operation) is not None:
            client.cancel(operation.op_id)


@pytest.fixture
def in_process(ray_home: Path, config: PoolConfig) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Runs code in another process, where `pool` is an attached client."""
    started: list[subprocess.Popen[str]] = []
    prelude = (
        "from engine.pool.client import PoolClient; from engine.pool.config import PoolConfig\n"
        f"pool = PoolClient.attach(PoolConfig.model_validate_json({config.model_dump_json()!r}))\n"
    )

    def run(code: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-u", "-c", prelude + code]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def no_leftovers(config: PoolConfig) -> Iterator[None]:
    """Ends the shared pool before and after a test that needs an empty or fresh Ray."""
    _stop(config)
    yield
    _stop(config)


def _stop(config: PoolConfig) -> None:
    try:
        PoolClient.attach(config).stop()
    except PoolError:
        connection.disconnect()
        cluster.stop()
