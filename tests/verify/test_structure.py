from __future__ import annotations

import itertools
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.errors import CheckpointUnsound
from reshard.formats import manifest
from reshard.formats.manifest import Manifest, World
from reshard.verify.structure import structure_faults, unreferenced_files

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "step-40"
    state = {"model": {"a": torch.randn(50, 30), "empty": torch.zeros(0, 4), "scalar": torch.tensor(1)}, "lr": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def saved(stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock, tmp_path / stock.name))


def write(folder: Path, tensors: dict[str, tuple[tuple[int, ...], Boxes]]) -> Path:
    """A checkpoint of the given shapes and (offsets, sizes) boxes, in one file of as many bytes as it needs."""
    entries, storage = {}, {}
    for key, (shape, boxes) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        entries[key] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
        for offsets, _ in boxes:
            storage[MetadataIndex(key, offsets)] = _StorageInfo("__0_0.distcp", len(storage), 1)
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(dict(entries), storage_data=storage)))
    (folder / "__0_0.distcp").write_bytes(bytes(sum(len(boxes) for _, boxes in tensors.values())))
    return folder


def write_manifest(folder: Path, step: int) -> None:
    content = Manifest(step, "1", World(1, 1, 1, {}), {}, [], None, None, {}, None, None, {}, {}, {}, "")
    (folder / manifest.FILE_NAME).write_bytes(manifest.to_bytes(content))


def test_a_stock_checkpoint_is_sound(saved: Path) -> None:
    assert structure_faults(saved) == []
    assert unreferenced_files(saved) == []


def test_a_truncated_file(saved: Path) -> None:
    path = saved / "__0_0.distcp"
    length_bytes = path.stat().st_size
    os.truncate(path, length_bytes - 1)
    (fault,) = structure_faults(saved)
    assert fault.startswith(
        f"{path}: cut short: expected at least {length_bytes} bytes, found {length_bytes - 1}; lost:"
    )
    os.truncate(path, 10)
    assert "and 3 more" in structure_faults(saved)[0]


def test_an_empty_file_a_pointer_a_folder_and_none(saved: Path) -> None:
    path = saved / "__0_0.distcp"
    path.write_bytes(b"")
    assert f"{path}: empty (0 bytes): expected at least " in structure_faults(saved)[0]
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "a Git LFS pointer, not the data; run git lfs pull: expected" in structure_faults(saved)[0]
    path.unlink()
    assert f"{path}: missing: expected" in structure_faults(saved)[0]
    path.mkdir()
    assert "not a file" in structure_faults(saved)[0]


def test_a_stale_file_is_reported_and_no_fault(saved: Path) -> None:
    (saved / "__7_0.distcp").write_bytes(b"of an earlier, larger save")
    assert structure_faults(saved) == []
    assert unreferenced_files(saved) == [("__7_0.distcp", 26)]


def test_metadata_that_is_missing_or_damaged(saved: Path) -> None:
    (saved / ".metadata").write_bytes(b"damaged")
    assert "not a readable pickle" in structure_faults(saved)[0]
    (saved / ".metadata").unlink()
    write_manifest(saved, 41)
    first, second = structure_faults(saved)
    assert ".metadata: missing; the save was not finished" in first
    assert "reshard.json" in second
    with pytest.raises(CheckpointUnsound, match="missing"):
        unreferenced_files(saved)


def test_chunks_without_bytes_are_listed(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": ((4,), [((0,), (2,)), ((2,), (2,))])})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    summary, *each = structure_faults(folder)
    assert "never stored" in summary
    assert each == [f"w: no bytes are recorded for the chunk of (2,) at ({offset},)" for offset in (0, 2)]


def test_the_manifest_belongs_to_the_folder(saved: Path) -> None:
    write_manifest(saved, 40)
    assert structure_faults(saved) == []
    link = saved.parent / "latest"
    link.symlink_to(saved)
    write_manifest(saved, 41)
    for folder in (saved, link):
        (fault,) = structure_faults(folder)
        assert fault == f"{folder}/reshard.json: step: expected 40 as the folder's name says, found 41"
    (saved / manifest.FILE_NAME).write_bytes(b"{}")
    assert "reshard.json: format: missing" in structure_faults(saved)[0]
    other = saved.rename(saved.parent / "final")
    write_manifest(other, 41)
    assert structure_faults(other) == []


GRID: Boxes = [((row, column), (2, 3)) for row in (0, 2, 4) for column in (0, 3)]
PINWHEEL: Boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((0, 4), []),
        ((0, 4), [((0, 0), (0, 4)), ((9, 9), (0, 4))]),
        ((3, 2), [((0, 0), (3, 2)), ((3, 0), (0, 2)), ((1, 0), (0, 2))]),
        ((6, 6), GRID),
        ((3, 3), PINWHEEL),
        ((25,), [((0,), (13,)), ((20,), (5,)), ((13,), (7,))]),
    ],
    ids=["scalar", "no elements", "no elements, chunks", "ranks without rows", "grid", "pinwheel", "uneven"],
)
def test_sound_tilings(tmp_path: Path, shape: tuple[int, ...], boxes: Boxes) -> None:
    assert structure_faults(write(tmp_path, {"w": (shape, boxes)})) == []


@pytest.mark.parametrize(
    ("shape", "boxes", "fault"),
    [
        ((), [], "no chunk holds [] of the shape ()"),
        ((4, 2), [], "no chunk holds [0:4, 0:2]"),
        ((4, 2), [((0, 0), (1, 2)), ((3, 0), (1, 2))], "no chunk holds [1:3, 0:2]"),
        ((4, 2), [((1, 0), (3, 2))], "no chunk holds [0:1, 0:2]"),
        ((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 1))], "no chunk holds [2:4, 1:2]"),
        ((4, 2), [((0, 0), (3, 2)), ((2, 0), (2, 2))], "two chunks hold [2:3, 0:2]"),
        ((4, 2), [((0, 0), (4, 2)), ((1, 1), (1, 1))], "two chunks hold [1:2, 1:2]"),
        ((4, 2), [((0, 0), (5, 2))], "the chunk [0:5, 0:2] sticks out of the shape (4, 2)"),
        ((6, 6), GRID[:3] + GRID[4:], "no chunk holds [2:4, 3:6]"),
        ((3, 3), PINWHEEL[:4], "no chunk holds a part of [0:3, 0:3]"),
        ((0, 4), [((0, 0), (1, 4))], "sticks out"),
    ],
)
def test_faulty_tilings_are_named_with_their_place(
    tmp_path: Path, shape: tuple[int, ...], boxes: Boxes, fault: str
) -> None:
    faults = structure_faults(write(tmp_path, {"good": ((1,), [((0,), (1,))]), "bad": (shape, boxes)}))
    assert len(faults) == 1
    assert faults[0].startswith("bad: ") and fault in faults[0]


def test_a_chunk_stored_twice_is_an_overlap(tmp_path: Path) -> None:
    for shape in ((), (3,)):
        box = ((0,) * len(shape), shape)
        (fault,) = structure_faults(write(tmp_path, {"w": (shape, [box, box])}))
        assert "two chunks hold" in fault


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """A box cut up at random, then perhaps with a chunk dropped, repeated, moved or grown."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        for start, length in ((0, cut), (cut, sizes[dim] - cut)):
            moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            boxes.append((moved, (*sizes[:dim], length, *sizes[dim + 1 :])))
    if draw(st.booleans()):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        change = draw(st.tuples(*[st.integers(-1, 1) for _ in shape]))
        kind = draw(st.sampled_from(["drop", "repeat", "move", "grow"]))
        if kind == "repeat":
            boxes += [(offsets, sizes)] * 2
        elif kind == "move":
            boxes.append((tuple(max(0, o + c) for o, c in zip(offsets, change, strict=True)), sizes))
        elif kind == "grow":
            boxes.append((offsets, tuple(max(0, s + c) for s, c in zip(sizes, change, strict=True))))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=400, deadline=None)
@given(tiling=tilings())
def test_agrees_with_counting_every_element(
    tmp_path_factory: pytest.TempPathFactory, tiling: tuple[tuple[int, ...], Boxes]
) -> None:
    shape, boxes = tiling
    count = np.zeros([length + 6 for length in shape], dtype=int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    inside = count[tuple(slice(0, length) for length in shape)]
    is_sound = bool((inside == 1).all()) and int(count.sum()) == int(inside.sum())
    faults = structure_faults(write(tmp_path_factory.getbasetemp() / "tilings", {"w": (shape, boxes)}))
    assert (faults == []) == is_sound, faults


def test_many_chunks_take_no_quadratic_time(tmp_path: Path) -> None:
    rows: Boxes = [((row, 0), (1, 8)) for row in range(8000)]
    grid: Boxes = [(place, (2, 2, 2)) for place in itertools.product(range(0, 40, 2), repeat=3)]
    start_s = time.process_time()
    assert structure_faults(write(tmp_path, {"rows": ((8000, 8), rows), "grid": ((40, 40, 40), grid)})) == []
    assert time.process_time() - start_s < 5
