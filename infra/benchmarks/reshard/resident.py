"""The memory of the baselines: training weights that stay while generation has weights of its own.

One engine serves all modes, because a second one in a process fails on CUDA (vLLM 0.26) and processes of their own could not take
turns. It stays bound to the generation tensors of `HybridWeights`. Where those are the actor's own memory (equal layouts), the two
copies that a baseline holds change places: before its turn the weights are copied aside, the copy plays the training weights, and
what fills the generation tensors reads from it. Bytes, memory and work are those of a baseline, less the mapping of the second copy
(3 ms a GiB), which is left out in its favour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.megatron.optimizer import device_state
from engine.reshard.account import Transition
from engine.reshard.hybrid import ALIGNMENT, HybridWeights
from engine.reshard.memory import StorageRegion
from engine.roles.actor import Actor


@dataclass(frozen=True)
class Filled:
    """What one filling of the generation tensors cost on this rank.

    Attributes:
        received: bytes from other ranks.
        copied: bytes written on the device beside those.
        seconds: by step, where there are several.
    """

    received: int
    copied: int
    seconds: dict[str, float] = field(default_factory=dict)


Fill = Callable[[], Filled]
"""Copies `ResidentWeights.training` of all ranks to `ResidentWeights.generation`; every rank must call it."""


class ResidentWeights:
    """A rank's weights twice, with the interface that the engine uses of `HybridWeights`.

    Attributes:
        training: weight map name to the actor's weights of this rank: what is read.
        generation: weight map name to the engine's tensors: what is filled.
        in_generation: the generation tensors are filled.
    """

    def __init__(self, hybrid: HybridWeights) -> None:
        self.actor, self.plan, self.rank = hybrid.actor, hybrid.plan, hybrid.rank
        self.generation = hybrid.generation
        self.in_generation = False
        self._fill: Fill | None = None
        self._release_gradients = False
        self._region, self._gradients = hybrid.generation_region, hybrid.gradient_regions
        own = {name: parameter.data for name, parameter in self.actor.parameters.items()}
        self._aliased = {
            name: tensor
            for name, tensor in own.items()
            if name in self.generation and self.generation[name].data_ptr() == tensor.data_ptr()
        }
        self._moving_bytes = sum(t.nbytes for name, t in own.items() if name not in self._aliased)
        self._copy, copies = _copies(self._aliased, self.actor)
        self.training = {**own, **copies}
        self.release()

    def stage(self, fill: Fill, release_gradients: bool = False) -> None:
        """Before a turn: the training weights have memory of their own, and the generation tensors hold nothing of use.

        Args:
            fill: what `to_generation` is to call.
            release_gradients: give their memory back while generating, as onecopy does.
        """
        self._fill, self._release_gradients = fill, release_gradients
        self.take()
        for name, tensor in self._aliased.items():
            self.training[name].copy_(tensor)
        for tensor in self.generation.values():
            tensor.fill_(float("nan"))  # what a fill leaves out must not look right

    def take(self) -> None:
        """Hold both copies."""
        self._copy.take()
        if self._region is not None:
            self._region.take()

    def release(self) -> None:
        """Hold the actor's weights only."""
        self._copy.release()
        if self._region is not None:
            self._region.release()

    def restore(self) -> None:
        """Put back what `stage` moved aside."""
        for name, tensor in self._aliased.items():
            tensor.copy_(self.training[name])

    def to_generation(self) -> Transition:
        """Fill; the steps of filling are phases too, and parts of `move`. `stage` must have been called since `to_training`."""
        report = Transition("generation")
        if self.in_generation:
            return report
        assert self._fill is not None, "not staged"
        with report.phase("move"):
            filled = self._fill()
            self._synchronise()
        report.received.update(node=filled.received, local=filled.copied)
        report.seconds |= filled.seconds
        report.peak_weight_bytes = sum(size for owner, size in self.owners().items() if owner.endswith("_weights"))
        if self._release_gradients:
            for region in self._gradients:
                region.release()
        self.in_generation = True
        return report

    def to_training(self) -> Transition:
        """Give the generation memory back; the training weights never left.

        Raises:
            RuntimeError: the fill did not leave the actor's weights, bit for bit, where the layouts agree (phase `check`, which is
                no part of the transition). Where they do not agree, the log-probabilities tell.
        """
        report = Transition("training")
        if self.in_generation:
            with report.phase("check"):
                wrong = [n for n, tensor in self._aliased.items() if not torch.equal(tensor, self.training[n])]
                self.restore()
                self._synchronise()
            self.release()
            for region in self._gradients:
                region.take()
            self.in_generation = False
            if wrong:
                raise RuntimeError(f"{', '.join(wrong[:4])}: the baseline's copy is not the actor's weight")
        return report

    def bytes_to_train(self) -> int:
        return 0

    def optimizer_to_host(self) -> None:
        raise NotImplementedError("baselines are measured with the optimizer state on the device")

    def owners(self) -> dict[str, int]:
        """Bytes on the device by owner, named as the copies are used."""
        aliased = sum(tensor.nbytes for tensor in self._aliased.values())
        return {
            "training_weights": self._moving_bytes + (self._copy.resident_bytes or aliased),
            "generation_weights": (aliased if self._copy.resident_bytes else 0)
            + (self._region.resident_bytes if self._region is not None else 0),
            "gradients": sum(region.resident_bytes for region in self._gradients),
            "optimizer": sum(tensor.untyped_storage().nbytes() for tensor in device_state(self.actor.optimizer)),
            "optimizer_on_host": 0,
        }

    def _synchronise(self) -> None:
        if self.actor.device == "cuda":
            torch.cuda.synchronize()


def differences(weights: ResidentWeights, one: Fill, other: Fill) -> list[str]:
    """Generation tensors that two ways of filling do not leave bit-equal on any rank; every rank must ask.

    The first result waits in host memory, so that a big model fits. The actor's weights are as before, afterwards.
    """
    weights.stage(one)
    one()
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in weights.generation.items()}
    for tensor in weights.generation.values():
        tensor.fill_(float("nan"))
    other()
    mine = [name for name, t in weights.generation.items() if not torch.equal(expected[name].to(t.device), t)]
    weights.restore()
    weights.release()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sorted({name for names in everyone for name in names})


def _copies(tensors: dict[str, Tensor], actor: Actor) -> tuple[StorageRegion, dict[str, Tensor]]:
    """Memory that comes and goes, as big as the tensors, and a view of it for each of them."""
    starts, size = {}, 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(size, dtype=actor.dtype, device=actor.device)
    views = {name: flat[starts[name] : starts[name] + t.numel()].view(t.shape) for name, t in tensors.items()}
    return StorageRegion(flat), views
