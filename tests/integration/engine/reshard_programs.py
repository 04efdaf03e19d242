"""Transitions of bare weights over gloo: no engine, many layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from engine.reshard.execute import Execution
from engine.reshard.plan import plan_generation, reversed_plan
from tests.support.layouts import nothing, random_cases, shards, whole_tensors


class Poisoned(Execution):
    """Staging memory holds NaN before every use: a number that was not received shows."""

    def _buffer(self, size: int) -> torch.Tensor:
        return super()._buffer(size).fill_(float("nan"))


def transitions(count: int, seed: int, bucket_bytes: int, ranks_per_node: int) -> dict[str, Any]:
    """Random cases, there and back: descriptions of those where a tensor is not bit for bit what it must be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong, moved, phases, staging = [], 0, 0, 0
    for arch, train, generate in random_cases(world, count, seed):
        plan = plan_generation(arch, train, generate, bytes_per_number=8, ranks_per_node=ranks_per_node)
        tensors = whole_tensors(arch)
        moving = {
            m.weight.megatron for part in plan.classes if part.division not in plan.resident for m in part.members
        }

        def of(
            maker: Any, side: Any, *args: Any, moving: set[str] = moving, arch: Any = arch
        ) -> dict[str, torch.Tensor]:
            return {name: tensor for name, tensor in maker(arch, *args, side, rank).items() if name in moving}

        training, generation = of(shards, plan.source, tensors), of(nothing, plan.target)
        there = Poisoned(plan, rank, training, generation, bucket_bytes)
        back = Poisoned(reversed_plan(plan), rank, generation, training, bucket_bytes)
        for execution, filled, emptied, side in (
            (there, generation, training, plan.target),
            (back, training, generation, plan.source),
        ):
            execution.run()
            for tensor in emptied.values():  # as when its memory is given back
                tensor.fill_(float("nan"))
            for name, expected in of(shards, side, tensors).items():
                if not torch.equal(filled[name], expected):
                    wrong.append(f"{arch.model_type} {train} to {generate}: {name}")
            staging = max(staging, *(8 * phase.numbers for phase in execution.phases), 0)
            phases += len(execution.phases)
        moved += int(plan.received()[rank])
    return {"wrong": wrong[:10], "moved": moved, "phases": phases, "staging": staging}
