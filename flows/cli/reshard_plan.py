"""`onecopy reshard-plan`: what a change of layout moves and needs, for any number of GPUs, without a GPU."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.layout import Layout
    from engine.weights.architecture import Architecture

EPILOG = """examples:
  onecopy reshard-plan --model llama3-70b --train tp8,pp2 --generate tp4
  onecopy reshard-plan --model llama3-405b --train tp8,pp16,dp4 --generate tp8,pp2 --nodes 64x8 --json
  onecopy reshard-plan --model deepseek-v3-like --train tp4,pp16,dp32,ep32 --generate tp32,ep32
"""


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    parser = commands.add_parser(
        "reshard-plan",
        help="bytes, memory and redundancy of a change of layout",
        description="What moves between training and generation, beside the formulas of the HybridFlow paper. Needs no GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="name of a shape, a config.json, or a folder with one")
    parser.add_argument("--train", required=True, metavar="LAYOUT", help="tp8,pp2,dp4 and, of experts, ep, etp; vpp")
    parser.add_argument("--generate", required=True, metavar="LAYOUT", help="tp4,pp1; ep of experts; dp follows")
    parser.add_argument("--nodes", metavar="NxG", help="nodes x GPUs a node (default: 8 GPUs a node)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from engine.reshard.report import plan_report
    from flows.loading import ConfigError

    arch, train, generate, per_node, problems = _request(arguments)
    if problems or arch is None or train is None or generate is None:
        raise ConfigError(problems)
    size = 2 if arguments.dtype == "bfloat16" else 4
    report = plan_report(arch, train, generate, bytes_per_number=size, ranks_per_node=per_node)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(arguments.model, report)


def _request(
    arguments: argparse.Namespace,
) -> tuple[Architecture | None, Layout | None, Layout | None, int, list[str]]:
    """What the command line asks for, and everything that is wrong with it."""
    from engine.layout import Layout
    from engine.reshard.plan import RANKS_PER_NODE

    problems: list[str] = []
    arch = _attempt(problems, "--model", lambda: _architecture(arguments.model))
    train = _attempt(problems, "--train", lambda: Layout.parse(arguments.train))
    generate = _attempt(problems, "--generate", lambda: Layout.parse(arguments.generate))
    nodes = _attempt(problems, "--nodes", lambda: _nodes(arguments.nodes, train)) if arguments.nodes else None
    if arch is None or train is None or generate is None:
        return arch, train, generate, RANKS_PER_NODE, problems
    generate = _attempt(problems, "--generate", lambda: _on_the_same_ranks(generate, train))
    problems += [f"--train: {problem}" for problem in arch.layout_problems(train)]
    if generate is not None:
        problems += [f"--generate: {problem}" for problem in arch.layout_problems(generate)]
    return arch, train, generate, nodes or RANKS_PER_NODE, problems


def _attempt(problems: list[str], option: str, make: Any) -> Any:
    try:
        return make()
    except (ValueError, OSError) as error:
        problems.append(f"{option}: {error}")
        return None


def _architecture(name: str) -> Architecture:
    from pathlib import Path

    from engine.weights.architecture import architecture_of, read_architecture
    from engine.weights.shapes import SHAPES

    if name in SHAPES:
        return architecture_of(SHAPES[name], name)
    path = Path(name).expanduser()
    if path.is_file():
        return architecture_of(json.loads(path.read_text(encoding="utf-8")), name)
    if path.is_dir():
        return read_architecture(path)
    raise ValueError(f"{name!r} is no file or folder, and no shape; there are {', '.join(SHAPES)}")


def _on_the_same_ranks(generate: Layout, train: Layout) -> Layout:
    """The generation layout with as many replicas as the training ranks make."""
    import dataclasses

    replicas, left = divmod(train.world_size, generate.tp * generate.pp)
    if left:
        raise ValueError(f"tp{generate.tp},pp{generate.pp} does not divide the {train.world_size} ranks of {train}")
    if generate.dp not in (1, replicas):
        raise ValueError(
            f"dp{generate.dp}: {train.world_size} ranks make {replicas} replicas of tp{generate.tp},pp{generate.pp}"
        )
    if generate.ep not in (1, generate.tp):
        raise ValueError(f"ep{generate.ep}: vLLM divides experts over all of its tp{generate.tp} ranks or over none")
    return dataclasses.replace(generate, dp=replicas)


def _nodes(text: str, train: Layout | None) -> int:
    nodes, _, gpus = text.lower().partition("x")
    if not (nodes.isdigit() and gpus.isdigit() and int(nodes) * int(gpus)):
        raise ValueError(f"{text!r}: write nodes x GPUs a node, as 8x8")
    if train is not None and int(nodes) * int(gpus) < train.world_size:
        raise ValueError(f"{text} are {int(nodes) * int(gpus)} GPUs; {train} needs {train.world_size}")
    return int(gpus)


def _print(name: str, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def gigabytes(value: float) -> str:
        return f"{value / 1e9:,.2f}"

    console = Console()
    console.print(
        f"{name}, {gigabytes(report['model_bytes'])} GB: {report['train']} -> {report['generate']}"
        f" (planned in {report['seconds']:.2f} s)"
    )
    table = Table("GB a GPU", "received", "peak parameters", "redundant", "returned")
    table.add_row(
        "this plan (largest of all)",
        *(gigabytes(report[f"{key}_bytes_max"]) for key in ("received", "peak_parameter", "redundant", "return")),
    )
    table.add_row("  lower bound", gigabytes(report["lower_bound_bytes_max"]), "", "", "")
    table.add_row("  of it between nodes", gigabytes(report["received_network_bytes_max"]), "", "", "")
    for formula, cost in report["formulas"].items():
        cells = [gigabytes(cost[key]) for key in ("received", "peak", "redundant")] if cost else ["not defined", "", ""]
        table.add_row(f"{formula} (formula)", *cells, "")
    console.print(table)
    shares = ", ".join(f"{regime} {gigabytes(size)} GB" for regime, size in report["regimes"].items() if size)
    console.print(
        f"weights by regime: {shares}. In the transition itself, before the KV cache is there:"
        f" {gigabytes(report['transition_bytes_max'])} GB and one bucket."
    )
