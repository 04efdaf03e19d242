"""How a response becomes a number."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class OnError(StrEnum):
    """What a sample is worth when its scoring raised or returned something that is not a finite number."""

    MASK = "mask"
    ZERO = "zero"
    FAIL = "fail"


class RewardConfig(BaseModel):
    """Reward function, and what happens when it fails on a sample."""

    model_config = ConfigDict(extra="forbid")

    function: str = Field(
        "exact",
        title="Reward function",
        description="`exact`, `digits`, `gsm8k`, `reasoning_gym`, or your own as `module:function` or `file.py:function`.",
    )
    on_error: OnError = Field(
        OnError.MASK,
        title="When scoring fails",
        description="`mask` leaves the sample out of training and its group's statistics, `zero` scores 0, `fail` stops.",
    )
    max_failed_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        title="Failures tolerated",
        description="The stage fails when more of a step's samples cannot be scored.",
    )
    success_threshold: float = Field(
        1.0, title="Success", description="A sample counts as right, in accuracies, when its reward is at least this."
    )
    overlong_buffer: int | None = Field(
        None,
        ge=1,
        title="Length penalty begins",
        description="This many tokens before the longest response (DAPO's soft overlong punishment). Unset is no penalty.",
    )
    overlong_factor: float = Field(
        1.0, gt=0, title="Length penalty", description="Taken from the reward of a response of the longest length."
    )
