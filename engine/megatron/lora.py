"""Adapters beside Megatron's tensor parallel linear layers.

What travels between tensor parallel ranks is A x, `rank` numbers a token, never the layer's input or output: with divided rows A
sees this rank's tokens (sequence parallel) or all of them, and A x is gathered for the ranks' rows of B; with divided columns
every rank has a part of A, and the parts of A x are added up before B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from engine.adapters import Adapters
from engine.megatron.model import SharedModel
from engine.weights.architecture import Architecture
from engine.weights.map import Place, Shard, adapted_linears


def attach(
    models: Sequence[SharedModel], arch: Architecture, places: Mapping[str, Place], shards: Mapping[str, Shard]
) -> list[Adapters]:
    """Give the linear layers of this rank's chunks their adapters, whose numbers stay to be set; freeze everything else.

    Args:
        places, shards: weight map name to where it is on this rank, and which part of it.
    """
    attached = []
    for model in models:
        model.requires_grad_(False)
    for linear in adapted_linears(arch):
        place = places.get(linear.base.megatron)
        if place is None:
            continue
        model, rows = models[place.chunk], linear.base.axis == 0
        layer = model.get_submodule(place.name.removesuffix(".weight"))
        split_sequence = model.config.sequence_parallel
        assert arch.lora is not None
        adapters = Adapters(linear, shards, arch.lora.scale, model.config.params_dtype, _exchange(rows, split_sequence))
        for name, parameter in adapters.named_parameters():
            # it saw this rank's tokens only: `finalize_model_grads` adds its gradients up
            parameter.sequence_parallel = split_sequence and name.endswith("lora_A" if rows else "lora_B")  # type: ignore[attr-defined]
        layer.adapters = adapters
        layer.register_forward_hook(_add)
        attached.append(adapters)
    return attached


def _add(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """The layer's output with its adapters' part, while they are enabled."""
    return (layer.adapters(inputs[0], output[0]), output[1]) if layer.adapters.enabled else output


def _exchange(rows: bool, split_sequence: bool) -> Any:
    if rows:
        return _gathered if split_sequence else copy_to_tensor_model_parallel_region
    return reduce_scatter_to_sequence_parallel_region if split_sequence else reduce_from_tensor_model_parallel_region


def _gathered(low: Tensor) -> Tensor:
    """A x of all tokens. Its gradient is the sum over the ranks, of which each takes its own tokens."""
    return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
