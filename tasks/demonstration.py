"""Demonstrations of a step: prompts with the answers that the model shall learn to give."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from engine.tokenizer import Tokenizer
from storage.datasets import DEMONSTRATION, write_part
from storage.prompts import DataError, Prompt
from tasks.context import StageContext
from tasks.prompt import group_ids, prompt_tokens
from tasks.stage import StageOutput, Work, stage


def demonstration_settings(ctx: StageContext, step: int) -> dict[str, Any]:
    """What decides which demonstrations a step gets, and how they read."""
    return {
        "model": ctx.model_identity,
        "seed": ctx.seed,
        "demonstrations": ctx.training.prompts,
        "context_tokens": ctx.context_tokens,
        "data": ctx.training.source.fingerprint,
    }


@stage("demonstration", settings=demonstration_settings)
def demonstration(work: Work) -> StageOutput:
    """Draw and tokenize the step's demonstrations, one part (schema DEMONSTRATION).

    Raises:
        DataError: prompt and answer do not fit into the context (under `overlong: error`), or the answer is empty.
    """
    ctx = work.ctx
    drawn = ctx.training.source.batch(work.step, ctx.training.prompts, ctx.seed)
    rows = []
    for item, sample_id in zip(drawn, group_ids(work.step, len(drawn)), strict=True):
        row = demonstration_row(ctx.tokenizer, item, sample_id)
        if row["length"] <= ctx.context_tokens:
            rows.append(row)
        elif ctx.training.overlong == "error":
            raise DataError(
                f"prompt {item.prompt_id} of {item.source} and its answer have {row['length']} tokens, the context holds"
                f" {ctx.context_tokens}; shorten them, or set data.overlong: drop"
            )
    if not rows:
        raise DataError(f"none of the {len(drawn)} demonstrations drawn fits into {ctx.context_tokens} tokens")
    entry = write_part(work.store, work.path, 0, pa.Table.from_pylist(rows, schema=DEMONSTRATION), DEMONSTRATION)
    tokens = sum(len(row["response_tokens"]) for row in rows)
    return StageOutput(
        weight_version=work.step,
        files=[entry],
        metrics={"demonstrations": len(rows), "dropped": len(drawn) - len(rows), "tokens": tokens},
    )


def demonstration_row(tokenizer: Tokenizer, item: Prompt, sample_id: str) -> dict[str, Any]:
    """One row of the DEMONSTRATION schema. Raises DataError as `response_tokens` does."""
    prompt, response = prompt_tokens(tokenizer, item)[1], response_tokens(tokenizer, item)
    return {
        "sample_id": sample_id,
        "prompt_tokens": prompt,
        "response_tokens": response,
        "length": len(prompt) + len(response),
    }


def response_tokens(tokenizer: Tokenizer, item: Prompt) -> list[int]:
    """The answer as the model should produce it, up to and including the token that ends a response.

    For a chat, that is what the template writes between the generation prompt and the end of the turn.

    Raises:
        DataError: the answer is empty, or the tokenizer knows no token that ends a response.
    """
    if not item.answer:
        raise DataError(f"prompt {item.prompt_id} of {item.source} has no answer to learn from")
    stops = tokenizer.stop_token_ids
    if not stops:
        raise DataError(f"{tokenizer.folder} names no token that ends a response (eos_token_id)")
    if item.messages is None:
        return [*tokenizer.encode(item.answer, special_tokens=False), stops[0]]
    asked = tokenizer.render_text(item.messages)
    told = tokenizer.render_text(
        [*item.messages, {"role": "assistant", "content": item.answer}], generation_prompt=False
    )
    turn = told.removeprefix(asked) if told.startswith(asked) else item.answer
    tokens = tokenizer.encode(turn, special_tokens=False)
    end = next((index for index, token in enumerate(tokens) if token in stops), None)
    return [*tokens, stops[0]] if end is None else tokens[: end + 1]
