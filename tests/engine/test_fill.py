"""Pieces of stored tensors read into memory: against a copy of the whole tensor, and counted byte by byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sharded import places, write_sharded

from reshard.engine.fill import Pieces, fill
from reshard.errors import CheckpointUnsound, ReshardError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import open_dcp
from reshard.geometry.box import Box

Slices = tuple[slice, ...]


class Collected:
    """A sink: takes elements as a device would."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.values = np.zeros(shape, dtype=dtype)
        self.count = np.zeros(shape, dtype=np.int64)
        self.lock = threading.Lock()

    def put(self, box: Box, elements: NDArray[np.generic]) -> None:
        place = tuple(slice(low, high) for low, high in zip(box.offsets, box.ends, strict=True))
        with self.lock:
            self.values[place] = elements
            self.count[place] += 1


def pieces_of(source: Checkpoint, wanted: Sequence[tuple[str, Slices, Any]]) -> Pieces:
    """One piece a wanted box of a chunk: (key, slices of the tensor that lie in one chunk, target)."""
    rows, offsets, sizes, targets = [], [], [], []
    index = source.index
    for key, slices, target in wanted:
        number = index.number[key]
        low = [part.start for part in slices]
        row = next(
            row for row in range(int(index.first[number]), int(index.first[number + 1]))
            if all(a <= at < b for a, at, b in zip(index.box(row).offsets, low, index.box(row).ends, strict=True))
        )  # fmt: skip
        pad = index.dims - len(slices)
        rows.append(row)
        offsets.append([at - a for at, a in zip(low, index.box(row).offsets, strict=True)] + [0] * pad)
        sizes.append([part.stop - part.start for part in slices] + [1] * pad)
        targets.append(target)
    shape = (len(rows), index.dims)
    return Pieces(
        np.array(rows, dtype=np.int64),
        np.array(offsets, dtype=np.int64).reshape(shape),
        np.array(sizes, dtype=np.int64).reshape(shape),
        targets,
    )


@contextmanager
def opened(folder: Path) -> Iterator[Checkpoint]:
    with open_dcp(folder) as source:
        yield source


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Of one chunk each: contiguous, transposed, with a stride of its own, tiny, without dims, of wide elements."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "plain": torch.randn(37, 11, 5, generator=generator),
        "turned": torch.randn(13, 29, generator=generator).t(),
        "long": torch.randn(300_000, generator=generator),
        "scalar": torch.tensor(2.5),
        "tiny": torch.arange(3, dtype=torch.int16),
        "wide": torch.randn(9, 4, dtype=torch.complex128, generator=generator),
    }
    return write_sharded(tmp_path_factory.mktemp("fill") / "a", tensors, 1), tensors


def words(tensor: torch.Tensor) -> NDArray[np.generic]:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 16: torch.complex128}
    return tensor.contiguous().view(kinds[tensor.element_size()]).numpy()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_into_any_memory(stored: tuple[Path, dict[str, torch.Tensor]], data: st.DataObject) -> None:
    folder, tensors = stored
    wanted, checks = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        key = data.draw(st.sampled_from(sorted(tensors)))
        whole = words(tensors[key])
        pairs = [st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True) for n in whole.shape]
        slices = tuple(slice(*sorted(data.draw(pair))) for pair in pairs)
        expected = whole[slices]
        kind = data.draw(st.sampled_from(["contiguous", "strided", "reversed order", "sink"]))
        if kind == "contiguous":
            target: Any = np.zeros(expected.shape, expected.dtype)
        elif kind == "strided":
            room = np.zeros([2 * n for n in expected.shape], expected.dtype)
            target = room[(..., *[slice(None, None, 2)] * expected.ndim)]
        elif kind == "reversed order":
            target = np.zeros(expected.shape[::-1], expected.dtype).transpose()
        else:
            target = Collected(expected.shape, expected.dtype)
        wanted.append((key, slices, target))
        checks.append((target, expected))
    verify: Any = data.draw(st.sampled_from(["never", "whole", "always"]))
    with opened(folder) as source:
        fill(source, pieces_of(source, wanted), verify=verify)
    for target, expected in checks:
        found = target.values if isinstance(target, Collected) else target
        assert found.tobytes() == expected.tobytes()
        if isinstance(target, Collected):
            assert (target.count == 1).all()


def test_nothing_is_read_for_nothing(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with opened(stored[0]) as source:
        before = source.files.bytes_read
        fill(source, pieces_of(source, []))
        assert source.files.bytes_read == before


def big(folder: Path, ranks: int = 1) -> tuple[Path, torch.Tensor]:
    whole = torch.randn(4096, 512, generator=torch.Generator().manual_seed(1))
    return write_sharded(folder, {"w": whole}, ranks), whole


@pytest.mark.parametrize(
    ("slices", "most"),
    [
        ((slice(0, 4096), slice(0, 512)), 1.001),
        ((slice(1000, 1003), slice(0, 512)), 1.6),  # The head of the archive counts beside 6 KiB.
        ((slice(1024, 3072), slice(0, 512)), 1.001),
        ((slice(0, 4096), slice(128, 384)), 1.001),
    ],
    ids=["all", "few rows", "half", "columns"],
)
@pytest.mark.parametrize("into", ["memory", "sink"])
def test_no_more_is_read_than_is_needed(tmp_path: Path, slices: Slices, most: float, into: str) -> None:
    folder, whole = big(tmp_path / "a")
    expected = words(whole)[slices]
    target = np.zeros(expected.shape, expected.dtype) if into == "memory" else Collected(expected.shape, expected.dtype)
    with opened(folder) as source:
        fill(source, pieces_of(source, [("w", slices, target)]))
        needed = expected.nbytes
        assert needed <= source.files.bytes_read <= needed * most
    found = target.values if isinstance(target, Collected) else target
    assert found.tobytes() == expected.tobytes()


def test_always_reads_the_rest_of_a_record_once(tmp_path: Path) -> None:
    folder, whole = big(tmp_path / "a")
    targets = [np.zeros((100, 512), np.int32) for _ in range(2)]
    rows = [slice(50, 150), slice(3000, 3100)]
    wanted = [("w", (part, slice(0, 512)), target) for part, target in zip(rows, targets, strict=True)]
    with opened(folder) as source:
        fill(source, pieces_of(source, wanted), verify="always")
        assert whole.nbytes <= source.files.bytes_read <= whole.nbytes * 1.001
    assert targets[1].tobytes() == words(whole)[3000:3100].tobytes()


def damaged(folder: Path, key: str, offsets: tuple[int, ...], at: bytes) -> None:
    path = folder / places(folder)[key, offsets].relative_path
    content = bytearray(path.read_bytes())
    content[content.index(at) + 1] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("into", ["memory", "strided", "sink"])
@pytest.mark.parametrize(
    ("verify", "is_whole", "is_found"),
    [("whole", True, True), ("whole", False, False), ("always", False, True), ("never", True, False)],
)
def test_which_damage_is_found(tmp_path: Path, into: str, verify: Any, is_whole: bool, is_found: bool) -> None:
    """The damage lies in the last row, which only a reader of the whole record needs."""
    folder, whole = big(tmp_path / "a")
    damaged(folder, "w", (0, 0), words(whole)[-1:].tobytes())
    slices = (slice(0, 4096 if is_whole else 4095), slice(0, 512))
    shape = tuple(part.stop for part in slices)
    target: Any = np.zeros(shape, np.int32)
    if into == "strided":
        target = np.zeros((shape[0], 1024), np.int32)[:, ::2]
    elif into == "sink":
        target = Collected(shape, np.int32)
    with opened(folder) as source:
        if not is_found:
            fill(source, pieces_of(source, [("w", slices, target)]), verify=verify)
            return
        with pytest.raises(CheckpointUnsound, match=r"__0_0\.distcp: w: damaged: .*CRC-32"):
            fill(source, pieces_of(source, [("w", slices, target)]), verify=verify)


def test_pieces_that_overlap_are_verified_all_the_same(tmp_path: Path) -> None:
    """Two names of one tensor in a state are two pieces of one chunk."""
    folder, whole = big(tmp_path / "a")
    damaged(folder, "w", (0, 0), words(whole)[-1:].tobytes())
    everything = (slice(0, 4096), slice(0, 512))
    wanted = [("w", everything, np.zeros((4096, 512), np.int32)) for _ in range(2)]
    with opened(folder) as source, pytest.raises(CheckpointUnsound):
        fill(source, pieces_of(source, wanted), verify="always")


def test_a_small_record_that_was_read_when_it_was_found_is_verified(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.arange(6.0) + number for number in range(4)}
    folder = write_sharded(tmp_path / "a", tensors, 1)
    damaged(folder, "t2", (0,), words(tensors["t2"]).tobytes())
    wanted = [(key, (slice(0, 6),), np.zeros(6, np.int32)) for key in tensors]
    with opened(folder) as source, pytest.raises(CheckpointUnsound, match="t2: damaged"):
        fill(source, pieces_of(source, wanted))


def test_the_first_fault_is_told_and_threads_end(tmp_path: Path) -> None:
    folder, _ = big(tmp_path / "a", ranks=4)
    with (folder / "__2_0.distcp").open("r+b") as file:
        file.truncate(1 << 20)
    wanted = [
        ("w", (slice(low, low + 1024), slice(0, 512)), np.zeros((1024, 512), np.int32)) for low in range(0, 4096, 1024)
    ]
    before = threading.active_count()
    with opened(folder) as source, pytest.raises(ReshardError, match=r"__2_0\.distcp"):
        fill(source, pieces_of(source, wanted))
    assert threading.active_count() == before


class Refusing:
    def put(self, box: Box, elements: NDArray[np.generic]) -> None:
        raise ValueError("no room on the device")


def test_a_sink_that_fails_is_not_silent(tmp_path: Path) -> None:
    folder, _ = big(tmp_path / "a")
    wanted = [("w", (slice(0, 10), slice(0, 512)), Refusing())]
    with opened(folder) as source, pytest.raises(ValueError, match="no room on the device"):
        fill(source, pieces_of(source, wanted))


def test_many_files_are_open_in_turn(tmp_path: Path) -> None:
    """More files than a process may have open at once."""
    import resource

    whole = torch.arange(700.0).reshape(700, 1)
    folder = write_sharded(tmp_path / "a", {"w": whole}, 700)
    targets = [np.zeros((1, 1), np.int32) for _ in range(700)]
    wanted = [("w", (slice(n, n + 1), slice(0, 1)), target) for n, target in enumerate(targets)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
    try:
        with opened(folder) as source:
            fill(source, pieces_of(source, wanted))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert np.concatenate(targets).tobytes() == words(whole).tobytes()
