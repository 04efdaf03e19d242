"""Pools on a Ray cluster that somebody else runs, here one that claims to have two GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_helpers import HERE, ROOT, WORKER

pytestmark = pytest.mark.integration

Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs code in a process whose RAY_ADDRESS names the foreign cluster (this process stays on the local one)."""
    home = tmp_path_factory.mktemp("foreign-home")
    (home / "token").write_text("0123456789abcdef" * 4)
    environment = {
        **os.environ,
        "ONECOPY_HOME": str(home),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with tempfile.TemporaryDirectory(prefix="foreign", dir="/tmp") as temp_dir:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", f"--temp-dir={temp_dir}"),
            *("--num-cpus=2", "--num-gpus=2", "--object-store-memory=80000000", "--include-dashboard=false"),
        ]
        head = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            assert head.wait(60) == 0
            environment["RAY_ADDRESS"] = (Path(temp_dir) / "ray_current_cluster").read_text().strip()

            def run_code(code: str) -> subprocess.CompletedProcess[str]:
                prelude = (
                    "from engine.pool.client import PoolClient; from engine.pool.config import PoolConfig\n"
                    f"from engine.pool.errors import *; WORKER = {WORKER!r}\n"
                )
                command = [sys.executable, "-c", prelude + code]
                return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)

            yield run_code
        finally:
            os.killpg(head.pid, signal.SIGKILL)


def test_each_rank_gets_a_gpu_and_the_cluster_outlives_the_pool(run: Run) -> None:
    result = run(
        "pool = PoolClient.attach_or_start(PoolConfig(name='gpus'), 2, WORKER)\n"
        "ranks = pool.call('describe', 'd', {}, pool.lease('r', 'h', 0))['ranks']\n"
        "print(pool.status().device, [rank['environment']['CUDA_VISIBLE_DEVICES'] for rank in ranks])\n"
        "try: PoolClient.start(PoolConfig(name='late', startup_timeout_s=3), 1, WORKER)\n"
        "except PoolError as error: print(error)\n"
        "pool.stop()\n"
        "try: PoolClient.attach(PoolConfig(name='gpus'))\n"
        "except PoolAbsent as error: print(error)\n"
        "pool = PoolClient.start(PoolConfig(name='cpus', device='cpu'), 3, WORKER)\n"
        "print(pool.status().device, len(pool.status().ranks))\n"
        "pool.stop()\n"
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "cuda ['0', '1']" in lines or "cuda ['1', '0']" in lines
    assert any("for 1 free GPUs; 0 are free" in line for line in lines)
    assert "pool 'gpus' is not running on the Ray cluster" in lines
    assert "cpu 3" in lines


def test_a_wrong_token_is_refused(run: Run) -> None:
    result = run(
        "import os; os.environ['RAY_AUTH_TOKEN'] = 'f' * 64\n"
        "try: PoolClient.attach(PoolConfig())\n"
        "except PoolError as error: print('refused:', error)\n"
    )
    assert "refused: cannot connect to the Ray at" in result.stdout, result.stderr
