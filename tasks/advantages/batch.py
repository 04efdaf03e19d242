"""What an estimator sees: one number a sample, its group, and how many of its tokens are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rewards of one step, ragged: no padding and no fixed group size.

    Attributes:
        rewards: (samples,) float64; NaN where scoring failed.
        groups: (samples,) int64, equal for the samples of one prompt.
        token_counts: (samples,) int64, response tokens that take part in the loss.
    """

    rewards: Floats
    groups: Ints
    token_counts: Ints

    @classmethod
    def of(
        cls, rewards: Sequence[float | None], group_ids: Sequence[str], token_counts: Sequence[int] | None = None
    ) -> Batch:
        """From plain columns; a missing reward is None (or NaN). Without token counts every sample weighs the same."""
        _, groups = np.unique(np.asarray(group_ids, dtype=str), return_inverse=True)
        counts = np.ones(len(rewards)) if token_counts is None else token_counts
        return cls(
            rewards=np.array([np.nan if r is None else r for r in rewards], dtype=np.float64),
            groups=groups.astype(np.int64).reshape(-1),
            token_counts=np.asarray(counts, dtype=np.int64),
        )

    @property
    def scored(self) -> Bools:
        """(samples,) True where there is a finite reward. Only these may enter any statistic."""
        return np.isfinite(self.rewards)

    @property
    def comparable(self) -> Bools:
        """(samples,) True where the sample is scored and at least one other sample of its group is."""
        return self.scored & (self.group_sizes()[self.groups] > 1)

    def group_sizes(self) -> Ints:
        """(groups,) scored samples of each group."""
        return np.bincount(self.groups, weights=self.scored, minlength=self._group_count()).astype(np.int64)

    def group_means(self) -> Floats:
        """(groups,) mean of the scored rewards; 0 for a group without any."""
        sums = np.bincount(self.groups, weights=np.where(self.scored, self.rewards, 0.0), minlength=self._group_count())
        return sums / np.maximum(self.group_sizes(), 1)

    def group_deviations(self) -> Floats:
        """(groups,) sample standard deviation (ddof 1) of the scored rewards; 0 for a group of one."""
        centred = np.where(self.scored, self.rewards - self.group_means()[self.groups], 0.0)
        squares = np.bincount(self.groups, weights=centred**2, minlength=self._group_count())
        return np.sqrt(squares / np.maximum(self.group_sizes() - 1, 1))

    def constant_groups(self, tolerance: float = 1e-6) -> Bools:
        """(groups,) True where all scored rewards are the same number.

        Compared with a tolerance: 0.1 stored in different precisions, or summed in another order, is still the same reward,
        and rounding noise divided by its own deviation would become a training signal of size one.
        """
        lowest = np.full(self._group_count(), np.inf)
        highest = np.full(self._group_count(), -np.inf)
        np.minimum.at(lowest, self.groups[self.scored], self.rewards[self.scored])
        np.maximum.at(highest, self.groups[self.scored], self.rewards[self.scored])
        empty = self.group_sizes() == 0
        lowest[empty], highest[empty] = 0.0, 0.0
        scale = np.maximum(1.0, np.maximum(np.abs(lowest), np.abs(highest)))
        return highest - lowest <= tolerance * scale

    def _group_count(self) -> int:
        return int(self.groups.max()) + 1 if len(self.groups) else 0


def whiten(values: Floats, weights: Ints | Floats, eps: float = 1e-8) -> Floats:
    """Shift to mean 0 and scale to deviation 1, weighted; entries of weight 0 have no influence and become 0.

    Args:
        values: (n,); anything, NaN included, where the weight is 0.
        weights: (n,) how often each value counts (trained tokens of a sample); the variance divides by their sum - 1.
        eps: added to the variance, so that equal values give 0 and one value alone does not divide by zero.
    """
    total = float(weights.sum())
    if total == 0:
        return np.zeros_like(values)
    used = np.where(weights > 0, values, 0.0)
    mean = float((weights * used).sum()) / total
    variance = float((weights * (used - mean) ** 2).sum()) / max(total - 1.0, 1.0)
    return np.where(weights > 0, (used - mean) / np.sqrt(variance + eps), 0.0)
