"""Operations on a real pool of two ranks: ids, versions, leases, progress, cancel, lost clients."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool_helpers import wait_until

from engine.pool.client import PoolClient
from engine.pool.config import PoolConfig
from engine.pool.errors import (
    OperationCancelled,
    OperationFailed,
    OperationTimeout,
    PoolBusy,
    StaleLease,
    VersionMismatch,
)

pytestmark = pytest.mark.integration

InProcess = Callable[[str], "subprocess.Popen[str]"]


def test_the_ranks_get_their_environment_and_logs(pool: PoolClient) -> None:
    lease = pool.lease("environment", "test", 15)
    ranks = pool.call("describe", "describe-environment", {}, lease)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[0]["pid"] != ranks[1]["pid"]
    environment = ranks[0]["environment"]
    assert int(environment["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert (environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "1")
    for rank in pool.status().ranks:
        assert f"fake worker {rank.rank} of 2 on cpu" in Path(rank.log).read_text()
    pool.release(lease)


def test_an_update_happens_once_whoever_asks_again(pool: PoolClient, config: PoolConfig) -> None:
    lease = pool.lease("once", "test", 15)
    pool.call("load", "once-load", {"version": 0}, lease)
    first = pool.call("update", "once-update-0", {}, lease, expect_version=0)
    assert first["weight_version"] == 1
    assert pool.call("update", "once-update-0", {}, lease, expect_version=0) == first
    other = PoolClient.attach(config)
    again = other.lease("once", "second attempt", 0)
    assert other.call("update", "once-update-0", {}, again, expect_version=0) == first
    with pytest.raises(StaleLease, match="second attempt"):
        pool.call("update", "once-update-1", {}, lease, expect_version=1)
    with pytest.raises(VersionMismatch, match="holds weight version 1"):
        other.call("update", "once-update-5", {}, again, expect_version=5)
    assert pool.status().weight_version == 1
    other.release(again)


def test_a_failure_is_told_and_forgotten(pool: PoolClient) -> None:
    lease = pool.lease("failure", "test", 15)
    pool.call("load", "failure-load", {"version": 3}, lease)
    with pytest.raises(OperationFailed, match="failed on rank 1: ValueError: no luck on rank 1") as error:
        pool.call("fail", "failure-0", {"only": 1}, lease, expect_version=3)
    assert "pool_fake_worker.py" in error.value.remote_traceback
    with pytest.raises(OperationFailed):
        pool.call("fail", "failure-0", {"only": 1}, lease, expect_version=3)
    with pytest.raises(OperationFailed, match="not finite"):
        pool.call("broken_update", "failure-update", {}, lease, expect_version=3)
    with pytest.raises(VersionMismatch, match="no known weights"):
        pool.call("update", "failure-update-2", {}, lease, expect_version=3)
    with pytest.raises(TypeError, match="JSON"):
        pool.call("describe", "failure-args", {"path": object()}, lease)
    pool.release(lease)


def test_progress_arrives_and_cancel_stops(pool: PoolClient) -> None:
    lease = pool.lease("cancel", "test", 15)
    seen: list[dict[str, Any]] = []

    def on_progress(progress: dict[str, Any]) -> None:
        seen.append(progress)
        if progress["ranks"][0].get("slept", 0) > 1:
            assert pool.cancel("cancel-sleep")

    with pytest.raises(OperationCancelled, match="it was cancelled"):
        pool.call("sleep", "cancel-sleep", {"seconds": 60}, lease, on_progress=on_progress)
    assert seen and seen[-1]["op_id"] == "cancel-sleep" and len(seen[-1]["ranks"]) == 2
    assert pool.call("sleep", "cancel-sleep", {"seconds": 0}, lease)["ranks"], "the same id runs again"
    pool.release(lease)


def test_an_update_is_finished_although_it_is_cancelled(pool: PoolClient) -> None:
    lease = pool.lease("finish", "test", 15)
    pool.call("load", "finish-load", {"version": 0}, lease)
    cancelled: list[bool] = []
    outcome = pool.call(
        "update",
        "finish-update",
        {"seconds": 2.5},
        lease,
        on_progress=lambda progress: cancelled.append(pool.cancel("finish-update")),
    )
    assert outcome["weight_version"] == 1
    assert cancelled and not any(cancelled)
    pool.release(lease)


def test_an_operation_at_its_limit_is_stopped(pool: PoolClient) -> None:
    lease = pool.lease("limit", "test", 15)
    with pytest.raises(OperationTimeout, match="limit of 1 s"):
        pool.call("sleep", "limit-sleep", {"seconds": 60}, lease, timeout_s=1)
    assert pool.status().operation is None, "a retry may start at once"
    pool.release(lease)


def test_another_client_joins_what_a_dead_one_started(pool: PoolClient, in_process: InProcess) -> None:
    first = in_process(
        "lease = pool.lease('join', 'first', 5)\n"
        "pool.call('load', 'join-load', {'version': 0}, lease)\n"
        "print('loaded')\n"
        "pool.call('update', 'join-update', {'seconds': 3}, lease, expect_version=0)\n"
    )
    assert first.stdout is not None and first.stdout.readline() == "loaded\n"
    wait_until(lambda: pool.status().operation)
    first.send_signal(signal.SIGKILL)
    lease = pool.lease("join", "second", 0)
    outcome = pool.call("update", "join-update", {"seconds": 3}, lease, expect_version=0)
    assert outcome["weight_version"] == 1
    assert pool.status().weight_version == 1
    pool.release(lease)


def test_another_run_waits_for_its_turn(pool: PoolClient, in_process: InProcess) -> None:
    other = in_process("lease = pool.lease('theirs', 'flow-7', 5); print('taken'); input()")
    assert other.stdout is not None and other.stdout.readline() == "taken\n"
    with pytest.raises(PoolBusy, match="waited 0 s .* run 'theirs' \\(flow-7\\)"):
        pool.lease("ours", "test", 0)


def test_a_killed_client_loses_its_lease_and_its_rollout(config: PoolConfig, pool: PoolClient) -> None:
    short = config.model_copy(update={"lease_seconds": 2.0})
    client = PoolClient.attach(short)
    lease = client.lease("lost", "test", 40)
    client._submit(_request(lease, "lost-sleep"))
    wait_until(lambda: pool.status().operation)
    client._heartbeats.pop(lease.token).stop()  # as if the process had died
    wait_until(lambda: pool.status().operation is None, limit_s=10)
    wait_until(lambda: pool.status().lease_seconds_left == 0)
    pool.release(pool.lease("next", "test", 0))


def test_the_lease_is_kept_while_the_flow_works_elsewhere(config: PoolConfig, pool: PoolClient) -> None:
    client = PoolClient.attach(config.model_copy(update={"lease_seconds": 1.0}))
    lease = client.lease("elsewhere", "test", 40)
    time.sleep(2.5)
    with pytest.raises(PoolBusy):
        pool.lease("other", "test", 0)
    client.release(lease)


def test_an_interrupted_client_stops_its_rollout(pool: PoolClient, in_process: InProcess) -> None:
    client = in_process(
        "lease = pool.lease('interrupt', 'flow-1', 5); print('taken')\n"
        "pool.call('sleep', 'interrupt-sleep', {'seconds': 60}, lease)\n"
    )
    assert client.stdout is not None and client.stdout.readline() == "taken\n"
    wait_until(lambda: pool.status().operation)
    client.send_signal(signal.SIGINT)
    wait_until(lambda: pool.status().operation is None, limit_s=10)


def test_releasing_stops_the_rollout_of_another_thread(pool: PoolClient) -> None:
    lease = pool.lease("release", "test", 15)
    errors: list[Exception] = []

    def call() -> None:
        try:
            pool.call("sleep", "release-sleep", {"seconds": 60}, lease)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: pool.status().operation)
    pool.release(lease)
    thread.join(15)
    assert errors and isinstance(errors[0], (OperationCancelled, StaleLease))


def _request(lease: Any, op_id: str) -> dict[str, Any]:
    return {
        "op": "sleep",
        "op_id": op_id,
        "args": {"seconds": 60},
        "digest": op_id,
        "token": lease.token,
        "epoch": lease.epoch,
        "expect_version": None,
        "limit_s": 60.0,
        "patience_s": lease.seconds,
    }
