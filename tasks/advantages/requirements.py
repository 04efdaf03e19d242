"""What an algorithm's settings need of the rest of a configuration, found before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import GenerationConfig
from tasks.advantages.config import AlgorithmConfig
from tasks.advantages.registry import ABSENT, NEEDS, Estimator, find_estimator
from tasks.plugins import UnknownFunction
from tasks.rewards.config import RewardConfig

Problem = tuple[tuple[str, ...], str]
"""Dotted keys, and what is wrong with them."""


def problems(algorithm: AlgorithmConfig, generation: GenerationConfig, reward: RewardConfig) -> Iterator[Problem]:
    """Every reason why the step's samples could not be made or be given advantages."""
    try:
        yield from _of_estimator(find_estimator(algorithm.estimator), algorithm, generation, reward)
    except UnknownFunction as error:
        yield ("algorithm.estimator",), str(error)
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield ("algorithm.kl_target", "algorithm.kl_coef"), "a coefficient of 0 stays 0, whatever the target"
    if algorithm.dynamic_sampling and generation.samples_per_prompt < 2:
        yield (
            ("algorithm.dynamic_sampling", "generation.samples_per_prompt"),
            "a group of one never has any variance: every group would be replaced",
        )
    if reward.overlong_buffer is not None and reward.overlong_buffer > generation.max_response_tokens:
        yield (
            ("reward.overlong_buffer", "generation.max_response_tokens"),
            f"the last {reward.overlong_buffer} tokens of {generation.max_response_tokens} cannot be penalised",
        )


def _of_estimator(
    found: Estimator, algorithm: AlgorithmConfig, generation: GenerationConfig, reward: RewardConfig
) -> Iterator[Problem]:
    if found.group and generation.samples_per_prompt < 2:
        yield (
            ("generation.samples_per_prompt",),
            f"must be at least 2: {found.name} compares the samples of one prompt with each other",
        )
    for need in found.needs:
        if need in ABSENT:
            yield ("algorithm.estimator",), f"{found.name} needs {_absent(need)}"
    if "components" in found.needs and not algorithm.gdpo_weights:
        yield (
            ("algorithm.gdpo_weights",),
            f"{found.name} needs at least one component of the reward with its weight",
        )
    if found.name == "maxrl" and reward.overlong_buffer is not None:
        yield (
            ("algorithm.estimator", "reward.overlong_buffer"),
            "maxrl needs rewards from 0 up, a penalty for length makes them negative",
        )


def _absent(need: str) -> str:
    return f"{NEEDS[need]}, which this release of onecopy does not have"
