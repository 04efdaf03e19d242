"""RMSNorm for every place of a Megatron model, with or without sequence parallel."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in fp32 (Zhang and Sennrich, arXiv 1910.07467).

    Megatron-core's own torch norm refuses sequence parallel. This one marks its weight, so that `finalize_model_grads` sums
    the gradient over the tensor parallel ranks, each of which saw only its part of the sequence.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same shape and dtype."""
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
