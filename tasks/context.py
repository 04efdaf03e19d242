"""What a stage works with: the ledger, the pool, and the parts of the configuration that stages read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config import CriticConfig, GenerationConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.losses.config import LossConfig
from engine.tokenizer import Tokenizer
from storage.ledger import Ledger
from storage.prompts import PromptSource
from tasks.advantages import AlgorithmConfig
from tasks.devices import Devices, at_once, merged
from tasks.rewards import RewardConfig


@dataclass(frozen=True)
class Sampling:
    """One purpose for which prompts are answered: training, or held-out evaluation.

    Attributes:
        source: the prompts.
        prompts: prompts a step.
        samples_per_prompt: answers to each.
        temperature: of sampling; 0 is greedy.
        overlong: "error" or "drop" for prompts that do not fit into the context.
        advance: whether each step takes the next prompts; evaluation takes the same ones every time.
    """

    source: PromptSource
    prompts: int
    samples_per_prompt: int
    temperature: float
    overlong: str
    advance: bool


@dataclass(frozen=True)
class Fit:
    """How an update divides a step's samples into optimizer steps, and with which loss."""

    loss: LossConfig
    mini_batch_size: int
    epochs: int
    max_tokens_per_micro_batch: int


class StageContext:
    """Handed to every stage of a run.

    A plain class on purpose: Prefect searches dataclasses and pydantic models among a task's arguments for futures, at every call.

    Args:
        ledger: of the run.
        devices: that do the heavy work.
        tokenizer: of the model.
        model_identity, reference_identity, critic_identity: change with the files of the model, wherever they are; None: no such
            model.
        critic: how the critic learns.
        training: prompts that are trained on.
        held_out: prompts for evaluation; None without a validation set.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        devices: Devices,
        tokenizer: Tokenizer,
        seed: int,
        model: ModelConfig,
        model_identity: str,
        parallel: ParallelConfig,
        generation: GenerationConfig,
        reward: RewardConfig,
        optimizer: OptimizerConfig,
        fit: Fit,
        training: Sampling,
        held_out: Sampling | None = None,
        algorithm: AlgorithmConfig | None = None,
        reference_identity: str | None = None,
        critic: CriticConfig | None = None,
        critic_identity: str | None = None,
        context_tokens: int,
    ) -> None:
        self.ledger, self.devices, self.tokenizer, self.seed = ledger, devices, tokenizer, seed
        self.model, self.parallel, self.generation = model, parallel, generation
        self.reward, self.optimizer, self.fit = reward, optimizer, fit
        self.algorithm = algorithm or AlgorithmConfig()
        self.training, self.held_out = training, held_out
        self.model_identity, self.reference_identity = model_identity, reference_identity
        self.critic, self.critic_identity = critic, critic_identity
        self.context_tokens = context_tokens

    @property
    def store_uri(self) -> str:
        """Root that holds the runs: the store that workers open, and to which stage paths are relative."""
        return self.ledger.root_uri

    def weights(self, version: int) -> str:
        """Identity of the weights after `version` updates: it changes with the model and with every batch trained on."""
        if version == 0:
            return self.model_identity
        update = self.ledger.get("update", version - 1)
        if update is None:
            raise LookupError(f"weight version {version} does not exist: step {version - 1} has no committed update")
        return update.digest

    def call(
        self, op: str, op_id: str, args: dict[str, Any], expect_version: int | None = None, role: str = "actor"
    ) -> dict[str, Any]:
        """Run one operation on the devices that hold a role's model, and wait for it; see Devices.call."""
        return self.devices.call(self.devices.with_role(role), op, op_id, args, expect_version)

    def call_trained(
        self, op: str, op_id: str, args: dict[str, Any], expect_version: int | None = None
    ) -> dict[str, Any]:
        """Run one operation wherever a model learns, on all groups at once; their results as one. Raises what a group raises."""
        work = lambda group: self.devices.call(group, op, op_id, args, expect_version)  # noqa: E731
        return merged(at_once(work, self.devices.trained))
