"""Metrics that add up over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.roles.actor import Actor


class Meter:
    """Sums of metrics on this rank, added up over all ranks once, at the end.

    The names are fixed beforehand: a rank without a sample, or of another than the last pipeline stage, takes part with zeros.
    """

    def __init__(self, names: list[str], device: str) -> None:
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add scalars; raises KeyError for a name that the other ranks would not reduce."""
        for name, value in values.items():
            self.sums[name] += value.detach().double()

    def total(self, actor: Actor) -> dict[str, float]:
        """The sums over all samples, equal on every rank."""
        values = torch.stack(list(self.sums.values()))
        actor.sum_over_ranks(values)
        return dict(zip(self.sums, values.tolist(), strict=True))
