"""Rectangles of matrices, and the runs of numbers they are made of: the arithmetic of sharded tensors. Plain integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a matrix. A vector is a matrix of one column."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def moved(self, row: int, column: int) -> Box:
        """The same rectangle, so many rows and columns further."""
        return Box(self.row + row, self.column + column, self.rows, self.columns)

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Where it lies in the array of a rectangle that contains it."""
        row, column = self.row - outer.row, self.column - outer.column
        return slice(row, row + self.rows), slice(column, column + self.columns)


def overlap(a: Box, b: Box) -> Box | None:
    """What two rectangles have in common."""
    row, column = max(a.row, b.row), max(a.column, b.column)
    rows = min(a.row + a.rows, b.row + b.rows) - row
    columns = min(a.column + a.columns, b.column + b.columns) - column
    return Box(row, column, rows, columns) if rows > 0 and columns > 0 else None


def boxes_of_run(start: int, stop: int, columns: int) -> Iterator[Box]:
    """Elements [start, stop) of a row-major matrix as at most three rectangles, in order: a row's end, rows, a row's beginning."""
    if start >= stop:
        return
    row, column = divmod(start, columns)
    if column:
        length = min(columns - column, stop - start)
        yield Box(row, column, 1, length)
        start, row = start + length, row + 1
    if rows := (stop - start) // columns:
        yield Box(row, 0, rows, columns)
    if rest := (stop - start) % columns:
        yield Box(row + rows, 0, 1, rest)


def run_of_rows(box: Box, outer: Box) -> tuple[int, int]:
    """Elements [start, stop) of `outer`'s array, row-major, that hold the whole rows of `outer` in which `box` lies."""
    return (box.row - outer.row) * outer.columns, (box.row + box.rows - outer.row) * outer.columns
