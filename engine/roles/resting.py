"""A frozen model that is on the device only while it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.reshard.memory import HostCopy
from engine.roles.model import Model


class Frozen:
    """A model without an optimizer that takes turns with the others on one GPU: in host memory between questions.

    On CPU it stays where it is.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._host = HostCopy()
        self._tensors = [parameter.data for parameter in model.parameters.values()]
        self._rest()

    @contextmanager
    def awake(self) -> Iterator[Model]:
        """The model, on the device inside the block."""
        self._host.move_back()
        try:
            yield self.model
        finally:
            self._rest()

    def _rest(self) -> None:
        if self.model.device == "cuda":
            self._host.move_out(self._tensors)
