"""The command line as a user runs it: real processes, a real pool and Prefect's embedded server, shared by all tests here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tiny_models import make_model

RUN_TIMEOUT_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts real processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.acceptance)


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder for homes, models, data and runs; short, because Ray's sockets live in it. The pool is stopped at the end."""
    folder = Path(tempfile.mkdtemp(prefix="oc-"))
    make_model("qwen2", folder / "model")
    for name, start in (("train", 0), ("held-out", 60)):
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(start, start + 40)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield folder
    subprocess.run(
        [sys.executable, "-m", "flows.cli", "pool", "down"], env=environment(folder), timeout=60, check=False
    )
    shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "ONECOPY_HOME": str(folder / "home"), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def recipe(place: Path) -> Callable[..., Path]:
    """Writes a recipe: a tiny model, 3 steps of 4 prompts x 4 samples, checkpoint and evaluation along the way."""

    def write(name: str, **changes: Any) -> Path:
        data = {"path": str(place / "train.jsonl")}
        values: dict[str, Any] = {
            "experiment": name,
            "root": str(place / "runs"),
            "total_steps": 3,
            "prompts_per_step": 4,
            "checkpoint_every": 2,
            "evaluate_every": 3,
            "model": {"path": str(place / "model")},
            "data": data,
            "validation": {"size": 5, "data": {"path": str(place / "held-out.jsonl")}},
            "reward": {"function": "digits"},
            "generation": {
                "samples_per_prompt": 4, "max_response_tokens": 6, "max_model_len": 64, "kv_cache_gib": 0.2,
                "max_concurrent_samples": 32,
            },
            "optimizer": {"lr": 1e-3},
            **changes,
        }  # fmt: skip
        path = place / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture(scope="session")
def start(place: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `onecopy ARGUMENTS` in a session of its own and returns the process."""

    def run(*arguments: object, home: Path = place) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *map(str, arguments)],
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


@pytest.fixture(scope="session")
def onecopy(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `onecopy ARGUMENTS` to its end."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, **options)
        try:
            out, err = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def undisturbed(onecopy: Callable[..., Any], recipe: Callable[..., Path], place: Path) -> Path:
    """The run that nothing happened to."""
    done = onecopy("post-train", "--config", recipe("undisturbed"))
    assert done.returncode == 0, done.stderr
    return place / "runs" / "undisturbed"
