"""Rows of several sequences."""

import pytest

from engine.megatron.packing import pack


def test_a_packed_row_has_no_padding_but_a_tail_for_sequence_parallel():
    row = pack([[5], [6, 7]], [[8, 9], [1]], 4, "cpu")
    assert row.ids.tolist() == [[5, 8, 9, 6, 7, 1, 0, 0]]
    assert row.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert row.response.tolist() == [0, 1, 4]
    assert row.targets[row.response].tolist() == [8, 9, 1]
    assert row.attention.cu_seqlens_q.tolist() == [0, 3, 6, 8]


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_row_of_nothing_is_a_throw_away_tail(multiple):
    row = pack([], [], multiple, "cpu")
    assert row.ids.tolist() == [[0] * multiple]
    assert row.response.tolist() == []
    assert row.attention.cu_seqlens_q.tolist() == [0, multiple]
