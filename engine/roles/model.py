"""One rank's part of a model in Megatron-core: what actor, critic, reference and reward model have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from engine.adapters import initialise
from engine.config import OptimizerConfig
from engine.layout import Layout
from engine.megatron.cpu import megatron_device
from engine.megatron.lora import attach
from engine.megatron.model import SharedModel, initialise_parallel_state, transformer_config
from engine.megatron.optimizer import build_optimizer, configure, learning_rate, reset_state, set_learning_rate
from engine.megatron.packing import pack
from engine.megatron.schedule import Chunk, Loss, run_rows
from engine.weights.architecture import Architecture
from engine.weights.huggingface import WeightsMismatch, load_folder
from engine.weights.map import Place, Weight, megatron_places, weight_map

Tokens = list[list[int]]
MicroBatch = tuple[Tokens, Tokens]
"""Prompts and responses of the sequences that go through the model in one row."""


class Model:
    """One rank's part of a model. `torch.distributed` must be initialised with `layout.world_size` ranks.

    The order matters: build, read the weights, give them to Megatron's data parallel buffers (which move them, once), build the
    optimizer. From then on no parameter's address changes, so vLLM and its CUDA graphs can keep them. Models of one process must
    have the same layout: Megatron keeps its process groups in globals.

    Args:
        arch: with `labels` the model has a score head in place of the language model's; with `lora` it has adapters, and only
            these are trained: nothing else has gradients, masters or moments.
        folder: Hugging Face folder of its weights.
        optimizer: None: the model is frozen; it has neither gradients nor optimizer.
        seed: of the adapters' first numbers.

    Attributes:
        trained: it has gradients and an optimizer.
        coordinates: this rank's place in `layout`.
        chunks: its parts of the model, in model order; more than one with a virtual pipeline.
        parameters: name in the weight map (global layer numbers) to this rank's parameter, over all chunks.
        shards: the same names to the part of the weight that the parameter is.
    """

    def __init__(
        self,
        arch: Architecture,
        folder: str | Path,
        layout: Layout,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: str,
        optimizer: OptimizerConfig | None,
        seed: int = 0,
    ) -> None:
        self.arch, self.layout, self.device, self.dtype = arch, layout, device, dtype
        self.row_multiple = layout.tp if sequence_parallel else 1
        self.optimizer_steps = 0
        self.coordinates = layout.coordinates(torch.distributed.get_rank())
        self.optimizer_config, self.trained = optimizer or OptimizerConfig(), optimizer is not None
        weights = {weight.megatron: weight for weight in weight_map(arch)}
        places = megatron_places(tuple(weights.values()), layout, arch.layers, self.coordinates.pp)
        self.shards = {name: weights[name].shard(layout, self.coordinates) for name in places}
        with megatron_device(device):
            initialise_parallel_state(layout, device)
            config = transformer_config(arch, layout, sequence_parallel, dtype)
            models = [SharedModel(config, arch, layout, self.coordinates.pp, chunk) for chunk in range(layout.vpp)]
            self._adapters = [] if arch.lora is None else attach(models, arch, places, self.shards)
            if device == "cuda":
                models = [model.cuda() for model in models]
            self._name_parameters(models, weights, places)
            self._fill(folder, seed)
            if optimizer is None:
                self.chunks: list[Chunk] = [model.requires_grad_(False) for model in models]
            else:
                self.chunks = [
                    DistributedDataParallel(config, _buffer_config(), model, disable_bucketing=number > 0)
                    for number, model in enumerate(models)
                ]
                self.optimizer = build_optimizer(self.chunks, optimizer, dtype)

    @property
    def buffers(self) -> list[Any]:
        """Megatron's stretches of memory for parameters (`param_data`) and gradients (`grad_data`); none if it is frozen."""
        if not self.trained:
            return []
        return [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # type: ignore[union-attr]

    def _name_parameters(self, models: list[SharedModel], weights: dict[str, Weight], places: dict[str, Place]) -> None:
        """Find the weight map's parameters, and tell Megatron which are divided: its gradient norm counts the others once.

        Its layers would mark them while drawing random weights, which is skipped here.
        """
        named = [dict(model.named_parameters()) for model in models]
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: named[place.chunk][place.name] for name, place in places.items()
        }
        known = {id(parameter) for parameter in self.parameters.values()}
        unknown = [name for chunk in named for name, parameter in chunk.items() if id(parameter) not in known]
        if unknown:
            raise WeightsMismatch(f"Megatron's parameters {', '.join(unknown[:4])} are in no row of the weight map")
        for name, parameter in self.parameters.items():
            axis, stacked = weights[name].axis, weights[name].stacked
            parameter.tensor_model_parallel = axis is not None  # type: ignore[attr-defined]
            parameter.partition_dim = -1 if axis is None else axis + stacked  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]

    def _fill(self, folder: str | Path, seed: int) -> None:
        """The folder's weights and fresh adapters, in place."""
        load_folder(self.parameters, self.arch.base, folder, self.shards)
        initialise(self.parameters, self.arch, self.shards, seed)

    def load(self, folder: str | Path, optimizer: OptimizerConfig | None, seed: int = 0) -> None:
        """Other weights of the same architecture, in place, with fresh adapters and optimizer (None where there is none)."""
        with megatron_device(self.device):
            self._fill(folder, seed)
            if optimizer is not None:
                reset_state(self.optimizer)
                configure(self.optimizer, optimizer)
        self.optimizer_config, self.optimizer_steps = optimizer or OptimizerConfig(), 0

    @contextmanager
    def without_adapters(self) -> Iterator[Self]:
        """The model as it was before it was trained, inside the block: its base."""
        for each in self._adapters:
            each.enabled = False
        try:
            yield self
        finally:
            for each in self._adapters:
                each.enabled = True

    def run(
        self, batches: Sequence[MicroBatch], count: int, temperature: float, loss: Loss, *, forward_only: bool = False
    ) -> None:
        """Run micro-batches forward and, unless `forward_only`, backward, adding to the gradients.

        Args:
            batches: the same on all ranks of a model replica.
            count: at least as many, the same on all ranks: they share experts. The rest is filled with empty micro-batches,
                and up to a multiple of the stages for an interleaved pipeline; they change no gradient.
            temperature: divides the logits.
            loss: called on the last pipeline stage with the number and the two outputs of each of `batches`; returns what
                backward starts from.
            forward_only: no backward; call it without gradients.
        """
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        total = multiple * max(1, -(-count // multiple))
        filled = [*batches, *[([], [])] * (total - len(batches))]
        rows = [pack(*batch, self.row_multiple, self.device) for batch in filled]

        def loss_of_any(number: int, first: Tensor, second: Tensor) -> Tensor:
            return loss(number, first, second) if number < len(batches) else first.sum()

        run_rows(self.chunks, rows, temperature, loss_of_any, forward_only=forward_only)

    def evaluate(
        self, batches: Sequence[MicroBatch], count: int, temperature: float, output: int, sizes: Sequence[int]
    ) -> list[Tensor]:
        """One of the model's two outputs for some micro-batches, without gradient, on every rank of the model replica.

        Args:
            batches, count, temperature: as for `run`.
            output: 0 or 1, see `SharedModel.outputs`.
            sizes: elements that it has for each of `batches`.

        Returns:
            one fp32 vector a micro-batch.
        """
        found = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        parts = list(found.split(list(sizes)))

        def keep(number: int, first: Tensor, second: Tensor) -> Tensor:
            return parts[number].copy_((first, second)[output])

        with torch.no_grad(), megatron_device(self.device):
            self.run(batches, count, temperature, keep, forward_only=True)
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast(found, last, group=parallel_state.get_pipeline_model_parallel_group())
        return parts

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> tuple[float, float]:
        """Sum gradients over all ranks, clip, and step. Returns the gradient norm before clipping and the rate used.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are as before.
        """
        finalize_model_grads(self.chunks)
        rate = learning_rate(self.optimizer_config, self.optimizer_steps + 1)
        set_learning_rate(self.optimizer, rate)
        for part in self.optimizer.chained_optimizers:
            part.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not norm < float("inf"):
            raise FloatingPointError(
                f"the gradient norm is {norm}: this optimizer step was not applied; look at the rewards and the learning rate"
            )
        self._clip(norm)
        self.optimizer.step_with_ready_grads()
        self.optimizer_steps += 1
        return norm, rate

    def _clip(self, norm: float) -> None:
        limit = self.optimizer_config.clip_grad
        if limit <= 0 or norm <= limit:
            return
        for part in self.optimizer.chained_optimizers:
            for parameter in part.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (norm + 1e-6))

    def sum_over_ranks(self, values: Tensor) -> None:
        """Add up, in place, what the last pipeline stages hold (zeros elsewhere): over data, then over pipeline ranks."""
        torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
        torch.distributed.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())


def _buffer_config() -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
