"""Log-probabilities and entropies of a vocabulary-parallel model, without [tokens x vocabulary] in fp32 at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024
"""Rows of logits that exist at once: 1024 x 152,000 x 4 bytes = 0.6 GB, recomputed in backward."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    places: Tensor,
    *,
    vocabulary: int,
    temperature: float,
    group: ProcessGroup,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy of the distribution, at some places of a packed row.

    Args:
        hidden: [tokens (/ tp with sequence parallel), 1, hidden], the decoder's output.
        weight: [padded vocabulary / tp, hidden], this rank's rows of the output layer.
        targets: [tokens] int64, global token ids.
        places: [n] int64, the row's positions to evaluate.
        vocabulary: real token ids; columns beyond have probability 0 and no gradient.
        temperature: divides the logits, as the sampler did.
        group: the tensor parallel group.
        sequence_parallel: `hidden` is divided over the group.

    Returns:
        logprobs, entropies: [n] fp32 each.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    rows, wanted = hidden[:, 0].index_select(0, places), targets.index_select(0, places)
    if len(places) == 0:  # keeps the graph whole: every rank must take part in backward
        nothing = rows.float().sum() * 0 + weight.float().sum() * 0
        return nothing.expand(0), nothing.expand(0)
    first = torch.distributed.get_rank(group) * weight.shape[0]
    logprobs, entropies = [], []
    for start in range(0, len(places), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        a, b = checkpoint(
            _chunk,
            rows[part],
            weight,
            wanted[part],
            first,
            vocabulary,
            temperature,
            group,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(a)
        entropies.append(b)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    rows: Tensor, weight: Tensor, targets: Tensor, first: int, vocabulary: int, temperature: float, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """One chunk: rows [n, hidden] to log-probabilities and entropies [n]."""
    logits = F.linear(rows, weight).float() / temperature
    real = max(0, min(logits.shape[1], vocabulary - first))
    highest = _global_max(logits[:, :real], group)
    shifted = logits[:, :real] - highest[:, None]
    weights = shifted.exp()
    local = (targets >= first) & (targets < first + real)
    index = torch.where(local, targets - first, 0)
    chosen = shifted.gather(1, index[:, None])[:, 0] * local if real else shifted.sum(1)
    # One reduction of three rows: the sum of exponentials, the chosen logit, and what the entropy needs.
    sums = torch.stack((weights.sum(1), chosen, (weights * shifted).sum(1)))
    total, chosen, expected = reduce_from_tensor_model_parallel_region(sums, group=group)
    log_total = total.log()
    return chosen - log_total, log_total - expected / total


def _global_max(logits: Tensor, group: ProcessGroup) -> Tensor:
    """Highest logit of each row over all ranks, without gradient; a rank of padding only contributes nothing."""
    with torch.no_grad():
        nothing = logits.new_full((logits.shape[0],), float("-inf"))
        highest = logits.max(1).values if logits.shape[1] else nothing
        all_reduce(highest, op=ReduceOp.MAX, group=group)
    return highest
