"""One rank of the benchmark: an actor and an engine, each mode once a round."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import GenerationConfig, OptimizerConfig
from engine.generation.engine import GenerationEngine, Sampling
from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.update import Update, UpdateSettings
from engine.megatron.working_memory import WorkingMemory
from engine.reshard.hybrid import HybridWeights
from engine.reshard.plan import plan_generation
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.weights.architecture import read_architecture
from infra.benchmarks.reshard.private import CoreSwap, FullGather, PrivateWeights, why_no_core_swap


class Bench:
    """Builds everything, and measures.

    Attributes:
        engine: one a process: a second one in the same process fails on CUDA (vLLM 0.26).
        modes: name to what is set before the engine is woken.
        skipped: name of a mode to why it was not run.
    """

    def __init__(
        self, options: argparse.Namespace, folder: Path, device: str, train: Layout, generate: Layout, ours: bool
    ) -> None:
        self.options, self.device, self.folder = options, device, folder
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.idle_bytes = used_bytes(device)
        arch = read_architecture(folder)
        self.actor = Actor(
            arch, folder, train, sequence_parallel=train.tp > 1 and options.sequence_parallel, dtype=self.dtype, device=device,
            optimizer=OptimizerConfig(lr=1e-5),
        )  # fmt: skip
        self.control = self._control_gap() if ours else None
        self.plan = plan_generation(arch, train, generate, bytes_per_number=self.dtype.itemsize)
        self.working_memory = WorkingMemory(device)
        self.modes: dict[str, Callable[[], None]] = {}
        self.skipped: dict[str, str] = {}
        self._build(ours)

    def _build(self, ours: bool) -> None:
        if ours:
            self.modes["onecopy"] = lambda: None
            self.engine = self._engine(HybridWeights(self.actor, self.plan))
            return
        private = PrivateWeights(self.actor, self.plan)
        self.engine = self._engine(private)
        gather = FullGather(private, self.engine.shared.model)  # type: ignore[arg-type]

        def use(fill: Callable[[], None], release: bool) -> Callable[[], None]:
            def choose() -> None:
                private.fill, private.release_gradients = fill, release

            return choose

        self.modes["full_gather"] = use(gather, False)
        self.modes["full_gather, gradients released"] = use(gather, True)
        if reason := why_no_core_swap(self.device, dist.get_world_size()):
            self.skipped["core_swap"] = reason
        else:
            self.modes["core_swap"] = use(CoreSwap(private, str(self.folder)), False)

    def _engine(self, weights: Any) -> GenerationEngine:
        config = GenerationConfig(
            max_model_len=self.options.prompt + self.options.response, max_concurrent_samples=self.options.samples,
            memory_fraction=self.options.memory_fraction, kv_cache_gib=0.2, offload_optimizer="never",
            **generation_sizes(self.plan.target.layout),
        )  # fmt: skip
        engine = GenerationEngine(weights, self.folder, config)
        engine.sleep()
        return engine

    def round(self, number: int) -> list[dict[str, Any]]:
        """Every mode once, then an update."""
        rows = [self._turn(name, number) for name in self.modes]
        if not self.options.weights_only:
            self._update(number)
        return rows

    def _turn(self, name: str, number: int) -> dict[str, Any]:
        engine = self.engine
        self.modes[name]()
        before = used_bytes(self.device) - self.idle_bytes
        with Peak(self.device) as peak:
            seconds_in, report = timed(self.device, engine.wake)
        used = used_bytes(self.device) - self.idle_bytes
        prompts = tokens(self.options.samples, self.options.prompt, self.actor.arch.vocabulary, 1000 + number)
        sampling = Sampling(1.0, 1.0, self.options.response, (), number)
        seconds_generating, completions = timed(self.device, lambda: engine.generate(prompts, sampling))
        memory, shared = engine.memory(), engine.shared.check()
        seconds_out, back = timed(self.device, engine.sleep)
        shown = min(8, len(completions))
        gap = self._gap(
            prompts[:shown], [c.tokens for c in completions[:shown]], [c.logprobs for c in completions[:shown]]
        )
        count = sum(len(c.tokens) for c in completions)
        return {
            "mode": name, "round": number, "into_generation_s": seconds_in, "phases_s": report.seconds,
            "received_bytes": sum(report.received.get(link, 0) for link in ("node", "network")),
            "copied_bytes": report.received.get("local", 0), "into_training_s": seconds_out, "back_phases_s": back.seconds,
            "used_in_training": before, "used_in_generation": used, "peak_in_transition": peak.highest - self.idle_bytes,
            "memory": memory, "weight_bytes_in_use": shared, "gap_mean": gap[0], "gap_max": gap[1],
            "generated_tokens_per_s": count / seconds_generating,
        }  # fmt: skip

    def _gap(self, prompts: Any, responses: Any, logprobs: Any) -> tuple[float, float]:
        """Mean and largest difference between rollout and actor; every training replica looks at all ranks' samples."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (prompts, responses, logprobs))
        flat = [[row for rank in everyone for row in rank[column]] for column in range(3)]
        mine = self.actor.logprobs(flat[0], flat[1], 1.0).cpu()
        gap = (mine - torch.tensor([x for row in flat[2] for x in row])).abs()
        return gap.mean().item(), gap.max().item()

    def _update(self, seed: int) -> None:
        sequences = tokens(self.options.batch, self.options.sequence, self.actor.arch.vocabulary, seed)
        half = self.options.sequence // 2
        responses = [s[half:] for s in sequences]
        ones = [[1] * len(r) for r in responses]
        samples = Samples([s[:half] for s in sequences], responses, ones, [[0.0] * len(r) for r in responses])
        settings = UpdateSettings(LossConfig(name="sft"), 1.0, None, 1, self.options.micro_batch_tokens, half, 0)
        work = Update(self.actor, samples, settings)
        with self.working_memory.measured(work.largest_micro_batch):
            work.run()

    def kept(self, number: int) -> dict[str, Any]:
        """One alternation of onecopy alone in which the KV cache keeps its memory if the update does not need it."""
        needed = 0 if self.options.weights_only else self.working_memory.needed(self.options.micro_batch_tokens)
        seconds_in, _ = timed(self.device, self.engine.wake)
        self.engine.generate(tokens(8, 16, self.actor.arch.vocabulary, number), Sampling(1.0, 1.0, 8, (), number))
        seconds_out, _ = timed(self.device, lambda: self.engine.sleep(needed))
        row = {
            "into_generation_s": seconds_in,
            "into_training_s": seconds_out,
            "kept": self.engine.awake,
            "needed": needed,
        }
        if not self.options.weights_only:
            self._update(number)
        return row

    def alternation(self, number: int) -> dict[str, int]:
        """Generate a little, train a little, onecopy alone; what torch's allocator and the device say afterwards."""
        self.engine.wake()
        self.engine.generate(tokens(8, 16, self.actor.arch.vocabulary, number), Sampling(1.0, 1.0, 8, (), number))
        self.engine.sleep()
        self._update(number)
        if self.device == "cpu":
            return {"used": used_bytes("cpu")}
        stats = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        return stats | {"used": used_bytes("cuda")}

    def _control_gap(self) -> float | None:
        """Mean difference between the actor and transformers in the same precision: what two right programs differ by."""
        from transformers import AutoModelForCausalLM

        if dist.get_world_size() > 1 or not self.options.control:
            return None
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).to(self.device)
        length = self.options.prompt + self.options.response
        sequences = tokens(8, length, self.actor.arch.vocabulary, 7)
        prompts, responses = [s[:1] for s in sequences], [s[1:] for s in sequences]
        with torch.no_grad():
            logprobs = model(torch.tensor(sequences, device=self.device)).logits[:, :-1].float().log_softmax(-1)
            wanted = torch.tensor(responses, device=self.device)[..., None]
            theirs = logprobs.gather(2, wanted)[..., 0].flatten()
        mine = self.actor.logprobs(prompts, responses, 1.0)
        gap = (mine - theirs).abs().mean().item()
        del model, logprobs
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return gap


class Peak:
    """The most device memory in use inside a block, looked at every 2 ms by a thread."""

    def __init__(self, device: str) -> None:
        self._device, self.highest = device, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.highest = max(self.highest, used_bytes(self._device))
            time.sleep(0.002)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.highest = max(self.highest, used_bytes(self._device))


def used_bytes(device: str) -> int:
    """In use on the device; resident memory of the process on CPU."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


def timed(device: str, work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds around device work, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def tokens(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary - 1, (count, length), generator=generator).tolist()


def generation_sizes(layout: Layout) -> dict[str, Any]:
    return {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp, "expert_parallel": layout.ep > 1}
