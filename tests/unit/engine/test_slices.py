"""What the ranks of any layout own, as rectangles of whole tensors: each number once, and the one that is in memory."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import Layout
from engine.weights.map import weight_map
from engine.weights.slices import matrix_shape, saves, slices
from storage.filesystem import Store
from storage.manifest import Manifest
from storage.sharded import ShardedReader, Wanted, read_index, write_sharded
from tests.support.layouts import FAMILIES, architecture, layouts, whole_tensors

SPACE = [
    (family, world, tied)
    for family in FAMILIES for world in (1, 2, 4, 8) for tied in (False, True)
]  # fmt: skip


def matrices(arch):
    """Whole tensors as padded matrices; no number but the padding's zero occurs twice."""
    tensors = {name: tensor.numpy().astype(np.float32) for name, tensor in whole_tensors(arch).items()}
    out = {}
    for weight in weight_map(arch):
        for piece in weight.all_pieces():
            whole = np.zeros(matrix_shape(weight, piece), np.float32)
            whole[: piece.shape[0]] = tensors[piece.name].reshape(piece.shape[0], -1)
            out[piece.name] = whole
    return out


def in_memory(weight, shard, whole):
    """A shard as Megatron holds it, put together as the weight map describes it, flat."""
    rows = []
    for expert in weight.experts(shard):
        pieces = []
        for piece in weight.pieces[expert]:
            matrix = whole[piece.name]
            if weight.axis is not None:
                matrix = np.array_split(matrix, shard.parts, axis=weight.axis)[shard.part]
            pieces.append(matrix)
        rows.append(np.concatenate(pieces, axis=weight.axis or 0))
    return np.concatenate([row.reshape(-1) for row in rows])


def owners(weight, layout, stages):
    """Ranks that hold a weight in groups of replicas, each of which the distributed optimizer divides among its members."""
    groups = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if at.pp in weight.stages(layout, stages):
            copy = (at.pp, at.etp, at.ep) if weight.stacked else (at.pp, at.tp)
            groups.setdefault(copy, []).append(rank)
    return groups.values()


def ownership(arch, layout, seed):
    """rank -> [(weight, start, stop)], cut at random places as Megatron's buckets may cut them; some own nothing."""
    draw, stages = random.Random(seed), layout.stage_of_layer(arch.layers)
    owned = {rank: [] for rank in range(layout.world_size)}
    for weight in weight_map(arch):
        for ranks in owners(weight, layout, stages):
            size = math.prod(weight.shard_shape(weight.shard(layout, layout.coordinates(ranks[0]))))
            edges = sorted([0, size, *(draw.randint(0, size) for _ in ranks[1:])])
            for rank, start, stop in zip(ranks, edges[:-1], edges[1:], strict=True):
                owned[rank].append((weight, start, stop))
    return owned


def cut(box):
    return slice(box.row, box.row + box.rows), slice(box.column, box.column + box.columns)


@pytest.mark.parametrize(("family", "world", "tied"), SPACE)
def test_slices_are_what_is_in_memory_and_are_saved_once(family, world, tied):
    arch = architecture(family, layers=8, kv_heads=8, tied=tied)
    whole = matrices(arch)
    for number, layout in enumerate(layouts(world, arch, training=True)):
        stages = layout.stage_of_layer(arch.layers)
        counts = {name: np.zeros(matrix.shape, int) for name, matrix in whole.items()}
        for rank, parts in ownership(arch, layout, number).items():
            at = layout.coordinates(rank)
            for weight, start, stop in parts:
                shard = weight.shard(layout, at)
                found = list(slices(weight, shard, start, stop))
                numbers = np.concatenate([[], *(whole[t][cut(box)].reshape(-1) for t, box in found)])
                assert (numbers == in_memory(weight, shard, whole)[start:stop]).all(), (layout, weight.megatron)
                if saves(weight, layout, at, stages):
                    for tensor, box in found:
                        counts[tensor][cut(box)] += 1
        assert all((count == 1).all() for count in counts.values()), layout


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(FAMILIES), st.booleans(), st.data())
def test_what_one_layout_saved_another_one_loads(tmp_path_factory, family, tied, data):
    arch = architecture(family, layers=4, kv_heads=4, tied=tied)
    worlds = st.sampled_from((1, 2, 4))
    before = data.draw(st.sampled_from(layouts(data.draw(worlds), arch, True)), "saved under")
    after = data.draw(st.sampled_from(layouts(data.draw(worlds), arch, True)), "loaded into")
    whole, store = matrices(arch), Store.open(str(tmp_path_factory.mktemp("checkpoint")))
    entries, stages = [], before.stage_of_layer(arch.layers)
    for rank, parts in ownership(arch, before, data.draw(st.integers(0, 99))).items():
        at = before.coordinates(rank)
        mine = [
            each for weight, start, stop in parts if saves(weight, before, at, stages)
            for each in slices(weight, weight.shard(before, at), start, stop)
        ]  # fmt: skip
        if mine:
            values = np.concatenate([whole[t][cut(box)].reshape(-1) for t, box in mine])
            shapes = {t: whole[t].shape for t, _ in mine}
            entries += write_sharded(
                store, "run/checkpoint/step=000001", f"actor-{rank:05d}", mine, np.stack([values, -values]),
                states=["param", "exp_avg"], shapes=shapes, owner="actor", about={},
            )  # fmt: skip
    manifest = Manifest(run="run", step=1, stage="checkpoint", fingerprint="f", files=entries, weight_version=1,
                        started_at="", finished_at="")  # fmt: skip
    parts = [read_index(store, manifest, entry) for entry in entries if entry.path.endswith(".json")]
    reader = ShardedReader(store, manifest.folder, parts)
    for rank, owned in ownership(arch, after, data.draw(st.integers(0, 99))).items():
        for weight, start, stop in owned:
            shard = weight.shard(after, after.coordinates(rank))
            for state, sign in (("param", 1), ("exp_avg", -1)):
                out, offset, wanted = np.full(stop - start, np.nan, np.float32), 0, []
                for tensor, box in slices(weight, shard, start, stop):
                    array = out[offset : offset + box.size].reshape(box.rows, box.columns)
                    wanted.append(Wanted(state, tensor, box, array))
                    offset += box.size
                reader.read(wanted)
                assert (sign * out == in_memory(weight, shard, whole)[start:stop]).all()


def test_columns_of_a_divided_matrix():
    """o_proj [16, 16] over two ranks: the second has columns 8 to 15; its flat[4:20] is half a row, a whole one and a half."""
    arch = architecture("llama")
    weight = next(w for w in weight_map(arch) if w.megatron == "decoder.layers.0.self_attention.linear_proj.weight")
    layout = Layout(tp=2)
    found = [(tensor, tuple(box)) for tensor, box in slices(weight, weight.shard(layout, layout.coordinates(1)), 4, 20)]
    name = "model.layers.0.self_attn.o_proj.weight"
    assert found == [(name, (0, 12, 1, 4)), (name, (1, 8, 1, 8)), (name, (2, 8, 1, 4))]
