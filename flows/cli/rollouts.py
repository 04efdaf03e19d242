"""`onecopy rollouts show`: what the model wrote."""

from __future__ import annotations

import argparse
import json
from typing import Any

from flows.cli.place import add_run, open_ledger


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    group = commands.add_parser(
        "rollouts", help="read what the model wrote", description="Rollouts, read from a run's folder."
    )
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the best and worst samples of a step")
    add_run(show)
    show.add_argument("--step", type=int, required=True, metavar="N", help="from 0")
    show.add_argument("--best", type=int, default=3, metavar="N", help="how many (default 3)")
    show.add_argument("--worst", type=int, default=3, metavar="N", help="how many (default 3)")
    show.add_argument("--json", action="store_true", help="for programs")
    show.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> None:
    from storage.ledger import LedgerError
    from storage.query import samples

    if min(arguments.step, arguments.best, arguments.worst) < 0:
        raise LedgerError("--step, --best and --worst count from 0")
    rows = samples(open_ledger(arguments), arguments.step, arguments.best, arguments.worst)
    if arguments.json:
        print(json.dumps(rows))
        return
    _print_samples(rows)


def _print_samples(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    for row in rows:
        # Text, not markup: what a model writes may look like markup.
        body = Text.assemble((row["prompt"].rstrip() + "\n", "dim"), row["response"])
        if row["error"]:
            body.append(f"\nnot scored: {row['error']}", "red")
        if row["logprob_mean"] is not None:
            body.append(f"\n{_logprobs(row)}", "dim")
        console.print(Panel(body, title=Text(_title(row)), title_align="left"))


def _title(row: dict[str, Any]) -> str:
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
    return " · ".join([row["sample_id"], reward, f"{row['length']} tokens, {row['finish_reason']}"])


def _logprobs(row: dict[str, Any]) -> str:
    mean, lowest, total = (row[f"logprob_{name}"] for name in ("mean", "min", "sum"))
    return f"log-probs of the tokens: mean {mean:.3f}, lowest {lowest:.3f}, sum {total:.2f}"
