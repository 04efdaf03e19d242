"""vLLM's parallel groups over ranks in another order than their numbers.

vLLM makes its groups from consecutive ranks. Which rank has which part in generation is decided by the reshard plan, so that
the least has to travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Ordered(TorchFunctionMode):
    """`torch.arange(world size)` gives the ranks in order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self._order = order

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.arange and args == (len(self._order),) and not kwargs:
            return torch.tensor(self._order)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def rank_order(order: list[int]) -> Iterator[None]:
    """An engine built inside this block gives place v of its layout to rank order[v].

    Inside a group the order must ascend: torch sorts the ranks of its process groups.
    """
    from vllm.distributed import parallel_state

    original = parallel_state.initialize_model_parallel

    def initialise(*args: Any, **kwargs: Any) -> None:
        with _Ordered(order):
            original(*args, **kwargs)

    parallel_state.initialize_model_parallel = initialise
    try:
        yield
    finally:
        parallel_state.initialize_model_parallel = original
