from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from reshard.engine import blocks
from reshard.engine.blocks import PAGE_BYTES, BlockFile, aligned_buffer
from reshard.errors import StorageError

LENGTHS = [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES + 77]


@pytest.fixture(params=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "buffered":
        monkeypatch.delattr(os, "O_DIRECT")
    return bool(request.param == "direct")


@pytest.mark.parametrize("length", LENGTHS)
def test_a_file_of_any_length(tmp_path: Path, length: int, direct: bool) -> None:
    content = random.Random(length).randbytes(length)
    buffer = aligned_buffer(2 * PAGE_BYTES)
    file = BlockFile(tmp_path / "file", length, create=True)
    assert file.is_direct <= direct
    positions = list(range(0, length, len(buffer)))
    random.Random(0).shuffle(positions)
    for position in positions:
        part = content[position : position + len(buffer)]
        padded = -(-len(part) // PAGE_BYTES) * PAGE_BYTES if file.is_direct else len(part)
        buffer[:padded] = part + bytes(padded - len(part))
        file.write(buffer[:padded], position)
    file.sync()
    if length:
        file.patch(b"\xaa", length - 1)
    file.cut_to_length()
    file.close()
    expected = content[:-1] + b"\xaa" if length else b""
    assert (tmp_path / "file").read_bytes() == expected


def test_buffers_start_at_a_page() -> None:
    import numpy as np

    for _ in range(5):
        assert np.frombuffer(aligned_buffer(3 * PAGE_BYTES), dtype=np.uint8).ctypes.data % PAGE_BYTES == 0


def test_a_file_system_that_refuses_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(blocks.os, "open", refusing)
    file = BlockFile(tmp_path / "file", 3, create=True)
    assert not file.is_direct
    file.write(memoryview(b"abc"), 0)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_limit_on_files_is_named_with_the_place(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE_BYTES, before[1]))
    file = BlockFile(tmp_path / "file", 1 << 20, create=True)
    try:
        with pytest.raises(
            StorageError, match=r"file: cannot write beyond 8192 of 1048576 bytes: over the limit of 8192"
        ):
            file.write(aligned_buffer(PAGE_BYTES), 2 * PAGE_BYTES)
    finally:
        file.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("step", [PAGE_BYTES, 1000, 1])
def test_writes_that_stop_short_are_gone_on_with(
    tmp_path: Path, direct: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(blocks.os, "pwrite", lambda fd, data, at: real(fd, data[: max(step, 1)], at))
    if direct and step % PAGE_BYTES:
        # What the kernel does with a direct write that it cannot finish: it writes the aligned part.
        def short(fd: int, data: memoryview, at: int) -> int:
            aligned = at % PAGE_BYTES == 0 and len(data) % PAGE_BYTES == 0
            return real(fd, data[: PAGE_BYTES if aligned else step], at)

        monkeypatch.setattr(blocks.os, "pwrite", short)
    path = tmp_path / "file"
    length = 2 * PAGE_BYTES
    file = BlockFile(path, length, create=True)
    buffer = aligned_buffer(length)
    buffer[:] = content = os.urandom(length)
    file.write(buffer, 0)
    file.close()
    assert path.read_bytes() == content
