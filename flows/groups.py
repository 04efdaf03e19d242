"""The devices of a run: which groups there are, what each builds, and getting hold of them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

from prefect.runtime import flow_run

from engine.pool.client import PoolClient
from engine.pool.config import PoolConfig
from engine.pool.errors import PoolError
from flows.checks import Prepared
from flows.config import PostTrainConfig, TrainConfig
from flows.placement import ACTOR, group_of, parallel_of, pool_name
from tasks.devices import DeviceGroup, Pool

LEASE_WAIT_S = 600.0
"""How long to wait for devices that another run holds."""


class LeasedPool(Pool, Protocol):
    """The part of `PoolClient` that a run uses beside its operations."""

    def lease(self, run: str, holder: str, wait_s: float) -> Any: ...

    def release(self, lease: Any) -> Any: ...

    def stop(self) -> Any: ...


def leased_groups(config: TrainConfig, prepared: Prepared, run: str) -> list[DeviceGroup]:
    """All groups of devices, leased and with engines that fit, the actor's first: whoever has that one gets the others.

    Raises:
        PoolError: a pool cannot be started, or another run holds it; none is held then.
    """
    groups: list[DeviceGroup] = []
    try:
        for name, roles in group_roles(config, prepared).items():
            groups.append(_leased(config, name, roles, group_spec(config, prepared, name, roles), run))
    except BaseException:
        release(groups)
        raise
    return groups


def release(groups: Iterable[DeviceGroup]) -> None:
    """Give devices back. A lease that cannot be given back ends by itself."""
    for group in groups:
        with contextlib.suppress(PoolError):
            group.pool.release(group.lease)  # type: ignore[attr-defined]  # LeasedPool: they come from `leased_groups`


def group_roles(config: TrainConfig, prepared: Prepared) -> dict[str, frozenset[str]]:
    """The run's groups, the actor's first, and the roles of the models in each."""
    roles: dict[str, set[str]] = {ACTOR: {ACTOR}}
    for role in prepared.companions:
        roles.setdefault(group_of(config, role), set()).add(role)
    return {name: frozenset(group) for name, group in roles.items()}


def group_spec(config: TrainConfig, prepared: Prepared, name: str, roles: frozenset[str]) -> dict[str, Any]:
    """What the ranks of a group build: models (folders that exist here), layout, optimizer and generation engine."""
    generation = {**config.generation.model_dump(mode="json"), "max_model_len": prepared.context_tokens}
    model = {**config.model.model_dump(mode="json"), "path": prepared.folder}
    return {
        **_companion_specs(config, prepared, roles),
        "model": model if name == ACTOR else None,
        "parallel": parallel_of(config, name).model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "generation": generation if name == ACTOR and config.generates else None,
        "seed": config.seed,
    }


def get_pool(config: PoolConfig, ranks: int) -> LeasedPool:
    """The pool of that name, started if it is not up."""
    return PoolClient.attach_or_start(config, ranks)


def _leased(config: TrainConfig, name: str, roles: frozenset[str], spec: dict[str, Any], run: str) -> DeviceGroup:
    """A group's pool, leased, with engines that fit: engines built for another model or layout are started anew.

    Nobody loses by that: whoever holds the lease is the pool's only user.
    """
    wanted = config.pool.model_copy(update={"name": pool_name(config, name)})
    holder = str(flow_run.id or f"process {os.getpid()}")
    for _ in range(2):
        pool = get_pool(wanted, parallel_of(config, name).world_size)
        lease = pool.lease(run=run, holder=holder, wait_s=LEASE_WAIT_S)
        reason = _misfit(pool, lease, spec, wanted.operation_timeout_s)
        if reason is None:
            return DeviceGroup(name, roles, pool, lease, spec)
        print(f"pool {wanted.name} is started anew: its engines were built with {reason}", file=sys.stderr)
        pool.stop()
    raise PoolError(f"a new pool's engines still do not fit: {reason}")


def _misfit(pool: LeasedPool, lease: Any, spec: dict[str, Any], timeout_s: float) -> str | None:
    """What the running engines were built with otherwise; None if they fit or are not there yet."""
    try:
        result = pool.call("fits", f"fits/{lease.token}/{time.monotonic_ns()}", {"spec": spec}, lease, None, timeout_s)
    except BaseException:
        pool.release(lease)
        raise
    return result["ranks"][0]["different"]


def _companion_specs(config: TrainConfig, prepared: Prepared, roles: frozenset[str]) -> dict[str, Any]:
    """Those of the models beside the actor that are in a group, as its ranks build them; None for the others."""
    specs: dict[str, Any] = {"reference": None, "critic": None}
    if not isinstance(config, PostTrainConfig):
        return specs
    for key in prepared.companions.keys() & roles:
        model = getattr(config, key).model or config.model
        specs[key] = {**model.model_dump(mode="json"), "path": prepared.companions[key].folder}
    if specs["critic"] is not None:
        specs["critic"] = {**config.critic.model_dump(mode="json"), "model": specs["critic"]}
    return specs
