"""One policy update: mini-batches, micro-batches, and the loss whose gradient does not depend on how they were cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.layout import replica_rows
from engine.losses.config import LossConfig
from engine.losses.metrics import advantage_statistics, metric_names, summary, token_sums
from engine.losses.objective import MiniBatch, objective, with_statistics
from engine.megatron.cpu import megatron_device
from engine.megatron.meter import Meter
from engine.megatron.tokens import missing_data, token_batch, totals_of
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

    Raises:
        ValueError: the loss needs data that the samples lack.
    """

    def __init__(self, actor: Actor, samples: Samples, settings: UpdateSettings) -> None:
        self.actor, self.samples, self.settings = actor, samples, settings
        self.steps = mini_batches(len(samples), settings.mini_batch_size, settings.seed)
        self.on_policy = len(self.steps) * settings.epochs == 1
        self.old: dict[int, Tensor] = {}
        self._computes_old = not (self.on_policy or settings.loss.correction.bypass or settings.loss.name == "sft")
        if lacks := missing_data(samples, settings.loss):
            raise ValueError(f"the loss {settings.loss.name} as it is set needs {lacks}, which the samples lack")
        self.names = metric_names(
            settings.loss,
            rollout=samples.rollout_logprobs is not None,
            reference=samples.reference_logprobs is not None,
        )
        self.meter = Meter(self.names.all, actor.device)

    def run(self, on_step: Callable[[int, int], None] = lambda done, of: None) -> dict[str, float]:
        """Do it; returns the metrics, equal on every rank. `on_step(done, of)` is called after each optimizer step."""
        taken: list[tuple[float, float]] = []
        with megatron_device(self.actor.device):
            if self._computes_old:
                for indices in self.steps:
                    self.old |= self._logprobs(indices)
            total = len(self.steps) * self.settings.epochs
            for number in range(total):
                taken += self._optimizer_step(self.steps[number % len(self.steps)], number)
                on_step(number + 1, total)
        return self._metrics(taken)

    @property
    def passes(self) -> int:
        """Forward passes that the update's work on each sample is worth: a backward pass counts as two."""
        statistics = self.settings.epochs if self.settings.loss.needs_statistics else 0
        return 3 * self.settings.epochs + statistics + self._computes_old

    @property
    def largest_micro_batch(self) -> int:
        """Tokens of the longest row that this replica will run."""
        rows = [row for indices in self.steps for row in self._micro_batches(indices)[0]]
        return max((sum(self.samples.lengths[i] for i in row) for row in rows), default=0)

    def _micro_batches(self, indices: list[int]) -> tuple[list[list[int]], int]:
        """This replica's micro-batches (sample indices) of a mini-batch, and the highest number that any replica has."""
        at, layout = self.actor.coordinates, self.actor.layout
        return replica_rows(self.samples.lengths, indices, layout.dp, at.dp, self.settings.max_tokens_per_micro_batch)

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

    def _logprobs(self, indices: list[int]) -> dict[int, Tensor]:
        """Log-probabilities of this replica's samples of a mini-batch under the present weights; on the last stage only."""
        found: dict[int, Tensor] = {}

        def keep(members: list[int], logprobs: Tensor, entropies: Tensor) -> Tensor:
            found.update(zip(members, logprobs.split([len(self.samples.responses[i]) for i in members]), strict=True))
            return logprobs

        with torch.no_grad():
            self._run(indices, keep, forward_only=True)
        return found

    def _whole(self, indices: list[int], rows: dict[int, Tensor]) -> Tensor:
        """[tokens of the mini-batch] fp64 in the order of its samples, on every rank, from what the replicas' last stages hold."""
        parts = [
            rows[i].double() if i in rows else torch.zeros(len(self.samples.responses[i]), dtype=torch.float64)
            for i in indices
        ]
        values = torch.cat([part.to(self.actor.device) for part in parts])
        self.actor.sum_over_ranks(values)
        return values

    def _optimizer_step(self, indices: list[int], number: int) -> list[tuple[float, float]]:
        """Gradient norm and rate of the step; nothing where no token is trained on, and then no weight changes."""
        mini_batch = self._mini_batch(indices, number)
        if mini_batch.totals.tokens == 0:
            return []
        selected: dict[int, Tensor] = {}
        if mini_batch.selected is not None:
            pieces = mini_batch.selected.split([len(self.samples.responses[i]) for i in indices])
            selected = dict(zip(indices, pieces, strict=True))
        self.actor.zero_gradients()
        self._run(indices, partial(self._loss, mini_batch=mini_batch, selected=selected), forward_only=False)
        return [self.actor.optimizer_step()]

    def _mini_batch(self, indices: list[int], number: int) -> MiniBatch:
        """Counts of a mini-batch, and what its loss must know of all its tokens, from a forward pass of its own if need be."""
        config, part = self.settings.loss, self.samples.select(indices)
        totals, good = totals_of(part, config, self.settings.horizon)
        if totals.tokens == 0 or not config.needs_statistics:
            return MiniBatch(totals, good)
        logprobs = self._whole(indices, self._logprobs(indices))
        off_policy = not (self.on_policy or config.correction.bypass)
        old = self._whole(indices, self.old) if off_policy else logprobs
        whole = token_batch(part, config, logprobs, torch.zeros_like(logprobs), old)
        return with_statistics(whole, config, totals, good, self.settings.seed + number)

    def _loss(
        self,
        members: list[int],
        logprobs: Tensor,
        entropies: Tensor,
        mini_batch: MiniBatch,
        selected: dict[int, Tensor],
    ) -> Tensor:
        """The micro-batch's share of the loss; its metrics are counted on the way."""
        old = torch.cat([self.old[i] for i in members]) if self.old else logprobs.detach()
        batch = token_batch(self.samples.select(members), self.settings.loss, logprobs, entropies, old)
        if selected:
            batch = replace(batch, selected=torch.cat([selected[i] for i in members]))
        result = objective(batch, self.settings.loss, mini_batch)
        self.meter.add(token_sums(result, self.settings.loss))
        return result.loss

    def _metrics(self, taken: list[tuple[float, float]]) -> dict[str, float]:
        sums, steps, config = self.meter.total(self.actor), len(taken), self.settings.loss
        metrics = summary(sums, self.names, steps) | {
            "optimizer_steps": float(steps),
            "trained_tokens": float(self.samples.trained_tokens * self.settings.epochs),
        }
        if taken:
            norms = [norm for norm, _ in taken]
            metrics |= {"grad_norm": sum(norms) / steps, "grad_norm_max": max(norms), "lr": taken[-1][1]}
        if config.name != "sft":
            metrics |= advantage_statistics(self.samples.advantages, self.samples.masks)
        if config.kl.coef:
            metrics["kl_coef"] = config.kl.coef
        return metrics
