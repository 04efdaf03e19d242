"""`onecopy pool up | status | down`: the workers that outlive runs."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the three to the parser."""
    group = commands.add_parser("pool", help="start, look at or stop the worker pool", description="The worker pool.")
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="start the pool, or find it running")
    up.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="worker processes: tensor x pipeline x data parallel size (default 1)",
    )
    up.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    up.add_argument("--port", type=int, default=None, help="port of the local Ray (default: a free one)")
    status = actions.add_parser("status", help="what the pool holds and does; exit code 1 if it is not running")
    status.add_argument("--json", action="store_true", help="for programs")
    down = actions.add_parser("down", help="stop the pool")
    for parser, run in ((up, _up), (status, _status), (down, _down)):
        parser.add_argument("--name", default="default", help="of the pool (default: default)")
        parser.set_defaults(run=run)


def _config(arguments: argparse.Namespace, **more: Any) -> Any:
    from engine.pool.config import PoolConfig
    from flows.loading import ConfigError, build

    config, problems = build(PoolConfig, {"name": arguments.name, **more})
    if problems or config is None:
        raise ConfigError([f"--{message}" for message in problems.values()])
    return config


def _up(arguments: argparse.Namespace) -> None:
    from engine.pool.client import PoolClient
    from flows.loading import ConfigError

    if arguments.ranks < 1:
        raise ConfigError([f"--ranks: must be at least 1, not {arguments.ranks}"])
    config = _config(arguments, device=arguments.device, port=arguments.port)
    start = time.monotonic()
    client = PoolClient.attach_or_start(config, arguments.ranks)
    status = client.status()
    print(f"pool {status.name} is up: {status.world_size} ranks on {status.device} ({time.monotonic() - start:.1f} s)")


def _status(arguments: argparse.Namespace) -> int:
    from engine.pool.client import PoolClient
    from engine.pool.errors import PoolAbsent

    try:
        status = PoolClient.attach(_config(arguments)).status()
    except PoolAbsent:
        absent = json.dumps({"name": arguments.name, "state": "absent"})
        print(absent if arguments.json else f"pool {arguments.name} is not running")
        return 1
    if arguments.json:
        print(json.dumps(status.to_dict()))
    else:
        _show(status)
    return 0


def _show(status: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    held = "no weights" if status.weight_version is None else f"weight version {status.weight_version}"
    user = f"run {status.run} ({status.holder})" if status.run else "nobody"
    doing = f"{status.operation.op_id} for {status.operation.seconds:.0f} s" if status.operation else "nothing"
    print(f"pool {status.name}: {status.state.value}{f' ({status.reason})' if status.reason else ''}, {held}")
    print(f"used by {user}, doing {doing}")
    table = Table("rank", "pid", "node", "silent", "log")
    for rank in status.ranks:
        table.add_row(str(rank.rank), str(rank.pid), rank.node, f"{rank.silent_s:.0f} s", rank.log)
    Console().print(table)


def _down(arguments: argparse.Namespace) -> None:
    from engine.pool.client import PoolClient
    from engine.pool.errors import PoolAbsent

    try:
        PoolClient.attach(_config(arguments)).stop()
    except PoolAbsent:
        print(f"pool {arguments.name} is not running")
        return
    print(f"pool {arguments.name} is down")
