"""Operations counted by hand, and by torch's own counter."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.flops import forward_flops, peak_flops
from engine.weights.architecture import architecture_of
from engine.weights.shapes import SHAPES


def test_a_seven_billion_parameter_model_needs_two_operations_a_weight():
    arch = architecture_of(SHAPES["qwen2.5-7b"])
    weights = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 3584 * 152064
    assert forward_flops(arch, [1]) == 2 * weights + 4 * 28 * 3584
    # a thousand tokens: each attends to itself and those before
    assert forward_flops(arch, [1000]) == 1000 * 2 * weights + 4 * 28 * 3584 * 500500
    assert forward_flops(arch, [3, 5]) == forward_flops(arch, [3]) + forward_flops(arch, [5])


def test_only_the_chosen_experts_count():
    arch = architecture_of(SHAPES["qwen3-30b-a3b"])
    half = dataclasses.replace(arch, experts_per_token=4)
    assert forward_flops(arch, [1]) - forward_flops(half, [1]) == 48 * 4 * 2 * 3 * 2048 * 768


def test_the_weights_part_is_what_torch_counts():
    hidden, heads, kv, dim, ffn, vocabulary, n = 64, 4, 2, 16, 160, 96, 7
    arch = architecture_of(
        {
            **SHAPES["qwen2.5-0.5b"], "num_hidden_layers": 1, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocabulary,
        }
    )  # fmt: skip
    x = torch.randn(n, hidden)
    sizes = [(hidden, heads * dim), (hidden, kv * dim), (hidden, kv * dim), (heads * dim, hidden), (hidden, vocabulary)]
    with FlopCounterMode(display=False) as counter:
        for rows, columns in [*sizes, (hidden, ffn), (hidden, ffn)]:
            x[:, :rows] @ torch.randn(rows, columns)
        torch.randn(n, ffn) @ torch.randn(ffn, hidden)
    assert forward_flops(arch, [n]) == counter.get_total_flops() + 2 * 2 * heads * dim * n * (n + 1) // 2


@pytest.mark.parametrize(
    "name, peak",
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GB200", 2500e12), ("Tesla T4", None)],
)
def test_peak_rates(name, peak):
    assert peak_flops(name) == peak
