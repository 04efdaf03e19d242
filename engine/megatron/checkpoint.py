"""A model's state as safetensors: each rank writes the part of the optimizer state that it owns.

A part is `flat[start:stop]` of the shard of one weight that the rank holds, for the fp32 master weights and both Adam moments.
The header says which part of what it is, and the layout which shard, so that a reader can put shards together without
Megatron (export does). Names are those of the weight map, whatever the pipeline.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.layout import Layout
from engine.megatron.cpu import megatron_device
from engine.megatron.optimizer import (
    STATE_NAMES,
    ensure_state,
    publish_master_weights,
    set_adam_step,
    shard_states,
)
from engine.roles.model import Model

FORMAT = "onecopy-checkpoint-1"


class LayoutMismatch(ValueError):
    """The checkpoint was written under another layout."""


def write(model: Model, path: Path, extra: dict[str, Any]) -> None:
    """Write this rank's file. `extra` is kept in the header as JSON (weight version, model folder, ...)."""
    with megatron_device(model.device):
        ensure_state(model.optimizer)
    tensors: dict[str, Tensor] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, state in shard_states(model.optimizer, model.parameters):
        ranges[name] = (state.start, state.stop)
        for key, tensor in state.tensors.items():
            tensors[f"{name}|{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    header = {
        "format": FORMAT,
        "rank": torch.distributed.get_rank(),
        "layout": model.layout.to_json(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "optimizer_steps": model.optimizer_steps,
        "ranges": ranges,
        **extra,
    }
    save_file(tensors, path, metadata={"onecopy": json.dumps(header, sort_keys=True)})


def read_header(path: Path) -> dict[str, Any]:
    """The header of one rank's file; raises ValueError if it is not one of ours."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    header = json.loads(metadata.get("onecopy", "{}"))
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a onecopy checkpoint ({FORMAT})")
    return header


def read(model: Model, path: Path) -> None:
    """Bring the model, in place, to the state of this rank's file.

    Raises:
        LayoutMismatch: written under another layout.
    """
    header = read_header(path)
    stored = Layout.from_json(header["layout"])
    if not stored.divides_alike(model.layout, model.arch.layers):
        raise LayoutMismatch(
            f"{path} was written with {stored} and the pool has {model.layout}: "
            "restore with the same parallel sizes, or export the model and start a new run from it"
        )
    with megatron_device(model.device), torch.no_grad(), safe_open(path, framework="pt") as file:
        ensure_state(model.optimizer)
        for name, state in shard_states(model.optimizer, model.parameters):
            if tuple(header["ranges"][name]) != (state.start, state.stop):
                raise LayoutMismatch(f"{path}: {name} holds {header['ranges'][name]}, not {(state.start, state.stop)}")
            for key in STATE_NAMES:
                state.tensors[key].copy_(file.get_tensor(f"{name}|{key}"))
        set_adam_step(model.optimizer, header["optimizer_steps"])
        publish_master_weights(model.optimizer, model.chunks)
    model.optimizer_steps = header["optimizer_steps"]
