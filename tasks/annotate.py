"""What frozen models say about a step's samples: log-probabilities of the reference policy, on the pool."""

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
    """Write one row for every sample (schema REFERENCE).

    Raises:
        RuntimeError: the pool did not annotate every sample.
    """
    ctx = work.ctx
    args = {
        "store": ctx.store_uri,
        "rollout": rollouts.model_dump(mode="json"),
        "out": work.path,
        "temperature": ctx.training.temperature,
        "max_tokens_per_micro_batch": ctx.fit.max_tokens_per_micro_batch,
    }
    result = work.call("reference", args, expect_version=work.step)
    files = files_of(result)
    rows = sum(entry.rows for entry in files)
    if rows != rollouts.rows:
        raise RuntimeError(f"the pool annotated {rows} of {rollouts.rows} samples")
    return StageOutput(weight_version=rollouts.weight_version, files=files)
