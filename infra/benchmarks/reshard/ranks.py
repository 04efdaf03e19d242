"""The ranks of one measurement: start them, and what each does."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.layout import Layout
from engine.weights.initialise import write_random_model
from infra.benchmarks.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]
MODULE = "infra.benchmarks.reshard"


def run_shape(shape: str, options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Results of all ranks for one shape, each rank a process of its own."""
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        number_format = torch.bfloat16 if cuda else torch.float32
        write_random_model(SHAPES[shape], folder / "model", 0, number_format, "cuda" if cuda else "cpu")
        if cuda:
            torch.cuda.empty_cache()  # this process stays while the ranks measure
        command = [sys.executable, "-m", MODULE, *arguments, "--rank-of", f"{shape}={folder}"]
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment(number, options.gpus, cuda))
            for number in range(options.gpus)
        ]
        try:
            codes = [process.wait(options.timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"{shape}: ranks ended with {codes}")
        return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(options.gpus)]


def environment(rank: int, world: int, cuda: bool) -> dict[str, str]:
    """Of one rank's process: each of several sees one GPU, or one core."""
    found = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    if world > 1:
        found |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if cuda:
            found["CUDA_VISIBLE_DEVICES"] = str(rank)
    return found


def rank(options: argparse.Namespace) -> None:
    """One rank: measure, and leave the figures in a file."""
    shape, _, place = options.rank_of.partition("=")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.empty(1, device="cuda")
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{place}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    result = measure(options, shape, Path(place) / "model", device)
    (Path(place) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # engines keep threads that would hold the interpreter


def measure(options: argparse.Namespace, shape: str, folder: Path, device: str) -> dict[str, Any]:
    """All figures of this rank, in seconds and bytes; the first round is warm-up and left out."""
    from infra.benchmarks.reshard.bench import Bench

    number, world = dist.get_rank(), dist.get_world_size()
    train, generate = (
        dataclasses.replace(layout, dp=world // (layout.tp * layout.pp))
        for layout in (Layout.parse(options.train), Layout.parse(options.generate))
    )
    bench = Bench(options, folder, device, train, generate)
    rows = [row for count in range(options.rounds + 1) for row in bench.round(count)]
    kept = [bench.kept(1000 + count) for count in range(3)]
    alternations = [bench.alternation(2000 + count) for count in range(options.alternations)]
    return {
        "shape": shape, "rank": number, "world_size": world, "train": str(train), "generate": str(generate),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "vllm": __import__("vllm").__version__, "megatron_core": __import__("megatron.core").core.__version__,
        "precision": str(bench.dtype).removeprefix("torch."),
        "training_weight_bytes": int(bench.plan.held(bench.plan.source)[number]),
        "generation_weight_bytes": int(bench.plan.held(bench.plan.target)[number]),
        "control_gap": bench.control, "skipped": bench.skipped, "kept": kept, "alternations": alternations,
        "updates": [row for row in bench.updates if row["round"] > 0], "rounds": [row for row in rows if row["round"] > 0],
    }  # fmt: skip
