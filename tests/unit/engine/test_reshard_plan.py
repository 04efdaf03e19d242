"""The plan: exactly the lower bound, HybridFlow's formulas, and every number in its place when the plan is carried out."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import Layout
from engine.reshard.plan import plan_generation, reversed_plan
from engine.reshard.slices import Cell, cell_views
from tests.support.layouts import FAMILIES, architecture, held, layouts, nothing, shards, whole_tensors


def carry_out(plan, source, target):
    """Every transfer of a plan, on all ranks' tensors in one process; second rounds read what first rounds wrote."""
    for round_ in (0, 1):
        for part in plan.classes:
            transfers = part.transfers[part.transfers["round"] == round_].tolist()
            for giver, taker, *cell, _ in transfers:
                for member in part.members:
                    weight, name = member.weight, member.weight.megatron
                    side, tensors = (plan.target, target) if round_ else (plan.source, source)
                    from_ = weight.shard(side.layout, side.coordinates(giver))
                    to = weight.shard(plan.target.layout, plan.target.coordinates(taker))
                    there = cell_views(target[taker][name], member, to, part, Cell(*cell))
                    here = cell_views(tensors[giver][name], member, from_, part, Cell(*cell))
                    for a, b in zip(there, here, strict=True):
                        assert a.isnan().all(), "received twice"
                        a.copy_(b)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@st.composite
def cases(draw):
    world = draw(st.sampled_from((1, 2, 4, 6, 8)))
    arch = architecture(
        draw(st.sampled_from(FAMILIES)), layers=draw(st.integers(3, 9)), kv_heads=draw(st.sampled_from((1, 2, 4, 8))),
        tied=draw(st.booleans()),
    )  # fmt: skip
    train, generate = (draw(st.sampled_from(layouts(world, arch, side))) for side in (True, False))
    return arch, train, generate, draw(st.sampled_from((1, 2, 8)))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_there_and_back_every_number_is_in_its_place_and_nobody_receives_more_than_needed(case):
    arch, train, generate, ranks_per_node = case
    plan = plan_generation(arch, train, generate, bytes_per_number=8, ranks_per_node=ranks_per_node)
    tensors, ranks = whole_tensors(arch), range(train.world_size)
    for way in (plan, reversed_plan(plan)):
        source = [shards(arch, tensors, way.source, rank) for rank in ranks]
        target = [nothing(arch, way.target, rank) for rank in ranks]
        carry_out(way, source, target)
        for rank in ranks:
            assert_equal(target[rank], shards(arch, tensors, way.target, rank))
        bytes_of = [[sum(t.nbytes for t in side[rank].values()) for rank in ranks] for side in (source, target)]
        assert way.held(way.source).tolist() == bytes_of[0]
        assert way.held(way.target).tolist() == bytes_of[1]
        assert way.received().tolist() == way.lower_bound().tolist()
        assert way.received().sum() == (way.traffic["sent_node"] + way.traffic["sent_network"]).sum()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_the_lower_bound_counted_number_by_number(case):
    arch, train, generate, _ = case
    plan = plan_generation(arch, train, generate, bytes_per_number=1)
    tensors = whole_tensors(arch)
    bound = plan.lower_bound()
    for rank in range(train.world_size):
        before, after = (shards(arch, tensors, side, rank) for side in (plan.source, plan.target))
        missing = 0
        for weight in held(arch, plan.target, rank):
            wanted = after[weight.megatron].flatten()
            have = before.get(weight.megatron, torch.empty(0, dtype=torch.float64)).flatten()
            real = wanted[wanted != 0]
            padding = len(wanted) - len(real)
            missing += int((~torch.isin(real, have)).sum()) + _missing_padding(arch, weight, plan, rank, padding)
        assert bound[rank] == missing


def _missing_padding(arch, weight, plan, rank, padding):
    """Padded rows that the rank has not: they all look alike, so they are counted by place."""
    if not padding:
        return 0
    piece = weight.pieces[0][0]
    after = weight.bounds(piece, weight.shard(plan.target.layout, plan.target.coordinates(rank)))
    before = (0, 0)
    if weight in held(arch, plan.source, rank):
        before = weight.bounds(piece, weight.shard(plan.source.layout, plan.source.coordinates(rank)))
    real, columns = piece.shape
    rows = [row for row in range(max(real, after[0]), after[1]) if not before[0] <= row < before[1]]
    return len(rows) * columns


GRID = [
    (Layout(tp=t, pp=p, dp=d), Layout(tp=tg, pp=pg, dp=t * p * d // (tg * pg)))
    for t, p, d in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4))
    for tg, pg in itertools.product((1, 2, 4, 8), (1, 2, 4))
    if t % tg == 0 and p % pg == 0
]


@pytest.mark.parametrize(("train", "generate"), GRID, ids=lambda x: str(x))
def test_hybridflow_table_2_for_dense_models(train, generate):
    """(tp - t_g p_g) / (t_g p_g t p) M received, M / (t_g p_g) at the peak, for all that tensor parallelism divides.

    The formula is of a model that is divided evenly by stages; the mean over ranks has it whatever the stages hold.
    """
    arch = architecture("llama", layers=8, kv_heads=8)
    plan = plan_generation(arch, train, generate, bytes_per_number=2)
    divided = sum(part.numbers for part in plan.classes if part.division.kind == "dense") * 2
    whole = sum(part.numbers for part in plan.classes if part.division.kind == "whole") * 2
    t, p, tg, pg = train.tp, train.pp, generate.tp, generate.pp
    expected = divided * (t * p - tg * pg) / (tg * pg * t * p) + whole * (p - pg) / (pg * p)
    assert plan.received().mean() == pytest.approx(expected, rel=1e-12)
    assert plan.held(plan.target).mean() == pytest.approx(divided / (tg * pg) + whole / pg, rel=1e-12)
    assert set(map(plan.regime, plan.classes)) <= {"alias", "regroup"}
    assert reversed_plan(plan).received().sum() == 0


def test_the_papers_example_of_groups():
    """Figure 8 (b): training 1-4-2, generation 1-2-2-2: tensor parallel groups G1 G3, G2 G4, G5 G7, G6 G8."""
    plan = plan_generation(architecture("llama"), Layout(tp=4, dp=2), Layout(tp=2, dp=4), bytes_per_number=2)
    assert plan.target.order.reshape(-1, 2).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    part = next(part for part in plan.classes if part.division.kind == "dense")
    pairs = {tuple(sorted((s, t))) for s, t in part.transfers[["source", "target"]].tolist() if s != t}
    assert pairs == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_equal_layouts_alias_everything():
    for family, layout in (("qwen2", Layout(tp=2, pp=2, dp=2)), ("qwen3_moe", Layout(tp=2, dp=2, ep=2))):
        plan = plan_generation(architecture(family), layout, layout, bytes_per_number=2)
        assert plan.resident == {part.division for part in plan.classes}
        assert {plan.regime(part) for part in plan.classes} == {"alias"}
        assert not any(bytes_.any() for bytes_ in plan.traffic.values())


def test_experts_move_while_the_dense_weights_stay():
    train, generate = Layout(tp=2, ep=2), Layout(tp=2)
    plan = plan_generation(architecture("qwen3_moe"), train, generate, bytes_per_number=2)
    assert {part.division.kind for part in plan.classes if part.division in plan.resident} == {"dense", "whole"}
    assert {plan.regime(part) for part in plan.classes if part.division.kind == "experts"} == {"move"}


def test_a_node_receives_what_it_lacks_once_and_passes_it_on():
    """Stage 0 on one node, stage 1 on the other, everything wanted everywhere: half the model crosses, once each way."""
    arch = architecture("llama", layers=8, kv_heads=8)
    plan = plan_generation(arch, Layout(pp=2, dp=4), Layout(dp=8), bytes_per_number=2, ranks_per_node=4)
    model = sum(part.numbers for part in plan.classes) * 2
    assert plan.traffic["received_network"].sum() == model
    assert plan.received().tolist() == plan.lower_bound().tolist()
    once = [part for part in plan.classes if part.division.kind == "dense"]
    assert all(set(part.transfers["round"].tolist()) == {0, 1} for part in once)


def test_tensor_parallel_groups_stay_inside_a_node():
    plan = plan_generation(
        architecture("llama", layers=8, kv_heads=8), Layout(tp=4, pp=2, dp=2), Layout(tp=4, dp=4), bytes_per_number=2,
        ranks_per_node=8,
    )  # fmt: skip
    nodes = plan.target.order.reshape(-1, 4) // 8
    assert (nodes.max(1) == nodes.min(1)).all()


def test_groups_ascend_because_torch_sorts_process_groups():
    arch = architecture("llama", layers=8, kv_heads=8)
    for train, generate in GRID:
        order = plan_generation(arch, train, generate, bytes_per_number=2).target.order
        assert (np.diff(order.reshape(-1, generate.tp), axis=1) > 0).all()


def test_the_same_plan_every_time():
    arch = architecture("qwen3_moe", layers=6)
    plans = [
        plan_generation(arch, Layout(tp=2, pp=2, dp=2, ep=4), Layout(tp=4, dp=2), bytes_per_number=2) for _ in "ab"
    ]
    for a, b in zip(plans[0].classes, plans[1].classes, strict=True):
        assert a.division == b.division and (a.transfers == b.transfers).all()


def test_different_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match="generation uses 4 ranks and training 2"):
        plan_generation(architecture("llama"), Layout(tp=2), Layout(tp=4), bytes_per_number=2)


def test_planning_does_not_grow_with_the_layers():
    """Weights that are divided alike are planned once."""
    counts = []
    for layers in (8, 320):
        arch = architecture("llama", layers=layers)
        plan = plan_generation(arch, Layout(tp=4, pp=2, dp=2), Layout(tp=2, dp=8), bytes_per_number=2)
        counts.append(sum(len(part.transfers) for part in plan.classes))
    assert counts[0] == counts[1]
