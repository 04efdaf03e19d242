"""Life and death of pools: attach, start races, deaths of ranks and supervisor, stop, ports, two pools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pool_helpers import ROOT, WORKER, ray_processes, wait_until

from engine.pool.client import PoolClient
from engine.pool.config import Device, PoolConfig
from engine.pool.errors import PoolAbsent, PoolBroken, PoolError, PoolMismatch, StaleLease
from engine.pool.status import PoolState

pytestmark = pytest.mark.integration


def alive(pid: int | None) -> bool:
    return pid is not None and psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def is_broken(pool: PoolClient) -> bool:
    """The supervisor says so, or is gone itself."""
    try:
        return pool.status().state is PoolState.BROKEN
    except PoolBroken:
        return True


def pids(pool: PoolClient) -> list[int]:
    return [pid for rank in pool.status().ranks if (pid := rank.pid)]


def call_in_thread(pool: PoolClient, op: str, args: dict[str, object]) -> tuple[threading.Thread, list[Exception]]:
    """Start an operation and wait until it runs; its error ends up in the list."""
    lease, errors = pool.lease("victim", "test", 15), list[Exception]()

    def call() -> None:
        try:
            pool.call(op, f"victim-{op}", args, lease)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: pool.status().operation)
    return thread, errors


def test_start_attaches_when_the_pool_is_up(pool: PoolClient, config: PoolConfig) -> None:
    epoch = pool.status().epoch
    assert PoolClient.start(config, 2, WORKER).status().epoch == epoch
    assert PoolClient.attach_or_start(config, 2, WORKER).status().epoch == epoch
    with pytest.raises(PoolMismatch, match="stop it first"):
        PoolClient.attach_or_start(config, 1, WORKER)


def test_attaching_from_a_new_process_is_quick(
    pool: PoolClient, in_process: Callable[[str], subprocess.Popen[str]]
) -> None:
    epoch = pool.status().epoch
    times = []
    for _ in range(3):
        begin = time.monotonic()
        output, _ = in_process("print(pool.status().epoch)").communicate(timeout=30)
        times.append(time.monotonic() - begin)
        assert output == f"{epoch}\n"
    assert min(times) < 3.0, "interpreter start, imports, attach and exit"


def test_a_pool_that_does_not_run_is_absent(pool: PoolClient, config: PoolConfig) -> None:
    with pytest.raises(PoolAbsent, match="'nobody'"):
        PoolClient.attach(config.model_copy(update={"name": "nobody"}))


def test_a_killed_rank_breaks_the_pool_and_it_is_rebuilt(pool: PoolClient, config: PoolConfig) -> None:
    before = pool.status()
    thread, errors = call_in_thread(pool, "sleep", {"seconds": 120})
    begin = time.monotonic()
    os.kill(pids(pool)[1], signal.SIGKILL)
    thread.join(30)
    assert time.monotonic() - begin < 30 and errors
    error = errors[0]
    assert isinstance(error, PoolBroken) and error.rank == 1
    assert "SIGKILL" in error.exit and "rank-1.log" in str(error) and "rank 1" in str(error)
    status = pool.status()
    assert status.state is PoolState.BROKEN and "rank 1" in status.reason
    wait_until(lambda: not any(alive(rank.pid) for rank in before.ranks))
    with pytest.raises(PoolBroken):
        pool.lease("next", "test", 0)
    rebuilt = PoolClient.attach_or_start(config, 2, WORKER)
    after = rebuilt.status()
    assert (after.state, after.weight_version) == (PoolState.READY, None)
    assert after.epoch != before.epoch
    with pytest.raises(PoolBroken, match="supervisor"):
        pool.status()


def test_a_rank_that_exits_while_the_other_waits_for_it_is_named(pool: PoolClient) -> None:
    lease = pool.lease("exit", "test", 15)
    with pytest.raises(PoolBroken, match="rank 0") as broken:
        pool.call("exit", "exit-0", {"only": 0, "code": 3}, lease)
    assert broken.value.rank == 0


def test_an_idle_rank_that_dies_is_noticed(pool: PoolClient) -> None:
    os.kill(pids(pool)[0], signal.SIGKILL)
    wait_until(lambda: pool.status().state is PoolState.BROKEN, limit_s=10)


def test_ranks_that_diverge_break_the_pool(pool: PoolClient) -> None:
    lease = pool.lease("diverge", "test", 15)
    with pytest.raises(PoolBroken, match=r"different weight versions: \[0, 1\]"):
        pool.call("diverge", "diverge-0", {}, lease)


def test_when_the_supervisor_dies_hanging_ranks_die_too(pool: PoolClient, config: PoolConfig) -> None:
    status = pool.status()
    thread, errors = call_in_thread(pool, "hang", {})
    time.sleep(0.5)
    os.kill(status.supervisor_pid, signal.SIGKILL)
    thread.join(30)
    assert errors and isinstance(errors[0], PoolBroken)
    wait_until(lambda: not any(alive(rank.pid) for rank in status.ranks), limit_s=10)
    assert PoolClient.attach_or_start(config, 2, WORKER).status().epoch != status.epoch


def test_a_lease_does_not_survive_a_rebuild(pool: PoolClient, config: PoolConfig) -> None:
    lease = pool.lease("old", "test", 15)
    os.kill(pids(pool)[0], signal.SIGKILL)
    wait_until(lambda: pool.status().state is PoolState.BROKEN)
    rebuilt = PoolClient.attach_or_start(config, 2, WORKER)
    rebuilt.lease("old", "test", 0)
    with pytest.raises(StaleLease, match="rebuilt"):
        rebuilt.call("update", "old-0", {}, lease)


def test_a_worker_that_cannot_be_built_fails_the_start(pool: PoolClient, config: PoolConfig) -> None:
    other = config.model_copy(update={"name": "faulty"})
    with pytest.raises(PoolError, match="could not build the worker.*no attribute 'Missing'"):
        PoolClient.start(other, 2, "pool_fake_worker:Missing")
    with pytest.raises(PoolAbsent):
        PoolClient.attach(other)
    with pytest.raises(PoolError, match="cannot find the module"):
        PoolClient.start(other, 2, "no_such_module:Worker")


def test_more_gpus_than_there_are_is_refused(pool: PoolClient, config: PoolConfig) -> None:
    other = config.model_copy(update={"name": "gpus", "device": Device.CUDA})
    with pytest.raises(PoolError, match="1000 ranks need 1000 GPUs"):
        PoolClient.start(other, 1000, WORKER)


def test_a_process_that_imported_ray_before_can_attach(pool: PoolClient, config: PoolConfig) -> None:
    """Ray reads its token settings when it is imported; those of this test's own environment must not help."""
    code = (
        "import os\n"
        "for name in ('RAY_AUTH_MODE', 'RAY_AUTH_TOKEN_PATH'): os.environ.pop(name, None)\n"
        "import ray, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from engine.pool.client import PoolClient; from engine.pool.config import PoolConfig\n"
        f"pool = PoolClient.attach(PoolConfig.model_validate_json({config.model_dump_json()!r}))\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, 'Prefect cancels through its own handler'\n"
        "print(pool.status().epoch)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout == f"{pool.status().epoch}\n", result.stderr


def test_the_token_is_private(pool: PoolClient, ray_home: Path) -> None:
    assert (ray_home / "ray-token").stat().st_mode & 0o777 == 0o600


def test_two_pools_share_a_ray_and_the_last_one_takes_it_along(
    no_leftovers: None, config: PoolConfig, in_process: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = PoolClient.attach_or_start(config, 2, WORKER)
    second = PoolClient.attach_or_start(config.model_copy(update={"name": "second"}), 1, WORKER)
    lease, other = first.lease("a", "test", 15), second.lease("b", "test", 15)
    first.call("load", "load", {"version": 1}, lease)
    second.call("load", "load", {"version": 9}, other)
    assert (first.status().weight_version, second.status().weight_version) == (1, 9)
    gone = pids(second)
    second.stop()
    assert not any(alive(pid) for pid in gone)
    assert first.call("describe", "describe", {}, lease)["weight_version"] == 1
    everything = ray_processes()
    first.stop()
    assert everything and not any(alive(process.pid) for process in everything)
    assert ray_processes() == []
    with pytest.raises(PoolAbsent):
        PoolClient.attach(config)


def test_a_crashed_ray_is_replaced(no_leftovers: None, config: PoolConfig) -> None:
    """Two processes start at once, then Ray's node manager is killed; every rank goes with it."""
    started: list[str] = []

    def start() -> None:
        started.append(PoolClient.start(config, 2, WORKER).status().epoch)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(set(started)) == 1 and len(started) == 2
    pool = PoolClient.attach(config)
    ranks = pids(pool)
    (node_manager,) = [process for process in ray_processes() if process.name() == "raylet"]
    node_manager.kill()
    wait_until(lambda: not any(alive(pid) for pid in ranks), limit_s=20)
    wait_until(lambda: is_broken(pool))
    assert PoolClient.attach_or_start(config, 2, WORKER).status().state is PoolState.READY
