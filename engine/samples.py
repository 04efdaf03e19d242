"""Ragged training samples: what an update reads from the staged datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Ragged = list[list[float]]


@dataclass(frozen=True)
class Samples:
    """Prompt and response tokens with one number a response token for each training quantity.

    Attributes:
        prompts, responses: token ids.
        masks: 1 where a response token is trained on (0: tool output, a failed reward).
        advantages: per response token.
        rollout_logprobs: log-probabilities under the policy that generated; None for demonstrations.
        reference_logprobs: under the frozen reference policy; None where there is none.
        rewards: one a sample; None for demonstrations.
        values, returns: per response token, what the critic predicted and should have; None without one.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    masks: list[list[int]]
    advantages: Ragged
    rollout_logprobs: Ragged | None = None
    reference_logprobs: Ragged | None = None
    rewards: list[float] | None = None
    values: Ragged | None = None
    returns: Ragged | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        return [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]

    @property
    def trained_tokens(self) -> int:
        return sum(sum(mask) for mask in self.masks)

    @property
    def trained_sequences(self) -> int:
        return sum(any(mask) for mask in self.masks)

    def select(self, indices: Sequence[int]) -> Samples:
        """The samples at `indices`, in that order."""

        def of(rows: list[T]) -> list[T]:
            return [rows[i] for i in indices]

        def of_any(rows: list[T] | None) -> list[T] | None:
            return None if rows is None else of(rows)

        return Samples(
            of(self.prompts),
            of(self.responses),
            of(self.masks),
            of(self.advantages),
            of_any(self.rollout_logprobs),
            of_any(self.reference_logprobs),
            of_any(self.rewards),
            of_any(self.values),
            of_any(self.returns),
        )
