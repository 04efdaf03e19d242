"""A model's trained state in host memory, to be saved or just read: fp32 master weights and both Adam moments.

The model's own weights are the masters, rounded, so they are not kept besides. The learning rate follows from the number of
optimizer steps. Everything is named by rectangles of Hugging Face tensors (engine/weights/slices.py), so a state that one layout
saved can be put into another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.megatron.cpu import megatron_device
from engine.megatron.optimizer import (
    STATE_NAMES,
    ShardState,
    ensure_state,
    publish_master_weights,
    set_adam_step,
    shard_states,
)
from engine.roles.model import Model
from engine.weights.map import Weight, weight_map
from engine.weights.slices import saves, shapes, slices
from storage.sharded import ShardedReader, Slice, Wanted


def trained(model: Model) -> Iterator[tuple[Weight, ShardState]]:
    """What is in a model's state: every weight of which this rank's optimizer owns a part, and that part."""
    weights = {weight.megatron: weight for weight in weight_map(model.arch)}
    with megatron_device(model.device):
        ensure_state(model.optimizer)
    for name, state in shard_states(model.optimizer, model.parameters):
        if state.stop > state.start:
            yield weights[name], state


class HostMemory:
    """Room for one model's state beside it, kept for the next time; pinned if the model is on a GPU."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def room(self, numbers: int, device: str) -> Tensor:
        """fp32 [states, numbers], contiguous; the content is undefined, and the earlier room's is gone."""
        wanted = len(STATE_NAMES) * numbers
        if self._flat.numel() < wanted:
            self._free(device)  # before more is taken
            self._flat = torch.empty(wanted, dtype=torch.float32)
            if device == "cuda":  # torch's own pinned memory comes in powers of two, up to twice of what is needed
                cuda = torch.cuda.cudart()
                torch.cuda.check_error(cuda.cudaHostRegister(self._flat.data_ptr(), self._flat.nbytes, 0))
        return self._flat[:wanted].view(len(STATE_NAMES), numbers)

    def _free(self, device: str) -> None:
        if device == "cuda" and self._flat.numel():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr()))
        self._flat = torch.empty(0)


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a model's state at one moment.

    Attributes:
        slices: whose numbers `values` [states, numbers] holds, one after another.
        shapes: of the whole tensors.
        about: {"optimizer_steps", "dtype", "labels", "layout"}.
    """

    slices: list[Slice]
    values: np.ndarray
    shapes: dict[str, tuple[int, int]]
    about: dict[str, Any]


@torch.no_grad()
def take(model: Model, memory: HostMemory) -> Snapshot:
    """Copy what this rank saves of the model's state to host memory; ranks that hold copies of the same numbers share the work."""
    stages = model.layout.stage_of_layer(model.arch.layers)
    parts = [(w, state) for w, state in trained(model) if saves(w, model.layout, model.coordinates, stages)]
    room = memory.room(sum(state.stop - state.start for _, state in parts), model.device)
    for state, target in _places(parts, room):
        for key, values in zip(STATE_NAMES, target, strict=True):
            values.copy_(state.tensors[key], non_blocking=True)
    _wait(model)
    return Snapshot(
        slices=[each for weight, state in parts for each in _slices(model, weight, state)],
        values=room.numpy(),
        shapes={name: shape for weight, _ in parts for name, shape in shapes(weight).items()},
        about={
            "optimizer_steps": model.optimizer_steps,
            "dtype": str(model.dtype).removeprefix("torch."),
            "labels": model.arch.labels,
            "layout": str(model.layout),
        },
    )


def read(model: Model, reader: ShardedReader, memory: HostMemory) -> Tensor:
    """This rank's state as it was saved, in host memory; the model is as before. Raises CorruptFile, Missing, StorageError."""
    parts = list(trained(model))
    room = memory.room(sum(state.stop - state.start for _, state in parts), model.device)
    wanted, offset = [], 0
    for weight, state in parts:
        for tensor, box in _slices(model, weight, state):
            for key, row in zip(STATE_NAMES, room.numpy(), strict=True):
                array = row[offset : offset + box.size].reshape(box.rows, box.columns)
                wanted.append(Wanted(key, tensor, box, array))
            offset += box.size
    reader.read(wanted)
    return room


def put(model: Model, room: Tensor, optimizer_steps: int) -> None:
    """Bring the model, in place, to the state that `read` left in host memory. All ranks must call it."""
    with megatron_device(model.device), torch.no_grad():
        for state, source in _places(list(trained(model)), room):
            for key, values in zip(STATE_NAMES, source, strict=True):
                state.tensors[key].copy_(values, non_blocking=True)
        set_adam_step(model.optimizer, optimizer_steps)
        publish_master_weights(model.optimizer, model.chunks)
        _wait(model)
    model.optimizer_steps = optimizer_steps


def _slices(model: Model, weight: Weight, state: ShardState) -> Iterator[Slice]:
    return slices(weight, model.shards[weight.megatron], state.start, state.stop)


def _places(parts: list[tuple[Weight, ShardState]], room: Tensor) -> Iterator[tuple[ShardState, Tensor]]:
    """Each part and its numbers [states, numbers] in host memory."""
    sizes = [state.stop - state.start for _, state in parts]
    return zip((state for _, state in parts), room.split(sizes, dim=1) if sizes else (), strict=True)


def _wait(model: Model) -> None:
    if model.device == "cuda":
        torch.cuda.synchronize()
