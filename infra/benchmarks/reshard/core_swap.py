"""core_swap: megatron-core's own planner, executor and copy service (`core/resharding`), between any two layouts.

`swap_model_weights` takes two Megatron models, of which it reads names, parameters and process groups. Here each side is a `Side`
that lists those: one parameter a Hugging Face tensor, a view of the actor's or of the generation memory. It has to be so: in the
memory that vLLM reads, q, k and v (and gate and up) lie behind each other, which the planner's one stride a parameter cannot
describe, and whole parameters would arrive in a wrong order whenever the tensor parallel size changes. The copies are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from engine.reshard.assignment import Assignment
from engine.reshard.plan import Plan
from engine.weights.architecture import Architecture
from engine.weights.map import Shard, Weight, weight_map
from infra.benchmarks.reshard.resident import Filled, ResidentWeights


class CoreSwap:
    """Fills the generation tensors. Every rank must build it."""

    def __init__(self, weights: ResidentWeights) -> None:
        plan, actor = weights.plan, weights.actor
        self._rank = weights.rank
        weights.take()  # views are cut while there is something to cut from; they outlive its release
        self._source = Side(weights.training, actor.arch, plan.source, weights.rank)
        self._target = Side(weights.generation, actor.arch, plan.target, weights.rank)
        weights.release()
        self._service = _copy_service(actor.device)

    def __call__(self) -> Filled:
        """Copied are slices to its buffers (one a slice, all at the same time) on the rank, and from them to their places."""
        from megatron.core.resharding.refit import swap_model_weights

        swap_model_weights(self._source, self._target, self._service)
        received, local = self._bytes()
        return Filled(received, received + 2 * local)

    def _bytes(self) -> tuple[int, int]:
        """Bytes of Megatron's plan that come from other ranks, and from this one."""
        shapes, received, local = dict(self._target.named_parameters()), 0, 0
        for operation in self._target._cached_reshard_plan.recv_ops:  # type: ignore[union-attr]
            size = shapes[operation.param_name].data[operation.my_slice].nbytes
            if operation.peer_rank == self._rank:
                local += size
            else:
                received += size
        return received, local


class Side(torch.nn.Module):
    """One rank's parameters in one layout, as `swap_model_weights` looks at a model."""

    def __init__(self, tensors: Mapping[str, Tensor], arch: Architecture, side: Assignment, rank: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=arch.experts or None)
        self.pg_collection = _process_groups(side)
        at = side.coordinates(rank)
        self._listed = [
            (name, _parameter(view, weight))
            for weight in weight_map(arch)
            if weight.megatron in tensors
            for name, view in _views(tensors[weight.megatron], weight, weight.shard(side.layout, at))
        ]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._listed


def _views(tensor: Tensor, weight: Weight, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and view of this shard's part of every tensor."""
    for number, expert in enumerate(weight.experts(shard)):
        part, start = (tensor[number] if weight.stacked else tensor), 0
        for piece in weight.pieces[expert]:
            if weight.axis is None:
                yield piece.name, part
                continue
            first, stop = weight.bounds(piece, shard)
            yield piece.name, part.narrow(weight.axis, start, stop - first)
            start += stop - first


def _parameter(view: Tensor, weight: Weight) -> torch.nn.Parameter:
    """Marked as Megatron marks its own: divided over tensor parallel ranks or not, an expert's or not."""
    parameter = torch.nn.Parameter(view, requires_grad=False)
    parameter.tensor_model_parallel = weight.axis is not None  # type: ignore[attr-defined]
    parameter.partition_dim, parameter.partition_stride = weight.axis or 0, 1  # type: ignore[attr-defined]
    parameter.allreduce = not weight.stacked  # type: ignore[attr-defined]
    return parameter


def _process_groups(side: Assignment) -> ProcessGroupCollection:
    """The groups that the planner asks for their ranks. Nothing is sent through them."""
    at = [side.coordinates(rank) for rank in range(side.layout.world_size)]
    seen: Counter[tuple[int, ...]] = Counter()
    copies = []  # which of the copies of its experts a rank has
    for place in at:
        key = (place.pp, place.etp, place.ep)
        copies.append(seen[key])
        seen[key] += 1
    groups = ProcessGroupCollection()
    groups.tp = _group((place.pp, place.dp) for place in at)
    groups.dp = _group((place.pp, place.tp) for place in at)
    groups.pp = _group((place.dp, place.tp) for place in at)
    groups.ep = _group((place.pp, place.etp, copy) for place, copy in zip(at, copies, strict=True))
    groups.expt_tp = _group((place.pp, place.ep, copy) for place, copy in zip(at, copies, strict=True))
    return groups


def _group(keys: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
    """The group of the ranks that have this rank's key."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    mine = None
    for ranks in members.values():
        group = dist.new_group(ranks, backend="gloo")
        mine = group if dist.get_rank() in ranks else mine
    assert mine is not None
    return mine


def _copy_service(device: str) -> Any:
    """NCCL's on GPUs. On CPU gloo's, which makes a CUDA stream when it is built but can do without."""
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    if device == "cuda":
        return "nccl"
    with mock.patch.object(torch.cuda, "Stream", lambda: None):
        return GlooCopyService()


def why_no_core_swap(arch: Architecture, plan: Plan) -> str | None:
    """Why megatron-core's swap cannot be run between these layouts; None if it can."""
    try:
        import megatron.core.resharding.refit  # noqa: F401
    except ImportError:
        return "this megatron-core has no core/resharding"
    sizes = {plan.source.layout.tp, plan.target.layout.tp}
    if max(sizes) > arch.kv_heads:
        return f"its planner has no copies of key-value heads ({arch.kv_heads} for {max(sizes)} tensor parallel ranks)"
    return None
