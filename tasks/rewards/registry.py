"""The registry of reward functions, and how one is called.

A reward function takes any of these by name and ignores the rest (the annotation says the type):

    response: str               decoded response, special tokens left out
    answer: str                 ground truth of the prompt (JSON text where the data set had a structure)
    prompt: str                 prompt text as the model saw it
    extra: dict[str, Any]       further columns of the prompt, plain Python values
    response_tokens: list[int]  sampled token ids
    finish_reason: str          "stop" or "length"
    sample_id: str

It returns a number (int, float, bool, Decimal, NumPy scalar, or anything with `.item()` that gives one), a pair
(number, components), or a mapping with the key "reward" or "score"; what else is in the mapping is kept as components. Anything
else (None, NaN, infinity, text, a list, a coroutine) is an error of that sample, handled by `RewardConfig.on_error`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from numbers import Real
from typing import Any

from tasks.plugins import Registry, UnknownFunction

RewardFunction = Callable[..., Any]

REWARDS: Registry[RewardFunction] = Registry("reward function")
reward = REWARDS.register


@dataclass(frozen=True)
class Sample:
    """Everything a reward function may ask for."""

    sample_id: str
    response: str
    answer: str
    prompt: str
    extra: dict[str, Any]
    response_tokens: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Score:
    """A sample's reward and what it is made of."""

    reward: float
    components: dict[str, Any]


def bind(name: str) -> Callable[[Sample], Score]:
    """The reward function `name` as a call on a sample.

    Raises:
        UnknownFunction: it does not exist, is asynchronous, or requires an argument that a sample does not have.
    """
    function = REWARDS.find(name)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise UnknownFunction(f"reward function {name!r} is asynchronous; give a plain function")
    wanted = _arguments(function, name)

    def score(sample: Sample) -> Score:
        return as_score(function(**{argument: getattr(sample, argument) for argument in wanted}))

    return score


def _arguments(function: RewardFunction, name: str) -> list[str]:
    offered = [field.name for field in fields(Sample)]
    wanted: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return offered
        if parameter.name in offered and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            raise UnknownFunction(
                f"reward function {name!r} requires the argument {parameter.name!r}; a sample offers {', '.join(offered)}"
            )
    return wanted


def as_score(value: Any) -> Score:
    """Read a reward function's return value.

    Raises:
        TypeError: not one of the accepted types.
        ValueError: a number that is NaN or infinite, or a mapping without a reward.
    """
    if isinstance(value, Mapping):
        key = "reward" if "reward" in value else "score"
        if key not in value:
            raise ValueError(f"the reward function returned a mapping without 'reward': {sorted(map(str, value))}")
        return Score(_number(value[key]), {str(k): v for k, v in value.items() if k != key})
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[1], Mapping):
            raise TypeError("the reward function returned a tuple that is not (number, mapping of components)")
        return Score(_number(value[0]), {str(k): v for k, v in value[1].items()})
    return Score(_number(value), {})


def _number(value: Any) -> float:
    if not isinstance(value, Real | Decimal) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise TypeError(f"the reward function returned {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward function returned {number}")
    return number
