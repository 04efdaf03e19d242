"""`onecopy demo`."""

from __future__ import annotations

import argparse
from typing import Any


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    what = "make a small model and teach it arithmetic, on this machine, in minutes"
    parser = commands.add_parser("demo", help=what, description=what.capitalize())
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the sampling (default 0)")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from flows import demo

    demo.main(arguments.seed)
