"""Settings that must stand in the environment before Prefect (or Ray, or a model hub's client) is imported.

Nothing that the user has set is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from engine.weights.sources import onecopy_home


def prepare() -> None:
    """Privacy, and a Prefect that works without a server of the user's own."""
    _default(
        # Nobody is told that, or what, you train.
        DO_NOT_TRACK="1",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        RAY_USAGE_STATS_ENABLED="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        # SQLite behind Prefect answers 503 under light load, and its first start on a slow machine takes most of a minute.
        PREFECT_CLIENT_MAX_RETRIES="10",
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="120",
        # PREFECT_HOME alone does not move results.
        PREFECT_RESULTS_LOCAL_STORAGE_PATH=str(onecopy_home() / "prefect" / "storage"),
    )
    if not _has_own_prefect():
        _default(PREFECT_HOME=str(onecopy_home() / "prefect"))
        with contextlib.suppress(
            OSError
        ):  # Prefect makes its folder, but not the one above, and says what it cannot do
            onecopy_home().mkdir(mode=0o700, parents=True, exist_ok=True)


def quiet() -> None:
    """For the command line: its own lines are the output, so Prefect's console log (tracebacks included) stays out of it.

    The log that Prefect's server keeps is not affected. Call before Prefect is imported.
    """
    _default(
        PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="CRITICAL",
        PREFECT_SERVER_LOGGING_LEVEL="CRITICAL",
        PREFECT_CLI_PROMPT="false",
        PYTHONWARNINGS="ignore",
        TOKENIZERS_PARALLELISM="false",
    )


@contextlib.contextmanager
def without_heartbeat() -> Iterator[None]:
    """Flow runs of this process send no heartbeat: stopping its thread would cost each flow run a second at its end.

    A deployment keeps its heartbeat: there, an automation watches for processes that vanish.
    """
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def _has_own_prefect() -> bool:
    # A profile in the usual place may name the user's server; moving PREFECT_HOME would silently leave it for an embedded one.
    return "PREFECT_PROFILES_PATH" in os.environ or Path("~/.prefect/profiles.toml").expanduser().exists()


def _default(**variables: str) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
