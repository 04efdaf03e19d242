"""Arithmetic of ranks, packing and balance."""

from hypothesis import given
from hypothesis import strategies as st

from engine.layout import Layout, balanced_split, contiguous_ranges, pack_by_tokens, padded_vocabulary

LENGTHS = st.lists(st.integers(1, 500), max_size=60)


def test_ranks_are_numbered_tensor_parallel_first():
    layout = Layout(tp=2, dp=3)
    assert layout.world_size == 6
    assert [(layout.dp_rank(r), layout.tp_rank(r)) for r in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


def test_vocabulary_is_padded_once_to_64():
    assert [padded_vocabulary(n) for n in (1, 64, 65, 264, 151936)] == [64, 64, 128, 320, 151936]


@given(LENGTHS, st.integers(1, 8))
def test_every_sample_goes_to_exactly_one_rank(lengths, parts):
    groups = balanced_split(lengths, parts)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert len(groups) == parts


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_differ_by_at_most_the_longest_sample(lengths, parts):
    loads = [sum(lengths[i] for i in group) for group in balanced_split(lengths, parts)]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(1, 600))
def test_packing_keeps_every_sample_and_the_budget(lengths, budget):
    bins = pack_by_tokens(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert len(members) == 1 or sum(lengths[i] for i in members) <= budget


@given(st.integers(0, 100), st.integers(1, 9))
def test_contiguous_ranges_cover_everything_evenly(total, parts):
    ranges = contiguous_ranges(total, parts)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(total))
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1
