"""A vLLM model loader that loads nothing: every vLLM parameter becomes a view of the actor's Megatron parameter."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from engine.adapters import Adapters
from engine.weights.architecture import Architecture
from engine.weights.map import Shard, adapted_linears, weight_map

LOAD_FORMAT = "onecopy"


class NotShared(RuntimeError):
    """A vLLM parameter has no generation tensor of the same shape and type, or the reverse."""


class SharedWeights:
    """The generation tensors of this rank, offered to one vLLM engine.

    Args:
        tensors: weight map name to this rank's tensor; weights of other pipeline stages are missing.
        shards: the same names to the part of the weight that the tensor is.
    """

    def __init__(self, arch: Architecture, tensors: dict[str, Tensor], shards: Mapping[str, Shard]) -> None:
        weights = [weight for weight in weight_map(arch) if weight.megatron in tensors]
        self._source = {name: tensors[weight.megatron] for weight in weights for name in weight.vllm}
        self._all = dict(tensors)
        self._arch, self._shards = arch, shards
        self.model: torch.nn.Module | None = None
        self.private_bytes = 0

    def adapt(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Give vLLM's linear layers the adapters of the actor, as parameters that are still to be bound.

        They are added before the sum over tensor parallel ranks, which is then theirs too.
        """
        for linear in adapted_linears(self._arch):
            if linear.base.megatron not in self._shards:
                continue
            assert self._arch.lora is not None
            layer: Any = model.get_submodule(linear.base.vllm[0].removesuffix(".weight"))
            layer.adapters = Adapters(linear, self._shards, self._arch.lora.scale, dtype).requires_grad_(False)
            layer.quant_method.apply = _with_adapters(layer.quant_method.apply)

    def bind(self, model: torch.nn.Module) -> None:
        """Point every parameter of vLLM's model at its generation tensor.

        Raises:
            NotShared: something would be left over on either side.
        """
        self.private_bytes = sum(p.untyped_storage().nbytes() for p in model.parameters())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            source = self._source.get(name)
            if source is None:
                raise NotShared(f"vLLM's parameter {name} {tuple(parameter.shape)} is in no row of the weight map")
            if (parameter.shape, parameter.dtype) != (source.shape, source.dtype) or not source.is_contiguous():
                raise NotShared(
                    f"{name}: vLLM has {tuple(parameter.shape)} {parameter.dtype},"
                    f" the weight map {tuple(source.shape)} {source.dtype}"
                )
            parameter.data = source.data
        self.model = model
        self.check()

    def check(self) -> int:
        """Bytes shared. Raises NotShared if any address, on either side, is not the other's."""
        assert self.model is not None
        seen: dict[int, Tensor] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            source = self._source[name]
            if parameter.data_ptr() != source.data_ptr() or parameter.stride() != source.stride():
                raise NotShared(f"{name} is no longer the shared memory")
            seen[source.data_ptr()] = source
        left = [name for name, p in self._all.items() if p.data_ptr() not in seen]
        if left:
            raise NotShared(f"the weights {', '.join(left[:4])} are not used by vLLM")
        return sum(p.numel() * p.element_size() for p in seen.values())


_offered: SharedWeights | None = None


@contextlib.contextmanager
def offer(weights: SharedWeights) -> Iterator[None]:
    """While an engine is constructed inside this block, its loader takes these weights (vLLM passes no object through)."""
    global _offered
    _offered = weights
    try:
        yield
    finally:
        _offered = None


@register_model_loader(LOAD_FORMAT)
class SharedWeightsLoader(BaseModelLoader):
    """Builds vLLM's model without weight memory and binds it to the offered weights, before CUDA graphs are captured."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Nothing to load: the weights are already where the model looks."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        if _offered is None:
            raise RuntimeError(f"load_format={LOAD_FORMAT!r} works inside offer() only")
        device = torch.device(vllm_config.device_config.device)
        with set_default_torch_dtype(model_config.dtype), device, _NoWeightMemory():
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            _offered.adapt(model, model_config.dtype)
        _offered.bind(model)
        for module in model.modules():
            _keep_shared(module, device, model_config.dtype)
        return model.eval()


class _NoWeightMemory(TorchFunctionMode):
    """vLLM allocates every matrix before a loader may fill it: a second copy. Here a big torch.empty is one number, expanded."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.empty and len(args) >= 2 and all(isinstance(size, int) for size in args):
            return torch.empty(1, **(kwargs or {})).expand(args)
        return func(*args, **(kwargs or {}))


def _keep_shared(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """What vLLM does after loading, less everything that would copy or repack a weight."""
    if device.type == "cpu" and hasattr(module, "quant_method"):
        module.cpu_linear = F.linear  # type: ignore[assignment] # else oneDNN repacks a private copy
        if hasattr(module, "w13_weight"):
            method = module.quant_method
            method.apply = types.MethodType(_experts_on_cpu, method)  # type: ignore[union-attr, method-assign]
    if type(module).__name__ in ("Attention", "MLAAttention") and hasattr(module, "process_weights_after_loading"):
        module.process_weights_after_loading(dtype)  # type: ignore[operator] # scales and backend hooks, no weights
    if device.type == "cuda" and hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
        # The Triton experts read [gate | up] as it is. Other kernels reshuffle the weights, so the engine pins this one.
        module.quant_method._init_moe_kernel(module)  # type: ignore[union-attr, operator]


def _with_adapters(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A linear method that adds the adapters' part to what `plain` computes with the layer's matrix."""

    def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.adapters(x, plain(layer, x, bias))

    return apply


def _experts_on_cpu(
    self: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any = None,
    shared_experts_input: Any = None,
) -> Tensor:
    """vLLM's CPU kernel for experts reads a prepacked copy; this one reads the shared weights. x: [tokens, hidden]."""
    out = torch.zeros_like(x)
    if layer.expert_map is not None:  # expert parallel: global id to local slot, -1 elsewhere
        topk_ids = layer.expert_map[topk_ids.long()]
    for expert in range(layer.w13_weight.shape[0]):
        token, choice = torch.where(topk_ids == expert)
        if len(token):
            gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
            weighted = F.linear(F.silu(gate) * up, layer.w2_weight[expert]) * topk_weights[token, choice, None].to(
                x.dtype
            )
            out.index_add_(0, token, weighted)
    return out
