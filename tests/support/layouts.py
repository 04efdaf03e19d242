"""Small models whose every number is different, and the layouts that can hold them: for tests of plans and transitions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from engine.layout import Layout
from engine.reshard.assignment import Assignment
from engine.weights.architecture import Architecture, architecture_of
from engine.weights.huggingface import fill_shard
from engine.weights.map import Weight, weight_map

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")


def architecture(family: str, layers: int = 5, kv_heads: int = 4, tied: bool = False, heads: int = 8) -> Architecture:
    """Divisible by up to 8 (heads, sizes, experts); the padded vocabulary (100 to 128) too."""
    config: dict[str, Any] = dict(
        model_type=family, num_hidden_layers=layers, hidden_size=16, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=2, intermediate_size=24, vocab_size=100, tie_word_embeddings=tied,
    )  # fmt: skip
    if family == "qwen3_moe":
        config |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True)
    if family == "mixtral":
        config |= dict(num_local_experts=8, num_experts_per_tok=2)
    return architecture_of(config)


def layouts(world: int, arch: Architecture, training: bool) -> list[Layout]:
    """Every layout of `world` ranks that can hold the model; uneven and virtual pipelines among the training ones."""
    found = []
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for tp, pp in itertools.product(sizes, sizes):
        if world % (tp * pp):
            continue
        dp = world // (tp * pp)
        options: list[dict[str, Any]] = [{}]
        if arch.experts:
            pairs = itertools.product(sizes, sizes) if training else [(tp, 1)]
            options += [dict(ep=ep, etp=etp) for ep, etp in pairs if ep > 1]
        if training and pp > 1 and arch.layers >= 2 * pp:
            options += [{**option, "vpp": 2} for option in options]
        if training and pp > 1 and arch.layers >= pp:
            options.append(dict(stage_layers=(arch.layers - pp + 1, *[1] * (pp - 1))))
        for option in options:
            layout = Layout(tp=tp, pp=pp, dp=dp, **option)
            problems = arch.training_problems(layout, tp > 1) if training else arch.layout_problems(layout)
            if not problems:
                found.append(layout)
    return found


def random_cases(world: int, count: int, seed: int) -> Iterator[tuple[Architecture, Layout, Layout]]:
    """Models, training and generation layouts; the same ones for the same seed."""
    draw = random.Random(seed)
    for number in range(count):
        family = FAMILIES[number % len(FAMILIES)]
        arch = architecture(
            family, layers=draw.randint(world if world < 5 else 4, 9), kv_heads=draw.choice((1, 2, 4, 8)), tied=draw.random() < 0.5
        )  # fmt: skip
        yield arch, draw.choice(layouts(world, arch, True)), draw.choice(layouts(world, arch, False))


def whole_tensors(arch: Architecture) -> dict[str, torch.Tensor]:
    """Hugging Face tensors in which no number occurs twice (zero, the padding's, does not occur)."""
    tensors, start = {}, 1
    for weight in weight_map(arch):
        for piece in weight.all_pieces():
            size = torch.Size(piece.shape).numel()
            tensors[piece.name] = torch.arange(start, start + size, dtype=torch.float64).view(piece.shape)
            start += size
    return tensors


def held(arch: Architecture, side: Assignment, rank: int) -> list[Weight]:
    """Weights of which a rank has a part."""
    stages = side.layout.stage_of_layer(arch.layers)
    return [w for w in weight_map(arch) if side.coordinates(rank).pp in w.stages(side.layout, stages)]


def shards(
    arch: Architecture, tensors: dict[str, torch.Tensor], side: Assignment, rank: int
) -> dict[str, torch.Tensor]:
    """What a rank holds under an assignment, cut from the whole tensors as a load from a folder would."""
    out = {}
    for weight in held(arch, side, rank):
        shard = weight.shard(side.layout, side.coordinates(rank))
        out[weight.megatron] = torch.full(weight.shard_shape(shard), float("nan"), dtype=torch.float64)
        fill_shard(out[weight.megatron], weight, tensors.__getitem__, shard)
    return out


def nothing(arch: Architecture, side: Assignment, rank: int) -> dict[str, torch.Tensor]:
    """Tensors of a rank's shapes that hold NaN."""
    shapes = {w.megatron: w.shard_shape(w.shard(side.layout, side.coordinates(rank))) for w in held(arch, side, rank)}
    return {name: torch.full(shape, float("nan"), dtype=torch.float64) for name, shape in shapes.items()}
