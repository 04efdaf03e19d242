"""One update of the critic on the samples of a policy update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layout import replica_rows
from engine.losses.aggregate import Totals, aggregate
from engine.losses.value import explained_variance, value_loss, value_moments
from engine.megatron.cpu import megatron_device
from engine.megatron.update import mini_batches
from engine.roles.critic import Critic
from engine.samples import Ragged, Samples


@dataclass(frozen=True)
class ValueSettings:
    """How a batch of samples becomes optimizer steps of the critic.

    Attributes:
        clip: predictions are held this near to those before the update; None: plain squared error.
        mini_batch_size, epochs, max_tokens_per_micro_batch, seed: as for the policy, so that both see the same mini-batches.
    """

    clip: float | None
    mini_batch_size: int | None
    epochs: int
    max_tokens_per_micro_batch: int
    seed: int


class ValueUpdate:
    """Runs one update on one rank. All ranks must be given the same samples.

    Args:
        values, returns: [samples][response tokens] predictions before the update, and what they should have been.
    """

    def __init__(
        self, critic: Critic, samples: Samples, values: Ragged, returns: Ragged, settings: ValueSettings
    ) -> None:
        self.critic, self.samples, self.settings = critic, samples, settings
        self.values, self.returns = values, returns
        self.steps = mini_batches(len(samples), settings.mini_batch_size, settings.seed)
        self.sums = torch.zeros(7, dtype=torch.float64, device=critic.device)  # moments, loss, clipped

    def run(self) -> dict[str, float]:
        """Do it; returns the metrics, equal on every rank."""
        taken = []
        with megatron_device(self.critic.device):
            for number in range(len(self.steps) * self.settings.epochs):
                taken += self._optimizer_step(self.steps[number % len(self.steps)])
            self.critic.sum_over_ranks(self.sums)
        if not taken:
            return {}
        count, steps = max(1.0, self.sums[0].item()), len(taken)
        metrics = {
            "value_loss": self.sums[5].item() / steps,
            "value_clip_fraction": self.sums[6].item() / count,
            "value_grad_norm": sum(norm for norm, _ in taken) / steps,
            "value_lr": taken[-1][1],
        }
        explained = explained_variance(self.sums[:5])
        return metrics if explained is None else {**metrics, "explained_variance": explained}

    def _optimizer_step(self, indices: list[int]) -> list[tuple[float, float]]:
        """Gradient norm and rate of the step; nothing where no token is trained on."""
        part = self.samples.select(indices)
        totals = Totals(part.trained_tokens, part.trained_sequences, 1)
        if totals.tokens == 0:
            return []
        layout, replica, limit = (
            self.critic.layout,
            self.critic.coordinates.dp,
            self.settings.max_tokens_per_micro_batch,
        )
        members, count = replica_rows(self.samples.lengths, indices, layout.dp, replica, limit)
        batches = [
            ([self.samples.prompts[i] for i in row], [self.samples.responses[i] for i in row]) for row in members
        ]
        self.critic.zero_gradients()
        self.critic.run(batches, count, 1.0, lambda number, values, _: self._loss(members[number], values, totals))
        return [self.critic.optimizer_step()]

    def _loss(self, row: list[int], values: Tensor, totals: Totals) -> Tensor:
        mask = self._flat([self.samples.masks[i] for i in row])
        zero = torch.zeros_like(mask)
        old, returns = (
            torch.where(mask.bool(), self._flat([rows[i] for i in row]), zero) for rows in (self.values, self.returns)
        )
        losses, clipped = value_loss(values, old, returns, self.settings.clip)
        lengths = [len(self.samples.responses[i]) for i in row]
        loss = aggregate(losses, mask, lengths, "token-mean", totals)
        self.sums[:5] += value_moments(values, returns, mask)
        self.sums[5] += loss.detach().double()
        self.sums[6] += (clipped & mask.bool()).sum().double()
        return loss

    def _flat(self, rows: list[list[float]] | list[list[int]]) -> Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float32, device=self.critic.device)
