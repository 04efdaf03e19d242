"""Actor and vLLM on the same weights, in equal and in different layouts, on each rank."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
import torch.distributed as dist

from engine.config import GenerationConfig, ParallelConfig
from engine.generation.engine import GenerationEngine, Sampling
from engine.losses.config import LossConfig
from engine.megatron.optimizer import device_state
from engine.megatron.update import Update
from engine.reshard.hybrid import HybridWeights
from engine.reshard.plan import plan_generation
from engine.roles.actor import Actor
from engine.weights.architecture import read_architecture
from engine.weights.huggingface import fill_shard, huggingface_tensors
from engine.weights.map import weight_map
from tests.integration.engine.programs import ADAM, demonstrations, settings

GREEDY, WARM = Sampling(0.0, 1.0, 24, (0,), 5), Sampling(0.7, 1.0, 24, (0,), 5)

KEPT: list[Any] = []
"""Engines live as long as the process: vLLM takes the process groups down when it is collected."""


class Hybrid:
    """An actor and an engine over all ranks, and what is compared between them."""

    def __init__(
        self, folder: str, parallel: dict[str, Any], generate: dict[str, Any], lora: dict[str, Any] | None = None
    ) -> None:
        train = ParallelConfig(**parallel)
        config = GenerationConfig(max_model_len=256, kv_cache_gib=0.2, max_concurrent_samples=16, **generate)
        arch = read_architecture(folder)
        arch = arch if lora is None else arch.with_adapters(**lora)
        self.actor = Actor(
            arch, folder, train.layout, sequence_parallel=train.sequence_parallel, dtype=torch.float32, device="cpu",
            optimizer=ADAM,
        )  # fmt: skip
        self.plan = plan_generation(arch, train.layout, config.layout(train), bytes_per_number=4)
        self.weights = HybridWeights(self.actor, self.plan, bucket_bytes=1 << 16)
        self.engine = GenerationEngine(self.weights, folder, config)
        replica = self.engine.replica
        self.prompts = [[50 + replica, 51, 52 + i, *range(60, 60 + 3 * i)] for i in range(4)] * 2

    def measure(self) -> dict[str, Any]:
        """Greedy and sampled completions twice, and how far their log-probabilities are from the actor's."""
        out, rollouts = {}, {}
        for name, sampling in (("greedy", GREEDY), ("sampled", WARM)):
            found = self.engine.generate(self.prompts, sampling)
            again = self.engine.generate(self.prompts, sampling)
            rollouts[name] = [(p, c.tokens, c.logprobs) for p, c in zip(self.prompts, found, strict=True)]
            out[name] = {
                "repeats": [c.tokens for c in found] == [c.tokens for c in again],
                "different": len({tuple(c.tokens) for c in found}),
                "highest": max(max(c.tokens) for c in found),
                "tokens": [c.tokens for c in found],
            }
        shared = self.engine.shared.check()
        self.engine.sleep()
        for name, sampling in (("greedy", GREEDY), ("sampled", WARM)):
            out[name]["gap"] = self._gap(rollouts[name], sampling.temperature or 1.0)
        return {**out, "shared": shared}

    def _gap(self, rows: list[tuple[list[int], list[int], list[float]]], temperature: float) -> float:
        """Largest difference over the rollouts of all ranks: every training replica evaluates them all."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, rows)
        rows = [row for rank in everyone for row in rank]
        mine = self.actor.logprobs([row[0] for row in rows], [row[1] for row in rows], temperature)
        return (mine - torch.tensor([x for row in rows for x in row[2]])).abs().max().item()

    def update(self, seed: int) -> None:
        samples = demonstrations(seed, self.actor.arch.vocabulary)
        Update(self.actor, samples, settings(LossConfig(name="sft"))).run()

    def whole(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every weight's Hugging Face tensors as the actor holds them now, on every rank."""
        mine = {name: (self.actor.shards[name], p.data.clone()) for name, p in self.actor.parameters.items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        out = {}
        for weight in weight_map(self.actor.arch):
            shards = dict(rank[weight.megatron] for rank in everyone if weight.megatron in rank)
            out[weight.megatron] = huggingface_tensors(weight, shards)
        return out

    def wrong_slices(self, whole: dict[str, dict[str, torch.Tensor]]) -> list[str]:
        """Parameters of vLLM's model that are not, bit for bit, the slice of the export; call it in generation."""
        model, wrong = dict(self.engine.shared.model.named_parameters(remove_duplicate=False)), []  # type: ignore[union-attr]
        seen = set()
        for weight in weight_map(self.actor.arch):
            shard = self.weights.shards.get(weight.megatron)
            for name in weight.vllm:
                if shard is None or name not in model:
                    continue
                expected = torch.full_like(model[name].data, float("nan"))
                fill_shard(expected, weight, whole[weight.megatron].__getitem__, shard)
                seen.add(name)
                if not torch.equal(expected, model[name].data):
                    wrong.append(name)
        return wrong + sorted(set(model) - seen)


def generation(
    folder: str,
    parallel: dict[str, Any],
    generate: dict[str, Any] | None = None,
    alternations: int = 3,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Generate and update in turn; compare rollout log-probabilities, every weight, and resident memory along the way."""
    hybrid = Hybrid(folder, parallel, generate or {}, lora)
    KEPT.append(hybrid)
    first, memory, wrong, changed = hybrid.measure(), [], [], []
    frozen = {n: p.data.clone() for n, p in hybrid.actor.parameters.items() if not p.requires_grad}
    for seed in range(alternations):
        hybrid.update(seed)
        whole, before = hybrid.whole(), {n: p.data.clone() for n, p in hybrid.actor.parameters.items()}
        hybrid.engine.generate(hybrid.prompts, WARM)
        in_generation = hybrid.weights.owners()
        state = [tensor.clone() for tensor in device_state(hybrid.actor.optimizer)]
        hybrid.weights.optimizer_to_host()
        away = hybrid.weights.owners()
        wrong += hybrid.wrong_slices(whole)
        transition = hybrid.engine.sleep()
        changed += [n for n, p in hybrid.actor.parameters.items() if not torch.equal(p.data, before[n])]
        back = zip(state, device_state(hybrid.actor.optimizer), strict=True)
        changed += ["optimizer state" for a, b in back if not torch.equal(a, b)]
        memory.append(_resident_mib())
    changed += [n for n, values in frozen.items() if not torch.equal(hybrid.actor.parameters[n].data, values)]
    plan, rank = hybrid.plan, dist.get_rank()
    return {
        "first": first, "last": hybrid.measure(), "memory": memory, "wrong": wrong, "changed": changed,
        "private": hybrid.engine.shared.private_bytes, "in_generation": in_generation,
        "away": away,
        "in_training": hybrid.weights.owners(), "resident": len(plan.resident) == len(plan.classes),
        "train_bytes": int(plan.held(plan.source)[rank]), "generate_bytes": int(plan.held(plan.target)[rank]),
        "back": transition.metrics(),
    }  # fmt: skip


def _resident_mib() -> float:
    """Memory in use, without what the allocator keeps of freed memory: that grows for many rounds."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))
