"""Megatron-core on a machine without a GPU.

Megatron-core names CUDA in a few dozen places (`device="cuda"`, `.cuda()`, `torch.cuda.current_device()`, the tensor type's
name). Inside `megatron_device("cpu")` those mean the CPU; everything else runs unchanged over gloo. The context is entered
around Megatron calls only: vLLM lives in the same process and must not see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
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


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.startswith("cuda")
    return _CPU if named or (isinstance(value, torch.device) and value.type == "cuda") else value


@contextlib.contextmanager
def megatron_device(device: str) -> Iterator[None]:
    """Run the Megatron calls of this block on `device` ("cpu" or "cuda")."""
    if device != "cpu":
        yield
        return
    current, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    try:
        with _CudaMeansCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current, synchronize
