"""Files cut into segments and blocks at every place: the bytes are those of one segment and one block."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rewriting
import torch
from rewriting import any_bits, rows_of, write_boxes

from reshard.engine import run as engine
from reshard.engine.run import Budget, create_files, finish, segments_of, write_segments
from reshard.engine.segment import Outcome, Segment
from reshard.errors import CheckpointUnsound, ReshardError
from reshard.geometry.mesh import Mesh
from reshard.rewrite import run as offline
from reshard.rewrite.prepare import prepare

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

STATE = {
    "model.large": any_bits((70, 33), torch.float32, 1),
    "model.turned": any_bits((61, 50), torch.float32, 2).t(),
    "model.half": any_bits((45, 45), torch.bfloat16, 3),
    "model.byte": any_bits((9001,), torch.uint8, 4),
    "model.empty": torch.zeros(0, 5),
    "model.scalar": any_bits((), torch.int64, 5),
    "model.complex": any_bits((33, 17), torch.complex128, 6),
    **{f"model.small{n}": any_bits((n, 2), torch.int16, n) for n in range(1, 9)},
    **{f"model.none{n}": torch.zeros(3, 0, dtype=torch.float64) for n in range(3)},
}
OBJECTS = {"first": list(range(700)), "second": "x" * 5000, "third": None}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiled = {key: (tensor, rows_of(tensor, 4)) for key, tensor in STATE.items()}
    return write_boxes(tmp_path_factory.mktemp("source") / "saved", tiled, OBJECTS, files=4)


def write(
    source: Path, folder: Path, ranks: int, segment_bytes: int, block_bytes: int, threads: int = 2, **options: Any
) -> dict[str, bytes]:
    """The files, by segments and blocks of these lengths, in an order of their own."""
    usual = engine.SEGMENT_BYTES
    engine.SEGMENT_BYTES = segment_bytes
    try:
        prepared = prepare(source, Mesh(ranks), **options)
        with prepared.checkpoint:
            folder.mkdir()
            create_files(prepared.job, folder)
            outcomes: dict[Segment, Outcome] = {}
            segments = segments_of(prepared.job)
            budget = Budget(threads, block_bytes)
            write_segments(prepared.job, folder, segments[::-1], budget, outcomes.update)
            assert outcomes.keys() == set(segments)
            finish(prepared.job, folder, outcomes.values())
    finally:
        engine.SEGMENT_BYTES = usual
    return rewriting.file_bytes(folder)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("segment_bytes", "block_bytes"),
    [(4096, 4096), (8192, 4096), (12288, 8192), (4096, 1 << 20), (1 << 30, 4096), (1 << 30, 1 << 20)],
)
@pytest.mark.parametrize("dtype", [None, "fp64"])
def test_segments_and_blocks_make_no_difference(
    tmp_path: Path, source: Path, ranks: int, segment_bytes: int, block_bytes: int, dtype: str | None
) -> None:
    straight = write(source, tmp_path / "straight", ranks, 1 << 30, 1 << 24, 1, dtype=dtype)
    assert write(source, tmp_path / "cut", ranks, segment_bytes, block_bytes, dtype=dtype) == straight


@pytest.mark.parametrize("buffered", [False, True])
def test_past_the_page_cache_or_through_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, buffered: bool
) -> None:
    straight = write(source, tmp_path / "straight", 3, 1 << 30, 1 << 24, 1)
    if buffered:
        monkeypatch.setattr("os.O_DIRECT", 0)
    assert write(source, tmp_path / "cut", 3, 4096, 4096) == straight


@pytest.mark.parametrize("pad", range(0, 4096 + 64, 192))
def test_a_cut_at_every_place_of_a_record(tmp_path: Path, pad: int) -> None:
    """Heads, payloads, descriptors, directories and records without elements slide over the edge of a segment."""
    state = {
        "model.0": torch.zeros(pad, dtype=torch.uint8),
        "model.1": torch.zeros(0, 3),
        "model.2": any_bits((31, 40), torch.float32, 1),
        "model.3": torch.zeros(2, 0),
        "model.4": any_bits((9, 40), torch.float32, 2).t(),
        "model.5": torch.zeros(0),
        "model.6": any_bits((3,), torch.int8, 3),
    }
    tiled = {key: (tensor, rows_of(tensor, 1)) for key, tensor in state.items()}
    source = write_boxes(tmp_path / "source", tiled, {"object": "x" * 100}, files=1)
    straight = write(source, tmp_path / "straight", 1, 1 << 30, 1 << 24, 1)
    cut = write(source, tmp_path / "cut", 1, 4096, 4096)
    assert cut == straight
    rewriting.assert_same(_read_back(tmp_path / "cut", source), state)


def _read_back(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    """By stock torch, with the metadata of a full rewrite."""
    made = folder.parent / "made"
    rewriting.rewrite(source, made, 1)
    (folder / ".metadata").write_bytes((made / ".metadata").read_bytes())
    found = rewriting.stock_tensors(folder)
    (folder / ".metadata").unlink()
    return found


def test_every_record_written_is_a_sound_zip(tmp_path: Path, source: Path) -> None:
    write(source, tmp_path / "cut", 3, 4096, 4096)
    rewriting.rewrite(source, tmp_path / "made", 3)
    checked = 0
    for info in rewriting.stock_metadata(tmp_path / "made").storage_data.values():
        content = (tmp_path / "cut" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        piece = tmp_path / "piece.zip"
        piece.write_bytes(content)
        with zipfile.ZipFile(piece) as archive:
            assert archive.testzip() is None
        checked += 1
    assert checked > 40


def test_progress_adds_up_and_done_is_told_once_the_bytes_are_there(tmp_path: Path, source: Path) -> None:
    engine_usual = engine.SEGMENT_BYTES
    engine.SEGMENT_BYTES = 8192
    try:
        prepared = prepare(source, Mesh(2))
        folder = tmp_path / "made"
        folder.mkdir()
        create_files(prepared.job, folder)
        segments = segments_of(prepared.job)
        told, running, lock = [], [], threading.Lock()

        def done(written: Sequence[tuple[Segment, Outcome]]) -> None:
            assert lock.acquire(blocking=False), "two at a time"
            for segment, _ in written:
                path = folder / prepared.job.output.names[segment.file]
                assert path.stat().st_size >= segment.end
                running.append(segment)
            lock.release()

        with prepared.checkpoint:
            write_segments(prepared.job, folder, segments, Budget(3, 4096), done, told.append)
        assert sorted(running) == segments
        assert sum(told) == prepared.job.output.total_bytes == sum(segment.length_bytes for segment in segments)
    finally:
        engine.SEGMENT_BYTES = engine_usual


def test_a_wrong_checksum_names_file_and_key(tmp_path: Path) -> None:
    tensor = any_bits((64, 128), torch.float32)
    source = write_boxes(tmp_path / "source", {"model.w": (tensor, rows_of(tensor, 2))}, files=2)
    path, start, length = rewriting.payload_place(source, "model.w", (32, 0))
    content = bytearray(path.read_bytes())
    content[start + length - 1] ^= 1
    path.write_bytes(content)
    for number, (segment_bytes, block_bytes) in enumerate([(4096, 4096), (1 << 30, 1 << 20), (1 << 30, 4096)]):
        with pytest.raises(CheckpointUnsound, match="checksum") as caught:
            write(source, tmp_path / f"made{number}", 3, segment_bytes, block_bytes)
        assert (caught.value.path, caught.value.key) == (str(path), "model.w")


def test_a_gap_in_the_source_is_read_through_or_around(tmp_path: Path) -> None:
    """Chunks that lie in another order and apart; each byte of the payloads is read once, gaps at most besides."""
    tensor = any_bits((512, 64), torch.float32)
    boxes = list(rows_of(tensor, 16))[::-1]
    source = write_boxes(tmp_path / "source", {"model.w": (tensor, boxes)}, files=1)
    prepared = prepare(source, Mesh(2))
    summary = offline.run(prepared, tmp_path / "made")
    rewriting.assert_same(rewriting.stock_tensors(tmp_path / "made"), {"model.w": tensor})
    length = (source / "__0_0.distcp").stat().st_size
    assert tensor.nbytes <= summary.read_bytes <= 2 * length


def test_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More source files than may be open at once."""
    monkeypatch.setattr("reshard.storage.byte_ranges.MOST_OPEN_FILES", 3)
    state = {f"model.{n}": any_bits((8, 5), torch.float32, n) for n in range(20)}
    tiled = {key: (tensor, rows_of(tensor, 8)) for key, tensor in state.items()}
    source = write_boxes(tmp_path / "source", tiled, files=40)
    rewriting.rewrite(source, tmp_path / "made", 3)
    rewriting.assert_same(rewriting.stock_tensors(tmp_path / "made"), state)


def test_a_source_that_shrinks_meanwhile(tmp_path: Path, source: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    prepared = prepare(copy, Mesh(2))
    os.truncate(copy / "__1_0.distcp", 3000)
    with pytest.raises(ReshardError) as caught:
        offline.run(prepared, tmp_path / "made")
    assert "__1_0.distcp" in str(caught.value).splitlines()[0]
    assert not (tmp_path / "made").exists()
