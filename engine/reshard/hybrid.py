"""The actor's weights in two layouts, of which one is in memory at a time.

Into generation: take the generation memory, copy what this rank has and receive the rest, give the training memory back. Into
training: the same the other way. Where both layouts are the same, the two are the same memory and nothing happens.
Gradients, which hold nothing between updates, are given back too; the optimizer state goes to host memory if it has to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.megatron.optimizer import device_state
from engine.reshard.account import Transition
from engine.reshard.execute import BUCKET_BYTES, Execution
from engine.reshard.memory import HostCopy, Region, StorageRegion, flat_region
from engine.reshard.plan import Plan, reversed_plan
from engine.roles.actor import Actor
from engine.weights.map import Shard, weight_map

ALIGNMENT = 128
"""Elements: every generation tensor begins at a multiple, as torch's own allocator would give it (256 bytes in bfloat16)."""


@dataclass(frozen=True)
class _Place:
    """Where one generation tensor lies in the flat generation memory."""

    start: int
    shape: tuple[int, ...]


class HybridWeights:
    """One rank's weights.

    Args:
        actor: the training side; its parameters hold their weights.
        plan: the way from training to generation.
        bucket_bytes: memory for messages in flight.

    Attributes:
        in_generation: which of the two layouts is in memory.
        generation: weight map name to the tensor that the generation engine uses on this rank; always the same tensors.
    """

    def __init__(self, actor: Actor, plan: Plan, bucket_bytes: int = BUCKET_BYTES) -> None:
        began = time.perf_counter()
        self.actor, self.plan = actor, plan
        self.rank = torch.distributed.get_rank()
        self.in_generation = False
        self._changing = False
        self._host = HostCopy()
        self._back = reversed_plan(plan)
        moving = self._moving
        training = {name: p.data for name, p in actor.parameters.items() if name in moving}
        self._training = [StorageRegion(flat) for flat in _flat_parameters(actor, set(training))]
        self._gradients = [StorageRegion(buffer.grad_data) for buffer in actor.buffers]
        self._generation, tensors = self._allocate(moving)
        shared = {name: p.data for name, p in actor.parameters.items() if name not in moving}
        self.generation: dict[str, Tensor] = {**shared, **tensors}
        self._forward = Execution(plan, self.rank, training, tensors, bucket_bytes)
        self._backward = Execution(self._back, self.rank, tensors, training, bucket_bytes)
        self._plan_seconds = plan.seconds + time.perf_counter() - began
        if self._generation is not None:
            self._generation.release()

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """Weight map name to the part that this rank generates with."""
        layout, at = self.plan.target.layout, self.plan.target.coordinates(self.rank)
        stages = layout.stage_of_layer(self.actor.arch.layers)
        return {
            weight.megatron: weight.shard(layout, at)
            for weight in weight_map(self.actor.arch)
            if at.pp in weight.stages(layout, stages)
        }

    @property
    def generation_region(self) -> Region | None:
        """Memory of the generation tensors that are not the actor's own; None when all of them are."""
        return self._generation

    @property
    def gradient_regions(self) -> list[StorageRegion]:
        """Memory of the actor's gradients."""
        return self._gradients

    def to_generation(self) -> Transition:
        """Make the generation tensors hold the actor's weights; until `to_training` the actor cannot be used.

        Every rank must call it. Nothing happens when it is so already.
        """
        report = Transition("generation")
        if not self.in_generation:
            self._begin_change()
            report.count(self.plan, self.rank)
            report.seconds["plan"], self._plan_seconds = self._plan_seconds, 0.0  # made once, before the first change
            for region in self._gradients:
                region.release()
            if self._generation is not None:
                self._generation.take()
            with report.phase("move"):
                self._forward.run()
                self._synchronise()
            self._peak(report)
            for region in self._training:
                region.release()
            self.in_generation, self._changing = True, False
        return report

    def to_training(self) -> Transition:
        """Give the actor its weights and gradients back; the generation tensors' content is gone afterwards."""
        report = Transition("training")
        if self.in_generation:
            self._begin_change()
            report.count(self._back, self.rank)
            for region in self._training:
                region.take()
            with report.phase("move"):
                self._backward.run()
                self._synchronise()
            self._peak(report)
            if self._generation is not None:
                self._generation.release()
            for region in self._gradients:
                region.take()
            if self._host.away_bytes:
                with report.phase("optimizer"):
                    self._host.move_back()
            self.in_generation, self._changing = False, False
        return report

    def _begin_change(self) -> None:
        """Refuse a change after one that did not end: the weights are then in neither layout."""
        if self._changing:
            raise RuntimeError("an earlier change of layout failed: the weights are in neither; start the pool anew")
        self._changing = True

    def bytes_to_train(self) -> int:
        """Device bytes that `to_training` takes, less what it gives back."""
        if not self.in_generation:
            return 0
        taken = sum(region.full_bytes - region.resident_bytes for region in (*self._training, *self._gradients))
        return taken + self._host.away_bytes - (self._generation.resident_bytes if self._generation is not None else 0)

    def optimizer_to_host(self) -> None:
        """Move masters and moments to host memory until the next `to_training`."""
        if not self._host.away_bytes:
            self._host.move_out(device_state(self.actor.optimizer))

    def owners(self) -> dict[str, int]:
        """Bytes on the device by owner (and of the optimizer on the host)."""
        state = list(device_state(self.actor.optimizer))
        shared = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._shared_tensors()}
        return {
            "training_weights": sum(r.resident_bytes for r in self._training),
            "generation_weights": self._generation.resident_bytes if self._generation is not None else 0,
            "shared_weights": sum(shared.values()),
            "gradients": sum(region.resident_bytes for region in self._gradients),
            "optimizer": sum(tensor.untyped_storage().nbytes() for tensor in state),
            "optimizer_on_host": self._host.away_bytes,
        }

    def _shared_tensors(self) -> list[Tensor]:
        return [self.generation[name] for name in self.generation if name not in self._moving]

    @cached_property
    def _moving(self) -> set[str]:
        """Weights that have other memory in generation than in training."""
        parts = [part for part in self.plan.classes if part.division not in self.plan.resident]
        return {member.weight.megatron for part in parts for member in part.members}

    def _allocate(self, moving: set[str]) -> tuple[Region | None, dict[str, Tensor]]:
        places, size = {}, 0
        for weight in weight_map(self.actor.arch):
            if weight.megatron in moving and weight.megatron in self.shards:
                shape = weight.shard_shape(self.shards[weight.megatron])
                places[weight.megatron] = _Place(size, shape)
                size += -(-torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
        if not places:
            return None, {}
        flat, region = flat_region(size, self.actor.dtype, self.actor.device)
        tensors = {
            name: flat[place.start : place.start + torch.Size(place.shape).numel()].view(place.shape)
            for name, place in places.items()
        }
        return region, tensors

    def _peak(self, report: Transition) -> None:
        report.peak_weight_bytes = sum(value for owner, value in self.owners().items() if owner.endswith("_weights"))

    def _synchronise(self) -> None:
        if self.actor.device == "cuda":
            torch.cuda.synchronize()


def _flat_parameters(actor: Actor, moving: set[str]) -> list[Tensor]:
    """The memory of the weights that move: the buffers of those that are trained, and what each frozen one has."""
    parameters = {id(parameter): name for name, parameter in actor.parameters.items()}
    flats = [p.data for name, p in actor.parameters.items() if name in moving and not p.requires_grad]
    for buffer in actor.buffers:
        names = {parameters[id(parameter)] for parameter in buffer.params}
        if names & moving:
            assert names <= moving, f"{sorted(names - moving)[:4]} share memory with weights that move"
            flats.append(buffer.param_data)
    return flats
