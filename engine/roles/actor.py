"""The actor: the policy in Megatron-core, trained here and read by vLLM from the same memory."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from engine.config import OptimizerConfig
from engine.layout import Layout
from engine.megatron.cpu import megatron_device
from engine.megatron.model import SharedModel, initialise_parallel_state, transformer_config
from engine.megatron.optimizer import build_optimizer, configure, learning_rate, reset_state, set_learning_rate
from engine.megatron.packing import pack
from engine.weights.architecture import Architecture
from engine.weights.huggingface import load_folder
from engine.weights.map import weight_map

Tokens = list[list[int]]


class Actor:
    """One rank's part of the policy. `torch.distributed` must be initialised with `layout.world_size` ranks.

    The order matters: build, read the weights, give them to Megatron's data parallel buffer (which moves them, once), build the
    optimizer. From then on no parameter's address changes, so vLLM and its CUDA graphs can keep them.
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
        optimizer: OptimizerConfig,
    ) -> None:
        self.arch, self.layout, self.device, self.dtype = arch, layout, device, dtype
        self.row_multiple = layout.tp if sequence_parallel else 1
        self.optimizer_steps = 0
        rank = torch.distributed.get_rank()
        self.tp_rank, self.dp_rank = layout.tp_rank(rank), layout.dp_rank(rank)
        self.optimizer_config = optimizer
        with megatron_device(device):
            initialise_parallel_state(layout, device)
            config = transformer_config(arch, layout, sequence_parallel, dtype)
            model = SharedModel(config, arch)
            if device == "cuda":
                model = model.cuda()
            self.model = model
            mark_divided(self.parameters, arch)
            load_folder(self.parameters, arch, folder, layout.tp, self.tp_rank)
            self.parallel_model = DistributedDataParallel(config, _buffer_config(), model)
            self.optimizer = build_optimizer(self.parallel_model, optimizer, dtype)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Megatron name to parameter; a tied head is not listed twice."""
        return dict(self.model.named_parameters())

    def load(self, folder: str | Path, optimizer: OptimizerConfig) -> None:
        """Other weights of the same architecture, in place, with a fresh optimizer."""
        with megatron_device(self.device):
            load_folder(self.parameters, self.arch, folder, self.layout.tp, self.tp_rank)
            reset_state(self.optimizer)
            configure(self.optimizer, optimizer)
        self.optimizer_config, self.optimizer_steps = optimizer, 0

    def forward(self, prompts: Tokens, responses: Tokens, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [response tokens], responses end to end, with gradient if enabled."""
        row = pack(prompts, responses, self.row_multiple, self.device)
        hidden = self.parallel_model(row.ids, row.positions, None, packed_seq_params=row.attention)
        return self.model.response_logprobs(hidden, row, temperature)

    def logprobs(self, prompts: Tokens, responses: Tokens, temperature: float) -> Tensor:
        """Log-probabilities [response tokens] fp32 without gradient; every tensor parallel rank gets them all."""
        with torch.no_grad(), megatron_device(self.device):
            return self.forward(prompts, responses, temperature)[0]

    def zero_gradients(self) -> None:
        self.parallel_model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> tuple[float, float]:
        """Sum gradients over all ranks, clip, and step. Returns the gradient norm before clipping and the rate used.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are as before.
        """
        finalize_model_grads([self.parallel_model])
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

    @property
    def data_parallel_group(self) -> torch.distributed.ProcessGroup:
        return parallel_state.get_data_parallel_group()


def mark_divided(parameters: dict[str, torch.nn.Parameter], arch: Architecture) -> None:
    """Tell Megatron which parameters are divided over tensor parallel ranks: its gradient norm counts the others once.

    Its layers would mark them while drawing random weights, which is skipped here.
    """
    for weight in weight_map(arch):
        parameter = parameters[weight.megatron]
        parameter.tensor_model_parallel = weight.axis is not None  # type: ignore[attr-defined]
        parameter.partition_dim = -1 if weight.axis is None else weight.axis + weight.stacked  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


def _buffer_config() -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
