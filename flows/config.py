"""Configuration of the flows. Each part of onecopy owns its model; this file only composes them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.config import (
    CriticConfig,
    GenerationConfig,
    GroupConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceConfig,
)
from engine.losses.config import LossConfig
from engine.pool.config import PoolConfig
from storage.prompts import DataConfig
from tasks.advantages import AlgorithmConfig, find_estimator
from tasks.rewards import RewardConfig


class ValidationConfig(BaseModel):
    """Held-out prompts, and how they are answered when accuracy is measured."""

    model_config = ConfigDict(extra="forbid")

    data: DataConfig = Field(title="Held-out prompts")
    size: int = Field(64, ge=1, title="Prompts", description="The same ones at every evaluation; all of a smaller set.")
    temperature: float = Field(0.0, ge=0, le=2, title="Temperature", description="0 is greedy.")
    samples_per_prompt: int = Field(1, ge=1, title="Samples a prompt", description="More than one only when sampling.")


class RunConfig(BaseModel):
    """What every training flow has."""

    model_config = ConfigDict(extra="forbid")

    experiment: str | None = Field(
        None,
        title="Experiment",
        description="Name of the run's folder; the same name goes on where it stopped. Default: generated.",
    )
    root: str = Field("runs", title="Folder of runs", description="A path, or s3://bucket/prefix.")
    seed: int = Field(0, ge=0, lt=2**31, title="Seed", description="Of prompt order, sampling and mini-batches.")
    total_steps: int = Field(
        100, ge=1, title="Steps", description="Updates in all; a run that stopped early goes on up to here."
    )
    checkpoint_every: int = Field(
        10, ge=1, title="Checkpoint every", description="Steps; the last one is always saved."
    )
    evaluate_every: int = Field(
        0, ge=0, title="Evaluate every", description="Steps; before the first and after the last too. 0 is never."
    )
    keep_last_checkpoints: int = Field(2, ge=1, title="Checkpoints kept", description="The newest ones.")
    keep_checkpoint_every: int = Field(
        0, ge=0, title="Kept for ever", description="Checkpoints of steps that are multiples of this. 0: none."
    )
    keep_best: str | None = Field(
        "success",
        title="Best checkpoint kept",
        description="Held-out figure that says which one it is; with - in front, lower is better. Null: it is not kept.",
    )
    model: ModelConfig
    data: DataConfig
    validation: ValidationConfig | None = Field(None, title="Held-out evaluation")
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    pool: PoolConfig = Field(default_factory=PoolConfig)

    @property
    def generates(self) -> bool:
        """Whether responses are generated at all, so that the pool needs a generation engine."""
        return self.evaluate_every > 0

    def checkpoint_due(self, version: int) -> bool:
        """Whether weight version `version` is to be saved. Version 0 is the model itself."""
        return version > 0 and (version % self.checkpoint_every == 0 or version == self.total_steps)

    def last_checkpoint_due(self, version: int) -> int:
        """The newest version up to `version` that is to be saved; 0 if there is none."""
        return version if self.checkpoint_due(version) else version - version % self.checkpoint_every

    def evaluation_due(self, version: int) -> bool:
        """Whether weight version `version` is to be evaluated."""
        every = self.evaluate_every
        return every > 0 and (version % every == 0 or version == self.total_steps)


class PostTrainConfig(RunConfig):
    """Reinforcement learning: rollout, reward, advantage, update."""

    prompts_per_step: int = Field(
        32, ge=1, title="Prompts a step", description="Each is answered `samples_per_prompt` times."
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, title="Reference model")
    placement: dict[str, GroupConfig] = Field(
        {},
        title="Placement",
        description="Groups of devices beside the actor's, by name. Models in none of them take turns on the actor's devices.",
    )

    @property
    def generates(self) -> bool:
        """Always: that is what is learned from."""
        return True

    @property
    def samples_per_step(self) -> int:
        """Responses generated in one step."""
        return self.prompts_per_step * self.generation.samples_per_prompt

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator takes a critic's values. Raises UnknownFunction if there is no such estimator."""
        return "values" in find_estimator(self.algorithm.estimator).needs

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty, in the loss or in the reward, compares with a reference model."""
        return self.loss.needs_reference or self.algorithm.kl_coef > 0


class FitConfig(BaseModel):
    """How one step's demonstrations are divided into optimizer steps."""

    model_config = ConfigDict(extra="forbid")

    mini_batch_size: int = Field(32, ge=1, title="Mini-batch", description="Demonstrations an optimizer step.")
    epochs: int = Field(1, ge=1, title="Epochs", description="Passes over each step's demonstrations.")
    max_tokens_per_micro_batch: int = Field(
        8192,
        ge=1,
        title="Micro-batch",
        description="Tokens a forward pass, a rank. Changes memory and speed, never the result.",
    )


class SFTConfig(RunConfig):
    """Supervised fine-tuning on the data set's answers, as a warm start.

    A step is one committed batch of demonstrations and the optimizer steps made of it: the run can be resumed between steps.
    """

    demonstrations_per_step: int = Field(512, ge=1, title="Demonstrations a step")
    fit: FitConfig = Field(default_factory=FitConfig, title="Optimizer steps")


TrainConfig = PostTrainConfig | SFTConfig
"""The configuration of any flow that trains."""
