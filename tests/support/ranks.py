"""Run a function on several gloo ranks, each a process of its own, and collect what they return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(program: str, world_size: int, arguments: dict[str, Any], timeout_s: float = 280) -> list[Any]:
    """Results of `program` ("module:function", called with the arguments) on ranks 0 … world_size - 1.

    Raises:
        AssertionError: a rank failed or the time was up; the message holds the end of its output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        processes = [_start(program, rank, world_size, arguments, folder) for rank in range(world_size)]
        deadline = time.monotonic() + timeout_s
        try:
            for rank, process in enumerate(processes):
                code = process.wait(max(0.1, deadline - time.monotonic()))
                assert code == 0, f"rank {rank} of {program} ended with {code}:\n{_logs(folder, world_size)}"
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{program} did not end within {timeout_s} s:\n{_logs(folder, world_size)}") from error
        finally:
            for process in processes:
                process.kill()
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world_size)]


def _start(program: str, rank: int, world: int, arguments: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with (folder / f"log-{rank}.txt").open("wb") as log:
        command = [sys.executable, "-m", "tests.support.ranks", program, str(folder), json.dumps(arguments)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def _logs(folder: Path, world_size: int) -> str:
    """The end of every rank's output: one that waited in vain names another one's fault."""
    ends = [(folder / f"log-{rank}.txt").read_text(errors="replace")[-4000:] for rank in range(world_size)]
    return "\n".join(f"--- rank {rank}\n{end}" for rank, end in enumerate(ends))


def _main(program: str, folder: str, arguments: str) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    module, _, name = program.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    (Path(folder) / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # engines keep threads that would hold the interpreter


if __name__ == "__main__":
    _main(*sys.argv[1:4])
