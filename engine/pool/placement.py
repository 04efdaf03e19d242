"""Decides the device of a pool and where in the Ray cluster its ranks run."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.pool.errors import PoolError


@dataclass(frozen=True)
class Placement:
    """Ray options of each rank, and how many ranks share the fullest node."""

    options: list[dict[str, Any]]
    ranks_on_node: int


def choose_device(wanted: str, ranks: int) -> str:
    """Turn "auto" into "cuda" or "cpu", and refuse more ranks than the cluster has GPUs.

    Raises:
        PoolError: naming how many GPUs are wanted, present and free.
    """
    present = int(ray.cluster_resources().get("GPU", 0))
    if wanted == "cpu" or (wanted == "auto" and present == 0):
        return "cpu"
    if present < ranks:
        raise PoolError(f"{ranks} ranks need {ranks} GPUs, but Ray has {present}; use fewer ranks or device=cpu")
    return "cuda"


async def place(device: str, ranks: int, timeout_s: float) -> Placement:
    """Reserve what the ranks need, all or nothing, so that two starting pools never hold half each.

    On GPUs, consecutive ranks share a node: tensor parallelism runs over consecutive ranks and needs the fast links.
    CPU ranks ask Ray for nothing, so that there may be more of them than cores.

    Raises:
        PoolError: the GPUs did not become free in time.
    """
    if device == "cpu":
        return Placement([{"num_cpus": 0}] * ranks, ranks)
    group = placement_group([{"GPU": 1}] * ranks, strategy="PACK")
    ready = asyncio.ensure_future(_settled(group.ready()))
    done, _ = await asyncio.wait({ready}, timeout=timeout_s)
    if not done:
        free = int(ray.available_resources().get("GPU", 0))
        raise PoolError(f"waited {timeout_s:.0f} s for {ranks} free GPUs; {free} are free, the others are in use")
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))
    options = [
        {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
        for bundle in order
    ]
    return Placement(options, max(Counter(nodes.values()).values()))


async def _settled(reference: Any) -> None:
    """Wait for a Ray reference; asyncio's own functions do not take one."""
    await reference
