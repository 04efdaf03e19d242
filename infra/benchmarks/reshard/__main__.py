"""Transitions between training and generation on one or several devices, onecopy beside the ways of others.

    python -m infra.benchmarks.reshard --shape qwen2.5-1.5b --shape qwen2.5-3b --out infra/benchmarks/results
    python -m infra.benchmarks.reshard --shape qwen2.5-7b --weights-only --out infra/benchmarks/results
    python -m infra.benchmarks.reshard --shape qwen2.5-0.5b --only-onecopy --alternations 200 --out infra/benchmarks/results
    python -m infra.benchmarks.reshard --shape tiny --gpus 2 --train tp2 --generate tp1 --out /tmp/out      # gloo without GPUs

Random weights; bfloat16 on GPUs (fp32 on CPU) with fp32 masters and moments in memory, CUDA graphs on. In a round every mode goes
into generation, generates, compares with the actor, and goes back; then one update changes the weights. The first round
is warm-up and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.benchmarks.reshard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", action="append", required=True, help="may be given several times")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="ranks")
    parser.add_argument("--train", default="tp1", help="layout, as tp2,pp2")
    parser.add_argument("--generate", default="tp1")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alternations", type=int, default=0, help="of onecopy alone, for memory that grows")
    parser.add_argument("--only-onecopy", action="store_true")
    parser.add_argument("--weights-only", action="store_true", help="no update, so no moments")
    parser.add_argument("--no-control", dest="control", action="store_false", help="do not compare with transformers")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one shape")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    if options.rank_of:
        rank(options)
        return
    from infra.benchmarks.reshard.table import write

    command = "python -m infra.benchmarks.reshard " + shlex.join(arguments if arguments is not None else sys.argv[1:])
    for shape in options.shape:
        write(run_shape(shape, options, arguments or sys.argv[1:]), command, options.out)


def run_shape(shape: str, options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Results of all ranks for one shape, each rank a process of its own, onecopy first and then the baselines."""
    import torch

    from engine.weights.initialise import write_random_model
    from infra.benchmarks.shapes import SHAPES

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cuda = torch.cuda.is_available()
        number_format = torch.bfloat16 if cuda else torch.float32
        write_random_model(SHAPES[shape], folder / "model", 0, number_format, "cuda" if cuda else "cpu")
        torch.cuda.empty_cache()  # this process stays while the ranks measure
        groups = ("onecopy",) if options.only_onecopy else ("onecopy", "baselines")
        results = [_run_ranks(f"{shape}={group}={folder}", options, arguments) for group in groups]
        for ours, theirs in zip(results[0], results[-1], strict=True):
            if theirs is not ours:
                ours["rounds"] += theirs["rounds"]
                ours["skipped"] |= theirs["skipped"]
        return results[0]


def _run_ranks(task: str, options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Results of all ranks for some modes of one shape."""
    folder, processes = Path(task.split("=")[-1]), []
    (folder / "rendezvous").unlink(missing_ok=True)
    for number in range(options.gpus):
        environment = {
            **os.environ, "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": str(options.gpus), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        if options.gpus > 1:
            environment |= {"CUDA_VISIBLE_DEVICES": str(number), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "infra.benchmarks.reshard", *arguments, "--rank-of", task]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    try:
        codes = [process.wait(options.timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"{task}: ranks ended with {codes}")
    return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(options.gpus)]


def rank(options: argparse.Namespace) -> None:
    """One rank: measure, and leave the figures in a file."""
    import dataclasses

    import torch
    import torch.distributed as dist

    from engine.layout import Layout
    from infra.benchmarks.reshard.measure import Bench

    shape, group, place = options.rank_of.split("=")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.empty(1, device="cuda")
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{place}/rendezvous",
        rank=number,
        world_size=world,
    )
    train, generate = (Layout.parse(text) for text in (options.train, options.generate))
    train = dataclasses.replace(train, dp=world // (train.tp * train.pp))
    generate = dataclasses.replace(generate, dp=world // (generate.tp * generate.pp))
    ours = group == "onecopy"
    bench = Bench(options, Path(place) / "model", device, train, generate, ours)
    rows = [row for count in range(options.rounds + 1) for row in bench.round(count)]
    kept = [bench.kept(1000 + count) for count in range(3 * ours)]
    alternations = [bench.alternation(2000 + count) for count in range(options.alternations * ours)]
    result = {
        "shape": shape, "rank": number, "world_size": world, "train": str(train), "generate": str(generate),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "vllm": __import__("vllm").__version__, "precision": str(bench.dtype).removeprefix("torch."),
        "training_weight_bytes": int(bench.plan.held(bench.plan.source)[number]),
        "generation_weight_bytes": int(bench.plan.held(bench.plan.target)[number]),
        "control_gap": bench.control, "skipped": bench.skipped, "kept": kept, "alternations": alternations,
        "rounds": [row for row in rows if row["round"] > 0],
    }  # fmt: skip
    (Path(place) / f"rank-{number}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # engines keep threads that would hold the interpreter


if __name__ == "__main__":
    main()
