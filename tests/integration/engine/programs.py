"""What the engine tests run on each rank. Every function returns plain numbers that the tests compare."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.config import OptimizerConfig
from engine.layout import Layout
from engine.losses.config import CorrectionConfig, LossConfig
from engine.megatron.update import Update, UpdateSettings
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.weights.architecture import read_architecture
from engine.weights.map import weight_map

ADAM = OptimizerConfig(lr=1e-3, eps=1e-5, clip_grad=1.0, weight_decay=0.1)
LENGTHS = (7, 23, 2, 12, 9, 30)  # ragged; 83 tokens: odd, so that sequence parallel needs a throw-away tail


def make_actor(
    folder: str,
    tp: int,
    sequence_parallel: bool = False,
    optimizer: OptimizerConfig = ADAM,
    *,
    pp: int = 1,
    stage_layers: list[int] | None = None,
    dtype: str = "float32",
    **sizes: int,
) -> Actor:
    """An actor over all ranks; `sizes` are further fields of the layout."""
    layers = tuple(stage_layers) if stage_layers else None
    layout = Layout(tp=tp, pp=pp, dp=dist.get_world_size() // (tp * pp), stage_layers=layers, **sizes)
    return Actor(
        read_architecture(folder), folder, layout, sequence_parallel=sequence_parallel, dtype=getattr(torch, dtype), device="cpu",
        optimizer=optimizer,
    )  # fmt: skip


def batch(seed: int, vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts and responses; a third of each sequence is prompt, at least one token."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for length in lengths:
        tokens = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        cut = max(1, length // 3)
        prompts.append(tokens[:cut])
        responses.append(tokens[cut:])
    return prompts, responses


def settings(loss: LossConfig, **changes: Any) -> UpdateSettings:
    values: dict[str, Any] = dict(
        loss=loss, temperature=1.0, mini_batch_size=None, epochs=1, max_tokens_per_micro_batch=40, horizon=64, seed=0
    )
    return UpdateSettings(**{**values, **changes})


def demonstrations(seed: int, vocabulary: int) -> Samples:
    prompts, responses = batch(seed, vocabulary)
    return Samples(prompts, responses, [[1] * len(r) for r in responses], [[0.0] * len(r) for r in responses])


def reference_logprobs(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the response tokens by transformers, one plain forward a sequence."""
    out = []
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = torch.tensor([prompt + response])
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        out.append(logprobs.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0])
    return torch.cat(out)


def reference_optimizer(model: Any) -> torch.optim.AdamW:
    """torch's AdamW with ADAM's settings; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": ADAM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=ADAM.lr, eps=ADAM.eps, betas=(ADAM.beta1, ADAM.beta2))


def logit_gap(actor: Actor, reference: Any, tokens: list[int]) -> tuple[float, float]:
    """Largest differences of all logits of a sequence, and of the entropies of its predictions, from transformers'.

    Only the last pipeline stage can tell; the others return zeros.
    """
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    from engine.megatron.cpu import megatron_device

    hidden: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []

    def keep(_: int, logprobs: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        entropies.append(found)
        return logprobs

    hook = actor.chunks[-1].module.register_forward_hook(lambda _, __, output: hidden.append(output))
    with torch.no_grad(), megatron_device(actor.device):
        actor.run([([tokens[:1]], [tokens[1:]])], 1, 1.0, keep, forward_only=True)
        hook.remove()
        if actor.coordinates.pp != actor.layout.pp - 1:
            return 0.0, 0.0
        model, states = actor.chunks[-1].module, hidden[0]
        if model.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states)
        mine = torch.nn.functional.linear(states[:, 0], model.output_weight)
        logits = gather_from_tensor_model_parallel_region(mine)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    probabilities = expected[:-1].softmax(-1)
    expected_entropies = -(probabilities * probabilities.log()).sum(-1)
    gap = (logits[: len(tokens), : actor.arch.vocabulary] - expected).abs().max().item()
    return gap, (entropies[0] - expected_entropies).abs().max().item()


def training(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name to the arguments of `make_actor`: three updates each beside transformers."""
    return {name: _train_beside_transformers(arguments) for name, arguments in runs.items()}


def _train_beside_transformers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three supervised updates beside transformers and torch.optim.AdamW on the same batches."""
    reference = AutoModelForCausalLM.from_pretrained(arguments["folder"], dtype=torch.float32)
    adam = reference_optimizer(reference)
    actor = make_actor(**arguments)
    addresses = {name: p.data_ptr() for name, p in actor.parameters.items()}
    vocabulary = reference.config.vocab_size
    prompts, responses = batch(99, vocabulary)

    def gap() -> float:
        with torch.no_grad():
            expected = reference_logprobs(reference, prompts, responses)
        return (actor.logprobs(prompts, responses, 1.0) - expected).abs().max().item()

    probe = prompts[1] + responses[1]
    before, norms, logits = gap(), [], [logit_gap(actor, reference, probe)]
    for seed in range(3):
        samples = demonstrations(seed, vocabulary)
        metrics = Update(actor, samples, settings(LossConfig(name="sft"))).run()
        adam.zero_grad()
        loss = -reference_logprobs(reference, samples.prompts, samples.responses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), ADAM.clip_grad)
        adam.step()
        norms.append((metrics["grad_norm"], norm.item(), metrics["loss"], loss.item()))
    logits.append(logit_gap(actor, reference, probe))
    return {
        "before": before,
        "after": gap(),
        "logits": logits,
        "norms": norms,
        "padding": _padding(actor),
        "equal": _copies_equal(actor),
        "in_place": addresses == {name: p.data_ptr() for name, p in actor.parameters.items()},
        "named": _all_named(actor),
        "places": _place_in_megatron(actor),
    }


def _padding(actor: Actor) -> float:
    """Largest magnitude in the vocabulary's padded rows of this rank."""
    worst = 0.0
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in actor.parameters:
            weight = actor.parameters[name]
            real = max(0, min(weight.shape[0], actor.arch.vocabulary - actor.coordinates.tp * weight.shape[0]))
            worst = max(worst, float(weight[real:].abs().sum()))
    return worst


def _copies_equal(actor: Actor) -> bool:
    """All ranks that hold the same part of a weight (the norms, a tied embedding's two, replicas) have the same bits."""
    mine = {
        (name, actor.shards[name]): hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for name, parameter in actor.parameters.items()
    }
    ranks: list[dict[Any, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    return all(other.get(key, digest) == digest for other in ranks for key, digest in mine.items())


def _all_named(actor: Actor) -> bool:
    """Every parameter of every chunk has a name of the weight map, and once; shapes are those of the shards."""
    held = {id(parameter) for chunk in actor.chunks for parameter in chunk.parameters()}
    weights = {weight.megatron: weight for weight in weight_map(actor.arch)}
    shapes = all(weights[n].shard_shape(actor.shards[n]) == p.shape for n, p in actor.parameters.items())
    return shapes and held == {id(p) for p in actor.parameters.values()} and len(held) == len(actor.parameters)


def _place_in_megatron(actor: Actor) -> tuple[list[int], list[int]]:
    """This rank's coordinates by the layout, and by Megatron's process groups."""
    from megatron.core import parallel_state as state

    theirs = [
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_data_parallel_rank(),
        state.get_expert_tensor_parallel_rank(),
        state.get_expert_model_parallel_rank(),
    ]
    return list(actor.coordinates), theirs


def policy_updates(runs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The same policy update in several micro-batch sizes and aggregations: metrics, and the policy afterwards.

    Each of `runs` has the arguments of `make_actor`, and lists of aggregations and of tokens of a micro-batch.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for name, run in runs.items():
        for aggregation in run["aggregations"]:
            for budget in run["budgets"]:
                actor = make_actor(**run["arguments"])
                correction = CorrectionConfig(weights="token-truncate", high=1.5)
                loss = LossConfig(aggregation=aggregation, entropy_coef=0.01, correction=correction)
                chosen = settings(loss, mini_batch_size=3, epochs=2, max_tokens_per_micro_batch=budget, temperature=0.7)
                metrics = Update(actor, _scored(actor), chosen).run()
                prompts, responses = batch(99, actor.arch.vocabulary)
                logprobs = actor.logprobs(prompts, responses, 1.0).tolist()
                results[name].append({"aggregation": aggregation, "metrics": metrics, "logprobs": logprobs})
    return results


def one_sample(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """An update on a single sample, which only one of the data parallel ranks can hold."""
    results = {}
    for name, arguments in runs.items():
        actor = make_actor(**arguments)
        samples = _scored(actor).select([0])
        results[name] = Update(actor, samples, settings(LossConfig(), mini_batch_size=1, epochs=2)).run()
    return results


def _scored(actor: Actor) -> Samples:
    """Random samples with advantages, partly masked (one response wholly), and rollout log-probabilities a little off."""
    prompts, responses = batch(5, actor.arch.vocabulary)
    generator = torch.Generator().manual_seed(6)
    masks = [[int(i % 5 != 3) for i in range(len(r))] for r in responses]
    masks[2] = [0] * len(responses[2])
    advantages = [[(-1.0) ** n * 0.7] * len(r) for n, r in enumerate(responses)]
    rollout = [(torch.randn(len(r), generator=generator) * 0.2 - 5.5).tolist() for r in responses]
    return Samples(prompts, responses, masks, advantages, rollout)
