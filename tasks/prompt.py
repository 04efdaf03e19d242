"""Prompts of a step, tokenized with the model's own chat template and committed before anything is generated from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from engine.tokenizer import Tokenizer
from storage.datasets import PROMPT, write_part
from storage.prompts import DataError, Prompt
from tasks.context import Sampling, StageContext
from tasks.stage import StageOutput, Work, stage


def sampling_settings(ctx: StageContext, sampling: Sampling) -> dict[str, Any]:
    """What decides which prompts a step gets, and how they read."""
    return {
        "model": ctx.model_identity,
        "seed": ctx.seed,
        "prompts": sampling.prompts,
        "max_response_tokens": ctx.generation.max_response_tokens,
        "context_tokens": ctx.context_tokens,
        "data": sampling.source.fingerprint,
    }


@stage("prompt", settings=lambda ctx, step: sampling_settings(ctx, ctx.training))
def prompt(work: Work) -> StageOutput:
    """Draw and tokenize the step's training prompts."""
    return draw_prompts(work, work.ctx.training)


def draw_prompts(work: Work, sampling: Sampling, batch: int | None = None, groups_before: int = 0) -> StageOutput:
    """Write the step's prompts as one part (schema PROMPT).

    Args:
        batch: which batch of the source; the step's own without it.
        groups_before: groups that the step has already.

    Raises:
        DataError: a prompt does not fit beside its response into the context (under `overlong: error`), or none does.
    """
    ctx = work.ctx
    # Evaluation takes the same prompts at every version, and in runs of every seed: their accuracies can be compared.
    position, seed = (work.step if batch is None else batch, ctx.seed) if sampling.advance else (0, 0)
    drawn = sampling.source.batch(position, sampling.prompts, seed)
    groups = group_ids(work.step, len(drawn), groups_before)
    rows = [prompt_row(ctx.tokenizer, item, group) for item, group in zip(drawn, groups, strict=True)]
    fitting = fitting_rows(rows, ctx.context_tokens - ctx.generation.max_response_tokens, sampling.overlong)
    entry = write_part(work.store, work.path, 0, pa.Table.from_pylist(fitting, schema=PROMPT), PROMPT)
    return StageOutput(
        weight_version=work.step,
        files=[entry],
        metrics={"prompts": len(fitting), "dropped": len(rows) - len(fitting)},
    )


def group_ids(step: int, count: int, before: int = 0) -> list[str]:
    """One id a prompt drawn, after the `before` first ones of the step: the same prompt twice makes two groups."""
    return [f"{step:06d}-{index:05d}" for index in range(before, before + count)]


def prompt_row(tokenizer: Tokenizer, item: Prompt, group_id: str) -> dict[str, Any]:
    """One row of the PROMPT schema. Messages go through the chat template; plain text is taken as it is."""
    text, tokens = prompt_tokens(tokenizer, item)
    return {
        "prompt_id": item.prompt_id,
        "group_id": group_id,
        "source": item.source,
        "prompt_text": text,
        "prompt_tokens": tokens,
        "answer": item.answer,
        "extra": json.dumps(item.extra),
    }


def prompt_tokens(tokenizer: Tokenizer, item: Prompt) -> tuple[str, list[int]]:
    """Text and token ids as the model sees the prompt.

    Raises:
        DataError: the prompt is empty.
    """
    if item.messages is not None:
        text, tokens = tokenizer.render_text(item.messages), tokenizer.render(item.messages)
    else:
        text = item.text or ""
        tokens = tokenizer.encode(text)
    if not tokens:
        raise DataError(f"prompt {item.prompt_id} of {item.source} is empty")
    return text, tokens


def fitting_rows(rows: Sequence[dict[str, Any]], limit: int, overlong: str) -> list[dict[str, Any]]:
    """The rows whose prompt has at most `limit` tokens.

    Raises:
        DataError: a row is longer and `overlong` is "error", or no row is left.
    """
    too_long = [row for row in rows if len(row["prompt_tokens"]) > limit]
    if too_long and overlong == "error":
        first = too_long[0]
        raise DataError(
            f"prompt {first['prompt_id']} of {first['source']} has {len(first['prompt_tokens'])} tokens, but beside the longest"
            f" response only {limit} fit into the context; shorten it, lower generation.max_response_tokens,"
            " or set data.overlong: drop"
        )
    if rows and len(too_long) == len(rows):
        raise DataError(f"none of the {len(rows)} prompts drawn fits into {limit} tokens")
    return [row for row in rows if len(row["prompt_tokens"]) <= limit]
