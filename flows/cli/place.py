"""Naming a run on the command line: by its name below `--root`, or by the path of its folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.ledger import Ledger


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RUN and --root."""
    parser.add_argument(
        "name", metavar="RUN", help="name of the run, or its folder (runs/NAME, s3://bucket/prefix/NAME)"
    )
    add_root(parser)


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the argument --root."""
    parser.add_argument("--root", default="runs", help="folder of runs, a path or s3://bucket/prefix (default: runs)")


def open_ledger(arguments: argparse.Namespace) -> Ledger:
    """The ledger of an existing run.

    Raises:
        LedgerError: there is no such run; names those there are.
    """
    from storage.ledger import Ledger, LedgerError, list_runs

    root, _, name = arguments.name.rstrip("/").rpartition("/")
    ledger = Ledger(root or arguments.root, name)
    if ledger.record() is None:
        known = [record.name for record in list_runs(root or arguments.root)]
        hint = f"there are {', '.join(known[:10])}" if known else "there is none"
        raise LedgerError(f"no run {name!r} in {ledger.root_uri} ({hint})")
    return ledger
