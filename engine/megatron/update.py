"""One policy update: mini-batches, micro-batches, and the loss whose gradient does not depend on how they were cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.layout import balanced_split, pack_by_tokens
from engine.losses.aggregate import Totals, aggregate
from engine.losses.config import LossConfig
from engine.losses.policy import TokenLoss, importance_weights, k3, ppo_loss, sft_loss
from engine.megatron.cpu import megatron_device
from engine.roles.actor import Actor
from engine.samples import Samples


@dataclass(frozen=True)
class UpdateSettings:
    """How a batch of samples becomes optimizer steps.

    Attributes:
        loss: the loss and its aggregation.
        temperature: the sampler's, applied to the trained log-probabilities too.
        mini_batch_size: samples an optimizer step over all ranks; None: all in one step.
        epochs: passes over the batch.
        max_tokens_per_micro_batch: tokens of one packed row.
        horizon: the configured longest response (constant of seq-mean-token-sum-norm).
        seed: order of the samples.
    """

    loss: LossConfig
    temperature: float
    mini_batch_size: int | None
    epochs: int
    max_tokens_per_micro_batch: int
    horizon: int
    seed: int


class Meter:
    """Sums of metrics on this rank, added up over all ranks once, at the end.

    The names are fixed beforehand: a rank without a sample, or of another than the last pipeline stage, takes part with zeros.
    """

    def __init__(self, names: list[str], device: str) -> None:
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar; raises KeyError for a name that the other ranks would not reduce."""
        self.sums[name] += value.detach().double()

    def total(self, actor: Actor) -> dict[str, float]:
        """The sums over all samples, equal on every rank."""
        values = torch.stack(list(self.sums.values()))
        actor.sum_over_ranks(values)
        return dict(zip(self.sums, values.tolist(), strict=True))


def mini_batches(count: int, size: int | None, seed: int) -> list[list[int]]:
    """Sample indices of each optimizer step of one epoch; shuffled when there is more than one step.

    The last one takes what is left, so that every sample is used exactly once an epoch.
    """
    order = list(range(count))
    if size is None or size >= count:
        return [order]
    random.Random(seed).shuffle(order)
    return [order[start : start + size] for start in range(0, count, size)]


class Update:
    """Runs one update on one rank. All ranks must be given the same samples and settings.

    A sample stays on one model replica for all epochs, so its old log-probabilities are computed once, and kept where the loss
    needs them: on the last pipeline stage.
    """

    def __init__(self, actor: Actor, samples: Samples, settings: UpdateSettings) -> None:
        self.actor, self.samples, self.settings = actor, samples, settings
        self.steps = mini_batches(len(samples), settings.mini_batch_size, settings.seed)
        self.on_policy = len(self.steps) * settings.epochs == 1
        self.old: dict[int, Tensor] = {}
        names = ["loss", "tokens", "entropy", "clip_fraction", "dual_clip_fraction", "approx_kl"]
        if samples.rollout_logprobs is not None:
            names += ["rollout_kl", "rollout_logprob_gap"]
            names += ["importance_above_cap"] if settings.loss.importance_cap is not None else []
        self.meter = Meter(names, actor.device)

    def run(self, on_step: Callable[[int, int], None] = lambda done, of: None) -> dict[str, float]:
        """Do it; returns the metrics, equal on every rank. `on_step(done, of)` is called after each optimizer step."""
        norms, rates = [], []
        with megatron_device(self.actor.device):
            if not self.on_policy and self.settings.loss.name != "sft":
                self._compute_old_logprobs()
            total = len(self.steps) * self.settings.epochs
            for number in range(total):
                norm, rate = self._optimizer_step(self.steps[number % len(self.steps)])
                norms.append(norm)
                rates.append(rate)
                on_step(number + 1, total)
        return self._metrics(norms, rates)

    @property
    def largest_micro_batch(self) -> int:
        """Tokens of the longest row that this replica will run."""
        rows = [row for indices in self.steps for row in self._micro_batches(indices)[0]]
        return max((sum(self.samples.lengths[i] for i in row) for row in rows), default=0)

    def _micro_batches(self, indices: list[int]) -> tuple[list[list[int]], int]:
        """This replica's micro-batches (sample indices) of a mini-batch, and the highest number that any replica has."""
        lengths = self.samples.lengths
        packs = []
        for share in balanced_split([lengths[i] for i in indices], self.actor.layout.dp):
            members = [indices[i] for i in share]
            bins = pack_by_tokens([lengths[i] for i in members], self.settings.max_tokens_per_micro_batch)
            packs.append([[members[i] for i in packed] for packed in bins])
        return packs[self.actor.coordinates.dp], max(map(len, packs))

    def _run(self, indices: list[int], loss: Callable[[list[int], Tensor, Tensor], Tensor], forward_only: bool) -> None:
        """A mini-batch through the model; `loss` gets the samples of a micro-batch, their log-probabilities and entropies."""
        members, count = self._micro_batches(indices)
        parts = [self.samples.select(part) for part in members]
        self.actor.run(
            [(part.prompts, part.responses) for part in parts],
            count,
            self.settings.temperature,
            lambda number, logprobs, entropies: loss(members[number], logprobs, entropies),
            forward_only=forward_only,
        )

    def _compute_old_logprobs(self) -> None:
        def keep(members: list[int], logprobs: Tensor, entropies: Tensor) -> Tensor:
            pieces = logprobs.split([len(self.samples.responses[i]) for i in members])
            self.old.update(zip(members, pieces, strict=True))
            return logprobs

        with torch.no_grad():
            for indices in self.steps:
                self._run(indices, keep, forward_only=True)

    def _optimizer_step(self, indices: list[int]) -> tuple[float, float]:
        whole = self.samples.select(indices)
        totals = Totals(whole.trained_tokens, whole.trained_sequences, self.settings.horizon)
        self.actor.zero_gradients()
        self._run(indices, partial(self._loss, totals=totals), forward_only=False)
        return self.actor.optimizer_step()

    def _loss(self, members: list[int], logprobs: Tensor, entropies: Tensor, totals: Totals) -> Tensor:
        """The micro-batch's share of the loss; its metrics are counted on the way."""
        part, config = self.samples.select(members), self.settings.loss
        mask, lengths = self._flat(part.masks), [len(r) for r in part.responses]
        old = torch.cat([self.old[i] for i in members]) if self.old else logprobs.detach()
        result = self._token_loss(logprobs, old, part)
        loss = aggregate(result.loss, mask, lengths, config.aggregation, totals)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * aggregate(entropies, mask, lengths, config.aggregation, totals)
        self.meter.add("loss", loss)
        self._measure(part, mask, logprobs.detach(), old, entropies.detach(), result)
        return loss

    def _token_loss(self, logprobs: Tensor, old: Tensor, part: Samples) -> TokenLoss:
        config = self.settings.loss
        if config.name == "sft":
            return sft_loss(logprobs)
        result = ppo_loss(logprobs, old, self._flat(part.advantages), config)
        if config.importance_cap is None or part.rollout_logprobs is None:
            return result
        weights, above = importance_weights(old, self._flat(part.rollout_logprobs), config.importance_cap)
        self.meter.add("importance_above_cap", (above * self._flat(part.masks)).sum())
        return TokenLoss(result.loss * weights, result.clipped, result.dual_clipped)

    def _measure(
        self, part: Samples, mask: Tensor, logprobs: Tensor, old: Tensor, entropies: Tensor, result: TokenLoss
    ) -> None:
        def add(name: str, values: Tensor) -> None:
            self.meter.add(name, torch.where(mask.bool(), values.double(), 0.0).sum())

        self.meter.add("tokens", mask.sum())
        add("entropy", entropies)
        add("clip_fraction", result.clipped)
        add("dual_clip_fraction", result.dual_clipped)
        add("approx_kl", k3(old, logprobs))
        if part.rollout_logprobs is not None:
            rollout = self._flat(part.rollout_logprobs)
            add("rollout_kl", k3(rollout, old))
            add("rollout_logprob_gap", (old - rollout).abs())

    def _flat(self, rows: list[list[float]] | list[list[int]]) -> Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float32, device=self.actor.device)

    def _metrics(self, norms: list[float], rates: list[float]) -> dict[str, float]:
        sums = self.meter.total(self.actor)
        steps, tokens = len(norms), max(1.0, sums.pop("tokens", 0.0))
        metrics = {"loss": sums.pop("loss", 0.0) / steps}
        metrics |= {name: value / tokens for name, value in sums.items()}
        metrics |= {
            "grad_norm": sum(norms) / steps,
            "grad_norm_max": max(norms),
            "lr": rates[-1],
            "optimizer_steps": float(steps),
            "trained_tokens": float(self.samples.trained_tokens * self.settings.epochs),
        }
        return metrics
