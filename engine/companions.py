"""The models beside the actor: a frozen reference, a critic that learns with it. They take turns in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from engine.config import CriticConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.megatron.value_update import ValueSettings, ValueUpdate
from engine.roles.actor import Actor
from engine.roles.annotation import annotate
from engine.roles.critic import VALUES as VALUE_OUTPUT
from engine.roles.critic import Critic
from engine.roles.resting import Resting
from engine.samples import Samples
from engine.weights.architecture import read_architecture
from storage.datasets import REFERENCE, VALUES, read, write_part
from storage.filesystem import Store
from storage.manifest import Manifest


@dataclass(frozen=True)
class Annotation:
    """What a role says of a sample: which output of its model, as which column of which dataset."""

    output: int
    column: str
    schema: pa.Schema


ANNOTATIONS = {
    "reference": Annotation(0, "reference_logprobs", REFERENCE),
    "critic": Annotation(VALUE_OUTPUT, "values", VALUES),
}


class Companions:
    """Those of one run on one rank.

    Args:
        spec: as for `ModelSession`; "reference" and "critic" are None where the group holds none. All share the group's layout.
            One that has the group to itself does not leave the device.
    """

    def __init__(self, spec: dict[str, Any], device: str, dtype_of: Callable[[ModelConfig], torch.dtype]) -> None:
        self._roles: dict[str, Resting[Any]] = {}
        parallel = ParallelConfig(**spec["parallel"])
        self._layout, sequence_parallel = parallel.layout, parallel.sequence_parallel
        alone = [spec["model"], spec.get("reference"), spec.get("critic")].count(None) == 2
        if reference := spec.get("reference"):
            self._roles["reference"] = Resting(
                Actor(
                    read_architecture(reference["path"]),
                    reference["path"],
                    self._layout,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype_of(ModelConfig(**reference)),
                    device=device,
                    optimizer=None,
                ),
                stays=alone,
            )
        if critic := spec.get("critic"):
            folder = critic["model"]["path"]
            arch = read_architecture(folder)
            self._roles["critic"] = Resting(
                Critic(
                    arch if arch.labels else arch.with_score_head(),
                    folder,
                    self._layout,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype_of(ModelConfig(**critic["model"])),
                    device=device,
                    optimizer=OptimizerConfig(**critic["optimizer"]),
                ),
                stays=alone,
            )

    def annotate(
        self, role: str, store: str, rollout: dict[str, Any], out: str, temperature: float, max_tokens: int
    ) -> dict[str, Any]:
        """Write what a role says of staged samples; each data parallel rank writes its share as one part."""
        if role not in self._roles:
            raise RuntimeError(f"this run was loaded without a {role}")
        what, files = ANNOTATIONS[role], Store.open(store)
        table = read(files, Manifest(**rollout), ["sample_id", "prompt_tokens", "response_tokens"])
        prompts, responses = table["prompt_tokens"].to_pylist(), table["response_tokens"].to_pylist()
        with self._roles[role].awake() as model:
            found = annotate(
                model,
                prompts,
                responses,
                output=what.output,
                each="token",
                temperature=temperature,
                max_tokens=max_tokens,
            )
        at = self._layout.coordinates(torch.distributed.get_rank())
        if at.tp or at.pp or not found:
            return {}
        ids = table["sample_id"].to_pylist()
        rows = [{"sample_id": ids[index], what.column: found[index]} for index in sorted(found)]
        entry = write_part(files, out, at.dp, pa.Table.from_pylist(rows, schema=what.schema), what.schema)
        return {"files": [entry.model_dump()]}

    @property
    def has_critic(self) -> bool:
        return "critic" in self._roles

    def update_critic(self, config: dict[str, Any], samples: Samples, settings: ValueSettings) -> dict[str, float]:
        """Train the critic on the samples of a policy update; returns its metrics."""
        if samples.values is None or samples.returns is None:
            raise ValueError("a critic learns from values and returns, which the datasets lack")
        with self._roles["critic"].awake() as critic:
            critic.optimizer_config = CriticConfig(**config).optimizer
            return ValueUpdate(critic, samples, samples.values, samples.returns, settings).run()

    def critic_awake(self) -> AbstractContextManager[Critic]:
        """The critic, on the device inside the block."""
        return self._roles["critic"].awake()
