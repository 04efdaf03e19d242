"""What the models beside the actor say about a step's samples, on the pool: reference log-probabilities, values."""

from __future__ import annotations

from typing import Any

from storage.manifest import Manifest
from tasks.context import StageContext
from tasks.rollout import files_of
from tasks.stage import StageOutput, Work, stage


def reference_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides the numbers, beside the samples themselves."""
    return {"reference": ctx.reference_identity, "temperature": ctx.training.temperature}


@stage("reference", settings=reference_settings)
def reference(work: Work, rollouts: Manifest) -> StageOutput:
    """Log-probabilities under the frozen reference, one row for every sample (schema REFERENCE)."""
    return _annotated(work, "reference", rollouts)


def value_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """The critic learns from the same batches as the actor, so the actor's history is its own."""
    return {"critic": ctx.critic_identity, "weights": ctx.weights(step)}


@stage("values", settings=value_settings)
def values(work: Work, rollouts: Manifest) -> StageOutput:
    """The critic's predictions, one row for every sample (schema VALUES)."""
    return _annotated(work, "critic", rollouts)


def _annotated(work: Work, role: str, rollouts: Manifest) -> StageOutput:
    """Raises RuntimeError unless the pool annotated every sample."""
    ctx = work.ctx
    args = {
        "role": role,
        "store": ctx.store_uri,
        "rollout": rollouts.model_dump(mode="json"),
        "out": work.path,
        "temperature": ctx.training.temperature,
        "max_tokens_per_micro_batch": ctx.fit.max_tokens_per_micro_batch,
    }
    result = work.call("annotate", args, expect_version=work.step, role=role)
    files = files_of(result)
    rows = sum(entry.rows for entry in files)
    if rows != rollouts.rows:
        raise RuntimeError(f"the pool annotated {rows} of {rollouts.rows} samples")
    return StageOutput(weight_version=rollouts.weight_version, files=files)
