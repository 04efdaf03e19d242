"""`onecopy algorithms`: what can be named in a configuration's `algorithm` and `loss`, and where it comes from."""

from __future__ import annotations

import argparse
import json
from typing import Any

AGGREGATIONS = {
    "token-mean": ("sum over tokens / trained tokens of the mini-batch", "DAPO, arXiv 2503.14476 eq. 8"),
    "token-sum": ("sum over tokens", ""),
    "seq-mean-token-sum": ("mean over sequences of the sum over their tokens", "Williams 1992"),
    "seq-mean-token-mean": ("mean over sequences of the mean over their tokens", "GRPO, arXiv 2402.03300 eq. 3"),
    "seq-mean-token-sum-norm": (
        "mean over sequences of the sum over their tokens / longest response",
        "Dr.GRPO, arXiv 2503.20783",
    ),
}
KL_FORMS = {
    "k1": ("d = log-ratio to the reference: unbiased; in the reward, or weighted by the ratio", "J. Schulman 2020"),
    "k2": ("d^2 / 2: its gradient is that of KL(policy || reference)", "J. Schulman 2020"),
    "k3": ("exp(-d) - 1 + d: unbiased and never negative", "J. Schulman 2020"),
    "abs": ("|d|", ""),
    "full": ("sum over the vocabulary; refused until an update has whole distributions", ""),
    "k1+": ("k1's value with k2's gradient; in the loss only", "arXiv 2506.09477"),
    "k3+": ("k3's value with k2's gradient; in the loss only", "arXiv 2506.09477"),
}
CORRECTIONS = {
    "none": ("trainer and rollout are taken to be the same policy", ""),
    "token-truncate": ("token weights, at most the upper bound (TIS)", "Yao et al. 2025"),
    "token-mask": ("token weights, 0 outside the bounds (MIS; with a lower bound IcePop)", "arXiv 2510.18855"),
    "sequence-truncate": ("one weight a response, at most the upper bound", "Liu et al. 2025"),
    "sequence-mask": ("one weight a response, 0 outside the bounds", "Liu et al. 2025"),
}
"""One line and the source of each name that `engine.losses.config` knows but does not describe."""


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    parser = commands.add_parser(
        "algorithms",
        help="list estimators, losses, aggregations, KL forms and corrections",
        description="What `algorithm` and `loss` of a configuration can name. Your own goes as module:function.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = algorithms()
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table("kind", "name", "what it does", "source", "needs")
    for index, row in enumerate(found):
        last = index + 1 == len(found) or found[index + 1]["kind"] != row["kind"]
        cells = (row["kind"], row["name"], row["summary"], row["source"], ", ".join(row["needs"]))
        table.add_row(*map(Text, cells), end_section=last)  # Text: brackets in a formula are no markup
    Console().print(table)


def algorithms() -> list[dict[str, Any]]:
    """A row a name: kind, name, summary, source, needs (plain words, the estimators' only)."""
    from engine.losses.config import DESCRIPTIONS
    from tasks.advantages import ESTIMATORS
    from tasks.advantages.registry import ABSENT

    rows = []
    for name in ESTIMATORS.names():
        estimator = ESTIMATORS.find(name)
        needs = [f"{need} (not in this release)" if need in ABSENT else need for need in estimator.needs]
        needs = (["samples_per_prompt > 1"] if estimator.group else []) + needs
        rows.append(_row("estimator", name, estimator.summary, estimator.source, needs))
    rows += [_row("loss", name, item.summary, item.source) for name, item in DESCRIPTIONS.items()]
    for kind, table in (("aggregation", AGGREGATIONS), ("kl", KL_FORMS), ("correction", CORRECTIONS)):
        rows += [_row(kind, name, summary, source) for name, (summary, source) in table.items()]
    return rows


def _row(kind: str, name: str, summary: str, source: str, needs: list[str] | None = None) -> dict[str, Any]:
    return {"kind": kind, "name": name, "summary": summary, "source": source, "needs": needs or []}
