"""The loss of a name: a built-in one, or a user's `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from engine.losses.batch import TokenBatch, TokenLoss
from engine.losses.clipped import cispo_loss, ppo_loss, sapo_loss
from engine.losses.config import LossConfig
from engine.losses.covariance import clip_cov_loss, kl_cov_loss
from engine.losses.divergence import dppo_kl_loss, dppo_tv_loss
from engine.losses.gradient import dro_loss, reinforce_loss, sft_loss
from engine.losses.sequence import gmpo_loss, gspo_loss

PolicyLoss = Callable[[TokenBatch, LossConfig], TokenLoss]
"""One number a token, with gradient; NaN at masked tokens cannot come in. For example

>>> def my_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
...     ratio = (batch.logprobs - batch.old_logprobs).clamp(-20, 20).exp()
...     return TokenLoss(-batch.advantages * ratio.clamp(max=1 + config.clip_ratio_high))
"""

FUNCTIONS: dict[str, PolicyLoss] = {
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "gmpo": gmpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
    "dro": dro_loss,
    "reinforce": reinforce_loss,
    "gpg": reinforce_loss,
    "sft": sft_loss,
}
"""`engine.losses.config.DESCRIPTIONS` says what each is."""


def loss_function(name: str) -> PolicyLoss:
    """The function of a name.

    Raises:
        ValueError: a user's function cannot be imported, or the name is unknown.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything at import, and the user wants to know what
        raise ValueError(f"loss {name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"loss {name!r}: it is no function")
    return function
