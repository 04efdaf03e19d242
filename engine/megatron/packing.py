"""Several sequences in one row, so that no token is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch: sequences end to end.

    Attributes:
        ids: [1, tokens] int64, the sequences and a throw-away tail: with sequence parallel it makes tokens divisible, without
            any sequence it is all there is.
        positions: [1, tokens] int64, each token's place in its own sequence.
        targets: [tokens] int64, the following token of the same sequence (0 where there is none).
        response: [response tokens] int64, where the row holds the prediction of each response token, sequence by sequence.
        ends: [sequences] int64, the last token of each sequence.
        attention: the sequences' edges, for the attention kernel.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    response: Tensor
    ends: Tensor
    attention: PackedSeqParams


def pack(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], multiple: int, device: str) -> PackedRow:
    """Lay prompts + responses end to end; the row's length is made a multiple of `multiple` (sequence parallel).

    A prompt needs at least one token: the first response token is predicted from the prompt's last one. Without any sequence
    the row holds `multiple` throw-away tokens, for a rank that takes part in the others' communication.
    """
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    total = sum(map(len, sequences))
    if fill := -total % multiple if sequences else multiple:
        sequences.append([0] * fill)
    lengths = torch.tensor([len(s) for s in sequences])
    edges = torch.zeros(len(sequences) + 1, dtype=torch.int64)
    edges[1:] = lengths.cumsum(0)
    ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    targets = torch.roll(ids, -1)
    targets[edges[1:] - 1] = 0
    places = [
        torch.arange(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
        for start, prompt, response in zip(edges.tolist(), prompts, responses, strict=False)
    ]
    cumulative = edges.to(device=device, dtype=torch.int32)
    longest = int(lengths.max())
    # "sbhd": with "thd" Megatron would take a path with a loop and a host synchronisation a sequence.
    attention = PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return PackedRow(
        ids=ids[None].to(device),
        positions=torch.cat([torch.arange(int(n)) for n in lengths])[None].to(device),
        targets=targets.to(device),
        response=torch.cat(places).to(device) if places else torch.empty(0, dtype=torch.int64, device=device),
        ends=(edges[1 : len(prompts) + 1] - 1).to(device),
        attention=attention,
    )
