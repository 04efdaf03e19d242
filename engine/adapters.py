"""Low-rank adapters as both engines compute them. Training and generation run this code on the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.weights.architecture import Architecture
from engine.weights.huggingface import fill_shard
from engine.weights.map import AdaptedLinear, Shape, Shard, adapted_linears


class Adapter(torch.nn.Module):
    """One Hugging Face layer's: lora_A [rank, in] and lora_B [out, rank], this rank's parts of them."""

    def __init__(self, a: Shape, b: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.empty(*a, dtype=dtype))
        self.lora_B = torch.nn.Parameter(torch.empty(*b, dtype=dtype))


class Adapters(torch.nn.Module):
    """Those of one linear layer of an engine, whose output is that of one or more Hugging Face layers side by side.

    Args:
        linear: the layer, from the weight map.
        shards: weight map name to the part that this rank holds, of the matrix and of the adapters.
        scale: alpha / rank.
        exchange: what tensor parallel ranks do with A x [..., rank * layers]; None: nothing.
    """

    def __init__(
        self,
        linear: AdaptedLinear,
        shards: Mapping[str, Shard],
        scale: float,
        dtype: torch.dtype,
        exchange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.exchange, self.enabled = scale, exchange, True
        self.parts = [None if each is None else each.name for each in linear.adapters]
        self.sizes = linear.base.output_sizes(shards[linear.base.megatron])
        for adapter in filter(None, linear.adapters):
            a, b = (weight.shard_shape(shards[weight.megatron]) for weight in adapter)
            self.add_module(adapter.name, Adapter(a, b, dtype))

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """`out` [..., out] of the layer itself for `x` [..., in], with the adapters' part added."""
        found: list[Adapter | None] = [None if name is None else getattr(self, name) for name in self.parts]
        there = [adapter for adapter in found if adapter is not None]
        low = torch.cat([F.linear(x, adapter.lora_A) for adapter in there], -1) * self.scale
        if self.exchange is not None:
            low = self.exchange(low)
        lows = iter(low.chunk(len(there), -1))
        parts = zip(out.split(self.sizes, -1), found, strict=True)
        return torch.cat([y if each is None else y + F.linear(next(lows), each.lora_B) for y, each in parts], -1)


def initialise(parameters: Mapping[str, Tensor], arch: Architecture, shards: Mapping[str, Shard], seed: int) -> None:
    """Fresh adapters, in place: B is 0, so the model is its base; A is uniform in +-1/sqrt(in), as peft draws it.

    The numbers follow from the seed and the layer's name, whatever the layout.
    """
    for linear in adapted_linears(arch):
        for a, b in filter(None, linear.adapters):
            if a.megatron not in parameters:
                continue
            (piece,) = a.all_pieces()
            digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            drawn = (2 * torch.rand(piece.shape, generator=generator) - 1) / piece.shape[1] ** 0.5
            with torch.no_grad():
                fill_shard(parameters[a.megatron], a, {piece.name: drawn}.__getitem__, shards[a.megatron])
                parameters[b.megatron].zero_()
