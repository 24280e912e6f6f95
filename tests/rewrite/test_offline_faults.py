"""What can go wrong with a rewrite: damaged sources, a full disk, a kill at every storage call, two at once.

In each case the source stays as it was, the destination is absent or complete, and the next run succeeds.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rewriting
import sharded
import torch
from faults import REFUSED, in_child
from rewriting import any_bits, assert_same, rewrite, rows_of, stock_tensors, write_boxes

from reshard.engine import run as engine
from reshard.engine.run import Budget
from reshard.errors import CheckpointNotFound, CheckpointUnsound, ReshardError, StorageError, UnsafePickle, UsageError
from reshard.geometry.mesh import Mesh
from reshard.rewrite import run as offline
from reshard.rewrite.prepare import prepare
from reshard.storage.shared_work import SharedWork

STATE = {
    "model.a": any_bits((40, 33), torch.float32, 1),
    "model.b": any_bits((7, 5), torch.bfloat16, 2),
    "model.turned": any_bits((90, 41), torch.float32, 3).t(),
    "optim.state.a.exp_avg": any_bits((40, 33), torch.float32, 4),
    "optim.state.a.step": torch.tensor(12.0),
}
OBJECTS = {"optim.param_groups.0.lr": 0.5}


def write_source(folder: Path, parts: int = 4, state: dict[str, torch.Tensor] | None = None) -> Path:
    tiled = {key: (tensor, rows_of(tensor, parts)) for key, tensor in (state or STATE).items()}
    return write_boxes(folder, tiled, OBJECTS, files=parts)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def left_behind(folder: Path) -> list[str]:
    """What is beside source and destination."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def refused(
    tmp_path: Path, source: Path, *texts: str, kind: type[ReshardError] = CheckpointUnsound, **options: Any
) -> str:
    """Expects an error whose first line has all of the texts; nothing is changed by it."""
    before = rewriting.file_bytes(source)
    with pytest.raises(kind) as caught:
        rewrite(source, tmp_path / "made", 3, **options)
    first = str(caught.value).splitlines()[0]
    for text in texts:
        assert text in first, first
    assert rewriting.file_bytes(source) == before
    assert not (tmp_path / "made").exists()
    return str(caught.value)


# Damaged sources


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ([((0, 0), (4, 6)), ((6, 0), (4, 6))], "[4:6, 0:6]"),
        ([((0, 0), (6, 6)), ((5, 0), (5, 6))], "[5:6, 0:6]"),
        ([((0, 0), (5, 6)), ((5, 0), (5, 3))], "[5:10, 3:6]"),
        ([((0, 0), (10, 4)), ((0, 3), (10, 3))], "[0:10, 3:4]"),
        ([], "no chunk holds"),
    ],
    ids=["hole", "overlap", "hole in a column", "overlap of columns", "nothing"],
)
def test_chunks_that_do_not_tile(tmp_path: Path, boxes: Any, text: str) -> None:
    tensor = any_bits((10, 6), torch.float32)
    good = any_bits((8,), torch.float32)
    source = write_boxes(tmp_path / "source", {"good": (good, rows_of(good, 2)), "model.bad": (tensor, boxes)})
    refused(tmp_path, source, "model.bad", text)


def test_a_chunk_that_sticks_out(tmp_path: Path, source: Path) -> None:
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.a"].size = torch.Size((40, 32))
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, source, "model.a", "sticks out")


def test_every_bad_tensor_is_named(tmp_path: Path) -> None:
    tensor = any_bits((10,), torch.float32)
    source = write_boxes(tmp_path / "source", {f"t{n}": (tensor, [((0,), (n,))]) for n in range(1, 11)})
    text = refused(tmp_path, source, "t1")
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [f"t{n}" for n in range(2, 10)]


@pytest.mark.parametrize("left", [0, 1, 0.5, -8])
def test_a_file_cut_short(tmp_path: Path, source: Path, left: float) -> None:
    path = source / "__1_0.distcp"
    length = path.stat().st_size
    kept = int(length * left) if left == 0.5 else int(left) % length
    os.truncate(path, kept)
    # Stock's own writer leaves nothing behind the last archive, so that any cut is too much.
    refused(tmp_path, source, "__1_0.distcp", "cut short" if kept else "empty", str(length), str(kept))


def test_files_that_are_missing_are_all_named_and_found_elsewhere(tmp_path: Path, source: Path) -> None:
    others = [tmp_path / "node1", tmp_path / "node2"]
    for number, other in enumerate(others, start=1):
        other.mkdir()
        (source / f"__{number}_0.distcp").rename(other / f"__{number}_0.distcp")
    text = refused(tmp_path, source, "__1_0.distcp", "missing", "--in")
    assert "__2_0.distcp" in text.splitlines()[1]
    refused(tmp_path, source, "__2_0.distcp", "missing", also=[others[0]])
    rewrite(source, tmp_path / "made", 3, also=others)
    assert_same(stock_tensors(tmp_path / "made"), STATE)


def flip(path: Path, at: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 4), (1, 4), (3, 1)])
def test_a_flipped_bit_is_found_whatever_the_ranks(tmp_path: Path, before: int, after: int) -> None:
    source = write_source(tmp_path / "source", before)
    rewrite(source, tmp_path / "sound", after)
    rows = -(-40 // before)
    for first in range(0, 40, rows):
        for inside in (0, 700, -1):
            path, start, length = rewriting.payload_place(source, "model.a", (first, 0))
            at = start + inside % length
            flip(path, at)
            with pytest.raises(CheckpointUnsound) as caught:
                rewrite(source, tmp_path / "made", after)
            message = str(caught.value).splitlines()[0]
            assert path.name in message and "model.a" in message and "CRC-32" in message, message
            assert not (tmp_path / "made").exists()
            flip(path, at)
    rewrite(source, tmp_path / "made", after)
    assert rewriting.file_bytes(tmp_path / "made") == rewriting.file_bytes(tmp_path / "sound")


def test_a_flipped_bit_in_segments_that_cut_every_chunk(tmp_path: Path, source: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "SEGMENT_BYTES", 4096)
    path, start, _ = rewriting.payload_place(source, "model.a", (20, 0))
    flip(path, start + 1300)
    refused(tmp_path, source, path.name, "model.a", "CRC-32")


@pytest.mark.parametrize("mode", ["transposed", "cast"])
def test_a_flipped_bit_in_what_is_rearranged(tmp_path: Path, mode: str) -> None:
    tensor = any_bits((300, 200), torch.float32)
    source = write_source(tmp_path / "source", 1, {"model.w": tensor.t() if mode == "transposed" else tensor})
    path, start, _ = rewriting.payload_place(source, "model.w", (0, 0))
    flip(path, start + 100_003)
    # Of a transposed chunk that is cut there are no stretches long enough to keep books of.
    ranks, dtype = (1, None) if mode == "transposed" else (3, "bf16")
    with pytest.raises(CheckpointUnsound, match="CRC-32") as caught:
        rewrite(source, tmp_path / "made", ranks, dtype=dtype)
    assert path.name in str(caught.value) and "model.w" in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_bit_of_an_archive_is_refused_or_harmless(tmp_path: Path, stride: int) -> None:
    tensor = any_bits((4, 3), torch.float32)
    source = write_boxes(tmp_path / "source", {"model.w": (tensor, rows_of(tensor, 1))}, files=1)
    path = source / "__0_0.distcp"
    content = path.read_bytes()
    harmless = 0
    for at in range(0, len(content), stride):
        flip(path, at, at % 8)
        try:
            rewrite(source, tmp_path / "made", 2)
        except ReshardError as error:
            assert error.path and error.path.startswith(str(source)), error
        else:
            assert_same(stock_tensors(tmp_path / "made"), {"model.w": tensor})
            shutil.rmtree(tmp_path / "made")
            harmless += 1
        path.write_bytes(content)
    assert harmless < len(content) * 0.6


def test_a_file_saved_without_checksums_is_copied(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        source = write_source(tmp_path / "source")
    finally:
        torch.serialization.set_crc32_options(True)
    rewrite(source, tmp_path / "made", 3)
    assert_same(stock_tensors(tmp_path / "made"), STATE)


@pytest.mark.parametrize(
    "other",
    [
        any_bits((10, 34), torch.float32),
        any_bits((11, 33), torch.float32),
        any_bits((330,), torch.float32),
        any_bits((10, 33), torch.int32),
        any_bits((10, 66), torch.bfloat16),
        torch.nn.Parameter(any_bits((1, 2), torch.float32)),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_a_chunk_of_another_save(tmp_path: Path, other: torch.Tensor) -> None:
    state = {key: (tensor, rows_of(tensor, 4)) for key, tensor in STATE.items()}
    source = write_boxes(tmp_path / "source", state, archives={("model.a", 2): sharded.archive(other)})
    refused(tmp_path, source, "model.a", ".distcp", "(10, 33)", str(tuple(other.shape)))


def test_a_file_of_another_save_in_the_place_of_one(tmp_path: Path, source: Path) -> None:
    wider = {
        key: any_bits((*tensor.shape[:-1], 50), tensor.dtype) if tensor.dim() else tensor
        for key, tensor in STATE.items()
    }
    other = write_source(tmp_path / "other", 4, wider)
    shutil.copy(other / "__2_0.distcp", source)
    refused(tmp_path, source, "__2_0.distcp")


@pytest.mark.parametrize("value", [[1, 2], {"a": torch.ones(2)}, "text"], ids=["list", "dict", "text"])
def test_what_should_be_a_tensor_and_is_none(tmp_path: Path, value: Any) -> None:
    state = {key: (tensor, rows_of(tensor, 4)) for key, tensor in STATE.items()}
    source = write_boxes(tmp_path / "source", state, archives={("model.a", 2): sharded.archive(value)})
    refused(tmp_path, source, "model.a")


class Attack:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_pickles_that_would_run_code(tmp_path: Path, source: Path) -> None:
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.storage_meta = Attack(tmp_path / "pwned")
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, source, ".metadata", "mkdir", kind=UnsafePickle)
    assert not (tmp_path / "pwned").exists()


def test_an_archive_that_would_run_code(tmp_path: Path) -> None:
    state = {key: (tensor, rows_of(tensor, 4)) for key, tensor in STATE.items()}
    attack = sharded.archive(Attack(tmp_path / "pwned"))
    source = write_boxes(tmp_path / "source", state, archives={("model.a", 2): attack})
    refused(tmp_path, source, ".distcp", "mkdir", kind=UnsafePickle)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "sub/../../outside.distcp", "..", "", "a\0b"])
def test_a_path_that_climbs_out(tmp_path: Path, source: Path, name: str) -> None:
    (source / "__0_0.distcp").rename(tmp_path / "outside.distcp")
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        if info.relative_path == "__0_0.distcp":
            info.relative_path = name
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, source, ".metadata")


def edited_archive(tensor: torch.Tensor, edit: Callable[[bytearray], None]) -> bytes:
    content = bytearray(sharded.archive(tensor))
    edit(content)
    return bytes(content)


def central(content: bytearray, name: bytes) -> int:
    """Where the central header of a record begins."""
    at = content.rfind(name)
    return content.rfind(b"PK\x01\x02", 0, at)


def lies() -> Iterator[tuple[str, Callable[[bytearray], None]]]:
    def put(offset: int, layout: str, value: int) -> Callable[[bytearray], None]:
        return lambda content: struct.pack_into(layout, content, central(content, b"data/0") + offset, value)

    yield "shorter", put(24, "<I", 100)
    yield "longer", put(24, "<I", 1 << 30)
    yield "packed longer", put(20, "<I", 1 << 30)
    yield "compressed", put(10, "<H", 8)
    yield "header elsewhere", put(42, "<I", 0)
    yield "header outside", put(42, "<I", 1 << 30)
    yield "zip64 without extra", put(24, "<I", 0xFFFFFFFF)
    yield "encrypted", put(8, "<H", 1)

    def end(offset: int, layout: str, *values: int) -> Callable[[bytearray], None]:
        """In the zip64 end, which torch always writes."""
        return lambda content: struct.pack_into(layout, content, content.rfind(b"PK\x06\x06") + offset, *values)

    yield "directory elsewhere", end(48, "<Q", 10)
    yield "directory outside", end(48, "<Q", 1 << 40)
    yield "many records", end(24, "<QQ", 1 << 40, 1 << 40)
    yield "few records", end(24, "<QQ", 2, 2)
    yield "huge directory", end(40, "<Q", 1 << 62)
    yield "no end", lambda content: content.__setitem__(slice(len(content) - 22, None), bytes(22))


@pytest.mark.parametrize(("lie"), [edit for _, edit in lies()], ids=[name for name, _ in lies()])
def test_a_zip_that_lies(tmp_path: Path, lie: Callable[[bytearray], None]) -> None:
    state = {key: (tensor, rows_of(tensor, 4)) for key, tensor in STATE.items()}
    part = STATE["model.a"][20:30].clone()
    source = write_boxes(tmp_path / "source", state, archives={("model.a", 2): edited_archive(part, lie)})
    refused(tmp_path, source, "model.a", ".distcp")


def test_both_sizes_of_a_record_lie(tmp_path: Path) -> None:
    """Shorter than the tensor: what would be read lies outside of the record."""

    def shorten(content: bytearray) -> None:
        at = central(content, b"data/0")
        struct.pack_into("<II", content, at + 20, 100, 100)

    state = {key: (tensor, rows_of(tensor, 4)) for key, tensor in STATE.items()}
    part = STATE["model.a"][20:30].clone()
    source = write_boxes(tmp_path / "source", state, archives={("model.a", 2): edited_archive(part, shorten)})
    refused(tmp_path, source, "model.a", ".distcp")


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x02}", b"PK\x03\x04"])
def test_metadata_that_is_none(tmp_path: Path, source: Path, content: bytes) -> None:
    (source / ".metadata").write_bytes(content)
    refused(tmp_path, source, ".metadata")


def test_no_source(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    refused(tmp_path, tmp_path / "source", kind=CheckpointNotFound)


# Destinations


def test_a_destination_that_would_lose_something(tmp_path: Path, source: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    before = rewriting.file_bytes(source)
    cases = {
        source: "overlaps",
        source / "inside": "overlaps",
        tmp_path: "overlaps",
        tmp_path / "link": "overlaps",
        tmp_path / "link" / "inside": "overlaps",
        tmp_path / "there": "exists already",
    }
    for destination, text in cases.items():
        for force in (False, True) if text == "overlaps" else (False,):
            with pytest.raises(UsageError, match=text):
                rewrite(source, destination, 3, force=force)
    assert rewriting.file_bytes(source) == before
    assert (tmp_path / "there" / "file").read_text() == "mine"
    assert left_behind(tmp_path) == []
    with pytest.raises(UsageError, match="something else than a checkpoint"):
        rewrite(source, tmp_path / "there", 3, force=True)
    assert (tmp_path / "there" / "file").read_text() == "mine"
    (tmp_path / "there" / ".metadata").write_bytes(b"")
    rewrite(source, tmp_path / "there", 3, force=True)
    assert_same(stock_tensors(tmp_path / "there"), STATE)
    assert not (tmp_path / "there" / "file").exists()
    assert left_behind(tmp_path) == []


def test_a_step_by_another_number(tmp_path: Path) -> None:
    from small import Small

    import reshard

    reshard.save_state(tmp_path / "run", Small().state)
    with pytest.raises(UsageError, match="another step") as caught:
        rewrite(tmp_path / "run" / "step-0", tmp_path / "step-7", 2)
    assert "step-0" in str(caught.value)
    rewrite(tmp_path / "run" / "step-0", tmp_path / "step-0", 2)


def test_what_another_job_staged_is_thrown_away(tmp_path: Path, source: Path) -> None:
    interrupted(source, tmp_path / "made", 4, at=6)
    assert left_behind(tmp_path) == [".offline-made"]
    summary = rewrite(source, tmp_path / "made", 2)
    assert summary.continued_bytes == 0
    assert_same(stock_tensors(tmp_path / "made"), STATE)
    assert {path.name for path in (tmp_path / "made").iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert left_behind(tmp_path) == []


def test_a_source_that_has_changed_is_read_anew(tmp_path: Path, source: Path) -> None:
    interrupted(source, tmp_path / "made", 3, at=12)
    changed = {
        key: tensor if key != "model.a" else any_bits((40, 33), torch.float32, 99) for key, tensor in STATE.items()
    }
    shutil.rmtree(source)
    write_source(source, 4, changed)
    summary = small_run(source, tmp_path / "made", 3)
    assert summary.continued_bytes == 0
    assert_same(stock_tensors(tmp_path / "made"), changed)


# Faults while writing: tiny segments and blocks, so that there are many storage calls


WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


class Faults:
    """Calls ``strike`` before the Nth call of this process that changes the file system below ``folder``.

    For processes that end soon: an audit hook cannot be taken out again.
    """

    def __init__(self, folder: Path, at: int, strike: Callable[[], None], lasting: bool = False) -> None:
        self.folder, self.at, self.strike, self.lasting = str(folder), at, strike, lasting
        self.count = 0
        self.lock = threading.Lock()
        sys.addaudithook(self.hook)
        for call in ("fsync", "fdatasync", "write", "pwrite", "ftruncate"):
            setattr(os, call, self.watching(getattr(os, call)))

    def watching(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(descriptor: int, *args: Any) -> Any:
            self.step()
            return real(descriptor, *args)

        return watched

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED and str(args[0]).startswith(self.folder) and "/source/" not in str(args[0]):
            self.step()

    def step(self) -> None:
        with self.lock:
            self.count += 1
            struck = self.count == self.at or (self.lasting and self.count > self.at)
        if struck:
            self.strike()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def small_run(source: Path, destination: Path, ranks: int, force: bool = False, **options: Any) -> offline.Summary:
    """With segments of two pages, each noted when it is written, and blocks of one."""
    usual = engine.SEGMENT_BYTES, engine.SETTLE_S
    engine.SEGMENT_BYTES, engine.SETTLE_S = 8192, 0.0
    try:
        prepared = prepare(source, Mesh(ranks))
        return offline.run(replace(prepared, budget=Budget(2, 4096)), destination, force=force, **options)
    finally:
        engine.SEGMENT_BYTES, engine.SETTLE_S = usual


def interrupted(source: Path, destination: Path, ranks: int, at: int, **options: Any) -> None:
    """A run that is killed at its Nth storage call."""

    def action() -> None:
        Faults(destination.parent, at, die)
        small_run(source, destination, ranks, **options)

    assert in_child(action) == signal.SIGKILL


def journaled_bytes(folder: Path, name: str) -> int:
    """Bytes of the segments that are noted as done in a staging folder."""
    segments = set()
    for path in (folder / f".offline-{name}" / "work").glob("journal-*"):
        for line in filter(None, path.read_text().splitlines()):
            segments.add(tuple(json.loads(line)["segment"]))
    return sum(end - start for _, start, end in segments)


@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("fault", ["kill", "full once", "full from then on"])
@pytest.mark.parametrize("stride", [pytest.param(7, id="some"), pytest.param(1, id="each", marks=pytest.mark.slow)])
def test_a_fault_at_every_storage_call(tmp_path: Path, source: Path, fault: str, old: bool, stride: int) -> None:
    before = rewriting.file_bytes(source)
    small_run(source, tmp_path / "reference", 3)
    reference = rewriting.file_bytes(tmp_path / "reference")
    total_bytes = sum(len(content) for name, content in reference.items() if name != ".metadata")
    struck = continued = 0
    for at in range(1, 10_000, stride):
        folder = tmp_path / "work"
        folder.mkdir()
        made = folder / "made"
        if old:
            made.mkdir()
            (made / "old.distcp").write_text("old")
        mark = tmp_path / "struck"
        mark.unlink(missing_ok=True)

        def strike(mark: Path = mark) -> None:
            mark.touch()
            die() if fault == "kill" else no_space()

        def action(folder: Path = folder, made: Path = made, at: int = at, strike: Any = strike) -> None:
            Faults(folder, at, strike, lasting=fault == "full from then on")
            small_run(source, made, 3, force=old)

        status = in_child(action)
        assert rewriting.file_bytes(source) == before
        if not mark.exists():
            assert status == 0
            assert rewriting.file_bytes(made) == reference
            break
        struck += 1
        if fault == "kill":
            assert status == signal.SIGKILL
        else:
            # Clearing away comes after the commit and may fail.
            assert status == REFUSED << 8 or (status == 0 and rewriting.file_bytes(made) == reference), f"call {at}"
        found = rewriting.file_bytes(made) if made.exists() else None
        assert found in ((reference, {"old.distcp": b"old"}) if old else (reference, None)) or (
            # For the moment between two renames, or where the second one failed.
            old and found is None and (folder / ".replaced-made-offline" / "old.distcp").exists()
        ), f"call {at}"
        if found != reference:
            noted = journaled_bytes(folder, "made")
            job = folder / ".offline-made" / "work" / "job"
            if job.exists() and job.read_bytes() == b"committed":
                # About to be swapped: what lies there may be the old folder, and no launch goes on from that.
                noted = 0
            summary = small_run(source, made, 3, force=old)
            assert summary.continued_bytes == noted, f"call {at}"
            assert summary.written_bytes + noted == total_bytes
            continued += noted > 0
            assert rewriting.file_bytes(made) == reference, f"call {at}"
            assert left_behind(folder) == [], f"call {at}"
        shutil.rmtree(folder)
    assert struck >= 60 / stride
    assert continued > 10 / stride


def test_a_run_that_dies_again_and_again_gets_there(tmp_path: Path, source: Path) -> None:
    small_run(source, tmp_path / "reference", 3)
    made = tmp_path / "work" / "made"
    made.parent.mkdir()
    written = 0
    for _ in range(100):

        def action() -> None:
            Faults(made.parent, 80, die)
            small_run(source, made, 3)

        status = in_child(action)
        if status == 0:
            break
        now = journaled_bytes(made.parent, "made") if not made.exists() else written
        assert now >= written
        written = now
        if made.exists():
            break
    assert rewriting.file_bytes(made) == rewriting.file_bytes(tmp_path / "reference")


def test_a_flipped_bit_is_found_in_what_two_runs_have_read(tmp_path: Path, source: Path) -> None:
    """A chunk of which the run before has read a part, and this one the rest."""
    path, start, _ = rewriting.payload_place(source, "model.a", (10, 0))
    flip(path, start + 1310)
    for at in range(25, 80, 6):
        folder = tmp_path / f"work{at}"
        folder.mkdir()

        def action(folder: Path = folder, at: int = at) -> None:
            Faults(folder, at, die)
            small_run(source, folder / "made", 3)

        # Killed before it is found, or not.
        assert in_child(action) in (signal.SIGKILL, REFUSED << 8)
        with pytest.raises(CheckpointUnsound, match="CRC-32") as caught:
            small_run(source, folder / "made", 3)
        assert "model.a" in str(caught.value)
        assert not (folder / "made").exists()


def test_ranks_that_go_on_share_the_rest_alike(tmp_path: Path, source: Path) -> None:
    """One of three looks around late, when the others have begun to note what they do."""
    small_run(source, tmp_path / "reference", 3)
    made = tmp_path / "work" / "made"
    made.parent.mkdir()
    interrupted(source, made, 3, at=35)

    def rank(number: int) -> Callable[[], None]:
        def action() -> None:
            os.environ.update(RANK=str(number), WORLD_SIZE="3", TORCHELASTIC_RUN_ID="none", RESHARD_TIMEOUT_S="20")
            if number == 1:
                enter = SharedWork.__enter__

                def late(work: SharedWork) -> SharedWork:
                    enter(work)
                    time.sleep(0.7)
                    return work

                SharedWork.__enter__ = late  # type: ignore[method-assign]
            small_run(source, made, 3)

        return action

    statuses: list[int] = []
    acts = [rank(number) for number in range(3)]
    threads = [threading.Thread(target=lambda act=act: statuses.append(in_child(act))) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0, 0, 0]
    assert rewriting.file_bytes(made) == rewriting.file_bytes(tmp_path / "reference")
    assert left_behind(made.parent) == []


@pytest.mark.parametrize("how", ["gone", "cut", "folder gone"])
def test_staged_files_that_are_lost_are_written_again(tmp_path: Path, source: Path, how: str) -> None:
    small_run(source, tmp_path / "reference", 3)
    made = tmp_path / "work" / "made"
    made.parent.mkdir()
    for at in range(20, 200, 3):
        shutil.rmtree(made.parent)
        made.parent.mkdir()
        interrupted(source, made, 3, at=at)
        if journaled_bytes(made.parent, "made") > 20_000:
            break
    assert not made.exists()
    files = made.parent / ".offline-made" / "files"
    if how == "folder gone":
        shutil.rmtree(files)
    for path in list(files.glob("*.distcp")):
        path.unlink() if how == "gone" else os.truncate(path, path.stat().st_size // 8192 * 4096)
    small_run(source, made, 3)
    assert rewriting.file_bytes(made) == rewriting.file_bytes(tmp_path / "reference")


@pytest.mark.parametrize("torn", [b'{"segment": [0, 0, 8', b'{"segment": [0', b"\0" * 40, b"\xff\xfe"])
def test_a_journal_with_a_torn_line(tmp_path: Path, source: Path, torn: bytes) -> None:
    """As a full disk or a power cut leaves it."""
    small_run(source, tmp_path / "reference", 3)
    made = tmp_path / "work" / "made"
    made.parent.mkdir()
    interrupted(source, made, 3, at=30)
    work = made.parent / ".offline-made" / "work"
    with (work / "journal-0.jsonl").open("ab") as file:
        file.write(torn)
    small_run(source, made, 3)
    assert rewriting.file_bytes(made) == rewriting.file_bytes(tmp_path / "reference")
    assert left_behind(made.parent) == []


def test_a_file_that_may_not_grow_any_further(tmp_path: Path, source: Path) -> None:
    report = tmp_path / "report"

    def action() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            small_run(source, tmp_path / "made", 3)
        except ReshardError as error:
            report.write_text(f"{type(error).__name__} {error}")
            raise

    before = rewriting.file_bytes(source)
    assert in_child(action) == REFUSED << 8
    first = report.read_text().splitlines()[0]
    assert (
        first.startswith("StorageError ") and ".distcp" in first and "8192 bytes" in first and "RLIMIT_FSIZE" in first
    )
    assert rewriting.file_bytes(source) == before
    assert not (tmp_path / "made").exists()
    small_run(source, tmp_path / "made", 3)
    assert_same(stock_tensors(tmp_path / "made"), STATE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_too_small_is_found_out_first(tmp_path: Path, source: Path, small_disk: Path) -> None:
    large = write_source(tmp_path / "large", 4, {"model.w": any_bits((400, 200), torch.float32)})
    with pytest.raises(StorageError, match="not enough space") as caught:
        small_run(large, small_disk / "made", 3)
    assert str(small_disk / "made") in str(caught.value)
    assert not (small_disk / "made").exists()
    # Nothing of it remains in the way of what fits.
    rewrite(source, small_disk / "made", 2)
    assert_same(stock_tensors(small_disk / "made"), STATE)


@pytest.mark.parametrize("free_bytes", [0, 4096, 12288, 40960])
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, source: Path, small_disk: Path, free_bytes: int) -> None:
    small_run(source, tmp_path / "reference", 3)
    filler = small_disk / "filler"
    told: list[int] = []

    def fill(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            left = shutil.disk_usage(small_disk).free - free_bytes
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                for _ in range(left // 4096):
                    file.write(bytes(4096))

    before = rewriting.file_bytes(source)
    with pytest.raises(StorageError, match="o space left") as caught:
        small_run(source, small_disk / "made", 3, progress=fill)
    assert str(small_disk) in str(caught.value).splitlines()[0]
    assert rewriting.file_bytes(source) == before
    assert not (small_disk / "made").exists()
    filler.unlink()
    small_run(source, small_disk / "made", 3)
    assert rewriting.file_bytes(small_disk / "made") == rewriting.file_bytes(tmp_path / "reference")
    assert left_behind(small_disk) == []


def test_two_processes_and_one_destination(tmp_path: Path, source: Path) -> None:
    made = tmp_path / "made"
    ready, go_on = tmp_path / "ready", tmp_path / "go on"

    def slowly(count: int) -> None:
        ready.touch()
        while not go_on.exists():
            time.sleep(0.01)

    child = os.fork()
    if not child:
        try:
            small_run(source, made, 3, progress=slowly)
            os._exit(0)
        finally:
            os._exit(1)
    while not ready.exists():
        time.sleep(0.01)
    for ranks in (3, 2):
        with pytest.raises(UsageError, match="another process"):
            small_run(source, made, ranks)
    go_on.touch()
    assert os.waitpid(child, 0)[1] == 0
    assert_same(stock_tensors(made), STATE)
    assert left_behind(tmp_path) == []
    with pytest.raises(UsageError, match="exists already"):
        small_run(source, made, 3)
