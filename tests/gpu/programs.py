"""What the GPU tests run in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.config import GenerationConfig, OptimizerConfig
from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.update import Update
from engine.roles.actor import Actor
from engine.weights.architecture import read_architecture
from tests.integration.engine.programs import (
    ADAM,
    batch,
    demonstrations,
    reference_logprobs,
    reference_optimizer,
    settings,
)

KEPT: list[Any] = []
"""Engines live as long as the process: vLLM takes the process groups down when it is collected."""


def alternate(folder: str, shared: bool) -> dict[str, Any]:
    """fp32 updates beside transformers, then bf16 alternations of generation and training.

    Without `shared` the weights move between two memories although one would do, as they would between different layouts.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    result = _train_in_fp32(folder)
    return result | _alternate_in_bf16(folder, shared)


def _actor(folder: str, dtype: torch.dtype, optimizer: OptimizerConfig) -> Actor:
    return Actor(
        read_architecture(folder),
        folder,
        Layout(),
        sequence_parallel=False,
        dtype=dtype,
        device="cuda",
        optimizer=optimizer,
    )


def _train_in_fp32(folder: str) -> dict[str, Any]:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = reference_optimizer(reference)
    actor, norms = _actor(folder, torch.float32, ADAM), []
    vocabulary = reference.config.vocab_size
    for seed in range(3):
        samples = demonstrations(seed, vocabulary)
        metrics = Update(actor, samples, settings(LossConfig(name="sft"))).run()
        adam.zero_grad()
        (-reference_logprobs(reference, samples.prompts, samples.responses).mean()).backward()
        norms.append(
            (metrics["grad_norm"], torch.nn.utils.clip_grad_norm_(reference.parameters(), ADAM.clip_grad).item())
        )
        adam.step()
    prompts, responses = batch(99, vocabulary)
    with torch.no_grad():
        expected = reference_logprobs(reference, prompts, responses)
    return {"norms": norms, "fp32_gap": (actor.logprobs(prompts, responses, 1.0).cpu() - expected).abs().max().item()}


def _alternate_in_bf16(folder: str, shared: bool) -> dict[str, Any]:
    from engine.generation.engine import GenerationEngine, Sampling
    from engine.reshard.hybrid import HybridWeights
    from engine.reshard.plan import plan_generation

    actor = _actor(folder, torch.bfloat16, OptimizerConfig(lr=1e-4))
    plan = plan_generation(actor.arch, Layout(), Layout(), bytes_per_number=2)
    if not shared:
        plan.__dict__["resident"] = frozenset()
    weights = HybridWeights(actor, plan)
    engine = GenerationEngine(
        weights, folder, GenerationConfig(max_model_len=256, max_concurrent_samples=32, memory_fraction=0.2)
    )
    KEPT.append(engine)
    prompts = [[50 + i, 51, 52 + i] for i in range(32)]
    gaps, reserved = [], []
    for seed in range(6):
        found = engine.generate(prompts, Sampling(1.0, 1.0, 64, (0,), seed))
        shared_bytes, owners = engine.shared.check(), engine.memory()
        engine.sleep()
        mine = actor.logprobs(prompts, [c.tokens for c in found], 1.0).cpu()
        gaps.append((mine - torch.tensor([x for c in found for x in c.logprobs])).abs().mean().item())
        Update(actor, demonstrations(seed, actor.arch.vocabulary), settings(LossConfig(name="sft"))).run()
        engine.wake()
        reserved.append(torch.cuda.memory_reserved())
    parameters = sum(p.numel() * p.element_size() for p in actor.parameters.values())
    return {
        "gaps": gaps, "reserved": reserved[1:], "shared": shared_bytes, "owners": owners, "private": engine.shared.private_bytes,
        "parameters": parameters,
    }  # fmt: skip


def checkpoint(folder: str, root: str) -> dict[str, Any]:
    """A checkpoint written while the next update runs, read back into the spoiled actor; and the same update again."""
    import contextlib
    import time

    from engine.checkpointing import Checkpointing, TrainedModel
    from storage.ledger import Ledger
    from tests.integration.engine.checkpoint_programs import publish, train, whole_state

    actor, checkpoints, ledger = (
        _actor(folder, torch.bfloat16, OptimizerConfig(lr=1e-3)),
        Checkpointing(),
        Ledger(root, "run"),
    )
    models = {"actor": TrainedModel(lambda: contextlib.nullcontext(actor), folder)}
    out = ledger.stage_path("checkpoint", 2)
    train(actor, 0)
    checkpoints.save(root, out, models, time.monotonic())  # takes the host memory
    saved = whole_state(actor)
    stall = checkpoints.save(root, out, models, time.monotonic())["metrics"]["stall_seconds"]
    train(actor, 1)
    found = checkpoints.saved(out, wait=True)
    after = whole_state(actor)
    manifest = publish(ledger, found["files"])
    checkpoints.restore(root, manifest, models)
    restored = whole_state(actor)
    train(actor, 1)
    again = whole_state(actor)
    return {
        "different": [name for name in saved if not torch.equal(saved[name], restored[name])],
        "moved": sum(not torch.equal(saved[name], after[name]) for name in saved),
        "gap": max((after[name] - again[name]).abs().max().item() for name in after),
        "stall_seconds": stall,
        **found["metrics"],
    }
