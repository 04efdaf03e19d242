"""Rectangles against NumPy's own indexing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.boxes import Box, boxes_of_run, overlap

sides = st.integers(1, 7)


def test_a_run_is_a_rows_end_whole_rows_and_a_rows_beginning():
    assert list(boxes_of_run(3, 17, 5)) == [Box(0, 3, 1, 2), Box(1, 0, 2, 5), Box(3, 0, 1, 2)]


@pytest.mark.parametrize(
    ("start", "stop", "boxes"),
    [
        (0, 10, [Box(0, 0, 2, 5)]),
        (6, 8, [Box(1, 1, 1, 2)]),
        (5, 8, [Box(1, 0, 1, 3)]),
        (4, 10, [Box(0, 4, 1, 1), Box(1, 0, 1, 5)]),
        (4, 4, []),
        (7, 2, []),
    ],
)
def test_shorter_runs(start, stop, boxes):
    assert list(boxes_of_run(start, stop, 5)) == boxes


@given(sides, sides, st.data())
def test_a_runs_boxes_hold_its_numbers_in_order(rows, columns, data):
    matrix = np.arange(rows * columns).reshape(rows, columns)
    start = data.draw(st.integers(0, matrix.size))
    stop = data.draw(st.integers(start, matrix.size))
    boxes = list(boxes_of_run(start, stop, columns))
    found = [matrix[b.row : b.row + b.rows, b.column : b.column + b.columns].reshape(-1) for b in boxes]
    assert np.concatenate([*found, []]).tolist() == list(range(start, stop))
    assert len(boxes) <= 3 and all(box.size > 0 for box in boxes)


@given(*[st.builds(Box, st.integers(0, 4), st.integers(0, 4), sides, sides)] * 2)
def test_the_overlap_is_what_both_cover(a, b):
    def cover(box):
        mask = np.zeros((12, 12), bool)
        if box is not None:
            mask[box.row : box.row + box.rows, box.column : box.column + box.columns] = True
        return mask

    common = overlap(a, b)
    assert (cover(common) == (cover(a) & cover(b))).all()
    if common is not None:
        whole = np.arange(144).reshape(12, 12)
        part = whole[a.row : a.row + a.rows, a.column : a.column + a.columns]
        assert (part[common.within(a)] == whole[cover(common)].reshape(common.rows, common.columns)).all()
