"""What the tests of gradient invariance run on each rank: the engine's own update and Megatron's layouts, in float64."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

from engine.config import OptimizerConfig
from engine.layout import Layout
from engine.losses.config import KLConfig, LossConfig
from engine.megatron.logprobs import token_logprobs
from engine.megatron.update import Update
from engine.roles import model as model_module
from engine.roles.actor import Actor
from engine.samples import Samples
from engine.weights.architecture import read_architecture
from engine.weights.huggingface import fill_shard
from engine.weights.map import weight_map
from storage.datasets import ADVANTAGE, REFERENCE, ROLLOUT, write_part
from storage.ledger import Ledger
from storage.manifest import Manifest, fingerprint, utc_now
from tests.integration.engine.programs import ADAM, batch, make_actor, settings

DIRECTIONS = 2
"""Random directions on which each weight's gradient is measured: one number each, whatever its shards are."""


@contextmanager
def double_precision() -> Iterator[None]:
    """Models that compute in float64 wherever they would in fp32, with whole float64 gradients and without an optimizer."""
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=False)
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(model_module, "_buffer_config", lambda: buffers),
        mock.patch.object(model_module, "build_optimizer", lambda *_: mock.Mock()),
    ):
        yield


class Probe(Actor):
    """An actor whose optimizer step notes the gradient and moves the weights by a noise that is the same in every layout."""

    def __init__(self, folder: str, layout: Layout) -> None:
        super().__init__(
            read_architecture(folder), folder, layout, sequence_parallel=False, dtype=torch.float64, device="cpu", optimizer=ADAM
        )  # fmt: skip
        self.weights = {
            weight.megatron: weight for weight in weight_map(self.arch) if weight.megatron in self.parameters
        }
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.noted: list[dict[str, list[float]]] = []
        self.random_like = functools.cache(self._random_like)

    def _random_like(self, name: str, seed: int) -> torch.Tensor:
        """This rank's part of a random tensor of the whole weight's shape."""
        weight, part = self.weights[name], torch.empty_like(self.parameters[name])

        def whole(piece: str) -> torch.Tensor:
            shape = next(p.shape for p in weight.all_pieces() if p.name == piece)
            generator = torch.Generator().manual_seed(random.Random(f"{piece} {seed}").getrandbits(60))
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        fill_shard(part, weight, whole, self.shards[name])
        return part

    def restart(self) -> None:
        """The weights as they were loaded, and no notes."""
        self.noted = []
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.start[name])

    def optimizer_step(self) -> tuple[float, float]:
        finalize_model_grads(self.chunks)
        mine = {
            (name, self.shards[name]): [
                float((parameter.main_grad * self.random_like(name, n)).sum()) for n in range(DIRECTIONS)
            ]
            for name, parameter in self.parameters.items()
        }
        ranks: list[dict[Any, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        parts = {key: numbers for rank in ranks for key, numbers in rank.items()}
        assert all(
            abs(a - b) < 1e-8 for rank in ranks for key in rank for a, b in zip(rank[key], parts[key], strict=True)
        )
        sums: dict[str, list[float]] = {}
        for (name, _), numbers in sorted(parts.items()):
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * DIRECTIONS), numbers, strict=True)]
        self.noted.append(sums)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.add_(self.random_like(name, 100 + len(self.noted)), alpha=0.03)
        return 1.0, 0.0


def scored(vocabulary: int, poison: float | None = None) -> Samples:
    """Random samples with all that any loss needs; `poison` stands at every masked token (one response is masked wholly)."""
    prompts, responses = batch(5, vocabulary)
    generator = torch.Generator().manual_seed(6)
    masks = [[int(i % 5 != 3) for i in range(len(r))] for r in responses]
    masks[2] = [0] * len(responses[2])

    def numbers(scale: float, mean: float) -> list[list[float]]:
        rows = [(torch.randn(len(r), generator=generator) * scale + mean).tolist() for r in responses]
        if poison is not None:
            rows = [[x if m else poison for x, m in zip(*pair, strict=True)] for pair in zip(rows, masks, strict=True)]
        return rows

    advantages, rollout, reference = numbers(1.0, 0.0), numbers(0.3, -5.6), numbers(0.3, -5.6)
    return Samples(prompts, responses, masks, advantages, rollout, reference, rewards=[1.0, 0.0, 1.0, 0.5, -1.0, 1.0])


def gradients(
    folder: str, layouts: dict[str, dict[str, int]], cases: dict[str, dict[str, Any]], budgets: list[int]
) -> dict[str, dict[str, Any]]:
    """Case to way of cutting to every optimizer step's gradient and the metrics.

    Each of `cases` has a loss's settings, `mini_batch_size` of the update and what stands at masked tokens.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in cases}
    with double_precision():
        for layout_name, sizes in layouts.items():
            layout = Layout(dp=dist.get_world_size() // (sizes["tp"] * sizes["pp"]), **sizes)
            actor = Probe(folder, layout)
            for name, case in cases.items():
                for budget in budgets:
                    results[name][f"{layout_name}, {budget} tokens"] = _update(actor, case, budget)
    return results


def _update(actor: Probe, case: dict[str, Any], budget: int) -> dict[str, Any]:
    actor.restart()
    samples = scored(actor.arch.vocabulary, case.get("poison"))
    chosen = settings(
        LossConfig(**case["loss"]),
        mini_batch_size=case.get("mini_batch_size", 3),
        max_tokens_per_micro_batch=budget,
        temperature=0.7,
    )
    metrics = Update(actor, samples, chosen).run()
    return {"gradients": actor.noted, "metrics": metrics}


def on_one_rank(folder: str, root: str) -> dict[str, Any]:
    """What needs no second rank."""
    return {
        "temperatures": _processed_logprobs(),
        "penalised": {estimator: _penalised(folder, estimator) for estimator in ("k2", "k3", "abs", "k3+")},
        "still": _update_that_moves_nothing(folder),
        "staged": _staged_samples(root),
    }


def _processed_logprobs() -> dict[str, list[float]]:
    """Log-probability of token 0 and entropy of logits [2, 0, -1], by temperature."""
    found = {}
    for temperature in (1.0, 0.5):
        logprobs, entropies = token_logprobs(
            torch.tensor([[[2.0, 0.0, -1.0]]]), torch.eye(3), torch.tensor([0]), torch.tensor([0]),
            vocabulary=3, temperature=temperature, group=dist.group.WORLD, sequence_parallel=False,
        )  # fmt: skip
        found[str(temperature)] = [logprobs.item(), entropies.item()]
    return found


def _penalised(folder: str, estimator: str) -> list[dict[str, float]]:
    """Advantages 0 and only the KL term: metrics of several real updates."""
    actor = make_actor(folder, 1)
    samples = scored(actor.arch.vocabulary)
    still = replace(samples, advantages=[[0.0] * len(r) for r in samples.responses])
    loss = LossConfig(kl=KLConfig.model_validate({"coef": 1.0, "estimator": estimator}))
    return [Update(actor, still, settings(loss)).run() for _ in range(4)]


def _update_that_moves_nothing(folder: str) -> list[dict[str, float]]:
    """Two epochs at a rate of almost 0, by micro-batch size: the old log-probabilities come from a pass of their own."""
    actor = make_actor(folder, 1, optimizer=OptimizerConfig(lr=1e-14))
    samples = scored(actor.arch.vocabulary)
    budgets = (16, 4096)
    chosen = [settings(LossConfig(), epochs=2, max_tokens_per_micro_batch=budget) for budget in budgets]
    return [Update(actor, samples, setting).run() for setting in chosen]


def _staged_samples(root: str) -> dict[str, Any]:
    """Samples as an update reads them; the rollout and the reference have one that was not kept."""
    from engine.model_session import _read_samples

    ledger = Ledger(root, "run")
    ids, tokens = ["a", "b", "c"], [[5, 6], [7], [8, 9]]
    rollout = [
        {
            "sample_id": i, "group_id": "g", "prompt_id": "p", "weight_version": 0, "prompt_tokens": [1], "response_tokens": t,
            "response_mask": [1] * len(t), "rollout_logprobs": [-1.0] * len(t), "finish_reason": "stop", "text": "",
        }
        for i, t in zip(ids, tokens, strict=True)
    ]  # fmt: skip
    reference = [
        {"sample_id": i, "reference_logprobs": [-float(x) for x in t]} for i, t in zip(ids, tokens, strict=True)
    ]
    advantage = [
        {"sample_id": i, "group_id": "g", "advantages": [0.5] * len(t), "length": 1 + len(t), "reward": r}
        for i, t, r in (("c", tokens[2], 2.0), ("a", tokens[0], -1.0))
    ]
    tables = {"rollout": (rollout, ROLLOUT), "reference": (reference, REFERENCE), "advantage": (advantage, ADVANTAGE)}
    datasets = {}
    for stage, (rows, schema) in tables.items():
        part = write_part(
            ledger.store, ledger.stage_path(stage, 0), 0, pa.Table.from_pylist(rows, schema=schema), schema
        )
        manifest = Manifest(
            run="run", step=0, stage=stage, fingerprint=fingerprint(stage), files=[part], rows=len(rows), weight_version=0,
            started_at=utc_now(), finished_at=utc_now(),
        )  # fmt: skip
        datasets[stage] = ledger.publish(manifest).model_dump(mode="json")
    samples = _read_samples(ledger.store, datasets)
    without = _read_samples(ledger.store, {name: datasets[name] for name in ("rollout", "advantage")})
    return {"reference": samples.reference_logprobs, "rewards": samples.rewards, "without": without.reference_logprobs}


def all_masked(folder: str) -> dict[str, Any]:
    """A batch of which nothing, and one of which one mini-batch, has no trained token: metrics, and whether weights moved."""
    actor = make_actor(folder, 1)
    whole = scored(actor.arch.vocabulary)
    nothing = replace(whole, masks=[[0] * len(m) for m in whole.masks])
    before = {name: p.detach().clone() for name, p in actor.parameters.items()}
    steps: list[int] = []
    masked = Update(actor, nothing, settings(LossConfig())).run(lambda done, of: steps.append(done))
    unchanged = all(torch.equal(p, before[name]) for name, p in actor.parameters.items())
    partly = Update(actor, whole, settings(LossConfig(), mini_batch_size=1)).run()
    moved = not all(torch.equal(p, before[name]) for name, p in actor.parameters.items())
    return {"masked": masked, "unchanged": unchanged, "steps": steps, "partly": partly, "moved": moved}
