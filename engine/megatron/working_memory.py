"""How much device memory an update takes beside weights, gradients and optimizer state, learned from the one before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MARGIN = 1.2
"""The allocator's fragments, and what attention needs more of when the same tokens are fewer and longer sequences."""


class WorkingMemory:
    """Activations grow with the tokens of the largest micro-batch; what is measured once is scaled by them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen: tuple[int, int] | None = None

    @property
    def seen_bytes(self) -> int | None:
        """What the last measured update took at its peak."""
        return None if self._seen is None else self._seen[1]

    def needed(self, tokens: int) -> int | None:
        """Bytes for micro-batches of up to `tokens` tokens; None before anything was measured."""
        if self._seen is None:
            return None
        seen_tokens, seen_bytes = self._seen
        return int(MARGIN * seen_bytes * max(1.0, tokens / seen_tokens))

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """Measure the block, whose largest micro-batch has that many tokens (CUDA only)."""
        if self._device != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        self.learn(tokens, torch.cuda.max_memory_allocated() - before)

    def learn(self, tokens: int, used_bytes: int) -> None:
        """An update with micro-batches of up to `tokens` tokens took `used_bytes` at its peak."""
        if tokens > 0:
            self._seen = tokens, used_bytes
