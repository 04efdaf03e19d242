"""What a loss can be told. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class LossConfig(BaseModel):
    """A policy (or supervised) loss and how its tokens become one number."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["ppo", "sft"] = Field(
        "ppo", title="Loss", description="ppo: clipped policy gradient. sft: negative log-likelihood."
    )
    aggregation: Aggregation = Field(
        "token-mean", title="Aggregation", description="How token losses become one number."
    )
    clip_ratio_low: float = Field(0.2, ge=0, lt=1, title="Clip below", description="The ratio is held above 1 - this.")
    clip_ratio_high: float = Field(
        0.2, ge=0, title="Clip above", description="The ratio is held below 1 + this (DAPO: 0.28)."
    )
    clip_ratio_c: float | None = Field(
        3.0, gt=1, title="Dual clip", description="Bound of the loss for negative advantages."
    )
    entropy_coef: float = Field(0.0, title="Entropy bonus")
    importance_cap: float | None = Field(
        None,
        gt=0,
        title="Importance cap",
        description="Truncated importance sampling against the rollout policy; unset is off.",
    )
