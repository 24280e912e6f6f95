from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.geometry.box import Box, is_row_major, row_major_strides


@st.composite
def shapes_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    boxes = []
    for _ in range(count):
        low = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, low, strict=True))
        boxes.append(Box(low, sizes))
    return shape, boxes


def marked(shape: tuple[int, ...], box: Box) -> np.ndarray:
    marks = np.zeros(shape, dtype=int)
    marks[tuple(slice(low, end) for low, end in zip(box.offsets, box.ends, strict=True))] = 1
    return marks


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes(2))
def test_the_intersection_holds_what_both_hold(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (first, second) = drawn
    both = marked(shape, first) * marked(shape, second)
    shared = first.intersection(second)
    assert shared.elements == both.sum() == second.intersection(first).elements
    if shared.elements:
        assert (marked(shape, shared) == both).all()
        assert shared.relative_to(shared.offsets).offsets == (0,) * len(shape)


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes(1))
def test_slices_mean_what_numpy_means(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = drawn
    slices = tuple(slice(low, end) for low, end in zip(box.offsets, box.ends, strict=True))
    assert Box.within(shape, slices) == Box.within(shape, box) == box
    for count in range(len(shape) + 1):
        assert Box.within(shape, slices[:count]).sizes == np.empty(shape)[slices[:count]].shape
    assert Box.within(shape, None) == Box.whole(shape)


def test_negative_and_open_slices() -> None:
    assert Box.within((5, 4), (slice(-2, None),)) == Box((3, 0), (2, 4))
    assert Box.within((5, 4), slice(None, -3)) == Box((0, 0), (2, 4))
    assert Box.within((5,), slice(4, 2)).elements == 0


@pytest.mark.parametrize(
    "part", [slice(0, 4, 2), (slice(0, 1),) * 3, Box((0,), (1,)), Box((0, 0), (6, 1)), Box((-1, 0), (1, 1))]
)
def test_what_is_no_part_is_refused(part: object) -> None:
    with pytest.raises(UsageError):
        Box.within((5, 4), part)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.randoms())
def test_row_major_is_what_numpy_calls_contiguous(shape: list[int], chance: object) -> None:
    array = np.empty(shape, dtype=np.int8)
    assert is_row_major(shape, row_major_strides(shape))
    if array.size:
        axes = list(range(len(shape)))
        chance.shuffle(axes)  # type: ignore[attr-defined]
        moved = array.transpose(axes)
        assert is_row_major(moved.shape, moved.strides) == moved.flags.c_contiguous


def test_the_text_names_ranges() -> None:
    assert str(Box((1, 0), (2, 8))) == "[1:3, 0:8]"
