from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from cutting import cut_up
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.box import Box
from reshard.geometry.tiling import inexact_tensors, tiling_fault

Tiled = tuple[tuple[int, ...], list[Box]]


@st.composite
def tilings(draw: st.DrawFn) -> Tiled:
    """A tensor cut up at random, then perhaps with a box dropped, repeated, moved or grown."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = cut_up(draw, shape)
    if draw(st.booleans()):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        change = draw(st.tuples(*[st.integers(-1, 1) for _ in shape]))
        kind = draw(st.sampled_from(["drop", "repeat", "move", "grow"]))
        if kind == "repeat":
            boxes += [box, box]
        elif kind == "move":
            boxes.append(box._replace(offsets=tuple(max(0, o + c) for o, c in zip(box.offsets, change, strict=True))))
        elif kind == "grow":
            boxes.append(box._replace(sizes=tuple(max(0, s + c) for s, c in zip(box.sizes, change, strict=True))))
    return shape, draw(st.permutations(boxes))


def is_exact(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = np.zeros([size + 6 for size in shape], dtype=int)
    for box in boxes:
        count[tuple(slice(low, end) for low, end in zip(box.offsets, box.ends, strict=True))] += 1
    inside = count[tuple(slice(0, size) for size in shape)]
    return bool((inside == 1).all()) and int(count.sum()) == int(inside.sum())


def columns(tensors: list[Tiled], dims: int) -> tuple[np.ndarray, ...]:
    shapes = np.ones((len(tensors), dims), dtype=np.int64)
    first = [0]
    offsets, sizes = [], []
    for number, (shape, boxes) in enumerate(tensors):
        shapes[number, : len(shape)] = shape
        for box in boxes:
            rest = dims - len(shape)
            offsets.append([*box.offsets, *[0] * rest])
            sizes.append([*box.sizes, *[1] * rest])
        first.append(len(offsets))
    as_rows = [np.array(rows, dtype=np.int64).reshape(-1, dims) for rows in (offsets, sizes)]
    return shapes, np.array(first), *as_rows


@settings(max_examples=300, deadline=None)
@given(st.lists(tilings(), max_size=5), st.integers(3, 4))
def test_agrees_with_counting_every_element(tensors: list[Tiled], dims: int) -> None:
    expected = [number for number, (shape, boxes) in enumerate(tensors) if not is_exact(shape, boxes)]
    assert inexact_tensors(*columns(tensors, dims)).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(tilings())
def test_a_fault_has_words(tiling: Tiled) -> None:
    shape, boxes = tiling
    fault = tiling_fault(shape, boxes)
    assert (fault is None) == is_exact(shape, boxes), fault
    assert fault is None or "chunk" in fault


def test_a_hole_and_an_overlap_of_one_size_do_not_cancel() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((0, 0), (1, 4)), Box((3, 0), (1, 4))]
    assert inexact_tensors(*columns([((4, 4), boxes)], 2)).tolist() == [0]
    assert tiling_fault((4, 4), boxes) == "two chunks hold [0:1, 0:4] of the shape (4, 4)"


@pytest.mark.parametrize("dims", [9, 30, 64])
def test_many_dims_take_no_exponential_time(dims: int) -> None:
    shape = (2,) * dims
    halves = [Box((row, *(0,) * (dims - 1)), (1, *shape[1:])) for row in (0, 1)]
    skewed = [Box((0,) * dims, (1,) * dims), Box((1,) * dims, (1,) * dims)]
    tensors = [(shape, halves), (shape, skewed), (shape, halves[:1])]
    assert inexact_tensors(*columns(tensors, dims)).tolist() == [1, 2]


@pytest.mark.parametrize(("side", "dims"), [(3, 8), (2, 14), (40, 3), (60_000, 1)])
def test_a_grid_in_many_dims_takes_time_linear_in_its_chunks(side: int, dims: int) -> None:
    offsets = np.stack(np.unravel_index(np.arange(side**dims), (side,) * dims), axis=1).astype(np.int64)
    sizes = np.ones_like(offsets)
    shapes = np.full((1, dims), side, dtype=np.int64)
    start_s = time.process_time()
    assert inexact_tensors(shapes, np.array([0, len(offsets)]), offsets, sizes).tolist() == []
    assert inexact_tensors(shapes, np.array([0, len(offsets) - 1]), offsets[1:], sizes[1:]).tolist() == [0]
    moved = np.concatenate([offsets[1:2], offsets[1:]])
    assert inexact_tensors(shapes, np.array([0, len(offsets)]), moved, sizes).tolist() == [0]
    # All 2**14 corners of 2**14 chunks took minutes.
    assert time.process_time() - start_s < 5


def test_tensors_with_any_number_of_rows_and_no_elements_do_not_wrap() -> None:
    huge = (1 << 62) - 1
    half = [Box((0, 0), (2, 3))]
    tensors: list[Tiled] = [((huge, 0), []), ((4, 3), half), *[((huge, 0), [])] * 3, ((4, 3), [Box((2, 0), (2, 3))])]
    assert inexact_tensors(*columns(tensors, 2)).tolist() == [1, 5]


def test_a_large_grid_is_proved_in_columns() -> None:
    places = list(itertools.product(range(0, 60, 2), repeat=3))
    grid = [Box(place, (2, 2, 2)) for place in places]
    tensors = [((60, 60, 60), grid), ((60, 60, 60), grid[:-1]), ((60, 60, 60), [*grid, grid[7]])]
    assert inexact_tensors(*columns(tensors, 3)).tolist() == [1, 2]
