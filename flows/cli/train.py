"""`onecopy post-train` and `onecopy sft`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flows.config import PostTrainConfig, SFTConfig
    from flows.run import RunSummary

Trained = TypeVar("Trained", "PostTrainConfig", "SFTConfig")


def add_commands(commands: Any) -> None:
    """Add both to the parser."""
    for name, run, what in (
        ("post-train", _post_train, "post-train a model with rewards (GRPO and relatives)"),
        ("sft", _sft, "fine-tune a model on a data set's answers"),
    ):
        description = f"{what.capitalize()}. The same experiment goes on where it stopped."
        parser = commands.add_parser(name, help=what, description=description)
        parser.add_argument("--config", metavar="FILE", help="YAML recipe (see flows/recipes)")
        parser.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
            help="override one setting, e.g. optimizer.lr=1e-6; may be repeated",
        )  # fmt: skip
        parser.set_defaults(run=run)


def _post_train(arguments: argparse.Namespace) -> None:
    from flows.config import PostTrainConfig
    from flows.environment import without_heartbeat

    config = _checked(PostTrainConfig, arguments, "post-train")
    from flows.post_train import post_train

    with without_heartbeat():
        report(post_train(config), config.root)


def _sft(arguments: argparse.Namespace) -> None:
    from flows.config import SFTConfig
    from flows.environment import without_heartbeat

    config = _checked(SFTConfig, arguments, "sft")
    from flows.sft import sft

    with without_heartbeat():
        report(sft(config), config.root)


def _checked(model: type[Trained], arguments: argparse.Namespace, flow: str) -> Trained:
    """The configuration, with everything refused that the flow itself would refuse.

    The flow checks again; this spares a typo ten seconds for Prefect's server, and a failed flow run in its list.
    """
    from flows.changes import changed_since
    from flows.loading import ConfigError, load_config
    from storage.ledger import Ledger

    config = load_config(model, arguments.config, arguments.overrides)
    if config.experiment is not None:
        changes = changed_since(Ledger(config.root, config.experiment), config, flow)
        if changes:
            raise ConfigError([str(change) for change in changes])
    return config


def report(summary: RunSummary, root: str) -> None:
    """Say what a run came to and how to look at it."""
    parts = [f"run {summary.run}: {summary.steps} steps in {summary.seconds:.0f} s"]
    if summary.reward_first is not None and summary.reward_last is not None:
        parts.append(f"reward {summary.reward_first:.3f} -> {summary.reward_last:.3f}")
    if summary.accuracy_first is not None and summary.accuracy_last is not None:
        parts.append(f"accuracy {summary.accuracy_first:.2f} -> {summary.accuracy_last:.2f}")
    where = "" if root == "runs" else f" --root {root}"
    last = max(summary.steps - 1, 0)
    print(", ".join(parts), f"in {summary.uri}", sep="\n")
    print(f"onecopy runs show {summary.run}{where}")
    if summary.reward_last is not None:
        print(f"onecopy rollouts show {summary.run} --step {last} --best 3 --worst 3{where}")
    print(f"onecopy export {summary.run} --to DIR{where}")
    sys.stdout.flush()
