"""One rank of the benchmark: an actor and an engine, each mode once a round."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import GenerationConfig, OptimizerConfig
from engine.generation.engine import Completion, GenerationEngine, Sampling
from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.update import Update, UpdateSettings
from engine.megatron.working_memory import WorkingMemory
from engine.reshard.hybrid import HybridWeights
from engine.reshard.plan import plan_generation
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.weights.architecture import read_architecture
from infra.benchmarks.reshard.core_swap import CoreSwap, why_no_core_swap
from infra.benchmarks.reshard.gather import FullGather
from infra.benchmarks.reshard.measures import Peak, timed, tokens, used_bytes
from infra.benchmarks.reshard.resident import Fill, ResidentWeights, differences
from infra.benchmarks.reshard.table import OURS

COMPARED = 8
"""Completions of a rank whose log-probabilities the actor computes too."""


class Bench:
    """Builds everything, and measures: seconds, and bytes beyond those of the idle process.

    One engine a process, because a second one fails on CUDA (vLLM 0.26): its weights are `HybridWeights` in onecopy's turn and
    `ResidentWeights` in a baseline's.

    Args:
        options: of `__main__`.
        folder: the model's.
        device: "cuda" or "cpu".
        train, generate: layouts over all ranks.

    Attributes:
        hybrid: onecopy's weights.
        modes: name to what is called before the engine is woken.
        skipped: name of a mode to why it is not run.
        control: mean log-prob difference between the actor and transformers; None if it was not asked for.
        updates: of each round's update its device bytes before, at its peak, and after.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, device: str, train: Layout, generate: Layout) -> None:
        self.options, self.folder, self.device = options, folder, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.idle_bytes = used_bytes(device)
        arch = read_architecture(folder)
        self.actor = Actor(
            arch, folder, train, sequence_parallel=train.tp > 1 and options.sequence_parallel, dtype=self.dtype, device=device,
            optimizer=OptimizerConfig(lr=1e-5),
        )  # fmt: skip
        self.control = self._control_gap() if options.control and dist.get_world_size() == 1 else None
        self.plan = plan_generation(arch, train, generate, bytes_per_number=self.dtype.itemsize)
        self.working_memory = WorkingMemory(device)
        self.hybrid = HybridWeights(self.actor, self.plan)
        self.engine = self._engine()
        self.updates: list[dict[str, int]] = []
        self.skipped: dict[str, str] = {}
        self.modes: dict[str, Callable[[], None]] = {OURS: self._use_ours}
        if not options.only_onecopy:
            self._add_baselines()

    def round(self, number: int) -> list[dict[str, Any]]:
        """Every mode once, then an update; a row of figures a mode."""
        rows = [self._turn(name, number) for name in self.modes]
        if not self.options.weights_only:
            self.updates.append({"round": number, **self._update(number)})
        return rows

    def kept(self, number: int) -> dict[str, Any]:
        """One alternation of onecopy alone in which the KV cache keeps its memory if the update does not need it."""
        needed = 0 if self.options.weights_only else self.working_memory.needed(self.options.micro_batch_tokens)
        seconds_in, seconds_out = self._short_turn(number, needed)
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
        """Generate a little, train a little, onecopy alone; bytes of torch's allocator and of the device afterwards."""
        self._short_turn(number, None)
        self._update(number)
        if self.device == "cpu":
            return {"used": used_bytes("cpu")}
        stats = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        return stats | {"used": used_bytes("cuda")}

    def _engine(self) -> GenerationEngine:
        options, layout = self.options, self.plan.target.layout
        config = GenerationConfig(
            max_model_len=options.prompt + options.response, max_concurrent_samples=options.samples,
            memory_fraction=options.memory_fraction, kv_cache_gib=0.2, offload_optimizer="never",
            tensor_parallel_size=layout.tp, pipeline_parallel_size=layout.pp, expert_parallel=layout.ep > 1,
        )  # fmt: skip
        engine = GenerationEngine(self.hybrid, self.folder, config)
        engine.sleep()
        return engine

    def _add_baselines(self) -> None:
        weights = ResidentWeights(self.hybrid)
        gather = FullGather(weights, self.engine.shared.model)  # type: ignore[arg-type]
        self.modes["full_gather"] = partial(self._use, weights, gather)
        self.modes["full_gather, gradients released"] = partial(self._use, weights, gather, release_gradients=True)
        if reason := why_no_core_swap(self.actor.arch, self.plan):
            self.skipped["core_swap"] = reason
            return
        swap = CoreSwap(weights)
        if wrong := differences(weights, gather, swap):
            self.skipped["core_swap"] = f"its copy is not the model: {', '.join(wrong[:4])} differ from full_gather's"
        else:
            self.modes["core_swap"] = partial(self._use, weights, swap)

    def _use_ours(self) -> None:
        self.engine.weights = self.hybrid

    def _use(self, weights: ResidentWeights, fill: Fill, release_gradients: bool = False) -> None:
        weights.stage(fill, release_gradients)
        self.engine.weights = weights  # type: ignore[assignment]

    def _turn(self, name: str, number: int) -> dict[str, Any]:
        engine, options = self.engine, self.options
        if self.device == "cuda":
            torch.cuda.empty_cache()  # what another mode or the update gave back would be counted as in use
        before = used_bytes(
            self.device
        )  # and not later: staging takes what a baseline would only take in its transition
        self.modes[name]()
        with Peak(self.device) as changing:
            seconds_in, report = timed(self.device, engine.wake)
        used = used_bytes(self.device)
        prompts = tokens(options.samples, options.prompt, self.actor.arch.vocabulary, 1000 + number)
        sampling = Sampling(1.0, 1.0, options.response, (), number)
        with Peak(self.device) as generating:
            seconds_generating, completions = timed(self.device, lambda: engine.generate(prompts, sampling))
        memory, shared = engine.memory(), engine.shared.check()
        seconds_out, back = timed(self.device, engine.sleep)
        seconds_out -= back.seconds.pop("check", 0.0)
        gap_mean, gap_max = self._gap(prompts[:COMPARED], completions[:COMPARED])
        return {
            "mode": name, "round": number, "into_generation_s": seconds_in, "phases_s": report.seconds,
            "received_bytes": sum(report.received.get(link, 0) for link in ("node", "network")),
            "copied_bytes": report.received.get("local", 0), "into_training_s": seconds_out, "back_phases_s": back.seconds,
            "used_in_training": before - self.idle_bytes, "used_in_generation": used - self.idle_bytes,
            "peak_in_transition": changing.highest - self.idle_bytes,
            "peak_in_generation": generating.highest - self.idle_bytes,
            "memory": memory, "weight_bytes_in_use": shared, "gap_mean": gap_mean, "gap_max": gap_max,
            "generated_tokens_per_s": sum(len(c.tokens) for c in completions) / seconds_generating,
        }  # fmt: skip

    def _short_turn(self, number: int, needed: int | None) -> tuple[float, float]:
        """Seconds into generation and back of onecopy, a few tokens between them; `needed` is what `sleep` takes."""
        self._use_ours()
        seconds_in, _ = timed(self.device, self.engine.wake)
        self.engine.generate(tokens(8, 16, self.actor.arch.vocabulary, number), Sampling(1.0, 1.0, 8, (), number))
        seconds_out, _ = timed(self.device, lambda: self.engine.sleep(needed))
        return seconds_in, seconds_out

    def _gap(self, prompts: list[list[int]], completions: list[Completion]) -> tuple[float, float]:
        """Mean and largest difference between rollout and actor; every training replica looks at all ranks' samples."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(zip(prompts, completions, strict=True)))
        rows = [row for rank in everyone for row in rank]
        mine = self.actor.logprobs([prompt for prompt, _ in rows], [c.tokens for _, c in rows], 1.0).cpu()
        gap = (mine - torch.tensor([x for _, c in rows for x in c.logprobs])).abs()
        return gap.mean().item(), gap.max().item()

    def _update(self, seed: int) -> dict[str, int]:
        """Train on random tokens; bytes on the device before, at the peak, and after."""
        options = self.options
        sequences = tokens(options.batch, options.sequence, self.actor.arch.vocabulary, seed)
        half = options.sequence // 2
        responses = [s[half:] for s in sequences]
        ones = [[1] * len(r) for r in responses]
        samples = Samples([s[:half] for s in sequences], responses, ones, [[0.0] * len(r) for r in responses])
        settings = UpdateSettings(LossConfig(name="sft"), 1.0, None, 1, options.micro_batch_tokens, half, 0)
        before = used_bytes(self.device)
        with Peak(self.device) as peak:
            work = Update(self.actor, samples, settings)
            with self.working_memory.measured(work.largest_micro_batch):
                work.run()
        figures = {"before": before, "peak": peak.highest, "after": used_bytes(self.device)}
        return {name: size - self.idle_bytes for name, size in figures.items()}

    def _control_gap(self) -> float:
        """Mean difference between the actor and transformers in the same precision: what two right programs differ by."""
        from transformers import AutoModelForCausalLM

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
