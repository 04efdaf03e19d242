"""`onecopy export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

from flows.cli.place import add_run, open_ledger


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    parser = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    add_run(parser)
    parser.add_argument(
        "--step", type=int, default=None, metavar="N", help="weight version (default: the newest checkpoint)"
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write; must not exist or be empty")
    parser.add_argument("--role", default="actor", metavar="ROLE", help="which model: actor (default) or critic")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from storage.ledger import LedgerError

    ledger = open_ledger(arguments)
    saved = ledger.committed("checkpoint")
    step = arguments.step if arguments.step is not None else (saved[-1] if saved else None)
    if step not in saved:
        have = f"saved are {', '.join(map(str, saved))}" if saved else "none was saved"
        raise LedgerError(f"run {ledger.run!r} has no checkpoint{'' if step is None else f' of step {step}'} ({have})")
    # In a process of its own: it loads the weights with torch, which this one stays clear of.
    command = [
        sys.executable,
        "-m",
        "engine.weights.export",
        "--run",
        ledger.uri,
        "--step",
        str(step),
        "--to",
        arguments.to,
        "--role",
        arguments.role,
    ]
    return subprocess.run(command).returncode
