"""SIGKILL at every stage boundary: the same command goes on, repeats nothing, and ends in the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.dataset
import pytest
from safetensors import safe_open

STAGES = ("prompt", "rollout", "reward", "advantage", "update")
PARTS = ("prompt", "rollout", "reward", "advantage", "evaluation-rollout", "evaluation-reward")


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.002)


def manifests(run: Path) -> dict[str, str]:
    """Stage and step to the time the stage was finished."""
    found = {}
    for path in sorted(run.glob("*/step=*/_manifest.json")):
        record = json.loads(path.read_text())
        found[f"{record['stage']}/{record['step']}"] = record["finished_at"]
    return found


def rows(run: Path, stage: str) -> list[dict]:
    table = pyarrow.dataset.dataset(run / stage, partitioning="hive").to_table()
    key = "sample_id" if "sample_id" in table.column_names else "group_id"
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row[key]))


def weights(run: Path) -> dict[str, bytes]:
    with safe_open(run / "checkpoint" / "step=000003" / "actor-00000.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def assert_same(run: Path, other: Path) -> None:
    assert manifests(run).keys() == manifests(other).keys()
    for stage in PARTS:
        assert rows(run, stage) == rows(other, stage), stage
    assert weights(run) == weights(other)


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_after_a_stage_the_run_goes_on_behind_it(stage, start, onecopy, recipe, place, undisturbed):
    name = f"killed-after-{stage}"
    run, config = place / "runs" / name, recipe(name)
    process = start("post-train", "--config", config)
    wait_for(run / stage / "step=000001" / "_manifest.json", process)
    kill(process)
    before = manifests(run)
    done = onecopy("post-train", "--config", config)
    assert done.returncode == 0, done.stderr
    after = manifests(run)
    assert {key: after[key] for key in before} == before, "a finished stage was done again"
    assert_same(run, undisturbed)


def test_killed_with_its_pool_the_run_is_restored_from_checkpoint_and_replay(
    start, onecopy, recipe, place, undisturbed
):
    run, config = place / "runs" / "all-killed", recipe("all-killed")
    process = start("post-train", "--config", config)
    wait_for(
        run / "rollout" / "step=000001" / "_manifest.json", process
    )  # version 1: no checkpoint yet, one update to replay
    kill(process)
    assert onecopy("pool", "down").returncode == 0
    before = manifests(run)
    done = onecopy("post-train", "--config", config)
    assert done.returncode == 0, done.stderr
    assert {key: manifests(run)[key] for key in before} == before
    assert_same(run, undisturbed)


def test_a_finished_run_does_nothing_more(onecopy, recipe, undisturbed):
    before = manifests(undisturbed)
    done = onecopy("post-train", "--config", recipe("undisturbed"))
    assert done.returncode == 0, done.stderr
    assert manifests(undisturbed) == before


def test_another_configuration_under_the_same_name_is_refused_with_the_difference(onecopy, recipe, undisturbed):
    done = onecopy("post-train", "--config", recipe("undisturbed"), "--set", "optimizer.lr=0.5")
    assert done.returncode == 2
    assert "optimizer.lr" in done.stderr and "0.001" in done.stderr
