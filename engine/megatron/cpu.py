"""Megatron-core on a machine without a GPU.

Megatron-core names CUDA in a few dozen places (`device="cuda"`, `.cuda()`, `torch.cuda.current_device()`, the tensor type's
name). Inside `megatron_device("cpu")` those mean the CPU, and two collectives do what NCCL's do and gloo's do not; everything
else runs unchanged over gloo. The context is entered around Megatron calls only: vLLM lives in the same process and must not
see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_EQUAL_ALL_GATHER, _EQUAL_REDUCE_SCATTER = dist.all_gather, dist.reduce_scatter
_TYPE_NAMES = {torch.float32: "FloatTensor", torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor"}


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device of every torch call made below it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron compares this string; without the "cuda" it would take the tensor for one of an unknown kind.
            return "torch.cuda." + _TYPE_NAMES.get(args[0].dtype, "Tensor")
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(argument) for argument in args)
        return func(*args, **kwargs)


def _all_gather(gathered: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """`all_gather`, also of tensors that differ in their first dimension, which NCCL does and gloo does not."""
    sizes = [len(target) for target in gathered]
    if len(set(sizes)) == 1:
        return _EQUAL_ALL_GATHER(gathered, tensor, group, async_op)
    received = tensor.new_empty(sum(sizes), *tensor.shape[1:])
    copies = torch.cat([tensor] * len(sizes))
    dist.all_to_all_single(received, copies, sizes, [len(tensor)] * len(sizes), group=group)
    for target, part in zip(gathered, received.split(sizes), strict=True):
        target.copy_(part)
    return None


def _reduce_scatter(
    output: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """`reduce_scatter`, also of parts that differ in their first dimension (then always a sum)."""
    sizes = [len(part) for part in parts]
    if len(set(sizes)) == 1:
        return _EQUAL_REDUCE_SCATTER(output, parts, op, group, async_op)
    received = output.new_empty(len(parts) * len(output), *output.shape[1:])
    dist.all_to_all_single(received, torch.cat(parts), [len(output)] * len(parts), sizes, group=group)
    output.copy_(received.view(len(parts), *output.shape).sum(0))
    return None


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.startswith("cuda")
    return _CPU if named or (isinstance(value, torch.device) and value.type == "cuda") else value


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", lambda *_, **__: None),
    (dist, "all_gather", _all_gather),
    (dist, "reduce_scatter", _reduce_scatter),
)
"""Functions that Megatron looks up when it calls them. The mode does not reach into a backward pass; these do."""


@contextlib.contextmanager
def megatron_device(device: str) -> Iterator[None]:
    """Run the Megatron calls of this block on `device` ("cpu" or "cuda")."""
    if device != "cpu":
        yield
        return
    before = [(module, name, getattr(module, name)) for module, name, _ in _REPLACED]
    for module, name, replacement in _REPLACED:
        setattr(module, name, replacement)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
