"""The weight map: order inside fused tensors, shards, and the way there and back, bit for bit."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.layout import Layout
from engine.weights.architecture import architecture_of
from engine.weights.huggingface import (
    SafetensorsFolder,
    WeightsMismatch,
    check_names,
    fill_shard,
    huggingface_tensors,
    load_folder,
)
from engine.weights.map import Shard, megatron_places, weight_map

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]


def config(model_type="qwen2", **changes):
    return {
        **dict(
            model_type=model_type, hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=2, num_hidden_layers=2,
            intermediate_size=12, vocab_size=70, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=8, norm_topk_prob=True, num_local_experts=4,
        ),
        **changes,
    }  # fmt: skip


def tensors_of(arch):
    """Every element of every tensor is a different number other than 0, so that any wrong place shows."""
    tensors, start = {}, 1
    for weight in weight_map(arch):
        for piece in weight.all_pieces():
            size = torch.Size(piece.shape).numel()
            tensors[piece.name] = torch.arange(start, start + size, dtype=torch.float64).view(piece.shape)
            start += size
    return tensors


def filled(weight, tensors, shard):
    target = torch.full(weight.shard_shape(shard), float("nan"), dtype=torch.float64)
    fill_shard(target, weight, tensors.__getitem__, shard)
    assert not target.isnan().any()
    return target


def in_layout(arch, tensors, layout):
    """Name to shard to tensor, as all ranks of a layout hold them; ranks that hold the same shard hold the same numbers."""
    held, stage_of_layer = {}, layout.stage_of_layer(arch.layers)
    for weight in weight_map(arch):
        for at in map(layout.coordinates, range(layout.world_size)):
            if at.pp in weight.stages(layout, stage_of_layer):
                shard = weight.shard(layout, at)
                held.setdefault(weight.megatron, {})[shard] = filled(weight, tensors, shard)
    return held


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),  # key and value heads: 2, held twice
    Layout(tp=2, pp=2, dp=2, ep=2),
    Layout(pp=2, dp=2, ep=2, etp=1, stage_layers=(3, 2)),
    Layout(tp=2, pp=2, dp=2, ep=2, etp=2, vpp=2, stage_layers=(1, 2, 1, 1)),
    Layout(dp=4, ep=4),
    Layout(dp=2, etp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_exact(family, tied, layout):
    arch = architecture_of(config(family, tie_word_embeddings=tied, num_hidden_layers=5))
    tensors, back = tensors_of(arch), {}
    held = in_layout(arch, tensors, layout)
    for weight in weight_map(arch):
        back |= huggingface_tensors(weight, held[weight.megatron])
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@given(data=st.data())
def test_shards_are_disjoint_and_cover_the_weight(data):
    """Of a weight whose pieces may be divided without limit, every number is in exactly one shard."""
    arch = architecture_of(config("mixtral", num_key_value_heads=4))
    weight = data.draw(st.sampled_from(weight_map(arch)))
    parts = 1 if weight.axis is None else data.draw(st.sampled_from([1, 2, 4]))
    expert_parts = data.draw(st.sampled_from([1, 2, 4])) if weight.stacked else 1
    tensors = tensors_of(arch)
    shards = [Shard(parts, a, expert_parts, b) for a in range(parts) for b in range(expert_parts)]
    numbers = torch.cat([filled(weight, tensors, shard).flatten() for shard in shards])
    expected = torch.cat([tensors[piece.name].flatten() for piece in weight.all_pieces()])
    padding = len(numbers) - len(expected)
    assert padding == (58 * 8 if weight.vocabulary else 0)  # 70 token ids are padded to 128
    assert torch.equal(numbers.sort().values, torch.cat([torch.zeros(padding), expected]).sort().values)


def test_key_and_value_heads_that_are_fewer_than_the_ranks_are_copied_to_neighbours():
    arch = architecture_of(config("llama"))  # 4 heads, 2 key and value heads, of 2 rows each
    weight = next(w for w in weight_map(arch) if w.megatron.endswith("0.self_attention.linear_qkv.weight"))
    query, key, value = weight.pieces[0]
    assert [weight.bounds(query, Shard(4, part)) for part in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    for piece in (key, value):
        assert [weight.bounds(piece, Shard(4, part)) for part in range(4)] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert weight.shard_shape(Shard(4, 3)) == (6, 8)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_their_layers_and_the_ends(tied):
    arch = architecture_of(config("llama", tie_word_embeddings=tied, num_hidden_layers=5))
    layout = Layout(pp=2, vpp=2, stage_layers=(1, 2, 1, 1))
    weights = weight_map(arch)
    stages = {w.megatron: w.stages(layout, layout.stage_of_layer(5)) for w in weights}
    assert stages["embedding.word_embeddings.weight"] == ((0, 1) if tied else (0,))
    assert stages["decoder.final_layernorm.weight"] == (1,)
    assert ("output_layer.weight" in stages) != tied
    for pp in range(2):
        places = megatron_places(weights, layout, 5, pp)
        assert set(places) == {name for name, held in stages.items() if pp in held}
    assert places["decoder.layers.2.mlp.linear_fc1.weight"] == (0, "decoder.layers.1.mlp.linear_fc1.weight")
    assert places["decoder.layers.4.mlp.linear_fc1.weight"] == (1, "decoder.layers.0.mlp.linear_fc1.weight")
    head = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    assert places[head] == (1, "output_layer.weight")


def test_fused_qkv_is_all_q_then_k_then_v_of_the_rank():
    arch = architecture_of(config("llama"))
    weight = next(w for w in weight_map(arch) if w.megatron.endswith("0.self_attention.linear_qkv.weight"))
    rows = {"q": range(0, 8), "k": range(100, 104), "v": range(200, 204)}  # 4, 2 and 2 heads of 2 rows, labelled
    tensors = {
        f"model.layers.0.self_attn.{x}_proj.weight": torch.tensor(list(r), dtype=torch.float64)[:, None].expand(-1, 8)
        for x, r in rows.items()
    }
    assert filled(weight, tensors, Shard(2, 1))[:, 0].tolist() == [4, 5, 6, 7, 102, 103, 202, 203]


def test_gate_and_up_are_divided_each_by_itself():
    arch = architecture_of(config("llama", intermediate_size=4))
    weight = next(w for w in weight_map(arch) if w.megatron.endswith("0.mlp.linear_fc1.weight"))
    tensors = {
        f"model.layers.0.mlp.{x}_proj.weight": torch.tensor(r, dtype=torch.float64)[:, None].expand(-1, 8)
        for x, r in {"gate": [0, 1, 2, 3], "up": [10, 11, 12, 13]}.items()
    }
    assert filled(weight, tensors, Shard(2, 1))[:, 0].tolist() == [2, 3, 12, 13]


def test_the_padded_vocabulary_is_zero():
    arch = architecture_of(config())  # 70 rows, padded to 128: rank 0 has 64 real rows, rank 1 has 6
    weight, tensors = weight_map(arch)[0], tensors_of(arch)
    second = filled(weight, tensors, Shard(2, 1))
    assert second.shape == (64, 8)
    assert torch.equal(second[:6], tensors["model.embed_tokens.weight"][64:])
    assert not second[6:].any()


def test_names_that_are_missing_or_would_be_ignored_are_errors():
    arch = architecture_of(config())
    names = list(tensors_of(arch))
    with pytest.raises(WeightsMismatch, match="missing model.norm.weight"):
        check_names(arch, [n for n in names if n != "model.norm.weight"])
    with pytest.raises(WeightsMismatch, match="score.weight"):
        check_names(arch, [*names, "score.weight"])
    check_names(arch, [*names, "model.layers.0.self_attn.rotary_emb.inv_freq"])


def test_a_stale_head_beside_tied_embeddings_is_not_read(tmp_path):
    arch = architecture_of(config(tie_word_embeddings=True))
    tensors = tensors_of(arch)
    save_file({**tensors, "lm_head.weight": torch.zeros(70, 8, dtype=torch.float64)}, tmp_path / "model.safetensors")
    parameters = {w.megatron: torch.empty(w.shard_shape(Shard()), dtype=torch.float64) for w in weight_map(arch)}
    load_folder(parameters, arch, tmp_path, dict.fromkeys(parameters, Shard()))
    assert torch.equal(parameters["embedding.word_embeddings.weight"][:70], tensors["model.embed_tokens.weight"])


def test_a_folder_of_several_files_is_read(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = SafetensorsFolder(tmp_path)
    assert folder.names == {"a", "b"}
    assert torch.equal(folder.slice("b")[:], torch.zeros(3))


def test_a_folder_of_pickles_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    arch = architecture_of(config())
    tensors = {**tensors_of(arch), "model.norm.weight": torch.ones(9, dtype=torch.float64)}
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = {w.megatron: torch.empty(w.shard_shape(Shard()), dtype=torch.float64) for w in weight_map(arch)}
    with pytest.raises(WeightsMismatch, match="model.norm.weight"):
        load_folder(parameters, arch, tmp_path, dict.fromkeys(parameters, Shard()))
