"""What a frozen look of a model says about staged samples: reference log-probabilities, values, scores."""

from __future__ import annotations

from itertools import accumulate

from engine.layout import replica_rows
from engine.roles.model import Model, Tokens


def annotate(
    model: Model, prompts: Tokens, responses: Tokens, *, output: int, each: str, temperature: float, max_tokens: int
) -> dict[int, list[float]]:
    """One output of the model for this data parallel rank's share of the samples. Every rank must call it with all of them.

    Args:
        output: which of the model's two outputs, see `SharedModel.outputs`.
        each: "token": one number a response token; "sequence": one a sample.
        temperature: divides the logits of a language model.
        max_tokens: of one packed row; changes memory and speed, not the result.

    Returns:
        index of a sample to its numbers; the shares of all data parallel ranks together hold every sample once.
    """
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    mine, count = replica_rows(lengths, list(range(len(lengths))), model.layout.dp, model.coordinates.dp, max_tokens)
    sizes = {i: len(responses[i]) if each == "token" else 1 for members in mine for i in members}
    batches = [([prompts[i] for i in members], [responses[i] for i in members]) for members in mine]
    found = model.evaluate(batches, count, temperature, output, [sum(sizes[i] for i in members) for members in mine])
    out: dict[int, list[float]] = {}
    for members, values in zip(mine, found, strict=True):
        numbers = values.tolist()
        edges = [0, *accumulate(sizes[i] for i in members)]
        out.update((i, numbers[a:b]) for i, a, b in zip(members, edges[:-1], edges[1:], strict=True))
    return out
