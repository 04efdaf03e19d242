"""The critic's loss and how well it predicts."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, by the worse of the prediction and the one held near the old prediction.

    max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 (PPO's implementation; GAE, arXiv 1506.02438, eq. 28 without).

    Args:
        values: [tokens] with gradient.
        old_values, returns: [tokens], constants.
        clip: None: the plain squared error.

    Returns:
        loss and where the clipped branch was the larger, [tokens] each. Clean masked tokens before: `aggregate` drops what
        stands there, but not the gradient of a NaN that came in.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    held = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return torch.maximum(plain, held) / 2, (held > plain).detach()


def value_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """[5] fp64: count, and sums of R, R^2, R - v, (R - v)^2 over tokens with mask 1; they add up over micro-batches and ranks."""
    kept = mask.bool()
    targets, errors = returns[kept].double(), (returns - values.detach())[kept].double()
    count = torch.tensor(float(len(targets)), dtype=torch.float64, device=values.device)
    return torch.stack([count, targets.sum(), (targets**2).sum(), errors.sum(), (errors**2).sum()])


def explained_variance(moments: Tensor) -> float | None:
    """1 - Var(R - v) / Var(R) of summed `value_moments`; None where the returns do not vary."""
    count, total, squares, error, error_squares = moments.tolist()
    if count == 0:
        return None
    variance = squares / count - (total / count) ** 2
    if variance <= 1e-12 * max(1.0, squares / count):
        return None
    return 1 - (error_squares / count - (error / count) ** 2) / variance
