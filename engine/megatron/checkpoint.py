"""The actor's state as safetensors: each rank writes the part of the optimizer state that it owns.

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
from engine.roles.actor import Actor

FORMAT = "onecopy-checkpoint-1"


class LayoutMismatch(ValueError):
    """The checkpoint was written under another layout."""


def write(actor: Actor, path: Path, extra: dict[str, Any]) -> None:
    """Write this rank's file. `extra` is kept in the header as JSON (weight version, model folder, ...)."""
    with megatron_device(actor.device):
        ensure_state(actor.optimizer)
    tensors: dict[str, Tensor] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, state in shard_states(actor.optimizer, actor.parameters):
        ranges[name] = (state.start, state.stop)
        for key, tensor in state.tensors.items():
            tensors[f"{name}|{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    header = {
        "format": FORMAT,
        "rank": torch.distributed.get_rank(),
        "layout": actor.layout.to_json(),
        "dtype": str(actor.dtype).removeprefix("torch."),
        "optimizer_steps": actor.optimizer_steps,
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


def read(actor: Actor, path: Path) -> None:
    """Bring the actor, in place, to the state of this rank's file.

    Raises:
        LayoutMismatch: written under another layout.
    """
    header = read_header(path)
    stored = Layout.from_json(header["layout"])
    if not stored.divides_alike(actor.layout, actor.arch.layers):
        raise LayoutMismatch(
            f"{path} was written with {stored} and the pool has {actor.layout}: "
            "restore with the same parallel sizes, or export the model and start a new run from it"
        )
    with megatron_device(actor.device), torch.no_grad(), safe_open(path, framework="pt") as file:
        ensure_state(actor.optimizer)
        for name, state in shard_states(actor.optimizer, actor.parameters):
            if tuple(header["ranges"][name]) != (state.start, state.stop):
                raise LayoutMismatch(f"{path}: {name} holds {header['ranges'][name]}, not {(state.start, state.stop)}")
            for key in STATE_NAMES:
                state.tensors[key].copy_(file.get_tensor(f"{name}|{key}"))
        set_adam_step(actor.optimizer, header["optimizer_steps"])
        publish_master_weights(actor.optimizer, actor.chunks)
    actor.optimizer_steps = header["optimizer_steps"]
