"""Reward of the `reasoning-gym` data sets: each brings its own verifier, found by the name inside the prompt's entry."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from tasks.rewards.registry import reward

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward("reasoning_gym")
def reasoning_gym(response: str, extra: dict[str, Any]) -> float:
    """What the data set's own `score_answer` gives, 0 to 1 (some give partial credit).

    The answer is the last `<answer>...</answer>` of the response, or the whole response where there is none.

    Raises:
        ValueError: the prompt did not come from reasoning-gym (its `extra` is not one of its entries).
    """
    name = (extra.get("metadata") or {}).get("source_dataset")
    if name is None:
        raise ValueError(
            "the prompt is not a reasoning-gym entry; this reward needs data.task: reasoning_gym:<data set>"
        )
    tagged = _TAGGED.findall(response)
    return float(_verifier(name)((tagged[-1] if tagged else response).strip(), extra))


@lru_cache(maxsize=64)
def _verifier(name: str) -> Any:
    # Imported on first use: a second of start-up that only runs with this reward should pay.
    import reasoning_gym as gym

    return gym.get_score_answer_fn(name)
