"""The plan against counting every element; nothing is read or written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from cutting import cut_up
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import CheckpointUnsound, UsageError
from reshard.geometry.box import Box
from reshard.geometry.mesh import Mesh, shard_rows
from reshard.index.index import RAW, Index, IndexBuilder
from reshard.plan import Layout, make_plan, piece_boxes, sharded_layout

Tensors = list[tuple[tuple[int, ...], list[Box]]]


def index_of(tensors: Tensors) -> Index:
    builder = IndexBuilder(Path("folder"), RAW)
    file = builder.file("data")
    for number, (shape, boxes) in enumerate(tensors):
        builder.tensor(f"t{number}", "float32", shape)
        for box in boxes:
            builder.chunk(box.offsets, box.sizes, (file, 0, 4 * box.elements))
    return builder.build()


def layout_of(index: Index, wanted: list[tuple[int, Box]]) -> Layout:
    offsets = np.zeros((len(wanted), index.dims), dtype=np.int64)
    sizes = np.ones((len(wanted), index.dims), dtype=np.int64)
    for row, (_, box) in enumerate(wanted):
        offsets[row, : len(box.offsets)] = box.offsets
        sizes[row, : len(box.sizes)] = box.sizes
    tensor = np.array([number for number, _ in wanted], dtype=np.int64)
    return Layout(tensor, offsets, sizes, np.zeros(len(wanted), dtype=np.int64))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    return draw(st.permutations(cut_up(draw, shape)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensors, list[tuple[int, Box]]]:
    """Tensors as they are stored, and wanted boxes: another tiling of some of them, or boxes that overlap."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4))
    tensors = [(shape, draw(tilings(shape))) for shape in shapes]
    wanted = []
    for number, shape in enumerate(shapes):
        if draw(st.booleans()):
            wanted += [(number, box) for box in sorted(draw(tilings(shape)))]
    return tensors, wanted


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_wanted_element_comes_from_the_chunk_that_holds_it(case: tuple[Tensors, list[tuple[int, Box]]]) -> None:
    tensors, wanted = case
    index = index_of(tensors)
    layout = layout_of(index, wanted)
    plan = make_plan(index, layout)
    low, sizes = piece_boxes(index, layout, plan, slice(None))
    assert (np.diff(plan.wanted) >= 0).all()
    for row, (number, box) in enumerate(wanted):
        dims = len(box.sizes)
        holder = np.full(tensors[number][0], -1)
        for offset, chunk in enumerate(tensors[number][1]):
            place = tuple(slice(a, b) for a, b in zip(chunk.offsets, chunk.ends, strict=True))
            holder[place] = index.first[number] + offset
        found = np.full(tensors[number][0], -1)
        for piece in range(int(plan.first[row]), int(plan.first[row + 1])):
            assert plan.wanted[piece] == row
            part = tuple(slice(a, a + n) for a, n in zip(low[piece, :dims], sizes[piece, :dims], strict=True))
            assert (found[part] == -1).all(), "an element twice"
            found[part] = plan.source[piece]
        inside = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
        assert (found[inside] == holder[inside]).all()
        assert (found >= 0).sum() == box.elements


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([Box((0,), (2,)), Box((3,), (1,))], r"t1: no chunk holds \[2:3\]"),
        ([Box((0,), (3,)), Box((2,), (2,))], r"t1: two chunks hold \[2:3\]"),
        ([Box((0,), (5,))], r"t1: the chunk \[0:5\] sticks out"),
        ([], r"t1: no chunk holds \[0:4\]"),
    ],
)
def test_a_tensor_that_is_not_tiled_is_refused_by_name(boxes: list[Box], fault: str) -> None:
    index = index_of([((4,), [Box.whole((4,))]), ((4,), boxes), ((4,), boxes)])
    everything = layout_of(index, [(number, Box.whole((4,))) for number in range(3)])
    with pytest.raises(CheckpointUnsound, match=fault) as caught:
        make_plan(index, everything)
    assert "t2" in str(caught.value)
    make_plan(index, layout_of(index, [(0, Box.whole((4,)))]))


def test_a_wanted_box_outside_its_tensor_is_refused() -> None:
    index = index_of([((4,), [Box.whole((4,))])])
    with pytest.raises(UsageError, match="t0: a wanted box is not a part"):
        make_plan(index, layout_of(index, [(0, Box((2,), (3,)))]))


def sharded_index(shapes: list[tuple[int, ...]], ranks: int) -> Index:
    tensors = []
    for shape in shapes:
        _, _, first, rows = shard_rows(np.array([shape[0] if shape else 1]), ranks if shape else 1)
        boxes = [
            Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:])) if shape else Box((), ())
            for start, count in zip(first.tolist(), rows.tolist(), strict=True)
        ]
        tensors.append((shape, boxes))
    return index_of(tensors)


@pytest.mark.parametrize("shapes", [[(512, 3)], [(512,)] * 40])
def test_pieces_grow_with_chunks_and_not_with_their_square(shapes: list[tuple[int, ...]]) -> None:
    for ranks, wanted in ((8, 6), (64, 48), (512, 384)):
        index = sharded_index(shapes, ranks)
        tensors = np.arange(len(shapes))
        layout = sharded_layout(index, tensors, tensors < 0, Mesh(wanted), np.full(len(shapes), 4))
        plan = make_plan(index, layout)
        assert len(plan.source) <= len(index.file) + len(layout.tensor)


def test_whole_tensors_and_replicas_are_spread_by_bytes() -> None:
    index = sharded_index([(64, 8), (64, 8), (64, 8), (200,), (10,)], 4)
    whole = np.array([False, False, False, True, True])
    layout = sharded_layout(index, np.arange(5), whole, Mesh(2, 2), np.full(5, 4))
    assert layout.tensor.tolist() == [0, 0, 1, 1, 2, 2, 3, 4]
    for tensor, shard, rank in zip(layout.tensor.tolist(), [0, 1, 0, 1, 0, 1], layout.rank.tolist(), strict=False):
        assert tensor < 3 and rank % 2 == shard
    load = np.bincount(layout.rank, layout.elements, minlength=4)
    assert load.max() <= 2 * load.min()


def test_tensors_without_elements_are_there() -> None:
    index = index_of([((0, 3), [Box.whole((0, 3))]), ((2, 0), [Box.whole((2, 0))]), ((), [Box((), ())])])
    tensors = np.arange(3)
    layout = sharded_layout(index, tensors, tensors < 0, Mesh(4), np.full(3, 4))
    assert set(layout.tensor.tolist()) == {0, 1, 2}
    make_plan(index, layout)


def test_tensors_with_rows_and_no_elements_take_no_room_among_the_others() -> None:
    huge = (1 << 62) - 1
    tensors: Tensors = [((4, 3), [Box((0, 0), (4, 3))])]
    # Four of these went once around 64 bits, so that the last tensor lay where the first did.
    tensors += [((huge, 0), [])] * 4 + [((4, 3), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))])]
    index = index_of(tensors)
    layout = layout_of(index, [(0, Box((0, 0), (4, 3))), (5, Box((0, 0), (4, 3)))])
    assert make_plan(index, layout).source.tolist() == [0, 1, 2]


@pytest.mark.parametrize("shapes", [[(1 << 31, 1 << 32)], [(1, 1 << 61), (1 << 61,), (3,)]])
def test_more_elements_than_can_be_counted_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(CheckpointUnsound, match="larger than any checkpoint") as caught:
        index_of([(shape, []) for shape in shapes])
    assert caught.value.key == f"t{len(shapes) - 1}"


@pytest.mark.parametrize("mesh", [Mesh(3, 4), Mesh(1, 5), Mesh(16, 2), Mesh(4)])
def test_each_part_goes_to_the_owner_with_the_least_to_write(mesh: Mesh) -> None:
    """Against the rule, one part after the other."""
    chance = np.random.default_rng(mesh.ranks)
    shapes = [(int(rows), 3) for rows in chance.integers(1, 500, 60)]
    index = index_of([(shape, []) for shape in shapes])
    whole = chance.random(len(shapes)) < 0.3
    layout = sharded_layout(index, np.arange(len(shapes)), whole, mesh, np.full(len(shapes), 4))
    load = [0] * mesh.ranks
    length_bytes = layout.elements * 4
    for cut in (True, False):
        parts = np.flatnonzero(whole[layout.tensor] != cut)
        for part in parts[np.argsort(-length_bytes[parts], kind="stable")].tolist():
            rank = int(layout.rank[part])
            owners = range(rank % mesh.shard, mesh.ranks, mesh.shard) if cut else range(mesh.ranks)
            assert load[rank] == min(load[owner] for owner in owners)
            load[rank] += int(length_bytes[part]) + (0 if cut else 1024)


def test_ranks_of_a_large_mesh_are_dealt_without_a_loop_over_parts() -> None:
    count = 300
    shapes = [(4096, 2)] * count + [()] * 10_000
    index = index_of([(shape, []) for shape in shapes])
    start_s = time.process_time()
    whole = np.arange(len(shapes)) >= count
    layout = sharded_layout(index, np.arange(len(shapes)), whole, Mesh(1024, 2), np.full(len(shapes), 4))
    assert time.process_time() - start_s < 2
    load = np.bincount(layout.rank, layout.elements, minlength=2048)
    assert load.max() <= 1.05 * load.mean()


def test_a_part_of_the_tensors_is_planned_alone() -> None:
    index = sharded_index([(8,), (6, 2), (5,)], 3)
    layout = sharded_layout(index, np.array([0, 2]), np.zeros(2, dtype=bool), Mesh(2), np.full(2, 4))
    plan = make_plan(index, layout)
    assert set(layout.tensor.tolist()) == {0, 2}
    assert set(index.owner[plan.source].tolist()) == {0, 2}
