"""Environment variables of the processes that the pool starts, and where it keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

from engine.pool.errors import PoolError
from engine.weights.sources import onecopy_home

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Nothing phones home, and the tokenizers library does not warn about threads after a fork."""


def home() -> Path:
    """Folder for addresses, tokens and logs: `$ONECOPY_HOME` or `~/.onecopy`; created for this user only."""
    folder = onecopy_home()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PoolError(f"cannot create {folder}: {error.strerror}; set ONECOPY_HOME to a writable folder") from error
    return folder


def project_root() -> Path:
    """Folder from which `import engine` works; Ray's workers get it on their PYTHONPATH."""
    return Path(__file__).resolve().parents[2]


def rank_environment(ranks_on_node: int) -> dict[str, str]:
    """Variables for a rank that shares its machine's cores with `ranks_on_node - 1` others."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_on_node) if hasattr(os, "sched_getaffinity") else 1
    return {**QUIET, "OMP_NUM_THREADS": str(threads)}
