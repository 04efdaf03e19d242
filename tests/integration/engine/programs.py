"""What the engine tests run on each rank. Every function returns plain numbers that the tests compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.config import GenerationConfig, OptimizerConfig
from engine.layout import Layout
from engine.losses.config import LossConfig
from engine.megatron.update import Update, UpdateSettings
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.weights.architecture import read_architecture

ADAM = OptimizerConfig(lr=1e-3, eps=1e-5, clip_grad=1.0, weight_decay=0.1)
LENGTHS = (7, 23, 2, 12, 9, 30)  # ragged; 83 tokens: odd, so that sequence parallel needs a throw-away tail


def make_actor(folder: str, tp: int, sequence_parallel: bool = False, optimizer: OptimizerConfig = ADAM) -> Actor:
    layout = Layout(tp, dist.get_world_size() // tp)
    return Actor(
        read_architecture(folder), folder, layout, sequence_parallel=sequence_parallel, dtype=torch.float32, device="cpu",
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
    """Largest differences of all logits of a sequence, and of the entropies of its predictions, from transformers'."""
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    from engine.megatron.cpu import megatron_device
    from engine.megatron.packing import pack

    row = pack([tokens[:1]], [tokens[1:]], actor.row_multiple, actor.device)
    with torch.no_grad(), megatron_device(actor.device):
        hidden = actor.parallel_model(row.ids, row.positions, None, packed_seq_params=row.attention)
        if actor.model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        mine = torch.nn.functional.linear(hidden[:, 0], actor.model.output_weight)
        logits = gather_from_tensor_model_parallel_region(mine)
        entropies = actor.forward([tokens[:1]], [tokens[1:]], 1.0)[1]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    probabilities = expected[:-1].softmax(-1)
    expected_entropies = -(probabilities * probabilities.log()).sum(-1)
    gap = (logits[: len(tokens), : actor.arch.vocabulary] - expected).abs().max().item()
    return gap, (entropies - expected_entropies).abs().max().item()


def training(cases: dict[str, str], layouts: list[tuple[int, bool]]) -> dict[str, Any]:
    """Three supervised updates beside transformers and torch.optim.AdamW on the same batches."""
    results: dict[str, Any] = {}
    for case, folder in cases.items():
        for tp, sequence_parallel in layouts:
            name = f"{case} tp{tp} dp{dist.get_world_size() // tp}{' sp' if sequence_parallel else ''}"
            results[name] = _train_beside_transformers(folder, tp, sequence_parallel)
    return results


def _train_beside_transformers(folder: str, tp: int, sequence_parallel: bool) -> dict[str, Any]:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = reference_optimizer(reference)
    actor = make_actor(folder, tp, sequence_parallel)
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
        "equal": _replicas_equal(actor),
    }


def _padding(actor: Actor) -> float:
    """Largest magnitude in the vocabulary's padded rows of this rank."""
    weight = actor.model.output_weight
    real = max(0, min(weight.shape[0], actor.arch.vocabulary - actor.tp_rank * weight.shape[0]))
    return float(weight[real:].abs().sum())


def _replicas_equal(actor: Actor) -> bool:
    """Norms are the same numbers on every rank, bit for bit."""
    norms = torch.cat([p.data.flatten() for name, p in actor.parameters.items() if "norm" in name])
    low, high = norms.clone(), norms.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool((low == high).all())


def policy_updates(folder: str, layouts: list[tuple[int, bool]]) -> dict[str, Any]:
    """The same policy update in several layouts, micro-batch sizes and aggregations: metrics, and the policy afterwards."""
    results: dict[str, Any] = {}
    for tp, sequence_parallel in layouts:
        for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            for budget in (16, 64, 4096):
                actor = make_actor(folder, tp, sequence_parallel)
                loss = LossConfig(aggregation=aggregation, entropy_coef=0.01, importance_cap=1.5)  # type: ignore[arg-type]
                chosen = settings(loss, mini_batch_size=3, epochs=2, max_tokens_per_micro_batch=budget, temperature=0.7)
                metrics = Update(actor, _scored(actor), chosen).run()
                prompts, responses = batch(99, actor.arch.vocabulary)
                name = f"{aggregation} tp{tp} dp{dist.get_world_size() // tp} sp{sequence_parallel} budget {budget}"
                results[name] = {"metrics": metrics, "logprobs": actor.logprobs(prompts, responses, 1.0).tolist()}
    return results


def one_sample(folder: str) -> dict[str, Any]:
    """An update on a single sample, which only one of the data parallel ranks can hold."""
    actor = make_actor(folder, 1)
    samples = _scored(actor).select([0])
    return Update(actor, samples, settings(LossConfig(), mini_batch_size=1, epochs=2)).run()


def _scored(actor: Actor) -> Samples:
    """Random samples with advantages, partly masked (one response wholly), and rollout log-probabilities a little off."""
    prompts, responses = batch(5, actor.arch.vocabulary)
    generator = torch.Generator().manual_seed(6)
    masks = [[int(i % 5 != 3) for i in range(len(r))] for r in responses]
    masks[2] = [0] * len(responses[2])
    advantages = [[(-1.0) ** n * 0.7] * len(r) for n, r in enumerate(responses)]
    rollout = [(torch.randn(len(r), generator=generator) * 0.2 - 5.5).tolist() for r in responses]
    return Samples(prompts, responses, masks, advantages, rollout)


def generation(folder: str, tp: int, sequence_parallel: bool = False, alternations: int = 3) -> dict[str, Any]:
    """Generate and update in turn; compare rollout log-probabilities, addresses and resident memory along the way."""
    from engine.generation.engine import GenerationEngine, Sampling

    actor = make_actor(folder, tp, sequence_parallel)
    engine = GenerationEngine(
        actor, folder, GenerationConfig(max_model_len=256, kv_cache_gib=0.2, max_concurrent_samples=16)
    )
    vocabulary, replica = actor.arch.vocabulary, actor.dp_rank
    prompts = [[50 + replica, 51, 52 + i, *range(60, 60 + 3 * i)] for i in range(4)] * 2
    greedy, warm = Sampling(0.0, 1.0, 24, (0,), 5), Sampling(0.7, 1.0, 24, (0,), 5)

    def measure() -> dict[str, Any]:
        out = {}
        for name, sampling in (("greedy", greedy), ("sampled", warm)):
            found = engine.generate(prompts, sampling)
            again = engine.generate(prompts, sampling)
            mine = actor.logprobs(prompts, [c.tokens for c in found], sampling.temperature or 1.0)
            theirs = torch.tensor([x for c in found for x in c.logprobs])
            out[name] = {
                "gap": (mine - theirs).abs().max().item(),
                "repeats": [c.tokens for c in found] == [c.tokens for c in again],
                "different": len({tuple(c.tokens) for c in found}),
                "highest": max(max(c.tokens) for c in found),
                "tokens": [c.tokens for c in found],
            }
        return out

    first, shared, memory = measure(), engine.shared.check(), []
    for seed in range(alternations):
        Update(actor, demonstrations(seed, vocabulary), settings(LossConfig(name="sft"))).run()
        engine.generate(prompts, warm)
        engine.shared.check()
        memory.append(_resident_mib())
    parameters = sum(p.numel() * p.element_size() for p in actor.parameters.values())
    return {
        "first": first, "last": measure(), "shared": shared, "parameters": parameters, "memory": memory,
        "private": engine.shared.private_bytes,
    }  # fmt: skip


def _resident_mib() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))
