"""What a step's samples are worth to the update, and how they are divided into optimizer steps."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AlgorithmConfig(BaseModel):
    """Advantage estimator and mini-batches. The policy loss itself is `engine.losses.config.LossConfig`."""

    model_config = ConfigDict(extra="forbid")

    estimator: str = Field(
        "grpo",
        title="Advantage estimator",
        description="`grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus_baseline`, or your own as `module:function`.",
    )
    normalize_by_std: bool = Field(
        True, title="Divide by the group's deviation", description="GRPO only. Sample deviation (ddof 1) plus 1e-6."
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
