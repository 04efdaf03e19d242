"""Micro-batches through the pipeline: Megatron's schedules, over packed rows that differ in length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engine.megatron.model import SharedModel
from engine.megatron.packing import PackedRow

Chunk: TypeAlias = DistributedDataParallel | SharedModel
"""A part of a model, with gradient buffers around it if it is trained."""

Loss = Callable[[int, Tensor, Tensor], Tensor]
"""Number of a micro-batch and the model's two outputs for it (see `SharedModel.outputs`), to what backward starts from."""


def unwrapped(chunk: Chunk) -> SharedModel:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def run_rows(
    chunks: Sequence[Chunk],
    rows: Sequence[PackedRow],
    temperature: float,
    loss: Loss,
    *,
    forward_only: bool,
) -> None:
    """Run all rows forward and, unless `forward_only`, backward; gradients are added up in Megatron's buffers.

    The schedule follows from the layout: one after the other, 1F1B, or interleaved (whose number of rows must be a multiple of
    the pipeline's stages). The ranks of a pipeline tell each other the shape of every row.

    Args:
        chunks: this rank's part of the model, in model order.
        rows: at least one; the same on all ranks of a model replica.
        temperature: divides the logits.
        loss: called on the last pipeline stage, once a row, in order.
        forward_only: no backward; call it without gradients.
    """

    def forward(numbered: Iterator[tuple[int, PackedRow]], chunk: Chunk) -> tuple[Tensor, Any]:
        number, row = next(numbered)
        hidden = chunk(row.ids, row.positions, None, packed_seq_params=row.attention)

        def on_last_stage(hidden: Tensor) -> tuple[Tensor, int, None]:
            # (loss, tokens to divide by, what to collect): the loss carries its own divisor
            return loss(number, *unwrapped(chunk).outputs(hidden, row, temperature)), 0, None

        return hidden, on_last_stage

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(enumerate(rows)) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(rows),
        seq_length=1,  # not used: shapes are communicated
        micro_batch_size=1,
        forward_only=forward_only,
    )
