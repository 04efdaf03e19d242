"""Which settings of a run may change between its attempts: those that do not change what its steps compute."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from flows.checks import Prepared, Violation
from flows.config import TrainConfig
from storage.ledger import Ledger

FREE = (
    "experiment",
    "root",
    "total_steps",
    "checkpoint_every",
    "evaluate_every",
    "keep_last_checkpoints",
    "keep_checkpoint_every",
    "keep_best",
    "parallel",
    "placement",
    "pool",
    "algorithm.max_tokens_per_micro_batch",
    "algorithm.max_rollout_batches",
    "algorithm.when_too_few",
    "fit.max_tokens_per_micro_batch",
    "generation.max_concurrent_samples",
    "generation.memory_fraction",
    "generation.kv_cache_gib",
    "generation.cuda_graphs",
    "generation.tensor_parallel_size",
    "generation.pipeline_parallel_size",
    "generation.expert_parallel",
)
"""Names of the run, how far it goes, what is kept, when dynamic sampling gives up, and where the work is done: checkpoints load
into any layout. Another layout adds in another order, and its replicas draw other samples, as another machine may."""


def changed_since(ledger: Ledger, config: TrainConfig, flow: str, prepared: Prepared | None = None) -> list[Violation]:
    """One violation for every setting that differs from those the run was started with; none for a new run.

    Args:
        prepared: model and prompts as they are now, to compare their contents too.
    """
    record = ledger.record()
    if record is None:
        return []
    if record.flow != flow:
        return [
            Violation(
                ("experiment",), f"{record.name!r} is a {record.flow} run; choose another name for this {flow} run"
            )
        ]
    before, now = _leaves(_completed(record.config, type(config))), _leaves(config.model_dump(mode="json"))
    changes = [
        Violation(
            (key,), f"was {before.get(key)!r} when run {record.name!r} was started, now {now.get(key)!r}; {_MEND}"
        )
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_free(key)
    ]
    return changes or _changed_contents(ledger, prepared)


def _changed_contents(ledger: Ledger, prepared: Prepared | None) -> list[Violation]:
    """Files that were edited under an unchanged configuration, by what the first stage of the run noted of them."""
    first = ledger.get("prompt", 0) or ledger.get("demonstration", 0)
    if first is None or prepared is None:
        return []
    before = json.loads(first.inputs["settings"])
    now = {"data": prepared.source.fingerprint, "model": prepared.identity}
    return [
        Violation((key,), f"the files are not those that run {ledger.run!r} was started with; {_MEND}")
        for key in now
        if before[key] != now[key]
    ]


_MEND = "set it back, or start a run under another name"


def _completed(stored: dict[str, Any], model: type[TrainConfig]) -> dict[str, Any]:
    """The stored configuration with the defaults of settings that did not exist when it was written."""
    try:
        return model.model_validate(stored).model_dump(mode="json")
    except ValidationError:
        return stored


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
