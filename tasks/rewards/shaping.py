"""What is added to a reward for the length of the response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.rewards.scoring import Scored

UNSHAPED = "unshaped_reward"
"""Component that keeps what the reward function gave, wherever something was added to it."""

PENALTY = "overlong_penalty"
"""Component that keeps what was added."""


def overlong_penalty(lengths: Sequence[int], longest: int, buffer: int, factor: float) -> NDArray[np.float64]:
    """DAPO's soft penalty (arXiv 2503.14476, eq. 13): 0 up to `longest - buffer` tokens, then linear down to -factor at `longest`.

    With longest 20, buffer 4 and factor 1: 16 gives 0, 17 gives -.25, 20 gives -1.
    """
    beyond = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return 0.0 - factor * np.clip(beyond / buffer, 0.0, 1.0)


def penalise_length(rows: Sequence[Scored], penalties: Sequence[float]) -> list[Scored]:
    """The rows with their penalties added; both parts become components. Rows without a reward stay as they are."""
    return [
        row if row.reward is None else _shaped(row, row.reward, float(penalty))
        for row, penalty in zip(rows, penalties, strict=True)
    ]


def _shaped(row: Scored, reward: float, penalty: float) -> Scored:
    components = {**json.loads(row.components), UNSHAPED: reward, PENALTY: penalty}
    return replace(row, reward=reward + penalty, components=json.dumps(components))


def unshaped(reward: float | None, components: dict[str, Any]) -> float | None:
    """What the reward function gave, from a row's reward and components."""
    return components.get(UNSHAPED, reward)
