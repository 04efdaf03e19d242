"""Responses to the step's prompts, generated on the pool. Each data-parallel rank writes its own part."""

from __future__ import annotations

from typing import Any

from storage.manifest import FileEntry, Manifest
from tasks.context import Sampling, StageContext
from tasks.figures import largest_of_ranks
from tasks.stage import StageOutput, Work, flat, stage


def generation_settings(ctx: StageContext, sampling: Sampling, version: int) -> dict[str, Any]:
    """What decides which responses the prompts get. Memory and batching limits change speed, not responses, and are left out."""
    return {"weights": ctx.weights(version), "seed": ctx.seed, **flat(sampling=sampling_arguments(ctx, sampling))}


def sampling_arguments(ctx: StageContext, sampling: Sampling) -> dict[str, Any]:
    """The `sampling` argument of the pool's `generate`."""
    return {
        "temperature": sampling.temperature,
        "top_p": ctx.generation.top_p,
        "max_response_tokens": ctx.generation.max_response_tokens,
        "samples_per_prompt": sampling.samples_per_prompt,
    }


@stage("rollout", settings=lambda ctx, step: generation_settings(ctx, ctx.training, step))
def rollout(work: Work, prompts: Manifest) -> StageOutput:
    """Answer every training prompt `samples_per_prompt` times with the weights of version `step`."""
    return generate(work, work.ctx.training, prompts)


def generate(work: Work, sampling: Sampling, prompts: Manifest) -> StageOutput:
    """Have the pool answer the prompts; returns its parts (schema ROLLOUT).

    Raises:
        RuntimeError: the pool returned another number of samples than was asked for.
    """
    ctx = work.ctx
    result = work.call(
        "generate",
        {
            "store": ctx.store_uri,
            "prompts": prompts.model_dump(mode="json"),
            "out": work.path,
            "sampling": sampling_arguments(ctx, sampling),
            "seed": ctx.seed,
            "step": work.step,
            "weight_version": work.step,
        },
        expect_version=work.step,
    )
    files = files_of(result)
    rows, wanted = sum(entry.rows for entry in files), prompts.rows * sampling.samples_per_prompt
    if rows != wanted:
        raise RuntimeError(f"the pool wrote {rows} samples for {prompts.rows} prompts, {wanted} were asked for")
    return StageOutput(weight_version=work.step, files=files, metrics=_throughput(result) | largest_of_ranks(result))


def files_of(result: dict[str, Any]) -> list[FileEntry]:
    """The parts that all ranks wrote, in order of name (ranks that wrote none return no `files`)."""
    entries = [FileEntry.model_validate(entry) for rank in result["ranks"] for entry in rank.get("files", [])]
    return sorted(entries, key=lambda entry: entry.path)


def _throughput(result: dict[str, Any]) -> dict[str, float]:
    """Tokens of all ranks, the slowest rank's seconds, and what follows."""
    ranks = [rank["metrics"] for rank in result["ranks"] if rank.get("files")]
    tokens = sum(float(metrics["tokens"]) for metrics in ranks)
    seconds = max((float(metrics["seconds"]) for metrics in ranks), default=0.0)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}
