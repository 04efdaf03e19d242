"""The `onecopy` command. One file a group of commands; each loads what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flows import environment
from flows.cli import algorithms, demo, doctor, export, pool, reshard_plan, rollouts, runs, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done; 2 the request cannot be carried out as it stands (a line for each reason on stderr); 1 it failed on the way; 130
        interrupted.
    """
    environment.quiet()
    if os.getcwd() not in sys.path:  # `reward.function: my_rewards:score` means a file beside the recipe's user
        sys.path.insert(0, os.getcwd())
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        print("onecopy: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `onecopy runs list | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        from flows.cli.errors import explain  # imports every layer, which most commands do without

        code, lines = explain(error)
        for line in lines:
            print(f"onecopy: {line}", file=sys.stderr)
        return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="onecopy",
        description="Post-train language models: rollout, reward, advantage, update, resumable at every stage.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in (demo, train, pool, runs, rollouts, algorithms, export, reshard_plan, doctor):
        group.add_commands(commands)
    return parser
