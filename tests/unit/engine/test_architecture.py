"""What is read from config.json, and what is refused because it would silently be a different model."""

import json

import pytest

from engine.layout import Layout
from engine.weights.architecture import UnsupportedModel, architecture_of, read_architecture

PLAIN = dict(
    model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    intermediate_size=128, vocab_size=100, rope_theta=500.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def changed(**changes):
    return architecture_of({**PLAIN, **changes})


def test_sizes_and_switches():
    arch = changed()
    assert (arch.heads, arch.kv_heads, arch.head_dim, arch.norm_eps, arch.rope.theta) == (4, 2, 16, 1e-5, 500.0)
    assert not arch.family.qkv_bias and not arch.family.qk_norm
    assert changed(model_type="qwen2").family.qkv_bias
    assert changed(model_type="qwen3").family.qk_norm


def test_head_dim_may_be_given_absent_or_null():
    assert changed(head_dim=32).head_dim == 32
    assert changed(head_dim=None).head_dim == 16


def test_rope_of_old_and_new_files_is_the_same():
    new = changed(rope_theta=None, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    old = changed(rope_scaling={"type": "linear", "factor": 2.0})
    assert new.rope == old.rope
    assert new.rope.inverse_frequencies(4) == pytest.approx([0.5, 500.0**-0.5 / 2])


def test_llama3_rope_equals_transformers():
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    mine = architecture_of(json.loads(config.to_json_string())).rope.inverse_frequencies(128)
    assert torch.allclose(torch.tensor(mine), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(model_type="gpt2"), "gpt2"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(mlp_bias=True), "mlp_bias"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(use_sliding_window=True), "use_sliding_window"),
        (dict(layer_types=["sliding_attention", "full_attention"]), "layer_types"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (dict(model_type="qwen3_moe", mlp_only_layers=[0], **EXPERTS), "mlp_only_layers"),
        (dict(model_type="qwen3_moe"), "num_experts_per_tok"),
        (dict(hidden_size=None), "hidden_size"),
    ],
)
def test_what_would_change_logits_is_refused_by_name(change, named):
    with pytest.raises(UnsupportedModel, match=named):
        changed(**change)


def test_all_reasons_are_given_at_once():
    with pytest.raises(UnsupportedModel) as error:
        changed(mlp_bias=True, hidden_act="gelu", rope_scaling={"rope_type": "yarn"})
    assert all(word in str(error.value) for word in ("mlp_bias", "hidden_act", "yarn"))


def test_missing_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_architecture(tmp_path / "nowhere")


def test_layouts_that_do_not_divide():
    arch = changed(num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=126)
    assert arch.layout_problems(Layout(4)) == [
        "tensor_parallel_size 4 does not divide num_attention_heads 6, num_key_value_heads 3, intermediate_size 126 of llama"
    ]
    assert arch.layout_problems(Layout(3)) == [
        "tensor_parallel_size 3 does not divide the padded vocabulary 128 of llama"
    ]
    assert arch.training_problems(Layout(), True) == ["sequence_parallel needs tensor_parallel_size > 1"]
    assert "3 layers" not in str(arch.layout_problems(Layout(pp=2)))
    assert "cannot be divided over 3 pipeline chunks" in str(arch.layout_problems(Layout(pp=3)))


def test_generation_may_copy_key_and_value_heads_and_training_may_not():
    arch = changed()  # 4 heads, 2 key and value heads
    assert arch.layout_problems(Layout(tp=4)) == []
    (problem,) = arch.training_problems(Layout(tp=4))
    assert problem == "tensor_parallel_size 4 does not divide num_key_value_heads 2 of llama"


def test_layouts_of_experts():
    arch = changed(model_type="qwen3_moe", **EXPERTS)
    assert arch.training_problems(Layout(dp=4, ep=4)) == []
    assert "does not divide experts 4" in str(arch.training_problems(Layout(dp=3, ep=3)))
    assert "needs sequence_parallel" in str(arch.training_problems(Layout(tp=2)))
    assert arch.training_problems(Layout(tp=2, dp=2, ep=2, etp=2), True) == []
    assert "does not divide the 2 ranks" in str(arch.training_problems(Layout(dp=2, ep=2, etp=2)))
    assert "needs a mixture of experts" in str(changed().training_problems(Layout(dp=2, ep=2)))


def test_the_number_of_experts_has_two_names():
    new = {**EXPERTS, "num_local_experts": EXPERTS["num_experts"], "num_experts": None}
    assert changed(model_type="qwen3_moe", **new) == changed(model_type="qwen3_moe", **EXPERTS)


def test_mixtral_normalises_and_has_no_window():
    arch = changed(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    assert (arch.experts, arch.expert_intermediate, arch.normalise_top_k) == (4, 128, True)
    with pytest.raises(UnsupportedModel, match="sliding_window=4096"):
        changed(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=4096)
