"""The local Ray of a machine without a Ray cluster: started as a daemon, recorded, found again, stopped.

It runs in a session of its own (setsid), so it outlives the terminal and the flow that started it, and so all of its
processes can be found by their session id. `ray stop` is no option: it ends every Ray on the machine.

Ray listens on the host's address even for local use. Therefore each Ray started here requires a token, kept in a file
that only this user can read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from engine.pool.environment import QUIET, home, project_root
from engine.pool.errors import PoolError

OBJECT_STORE_BYTES = 80_000_000
"""Close to Ray's minimum: no tensor travels through Ray's object store."""

MAX_LOGICAL_CPUS = 8
"""Ray starts one idle worker (80 MB) a logical CPU. The pool's actors ask for none, so this only bounds that."""

STOP_GRACE_S = 2.0


@dataclass(frozen=True)
class LocalRay:
    """What `ray.json` records about a running local Ray.

    Attributes:
        address: host:port of its control store.
        session: id of the session (setsid) that all its processes belong to.
        booted_at: boot time of the machine; after a reboot the session id means nothing.
        temp_dir: its sockets and logs.
    """

    address: str
    session: int
    booted_at: float
    temp_dir: str


def token_file() -> Path:
    """File with the token that clients of the local Ray present."""
    return home() / "ray-token"


def running() -> LocalRay | None:
    """Return the local Ray if its control store and its node manager are both alive, else None."""
    record = _read_record()
    if record is None:
        return None
    daemons = {name for process in _processes(record) if (name := _daemon_name(process))}
    return record if daemons == {"gcs_server", "raylet"} else None


def ensure_running(port: int | None, timeout_s: float) -> LocalRay:
    """Return the running local Ray, starting one if there is none. Call it while holding `lock`.

    Args:
        port: port of the control store; None lets the system choose a free one.
        timeout_s: how long the start may take.

    Raises:
        PoolError: the port is taken, or Ray did not start; the message names the log.
    """
    if (found := running()) is not None:
        return found
    stop()  # what a crashed Ray left behind
    if port is not None:
        _refuse_taken_port(port)
    temp_dir = _temp_dir()
    shutil.rmtree(temp_dir, ignore_errors=True)
    temp_dir.mkdir(parents=True, mode=0o700)
    _ensure_token()
    session = _ray_start(temp_dir, port, timeout_s)
    # Ray writes the address it chose into this file; it is the only reliable way to learn a port it picked itself.
    address = (temp_dir / "ray_current_cluster").read_text().strip()
    record = LocalRay(address, session, psutil.boot_time(), str(temp_dir))
    temporary = _record_file().with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(_record_file())
    return record


def stop() -> None:
    """End every process of the local Ray, with all pools on it. Does nothing if there is none.

    Raises:
        PoolError: processes survived SIGKILL for ten seconds (stuck in the kernel); the message lists them.
    """
    record = _read_record()
    if record is None:
        return
    for sent, patience in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, 10.0)):
        # New processes may appear while the first ones end, hence the loop until nothing is left.
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while (processes := _processes(record)) and time.monotonic() < deadline:
            for process in processes:
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(sent)
            time.sleep(0.05)
    if processes:
        raise PoolError(f"processes of the local Ray do not end: {[process.pid for process in processes]}")
    _record_file().unlink(missing_ok=True)
    shutil.rmtree(record.temp_dir, ignore_errors=True)


@contextlib.contextmanager
def lock(timeout_s: float) -> Iterator[None]:
    """Hold this machine's lock on starting and stopping the local Ray.

    Raises:
        PoolError: another process held it for `timeout_s` seconds.
    """
    path = home() / "ray.lock"
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PoolError(
                        f"waited {timeout_s:.0f} s for {path}: another process starts or stops the local Ray"
                    ) from None
                time.sleep(0.05)
        yield


def _record_file() -> Path:
    return home() / "ray.json"


def _read_record() -> LocalRay | None:
    try:
        record = LocalRay(**json.loads(_record_file().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise PoolError(f"{_record_file()} is damaged ({error}); end Ray's processes and remove the file") from error
    # A second of slack: the boot time is computed from two clocks.
    return record if abs(record.booted_at - psutil.boot_time()) < 60 else None


def _processes(record: LocalRay) -> list[psutil.Process]:
    """Live processes of the recorded session, children last."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == record.session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    # The leader of our session (`ray start`) has exited. A live leader means that the id was given out again.
    return [] if any(process.pid == record.session for process in found) else found


def _daemon_name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        name = Path((process.cmdline() or [""])[0]).name
        return name if name in ("gcs_server", "raylet") else ""
    return ""


def _temp_dir() -> Path:
    """Ray's folder, short because Unix socket paths end at 107 bytes, and safe against other users of /tmp."""
    base = Path(f"/tmp/onecopy-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    owner = base.lstat()
    if base.is_symlink() or owner.st_uid != os.getuid():
        raise PoolError(f"{base} belongs to another user; remove it")
    return base / hashlib.sha256(str(home()).encode()).hexdigest()[:8]


def _ensure_token() -> None:
    path = token_file()
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def _refuse_taken_port(port: int) -> None:
    """Fail early and clearly; Ray itself needs 40 seconds and a stack trace to notice."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise PoolError(
                f"port {port} for the local Ray is in use ({error.strerror}); "
                "choose another one or leave the port empty to have a free one chosen"
            ) from error


def _ray_start(temp_dir: Path, port: int | None, timeout_s: float) -> int:
    """Run `ray start --head` and return the session id of what it started."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port or 0}"),
        f"--temp-dir={temp_dir}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--num-cpus={min(os.cpu_count() or 1, MAX_LOGICAL_CPUS)}",
        *("--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats", "--log-style=record"),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    paths = [str(project_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {
        **QUIET,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file()),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    log = home() / "ray-start.log"
    with log.open("wb") as output:
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=home(),
            start_new_session=True,
        )
        try:
            code = starter.wait(timeout_s)
        except BaseException as error:
            _end_session(starter)
            if isinstance(error, subprocess.TimeoutExpired):
                raise PoolError(f"Ray did not start within {timeout_s:.0f} s; see {log}") from error
            raise
    if code != 0:
        _end_session(starter)
        if "Failed to start the grpc server" in log.read_text(errors="replace"):
            raise PoolError(f"port {port} for the local Ray is in use; see {log}")
        raise PoolError(f"Ray did not start (exit code {code}); see {log}:\n{tail(log)}")
    return starter.pid


def _end_session(starter: subprocess.Popen[bytes]) -> None:
    """End a start that failed halfway; its daemons still are in the starter's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()


def tail(path: Path, lines: int = 8, characters: int = 2000) -> str:
    """Last non-empty lines of a log, or an empty string if it cannot be read (it may be on another machine)."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])[-characters:]
