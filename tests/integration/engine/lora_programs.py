"""Adapters on each rank, beside transformers with the low-rank product written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.optimizer import reset_state, shard_states
from engine.megatron.update import Update
from engine.roles.actor import Actor
from engine.weights.architecture import read_architecture
from engine.weights.huggingface import fill_shard
from engine.weights.map import weight_map
from tests.integration.engine.programs import (
    ADAM,
    _all_named,
    _copies_equal,
    batch,
    demonstrations,
    reference_logprobs,
    settings,
)

RANK, ALPHA = 4, 12.0


class LowRankLinear(torch.nn.Module):
    """The reference: a linear layer of transformers with x A' B' alpha / rank beside it."""

    def __init__(self, linear: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.a, self.b = linear, torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + ALPHA / RANK * (x @ self.a.T @ self.b.T)


def make_actor(
    folder: str, tp: int = 1, pp: int = 1, sequence_parallel: bool = False, targets: list[str] | None = None,
    seed: int = 0, **sizes: int,
) -> Actor:  # fmt: skip
    """An actor with adapters over all ranks; `sizes` are further fields of the layout."""
    layout = Layout(tp=tp, pp=pp, dp=dist.get_world_size() // (tp * pp), **sizes)
    return Actor(
        read_architecture(folder).with_adapters(RANK, ALPHA, targets), folder, layout, sequence_parallel=sequence_parallel,
        dtype=torch.float32, device="cpu", optimizer=ADAM, seed=seed,
    )  # fmt: skip


def draw_adapters(actor: Actor, seed: int) -> dict[str, torch.Tensor]:
    """Random whole adapters, B too, put into the actor; returned by their Hugging Face names."""
    generator, whole = torch.Generator().manual_seed(seed), {}
    base = {weight.megatron for weight in weight_map(actor.arch.base)}
    for weight in weight_map(actor.arch):
        if weight.megatron in base:
            continue
        (piece,) = weight.all_pieces()
        whole[piece.name] = torch.randn(piece.shape, generator=generator) * 0.1
        if weight.megatron in actor.parameters:
            shard = actor.shards[weight.megatron]
            fill_shard(actor.parameters[weight.megatron].data, weight, whole.__getitem__, shard)
    reset_state(actor.optimizer)
    return whole


def with_adapters(model: Any, whole: dict[str, torch.Tensor]) -> list[torch.nn.Parameter]:
    """Put the same adapters into a model of transformers; returns them, the only ones that need a gradient."""
    model.requires_grad_(False)
    for name in [name.removesuffix(".lora_A.weight") for name in whole if name.endswith(".lora_A.weight")]:
        parent, _, child = name.rpartition(".")
        layer = LowRankLinear(model.get_submodule(name), whole[f"{name}.lora_A.weight"], whole[f"{name}.lora_B.weight"])
        setattr(model.get_submodule(parent), child, layer)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def training(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name to the arguments of `make_actor`: three updates each beside transformers."""
    return {name: _train_beside_transformers(arguments) for name, arguments in runs.items()}


def _train_beside_transformers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three supervised updates of the adapters beside torch.optim.AdamW on the same batches."""
    reference = AutoModelForCausalLM.from_pretrained(arguments["folder"], dtype=torch.float32)
    vocabulary = reference.config.vocab_size
    prompts, responses = batch(99, vocabulary)
    with torch.no_grad():
        plain = reference_logprobs(reference, prompts, responses)
    actor = make_actor(**arguments)
    fresh = (actor.logprobs(prompts, responses, 1.0) - plain).abs().max().item()
    trained = with_adapters(reference, draw_adapters(actor, seed=7))
    adam = torch.optim.AdamW(
        trained, lr=ADAM.lr, eps=ADAM.eps, betas=(ADAM.beta1, ADAM.beta2), weight_decay=ADAM.weight_decay
    )
    base = {name: p.detach().clone() for name, p in actor.parameters.items() if not p.requires_grad}

    def gap() -> float:
        with torch.no_grad():
            expected = reference_logprobs(reference, prompts, responses)
        return (actor.logprobs(prompts, responses, 1.0) - expected).abs().max().item()

    before, norms = gap(), []
    for seed in range(3):
        samples = demonstrations(seed, vocabulary)
        metrics = Update(actor, samples, settings(LossConfig(name="sft"))).run()
        adam.zero_grad()
        loss = -reference_logprobs(reference, samples.prompts, samples.responses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, ADAM.clip_grad)
        adam.step()
        norms.append((metrics["grad_norm"], norm.item(), metrics["loss"], loss.item()))
    with actor.without_adapters():
        switched_off = (actor.logprobs(prompts, responses, 1.0) - plain).abs().max().item()
    owned = {name: state.stop - state.start for name, state in shard_states(actor.optimizer, actor.parameters)}
    return {
        "fresh": fresh,
        "before": before,
        "after": gap(),
        "moved": (actor.logprobs(prompts, responses, 1.0) - plain).abs().max().item(),
        "switched_off": switched_off,
        "norms": norms,
        "base_changed": [name for name, values in base.items() if not torch.equal(values, actor.parameters[name])],
        "base_has_state": sorted(set(base) & set(owned)),
        "adapters": sorted(set(actor.parameters) - set(base)),
        "gradient_numbers": sum(buffer.grad_data.numel() for buffer in actor.buffers),
        "adapter_numbers": sum(p.numel() for name, p in actor.parameters.items() if name not in base),
        "equal": _copies_equal(actor),
        "named": _all_named(actor),
    }
