"""A model that is on the device only while it works: roles that share GPUs with the actor take turns in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from torch import Tensor

from engine.megatron.optimizer import device_state
from engine.reshard.memory import HostCopy, StorageRegion
from engine.roles.model import Model

Role = TypeVar("Role", bound=Model)


class Resting(Generic[Role]):
    """A frozen or trained model in host memory between its turns; on CPU it stays where it is.

    Gradients hold nothing between turns and are given back.

    Args:
        stays: on its device too, because nobody else needs the room.
    """

    def __init__(self, model: Role, *, stays: bool = False) -> None:
        self.model, self._stays = model, stays
        self._host = HostCopy()
        flat = [buffer.param_data for buffer in model.buffers]
        self._weights = flat or [parameter.data for parameter in model.parameters.values()]
        self._gradients = [StorageRegion(buffer.grad_data) for buffer in model.buffers]
        self._rest()

    @contextmanager
    def awake(self) -> Iterator[Role]:
        """The model, on the device inside the block."""
        if not self._stays:
            self._host.move_back()
            for region in self._gradients:
                region.take()
        try:
            yield self.model
        finally:
            self._rest()

    def _rest(self) -> None:
        if self._stays:
            return
        for region in self._gradients:
            region.release()
        if self.model.device == "cuda":
            self._host.move_out(self._tensors())

    def _tensors(self) -> list[Tensor]:
        """Weights, and the optimizer state as far as it is there already."""
        return [*self._weights, *(device_state(self.model.optimizer) if self.model.trained else ())]
