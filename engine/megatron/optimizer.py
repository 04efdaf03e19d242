"""Megatron's distributed optimizer: construction, learning rate, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from engine.config import OptimizerConfig

STATE_NAMES = ("param", "exp_avg", "exp_avg_sq")
"""What Adam keeps for each parameter: the fp32 master weights and the two moments."""


def build_optimizer(chunks: list[DistributedDataParallel], config: OptimizerConfig, dtype: torch.dtype) -> Any:
    """AdamW on this rank's share of the fp32 master weights (ZeRO-1 over the ranks that hold the same weights).

    Experts that are divided otherwise than the rest have an optimizer of their own; Megatron chains the two.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    configure(optimizer, config)
    return optimizer


def configure(optimizer: Any, config: OptimizerConfig) -> None:
    """Set Adam's constants, at construction and when a new run takes over a pool that is up.

    Megatron leaves the multiplier of weight decay (0 for norms and biases) to its scheduler, which is not used here.
    """
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
        group["weight_decay"] = config.weight_decay * group["wd_mult"]


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step` (1 is the first).

    Warm-up rises linearly so that step `warmup_steps` has the full rate; without warm-up step 1 has it. Linear and cosine
    then fall to zero at `decay_steps`.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps is None:
        return config.lr
    span = max(1, config.decay_steps - config.warmup_steps)
    left = max(0.0, 1 - (step - config.warmup_steps - 1) / span)
    return config.lr * (left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@dataclass(frozen=True)
class ShardState:
    """Optimizer state of the part of one parameter that this rank owns: `flat[start:stop]` of its tensor parallel shard."""

    start: int
    stop: int
    tensors: dict[str, Tensor]


def shard_states(optimizer: Any, parameters: dict[str, torch.nn.Parameter]) -> Iterator[tuple[str, ShardState]]:
    """State of every parameter part of this rank, by the names of the weight map; views, not copies."""
    for name, parameter in parameters.items():
        for part in optimizer.chained_optimizers:
            if parameter not in part.model_param_group_index_map:
                continue
            owned = part._get_model_param_range_map(parameter)["param"]
            state = part._get_main_param_and_optimizer_states(parameter)
            tensors = {key: state[key].view(-1) for key in STATE_NAMES if key in state}
            yield name, ShardState(owned.start, owned.end, tensors)


def ensure_state(optimizer: Any) -> None:
    """Create Adam's moments (zeros) where no step was made yet, without changing a weight."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if parameter.numel() and "exp_avg" not in inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def set_adam_step(optimizer: Any, step: int) -> None:
    """Adam's own step count, which its bias correction uses."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(step))


def reset_state(optimizer: Any) -> None:
    """Forget all moments and take the model's weights for the master weights (after loading new ones)."""
    ensure_state(optimizer)
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].zero_()
    set_adam_step(optimizer, 0)
    optimizer.reload_model_params()


def publish_master_weights(optimizer: Any, chunks: list[DistributedDataParallel]) -> None:
    """Master weights to the model's weights, in place, and to all data parallel ranks."""
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def device_state(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that only the optimizer needs: fp32 masters (where the weights are half precision) and Adam's moments."""
    for part in optimizer.chained_optimizers:
        for group in part.shard_fp32_from_float16_groups:
            yield from (tensor for tensor in group if tensor is not None)
        for state in part.optimizer.state.values():
            yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)
