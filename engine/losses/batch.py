"""What a loss is given and what it gives back, for responses laid end to end without padding."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held in [-20, 20] before exp: values and gradients stay finite, and a ratio of e^20 means nothing anyway."""


@dataclass(frozen=True)
class TokenBatch:
    """The responses of one micro-batch, end to end. All tensors are [tokens], with tokens = sum(lengths).

    Only `logprobs` and `entropies` carry a gradient. A loss gets it cleaned (see `cleaned`), so nothing that stands at a
    masked token can reach its result.

    Attributes:
        logprobs: log-probabilities of the response tokens under the policy that is trained, at the sampler's temperature.
        old_logprobs: under the policy before the update (in bypass mode under the rollout's).
        advantages: one number a token.
        mask: bool, true where the token is trained on.
        lengths: tokens of each response, in order.
        entropies: of the trained policy's distribution at each token.
        rollout_logprobs: as the generation engine reported them; None for demonstrations.
        reference_logprobs: under the reference policy; None where there is none.
        positive: bool, true in samples whose reward counts as good; None unless they are imitated.
        selected: bool, the tokens chosen over the whole mini-batch (clip_cov, kl_cov); None for the other losses.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: list[int]
    entropies: Tensor
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    positive: Tensor | None = None
    selected: Tensor | None = None

    def cleaned(self) -> TokenBatch:
        """The same with 0 (false) at masked tokens, where then no gradient goes, not even one of NaN; fp32 at least."""
        mask = self.mask.bool()
        changed: dict[str, Tensor] = {"mask": mask}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("mask", "lengths") or value is None:
                continue
            wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            changed[field.name] = torch.where(mask, wide, torch.zeros_like(wide))
        return replace(self, **changed)


@dataclass(frozen=True)
class TokenLoss:
    """Results [tokens]: the loss (with gradient), and flags for the metrics: where the ratio, and the dual clip, took hold."""

    loss: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(pi / pi_old) per token, held in [-20, 20]; beyond, no gradient."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old per token, with the logarithm held before exp, so that value and gradient stay finite."""
    return log_ratio_of(logprobs, old_logprobs).exp()
