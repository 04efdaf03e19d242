"""Generation weights of their own, filled from the actor in the ways of others: the baselines.

- full_gather: every rank rebuilds every whole Hugging Face tensor and hands it to vLLM's `load_weights`, which cuts out its slice:
  what verl, NeMo-RL and slime do. The training weights stay in memory, and so do the gradients unless told otherwise.
- core_swap: megatron-core's own `core/resharding` into a second Megatron model, which has the generation memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from engine.layout import Coordinates
from engine.megatron.optimizer import device_state
from engine.reshard.account import Transition
from engine.reshard.memory import HostCopy, StorageRegion, flat_region
from engine.reshard.plan import Plan
from engine.roles.actor import Actor
from engine.weights.huggingface import huggingface_tensors
from engine.weights.map import Shard, Weight, weight_map

ALIGNMENT = 128


class PrivateWeights:
    """A second copy of the weights for generation, with the interface of `engine.reshard.hybrid.HybridWeights`.

    Attributes:
        fill: copies the actor's weights to `generation`; set before `to_generation` is called.
        release_gradients: give their memory back while generating.
        received: bytes that the last fill received from other ranks.
    """

    def __init__(self, actor: Actor, plan: Plan) -> None:
        self.actor, self.plan, self.rank = actor, plan, dist.get_rank()
        self.release_gradients = False
        self.received = 0
        self.fill: Callable[[], None] = lambda: None
        self._host = HostCopy()
        buffers = [b for chunk in actor.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # type: ignore[union-attr]
        self._gradients = [StorageRegion(buffer.grad_data) for buffer in buffers]
        self._training_bytes = sum(buffer.param_data.nbytes for buffer in buffers)
        self.generation = self._allocate()
        self.in_generation = True

    def to_generation(self) -> Transition:
        """Take the memory, and fill it."""
        report = Transition("generation")
        self.region.take()
        with report.phase("move"):
            self.fill()
            _synchronise(self.actor.device)
        report.received["node"] = self.received
        report.peak_weight_bytes = self._training_bytes + self.region.resident_bytes
        if self.release_gradients:
            for region in self._gradients:
                region.release()
        self.in_generation = True
        return report

    def to_training(self) -> Transition:
        """Give the generation memory back; the training weights never left."""
        if self.in_generation:
            self.region.release()
            for region in self._gradients:
                region.take()
            self._host.move_back()
            self.in_generation = False
        return Transition("training")

    def bytes_to_train(self) -> int:
        return 0

    def optimizer_to_host(self) -> None:
        if not self._host.away_bytes:
            self._host.move_out(device_state(self.actor.optimizer))

    def owners(self) -> dict[str, int]:
        return {
            "training_weights": self._training_bytes,
            "generation_weights": self.region.resident_bytes,
            "gradients": sum(region.resident_bytes for region in self._gradients),
            "optimizer": sum(t.untyped_storage().nbytes() for t in device_state(self.actor.optimizer)),
            "optimizer_on_host": self._host.away_bytes,
        }

    def _allocate(self) -> dict[str, Tensor]:
        at, layout = self.plan.target.coordinates(self.rank), self.plan.target.layout
        stages, places, size = layout.stage_of_layer(self.actor.arch.layers), {}, 0
        for weight in weight_map(self.actor.arch):
            if at.pp in weight.stages(layout, stages):
                shape = torch.Size(weight.shard_shape(weight.shard(layout, at)))
                places[weight.megatron] = size, shape
                size += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        flat, self.region = flat_region(size, self.actor.dtype, self.actor.device)
        return {name: flat[start : start + shape.numel()].view(shape) for name, (start, shape) in places.items()}


class FullGather:
    """Fills by whole tensors: gathers each weight's shards on every rank, and lets vLLM cut."""

    def __init__(self, weights: PrivateWeights, vllm_model: torch.nn.Module) -> None:
        self._weights, self._model = weights, vllm_model
        plan, actor = weights.plan, weights.actor
        layers = plan.source.layout.stage_of_layer(actor.arch.layers)
        self._owners = [(w, _owners(w, plan, layers)) for w in weight_map(actor.arch)]

    def __call__(self) -> None:
        self._weights.received = 0
        with torch.no_grad():
            for weight, owners in self._owners:
                tensors = huggingface_tensors(weight, dict(self._gather(weight, owners)))
                self._model.load_weights(iter(tensors.items()))  # type: ignore[operator]

    def _gather(self, weight: Weight, owners: dict[Shard, int]) -> Iterator[tuple[Shard, Tensor]]:
        actor, rank = self._weights.actor, self._weights.rank
        for shard, owner in owners.items():
            if rank == owner:
                tensor = actor.parameters[weight.megatron].data
            else:
                tensor = torch.empty(weight.shard_shape(shard), dtype=actor.dtype, device=actor.device)
                self._weights.received += tensor.nbytes
            if dist.get_world_size() > 1:
                dist.broadcast(tensor, owner)
            yield shard, tensor


def _owners(weight: Weight, plan: Plan, layers: list[int]) -> dict[Shard, int]:
    """Every shard of a weight, and the first rank that holds it."""
    layout, found = plan.source.layout, {}
    for rank in reversed(range(plan.world_size)):
        at: Coordinates = plan.source.coordinates(rank)
        if at.pp in weight.stages(layout, layers):
            found[weight.shard(layout, at)] = rank
    return found


class CoreSwap:
    """Fills with megatron-core's resharding, between two Megatron models of one layout on one rank (CUDA only).

    For several ranks the second model would need process groups of its own; Megatron's model builder takes them from globals.
    """

    def __init__(self, weights: PrivateWeights, folder: str) -> None:
        actor = weights.actor
        self._weights, self._source = weights, actor.chunks[0].module
        second = Actor(
            actor.arch,
            folder,
            actor.layout,
            sequence_parallel=False,
            dtype=actor.dtype,
            device=actor.device,
            optimizer=None,
        )
        for name, parameter in second.parameters.items():
            parameter.data = weights.generation[name]
        self._target = second.chunks[0]

    def __call__(self) -> None:
        from megatron.core.resharding.refit import swap_model_weights

        self._weights.received = 0
        swap_model_weights(self._source, self._target, "nccl")


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def why_no_core_swap(device: str, world_size: int) -> str | None:
    """Why core_swap cannot be run here; None if it can."""
    if device == "cpu":
        return "its copy services use CUDA streams"
    if world_size > 1:
        return "a second Megatron model in another layout needs process groups that its builder does not take"
    try:
        import megatron.core.resharding.refit  # noqa: F401
    except ImportError:
        return "this megatron-core has no core/resharding"
    return None
