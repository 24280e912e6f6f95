"""Ranges of row-major elements as boxes, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry.box import Box
from reshard.geometry.flat import boxes_of_range


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


@given(ranges())
def test_the_boxes_are_the_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    boxes = list(boxes_of_range(shape, begin, end))
    for done, box in boxes:
        assert done == len(found)
        part = whole[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes and part.size
        found += part.reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_that_cuts_every_dim_is_2n_minus_1_boxes() -> None:
    boxes = [box for _, box in boxes_of_range((4, 4, 4), 1, 63)]
    assert boxes == [
        Box((0, 0, 1), (1, 1, 3)),
        Box((0, 1, 0), (1, 3, 4)),
        Box((1, 0, 0), (2, 4, 4)),
        Box((3, 0, 0), (1, 3, 4)),
        Box((3, 3, 0), (1, 1, 3)),
    ]


def test_whole_rows_are_one_box() -> None:
    assert list(boxes_of_range((6, 5), 10, 25)) == [(0, Box((2, 0), (3, 5)))]
    assert list(boxes_of_range((6, 5), 0, 30)) == [(0, Box((0, 0), (6, 5)))]


def test_without_dims_it_is_the_one_element() -> None:
    assert list(boxes_of_range((), 0, 1)) == [(0, Box((), ()))]
    assert list(boxes_of_range((), 0, 0)) == []


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 2)])
def test_of_no_elements_there_are_no_boxes(shape: tuple[int, ...]) -> None:
    assert list(boxes_of_range(shape, 0, 0)) == []


def test_elements_beyond_memory() -> None:
    assert list(boxes_of_range((1 << 30, 1 << 30), 5 << 30, 7 << 30)) == [(0, Box((5, 0), (2, 1 << 30)))]
