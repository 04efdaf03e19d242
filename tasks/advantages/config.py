"""What a step's samples are worth to the update, which of them are used, and how they become optimizer steps."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

KLForm = Literal["k1", "k2", "k3", "abs"]


class AlgorithmConfig(BaseModel):
    """Advantages, sampling and mini-batches. The policy loss itself is `engine.losses.config.LossConfig`."""

    model_config = ConfigDict(extra="forbid")

    estimator: str = Field(
        "grpo",
        title="Advantage estimator",
        description="A name from `onecopy algorithms`, or your own as `module:function` or `file.py:function`.",
    )
    normalize_by_std: Literal["group", "batch", "none"] = Field(
        "group",
        title="Divide by the deviation",
        description="Of the sample's group, or of all rewards of the step; `none` only centres. GRPO and grpo_passk.",
    )
    gamma: float = Field(
        1.0,
        gt=0,
        le=1,
        title="Discount",
        description="A trained token. reinforce, reinforce_plus_plus, gae, optimal_token_baseline.",
    )
    lam: float = Field(1.0, ge=0, le=1, title="Lambda", description="Of gae: 1 trusts returns, 0 the critic.")
    gdpo_weights: dict[str, float] = Field(
        default_factory=dict, title="Component weights", description="Of gdpo: reward components by name, and weights."
    )
    kl_coef: float = Field(
        0.0, ge=0, title="KL in the reward", description="Penalty a token for leaving the reference model; 0 is off."
    )
    kl_form: KLForm = Field("k1", title="Form of that KL", description="k1, k2, k3 or abs; see `onecopy algorithms`.")
    kl_target: float | None = Field(
        None, gt=0, title="KL target", description="Adapts the coefficient to keep the KL there; unset keeps it fixed."
    )
    kl_horizon: int = Field(10_000, ge=1, title="KL horizon", description="Samples over which the coefficient adapts.")
    mask_truncated: bool = Field(
        False,
        title="Leave out truncated samples",
        description="Responses cut at the longest length are not trained on; their rewards stay in the group's statistics.",
    )
    dynamic_sampling: bool = Field(
        False,
        title="Dynamic sampling",
        description="Replace groups whose samples are all worth the same by further prompts (DAPO).",
    )
    filter_on: str = Field(
        "reward",
        title="Worth, for dynamic sampling",
        description="`reward` (before any penalty for length), or a component of the reward.",
    )
    max_rollout_batches: int = Field(
        10, ge=1, title="Rollouts a step at most", description="Of dynamic sampling, `prompts_per_step` prompts each."
    )
    when_too_few: Literal["fail", "continue"] = Field(
        "fail", title="Too few groups", description="After the last rollout: stop, or train on those there are."
    )
    mini_batch_size: int | None = Field(
        None, ge=1, title="Mini-batch", description="Samples an optimizer step; none is all samples of the step."
    )
    epochs: int = Field(1, ge=1, title="Epochs", description="Passes over each step's samples.")
    max_tokens_per_micro_batch: int = Field(
        8192,
        ge=1,
        title="Micro-batch",
        description="Tokens a forward pass, a rank. Changes memory and speed, never the result.",
    )

    @field_validator("normalize_by_std", mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        """True is `group` and False `none`, as older recipes and other systems have it."""
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value
