"""Rows of the weight map for adapters, and their first numbers."""

import math

import pytest
import torch

from engine.adapters import initialise
from engine.layout import Layout
from engine.reshard.plan import plan_generation
from engine.weights.architecture import UnsupportedModel, architecture_of
from engine.weights.map import adapted_linears, weight_map
from engine.weights.shapes import SHAPES


def adapted(name="qwen2.5-0.5b", rank=8, **more):
    return architecture_of(SHAPES[name]).with_adapters(rank=rank, alpha=16.0, **more)


def adapters_of(arch):
    base = {weight.megatron for weight in weight_map(arch.base)}
    return {weight.megatron: weight for weight in weight_map(arch) if weight.megatron not in base}


def test_as_many_numbers_as_peft_counts():
    """Rank 8 on all linear layers of Qwen2.5-0.5B: peft says `trainable params: 4,399,104`."""
    assert sum(w.numbers(p) for w in adapters_of(adapted()).values() for p in w.all_pieces()) == 4_399_104


def test_names_in_all_three_worlds():
    weights = adapters_of(adapted())
    for ours, vllm, theirs in (
        ("self_attention.linear_qkv", "self_attn.qkv_proj", "self_attn.k_proj"),
        ("mlp.linear_fc2", "mlp.down_proj", "mlp.down_proj"),
    ):
        own = f"adapters.{theirs.rpartition('.')[2]}.lora_A"
        weight = weights[f"decoder.layers.3.{ours}.{own}"]
        assert weight.vllm == (f"model.layers.3.{vllm}.{own}",)
        assert [piece.name for piece in weight.all_pieces()] == [f"model.layers.3.{theirs}.lora_A.weight"]


@pytest.mark.parametrize(
    ("layer", "a", "b"),
    [
        ("self_attention.linear_qkv.adapters.q_proj", (8, 896), (448, 8)),
        ("self_attention.linear_qkv.adapters.v_proj", (8, 896), (64, 8)),
        ("self_attention.linear_proj.adapters.o_proj", (8, 448), (896, 8)),
        ("mlp.linear_fc1.adapters.up_proj", (8, 896), (2432, 8)),
        ("mlp.linear_fc2.adapters.down_proj", (8, 2432), (896, 8)),
    ],
)
def test_divided_as_the_layer_is(layer, a, b):
    layout = Layout(tp=2)
    weights = adapters_of(adapted())
    for matrix, shape in (("lora_A", a), ("lora_B", b)):
        weight = weights[f"decoder.layers.0.{layer}.{matrix}"]
        assert weight.shard_shape(weight.shard(layout, layout.coordinates(1))) == shape


def test_key_and_value_adapters_are_copied_where_heads_are():
    layout = Layout(tp=4)  # two key and value heads
    weight = adapters_of(adapted())["decoder.layers.0.self_attention.linear_qkv.adapters.k_proj.lora_B"]
    shards = [weight.shard(layout, layout.coordinates(rank)) for rank in range(4)]
    assert [weight.bounds(next(weight.all_pieces()), shard) for shard in shards] == [
        (0, 64),
        (0, 64),
        (64, 128),
        (64, 128),
    ]


def test_chosen_layers_only_in_the_models_order():
    arch = adapted(targets=["down_proj", "k_proj"])
    assert arch.lora.targets == ("k_proj", "down_proj") and arch.lora.scale == 2.0
    first, second, *_ = adapted_linears(arch)
    assert [each and each.name for each in first.adapters] == [None, "k_proj", None]
    assert [each and each.name for each in second.adapters] == ["down_proj"]
    assert len(adapters_of(arch)) == 24 * 4
    assert weight_map(arch.base) == weight_map(architecture_of(SHAPES["qwen2.5-0.5b"]))


def test_experts_and_routers_have_none():
    assert adapted("qwen3-30b-a3b").lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("model", "targets", "says"),
    [
        ("qwen2.5-0.5b", [], "names no layer"),
        ("qwen2.5-0.5b", ["query", "q_proj"], "no linear layer query; possible are q_proj, k_proj, v_proj, o_proj, gate_proj"),
        ("qwen3-30b-a3b", ["up_proj"], "up_proj: experts cannot have adapters; possible are q_proj"),
        ("qwen3-30b-a3b", ["gate"], "no linear layer gate"),
    ],
)  # fmt: skip
def test_other_layers_are_refused(model, targets, says):
    with pytest.raises(UnsupportedModel, match=says):
        adapted(model, targets=targets)


def test_adapters_travel_with_the_weights():
    """From TP 2 to TP 1 x 2 a rank receives the other half of every divided number, adapters included."""
    arch, train, generate = adapted(), Layout(tp=2), Layout(dp=2)
    plans = [plan_generation(each, train, generate, bytes_per_number=2) for each in (arch, arch.base)]
    with_them, without = (int(plan.received()[0]) for plan in plans)
    # of a layer: B of q, k, v (rows 896 + 128 + 128), of gate and up (2 x 4864), and A of o and down (columns 896 + 4864)
    divided = 24 * 8 * (896 + 2 * 128 + 2 * 4864 + 896 + 4864)
    assert with_them - without == divided  # half of them, two bytes each


def test_first_numbers_do_not_depend_on_the_layout_but_on_the_seed():
    config = {**SHAPES["qwen2.5-0.5b"], "num_hidden_layers": 2}
    arch = architecture_of(config).with_adapters(rank=8, alpha=16.0)

    def filled(layout, rank, seed=3):
        weights = adapters_of(arch)
        shards = {n: w.shard(layout, layout.coordinates(rank)) for n, w in weights.items()}
        tensors = {n: torch.full(w.shard_shape(shards[n]), float("nan")) for n, w in weights.items()}
        base = {w.megatron: w.shard(layout, layout.coordinates(rank)) for w in weight_map(arch.base)}
        initialise(tensors, arch, base | shards, seed)
        return tensors

    whole = filled(Layout(), 0)
    halves = [filled(Layout(tp=2), rank) for rank in range(2)]
    for name, weight in adapters_of(arch).items():
        parts = [half[name] for half in halves]
        assert torch.equal(whole[name], parts[0] if weight.axis is None else torch.cat(parts, weight.axis))
        if name.endswith("lora_B"):
            assert not whole[name].any()
        else:
            bound = 1 / math.sqrt(whole[name].shape[1])
            assert whole[name].abs().max() <= bound
            assert whole[name].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    drawn = [tensor for name, tensor in whole.items() if name.endswith("lora_A")]
    assert len({tensor.flatten()[0].item() for tensor in drawn}) == len(drawn)
    other = filled(Layout(), 0, seed=4)
    assert all(not torch.equal(whole[name], other[name]) for name in whole if name.endswith("lora_A"))
