"""One process, one device: train and generate in turn on one copy of the weights; seconds, bytes, memory, agreement.

    python infra/benchmarks/one_gpu.py --shape qwen2.5-1.5b --out infra/benchmarks/results

Random weights, bf16 with fp32 master weights and Adam moments resident, CUDA graphs on. Each alternation is one update on
`--batch` sequences of `--sequence` tokens and one generation; the first is warm-up and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from engine.config import GenerationConfig, OptimizerConfig
from engine.generation.engine import GenerationEngine, Sampling
from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.update import Update, UpdateSettings
from engine.reshard.hybrid import HybridWeights
from engine.reshard.plan import plan_generation
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.weights.architecture import read_architecture
from engine.weights.initialise import write_random_model
from infra.benchmarks.shapes import SHAPES

GIB = 2**30
MATRIX_RATE = 790e12
"""bf16 matrix products of random numbers on an H200, measured; MFU is against this rate, not the data sheet's 990e12."""


class Clock:
    """Wall seconds around device work."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, work: Any) -> tuple[float, Any]:
        self._synchronise()
        start = time.perf_counter()
        result = work()
        self._synchronise()
        return time.perf_counter() - start, result

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def memory(device: str) -> dict[str, float]:
    """GiB allocated, reserved and used on the device (resident memory of the process on CPU)."""
    if device == "cpu":
        with open("/proc/self/status") as file:
            resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        return {"resident": resident / 2**20}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated() / GIB,
        "reserved": torch.cuda.memory_reserved() / GIB,
        "used": (total - free) / GIB,
    }


def random_tokens(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary - 1, (count, length), generator=generator).tolist()


def measure(options: argparse.Namespace, folder: Path, device: str) -> dict[str, Any]:
    clock, arch = Clock(device), read_architecture(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = memory(device)
    actor = Actor(
        arch,
        folder,
        Layout(),
        sequence_parallel=False,
        dtype=dtype,
        device=device,
        optimizer=OptimizerConfig(lr=options.lr),
    )
    with_actor = memory(device)
    generation = GenerationConfig(
        max_model_len=options.prompt + options.response, max_concurrent_samples=options.samples,
        memory_fraction=options.memory_fraction, kv_cache_gib=0.5,
    )  # fmt: skip
    plan = plan_generation(arch, Layout(), Layout(), bytes_per_number=dtype.itemsize)
    started, engine = clock(lambda: GenerationEngine(HybridWeights(actor, plan), folder, generation))
    rows = [alternation(number, options, actor, engine, clock) for number in range(options.alternations + 1)]
    parameters = sum(p.numel() for p in actor.parameters.values())
    result = {
        "shape": options.shape, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__, "vllm": __import__("vllm").__version__, "parameters": parameters,
        "weight_bytes": parameters * dtype.itemsize, "shared_bytes": engine.shared.check(),
        "private_bytes_of_vllm": engine.shared.private_bytes, "engine_start_s": started,
        "memory": {"before": before, "actor": with_actor, "end": memory(device)}, "alternations": rows[1:],
    }  # fmt: skip
    non_embedding = parameters - arch.vocabulary * arch.hidden
    tokens = options.batch * options.sequence
    for row in rows:
        row["mfu"] = 6 * non_embedding * tokens / row["train_s"] / MATRIX_RATE
    return result


def alternation(
    number: int, options: argparse.Namespace, actor: Actor, engine: GenerationEngine, clock: Clock
) -> dict[str, Any]:
    """Update, wake, generate, sleep, compare."""
    vocabulary = actor.arch.vocabulary
    engine.sleep()  # it is awake after its construction
    sequences = random_tokens(options.batch, options.sequence, vocabulary, number)
    half = options.sequence // 2
    responses = [s[half:] for s in sequences]
    samples = Samples(
        [s[:half] for s in sequences], responses, [[1] * len(r) for r in responses], [[0.0] * len(r) for r in responses]
    )
    settings = UpdateSettings(LossConfig(name="sft"), 1.0, None, 1, options.micro_batch_tokens, half, 0)
    train, metrics = clock(lambda: Update(actor, samples, settings).run())
    awake, _ = clock(engine.wake)
    prompts = random_tokens(options.samples, options.prompt, vocabulary, 1000 + number)
    sampling = Sampling(1.0, 1.0, options.response, (), number)
    generate, completions = clock(lambda: engine.generate(prompts, sampling))
    used = memory(actor.device)
    asleep, _ = clock(engine.sleep)
    shown = slice(0, 4)
    mine = actor.logprobs(prompts[shown], [c.tokens for c in completions[shown]], 1.0).cpu()
    theirs = torch.tensor([x for c in completions[shown] for x in c.logprobs])
    gap = (mine - theirs).abs()
    engine.shared.check()
    return {
        "sleep_s": asleep, "train_s": train, "wake_s": awake, "generate_s": generate,
        "generated_tokens_per_s": sum(len(c.tokens) for c in completions) / generate,
        "loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "gap_mean": gap.mean().item(), "gap_max": gap.max().item(),
        "memory": used,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: medians of the counted alternations."""
    rows = result["alternations"]
    lines = [f"### {result['shape']} on {result['device']} (vLLM {result['vllm']}, torch {result['torch']})", ""]
    lines += ["| what | median | min | max |", "| --- | --- | --- | --- |"]
    for key in ("sleep_s", "wake_s", "train_s", "mfu", "generate_s", "generated_tokens_per_s", "gap_mean", "gap_max"):
        values = [row[key] for row in rows]
        lines.append(f"| {key} | {statistics.median(values):.4g} | {min(values):.4g} | {max(values):.4g} |")
    lines.append("")
    lines.append(
        f"weights {result['weight_bytes'] / GIB:.2f} GiB, shared {result['shared_bytes'] / GIB:.2f} GiB,"
        f" vLLM's own {result['private_bytes_of_vllm'] / 2**20:.2f} MiB, weight bytes moved between the two: 0,"
        f" engine start {result['engine_start_s']:.0f} s, memory at the end {result['memory']['end']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--memory-fraction", type=float, default=0.6)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_model(SHAPES[options.shape], Path(scratch), seed=0)
        result = measure(options, folder, device)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"one-gpu-{options.shape}"
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    (options.out / f"{name}.md").write_text(table(result) + "\n")
    print(table(result), flush=True)
    os._exit(0)  # engines keep threads that would hold the interpreter


if __name__ == "__main__":
    main()
