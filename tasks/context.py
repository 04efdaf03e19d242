"""What a stage works with: the ledger, the pool, and the parts of the configuration that stages read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.config import CriticConfig, GenerationConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.losses.config import LossConfig
from engine.tokenizer import Tokenizer
from storage.ledger import Ledger
from storage.prompts import PromptSource
from tasks.advantages import AlgorithmConfig
from tasks.rewards import RewardConfig

Progress = Callable[[dict[str, Any]], None]


class Pool(Protocol):
    """The part of `engine.pool.client.PoolClient` that stages use."""

    def call(
        self,
        op: str,
        op_id: str,
        args: dict[str, Any],
        lease: Any,
        expect_version: int | None,
        timeout_s: float,
        on_progress: Progress | None = None,
    ) -> dict[str, Any]: ...

    def cancel(self, op_id: str) -> Any: ...


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
        pool, lease: who does the heavy work, and the right to ask for it.
        tokenizer: of the model.
        model_identity, reference_identity, critic_identity: change with the files of the model, wherever they are; None: no such
            model.
        critic: how the critic learns.
        training: prompts that are trained on.
        held_out: prompts for evaluation; None without a validation set.
        operation_timeout_s: longest time one operation of the pool may take.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        pool: Pool,
        lease: Any,
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
        operation_timeout_s: float,
        on_progress: Progress | None = None,
    ) -> None:
        self.ledger, self.pool, self.lease, self.tokenizer, self.seed = ledger, pool, lease, tokenizer, seed
        self.model, self.parallel, self.generation = model, parallel, generation
        self.reward, self.optimizer, self.fit = reward, optimizer, fit
        self.algorithm = algorithm or AlgorithmConfig()
        self.training, self.held_out = training, held_out
        self.model_identity, self.reference_identity = model_identity, reference_identity
        self.critic, self.critic_identity = critic, critic_identity
        self.context_tokens = context_tokens
        self.operation_timeout_s = operation_timeout_s
        self.on_progress = on_progress
        self.running_op: str | None = None

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

    def call(self, op: str, op_id: str, args: dict[str, Any], expect_version: int | None = None) -> dict[str, Any]:
        """Run one operation on the pool and wait for it; a repeated `op_id` joins it or returns what it returned."""
        self.running_op = op_id
        result = self.pool.call(
            op,
            op_id,
            args,
            self.lease,
            expect_version,
            timeout_s=self.operation_timeout_s,
            on_progress=self.on_progress,
        )
        self.running_op = None  # not in a finally: after an exception the flow cancels what may still be running
        return result
