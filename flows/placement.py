"""Which group of devices each of a run's models is in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set

from engine.config import ParallelConfig
from flows.config import PostTrainConfig, TrainConfig

ACTOR = "actor"
"""Name of the actor's group; its pool has the configured name, the others' theirs behind it."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def pool_name(config: TrainConfig, group: str) -> str:
    """Name of a group's pool."""
    return config.pool.name if group == ACTOR else f"{config.pool.name}-{group}"


def group_of(config: TrainConfig, role: str) -> str:
    """The group that a role's model is in; with the actor if it is not placed."""
    placement = config.placement if isinstance(config, PostTrainConfig) else {}
    return next((name for name, group in placement.items() if role in group.roles), ACTOR)


def parallel_of(config: TrainConfig, group: str) -> ParallelConfig:
    """How models are divided in a group."""
    return (
        config.placement[group].parallel if isinstance(config, PostTrainConfig) and group != ACTOR else config.parallel
    )


def placement_problems(config: PostTrainConfig, needed: Set[str]) -> Iterator[tuple[str, str]]:
    """Key and message of everything that is wrong with the placement.

    Args:
        needed: roles of the models beside the actor that the run has.
    """
    longest = 40  # of a pool's name
    times = Counter(role for group in config.placement.values() for role in group.roles)
    for name, group in config.placement.items():
        key = f"placement.{name}"
        if not _NAME.fullmatch(name) or name == ACTOR or len(pool_name(config, name)) > longest:
            yield (
                key,
                f"a group is named with a-z, 0-9, - and _, not {ACTOR!r}, and pool.name and it have at most {longest - 1}"
                " characters together",
            )
        for role in group.roles:
            if role not in needed:
                yield f"{key}.roles", f"this run has no {role}: neither its losses nor its estimator need one"
            if times[role] > 1:
                yield f"{key}.roles", f"{role} is placed {times[role]} times"
