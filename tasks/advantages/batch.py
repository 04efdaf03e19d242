"""What an estimator sees: the rewards of one step, their groups, and ragged numbers a token. No padding anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

PER_TOKEN = ("token_rewards", "rollout_logprobs", "reference_logprobs", "values", "sum_pi_squared")
"""Optional attributes of a batch that hold one number a token."""


@dataclass(frozen=True)
class Batch:
    """The samples of one step. All response tokens lie one after another; sample i has `offsets[i] : offsets[i + 1]`.

    Whatever an array holds where the mask is False is replaced by 0 when the batch is made, so that no estimator can be misled
    by it, NaN included.

    Attributes:
        outcomes: (samples,) what the reward function gave; NaN where scoring failed.
        groups: (samples,) equal for the samples of one prompt, counted from 0.
        offsets: (samples + 1,) where each response begins and ends.
        mask: (tokens,) True for trained tokens; False for what a tool or an environment wrote.
        token_rewards: (tokens,) what is added to the reward at single tokens, such as a KL penalty.
        rollout_logprobs, reference_logprobs: (tokens,) log-probabilities in nats.
        values: (tokens,) the critic's estimate before the token.
        sum_pi_squared: (tokens,) sum over the vocabulary of the squared probabilities.
        greedy_rewards: (samples,) reward of the greedy answer to the sample's prompt.
        components: parts of the reward by name, (samples,) each; NaN where a sample does not have it.
    """

    outcomes: Floats
    groups: Ints
    offsets: Ints
    mask: Bools
    token_rewards: Floats | None = None
    rollout_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    values: Floats | None = None
    sum_pi_squared: Floats | None = None
    greedy_rewards: Floats | None = None
    components: Mapping[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, np.where(self.mask, np.asarray(values, dtype=np.float64), 0.0))

    @classmethod
    def of(
        cls,
        rewards: Sequence[float | None],
        group_ids: Sequence[str],
        token_counts: Sequence[int] | None = None,
        masks: Sequence[Sequence[int]] | None = None,
        **further: Any,
    ) -> Batch:
        """From plain columns; a missing reward is None (or NaN).

        Args:
            token_counts: trained tokens of each sample, if there are no others; without it every sample has one.
            masks: a mask a sample, instead of `token_counts`.
            further: attributes by name; those with one number a token are flat.
        """
        if masks is None:
            masks = [[1] * count for count in token_counts or [1] * len(rewards)]
        return cls(
            outcomes=np.array([np.nan if r is None else r for r in rewards], dtype=np.float64),
            groups=numbered(group_ids),
            offsets=np.cumsum([0, *map(len, masks)], dtype=np.int64),
            mask=np.array([bool(m) for mask in masks for m in mask], dtype=bool),
            **further,
        )

    @cached_property
    def sample_of_token(self) -> Ints:
        """(tokens,) index of the sample that a token belongs to."""
        return np.repeat(np.arange(len(self.outcomes)), np.diff(self.offsets))

    @cached_property
    def token_counts(self) -> Ints:
        """(samples,) trained tokens."""
        return np.bincount(self.sample_of_token[self.mask], minlength=len(self.outcomes)).astype(np.int64)

    @cached_property
    def rewards(self) -> Floats:
        """(samples,) everything a sample earned: its outcome and what its tokens were given beside it."""
        if self.token_rewards is None:
            return self.outcomes
        return self.outcomes + self.sample_sums(self.token_rewards)

    @cached_property
    def scored(self) -> Bools:
        """(samples,) True where there is a finite reward, and a greedy one if there are such. Only these enter any statistic."""
        scored = np.isfinite(self.rewards)
        return scored if self.greedy_rewards is None else scored & np.isfinite(self.greedy_rewards)

    @property
    def comparable(self) -> Bools:
        """(samples,) True where the sample is scored and at least one other sample of its group is."""
        return self.scored & (self.group_sizes()[self.groups] > 1)

    def rewards_by_token(self) -> Floats:
        """(tokens,) the outcome at the last trained token of its sample, and the token rewards where they are."""
        placed = np.zeros(len(self.mask)) if self.token_rewards is None else self.token_rewards.copy()
        last = np.full(len(self.outcomes), -1)
        last[self.sample_of_token[self.mask]] = np.flatnonzero(self.mask)  # of equal indices the last one stays
        earned = (last >= 0) & self.scored
        placed[last[earned]] += self.outcomes[earned]
        return placed

    def spread(self, per_sample: Floats) -> Floats:
        """(tokens,) a sample's number at each of its trained tokens, 0 at the others."""
        return np.where(self.mask, np.asarray(per_sample, dtype=np.float64)[self.sample_of_token], 0.0)

    def sample_sums(self, per_token: Floats) -> Floats:
        """(samples,) sum over the trained tokens of each sample."""
        owners, values = self.sample_of_token[self.mask], per_token[self.mask]
        return np.bincount(owners, weights=values, minlength=len(self.outcomes)).astype(np.float64)

    def group_sums(self, per_sample: Floats) -> Floats:
        """(groups,) sum over the scored samples of each group."""
        values = np.where(self.scored, per_sample, 0.0)
        return np.bincount(self.groups, weights=values, minlength=self._group_count()).astype(np.float64)

    def group_sizes(self) -> Ints:
        """(groups,) scored samples of each group."""
        return self.group_sums(np.ones(len(self.outcomes))).astype(np.int64)

    def group_means(self) -> Floats:
        """(groups,) mean of the scored rewards; 0 for a group without any."""
        return self.group_sums(self.rewards) / np.maximum(self.group_sizes(), 1)

    def group_deviations(self) -> Floats:
        """(groups,) sample standard deviation (ddof 1) of the scored rewards; 0 for a group of one."""
        squares = self.group_sums((self.rewards - self.group_means()[self.groups]) ** 2)
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

    def centred(self) -> Floats:
        """(samples,) reward minus the mean of its group; exactly 0 where the group is constant or the sample not scored."""
        centred = self.rewards - self.group_means()[self.groups]
        return np.where(self.constant_groups()[self.groups] | ~self.scored, 0.0, centred)

    def _group_count(self) -> int:
        return int(self.groups.max()) + 1 if len(self.groups) else 0


def numbered(group_ids: Sequence[str]) -> Ints:
    """(samples,) group ids as numbers from 0."""
    _, groups = np.unique(np.asarray(group_ids, dtype=str), return_inverse=True)
    return groups.astype(np.int64).reshape(-1)
