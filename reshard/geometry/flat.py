"""Ranges of a tensor's elements in row-major order, as boxes: what flat parameters and partitions are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reshard.geometry.box import Box


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """The boxes that elements [begin, end) make up, in order, each with the number of elements before it.

    A range of a tensor with n dims is at most 2n - 1 boxes: of the outermost dim that it cuts, whole rows in the
    middle, and what is left of the rows at both ends.

    Args:
        shape: of the whole tensor; of one without dims, the range is its one element.
    """
    done = 0
    for box in _boxes(tuple(shape), begin, end):
        yield done, box
        done += box.elements


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _within_row(shape, first - 1, begin, end)
        return
    yield from _within_row(shape, first - 1, begin, first * row)
    if first < last:
        rest = shape[1:]
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _within_row(shape, last, last * row, end)


def _within_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    start = row * math.prod(shape[1:])
    for box in _boxes(shape[1:], begin - start, end - start):
        yield Box((row, *box.offsets), (1, *box.sizes))
