"""`onecopy runs list | show`: which runs there are, and how one went."""

from __future__ import annotations

import argparse
import json
from typing import Any

from flows.cli.place import add_root, add_run, open_ledger

COLUMNS = {
    "reward": ("reward", "reward"),
    "success": ("reward", "success"),
    "response": ("reward", "response_tokens"),
    "loss": ("update", "loss"),
    "kl": ("update", "approx_kl"),
    "rollout kl": ("update", "rollout_kl"),
    "grad norm": ("update", "grad_norm"),
    "tokens/s": ("rollout", "tokens_per_second"),
    "accuracy": ("evaluation-reward", "success"),
}
"""Columns of `runs show`: the stage and metric that fill them. A column that no step fills is left out."""


def add_commands(commands: Any) -> None:
    """Add both to the parser."""
    group = commands.add_parser(
        "runs", help="list runs, or show how one went", description="Runs, read from their folders."
    )
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all runs of a folder")
    add_root(listing)
    show = actions.add_parser("show", help="a run's steps and figures")
    add_run(show)
    for parser, run in ((listing, _list), (show, _show)):
        parser.add_argument("--json", action="store_true", help="for programs")
        parser.set_defaults(run=run)


def _list(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from storage.query import runs_table

    rows = runs_table(arguments.root)
    if arguments.json:
        print(json.dumps(rows))
        return
    table = Table("run", "flow", "updates", "seed", "started")
    for row in rows:
        table.add_row(row["name"], row["flow"], str(row["updates"]), str(row["seed"]), row["created_at"][:19])
    Console().print(table if rows else f"no runs in {arguments.root}")


def _show(arguments: argparse.Namespace) -> None:
    from storage.query import run_summary

    summary = run_summary(open_ledger(arguments))
    if arguments.json:
        print(json.dumps(summary))
        return
    record = summary["record"]
    print(f"{record['name']}: {record['flow']}, {summary['updates']} updates, started {record['created_at'][:19]}")
    print(f"checkpoints: {', '.join(map(str, summary['checkpoints'])) or 'none'}")
    _print_steps(summary["steps"])


def _print_steps(stages: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    steps: dict[int, dict[str, str]] = {}
    for stage in stages:
        cells = steps.setdefault(stage["step"], {})
        for column, (name, metric) in COLUMNS.items():
            if stage["stage"] == name and metric in stage["metrics"]:
                cells[column] = f"{stage['metrics'][metric]:.4g}"
    used = [column for column in COLUMNS if any(column in cells for cells in steps.values())]
    table = Table("step", *used)
    for step, cells in sorted(steps.items()):
        table.add_row(str(step), *(cells.get(column, "") for column in used))
    Console().print(table)
