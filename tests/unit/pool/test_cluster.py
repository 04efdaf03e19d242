"""The record of the local Ray, its lock and its port, without starting Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.pool import cluster, connection
from engine.pool.config import PoolConfig
from engine.pool.errors import PoolAbsent, PoolError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONECOPY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def write_record(home: Path, session: int, booted_at: float) -> None:
    record = {"address": "127.0.0.1:1", "session": session, "booted_at": booted_at, "temp_dir": str(home / "temp")}
    (home / "ray.json").write_text(json.dumps(record))


def test_no_record_means_no_pool() -> None:
    with pytest.raises(PoolAbsent, match="no local Ray"):
        connection.find_address(PoolConfig())
    cluster.stop()


def test_stop_ends_all_processes_of_the_session_and_nothing_else(home: Path) -> None:
    # Like `ray start`: the leader of the session exits, its children stay.
    spawn = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    leader = subprocess.Popen(
        [sys.executable, "-c", spawn],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = leader.communicate()
    child = psutil.Process(int(output))
    write_record(home, leader.pid, psutil.boot_time())
    assert child.is_running()
    assert cluster.running() is None, "its daemons are not there"
    cluster.stop()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not (home / "ray.json").exists()


def test_a_session_id_that_was_given_out_again_is_left_alone(home: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        write_record(home, stranger.pid, psutil.boot_time())
        cluster.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_record_from_before_a_reboot_means_nothing(home: Path) -> None:
    write_record(home, os.getsid(0), psutil.boot_time() - 3600)
    assert cluster.running() is None
    cluster.stop()


def test_a_damaged_record_is_reported(home: Path) -> None:
    (home / "ray.json").write_text("{")
    with pytest.raises(PoolError, match=r"ray\.json is damaged"):
        cluster.running()


def test_a_taken_port_is_named_at_once() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PoolError, match=f"port {port} for the local Ray is in use"):
            cluster.ensure_running(port, 30)


def test_the_lock_has_a_limit_and_is_released() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with cluster.lock(1):
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    with pytest.raises(PoolError, match="another process starts or stops"), cluster.lock(0.1):
        pass
    release.set()
    with cluster.lock(10):
        holder.join()


def test_the_client_is_light() -> None:
    heavy = "{'ray', 'torch', 'vllm', 'megatron', 'transformers', 'numpy'}"
    code = f"import sys, engine.pool.client; print(sorted({heavy} & set(sys.modules)))"
    root = Path(cluster.__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
