"""The archives that we write, read by torch, by zipfile and by ourselves."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from reshard.formats import archive_parts
from reshard.formats.archive_parts import ALIGNMENT
from reshard.formats.torch_archive import read_tensor
from reshard.formats.zip_parts import ZIP64_BYTES
from reshard.index.dtypes import ITEM_BYTES

SHAPES = [(), (3,), (0,), (4, 5), (2, 0, 3), (1, 2, 3, 4), (1,) * 8]
DTYPES = [dtype for dtype in ITEM_BYTES if not dtype.startswith("bits")]


def archive_of(dtype: str, shape: tuple[int, ...], payload: bytes) -> bytes:
    head = archive_parts.head(dtype, shape, len(payload))
    pad = -(len(head) + len(payload) + archive_parts.tail_bytes(False)) % ALIGNMENT
    return head + payload + archive_parts.tail(dtype, shape, len(payload), zlib.crc32(payload), pad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_what_was_written(dtype: str) -> None:
    for shape in SHAPES:
        length = math.prod(shape) * ITEM_BYTES[dtype]
        values = torch.randint(0, 2, (length,), dtype=torch.uint8)
        data = archive_of(dtype, shape, values.numpy().tobytes())
        assert len(data) % ALIGNMENT == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch finds complex32 experimental
            read = torch.load(io.BytesIO(data), weights_only=True)
        assert (str(read.dtype), tuple(read.shape)) == (f"torch.{dtype}", shape)
        assert bytes(read.untyped_storage()) == values.numpy().tobytes()
        assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
        ours = read_tensor(lambda start, count, data=data: data[start : start + count], len(data), Path("f"), "k")
        assert (ours.dtype, ours.shape, ours.record.crc) == (dtype, shape, zlib.crc32(values.numpy().tobytes()))
        assert ours.start_bytes % ALIGNMENT == 0


def test_lengths_depend_on_dtype_and_dims_alone() -> None:
    for dtype in DTYPES:
        for dims in range(6):
            for shape in ((0,) * dims, (1,) * dims, (1 << 40,) + (1,) * (dims - 1) if dims else ()):
                assert len(archive_parts.head(dtype, shape, 0)) == archive_parts.head_bytes(dtype, dims, False)
                assert len(archive_parts.tail(dtype, shape, 0, 0, 5)) == archive_parts.tail_bytes(False) + 5


def test_a_flipped_bit_is_seen_by_zipfile() -> None:
    data = bytearray(archive_of("float32", (2,), b"\x00\x01\x02\x03\x04\x05\x06\x07"))
    data[data.index(b"\x00\x01\x02\x03\x04\x05\x06\x07") + 3] ^= 1
    assert zipfile.ZipFile(io.BytesIO(bytes(data))).testzip() == "archive/data/0"


@pytest.mark.parametrize(
    "length", [ZIP64_BYTES - 1, ZIP64_BYTES, *((1 << 32) - less for less in (2048, 600, 64, 2, 1)), 1 << 32, 3 << 32]
)
def test_sizes_beyond_32_bits(tmp_path: Path, length: int) -> None:
    """In a file with a hole where the elements are, so that it takes no space."""
    is_large = length >= ZIP64_BYTES
    shape = (length,)
    head = archive_parts.head("uint8", shape, length)
    tail = archive_parts.tail("uint8", shape, length, 0x12345678, 0)
    assert (len(head), len(tail)) == (
        archive_parts.head_bytes("uint8", 1, is_large), archive_parts.tail_bytes(is_large),
    )  # fmt: skip
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + length)
        file.write(tail)
    info = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert (info.file_size, info.CRC) == (length, 0x12345678)
    size = path.stat().st_size
    with path.open("rb") as file:
        ours = read_tensor(lambda start, count: os.pread(file.fileno(), count, start), size, path, "k")
    assert (ours.record.length_bytes, ours.start_bytes, ours.shape) == (length, len(head), shape)


@pytest.mark.slow
def test_torch_reads_more_than_4_gib(tmp_path: Path) -> None:
    length = ZIP64_BYTES + 4096
    path = tmp_path / "large"
    crc = 0
    for _ in range(length // 4096):
        crc = zlib.crc32(bytes(4096), crc)
    crc = zlib.crc32(bytes(length % 4096), crc)
    with path.open("wb") as file:
        file.write(archive_parts.head("uint8", (length,), length))
        file.seek(length, os.SEEK_CUR)
        file.write(archive_parts.tail("uint8", (length,), length, crc, 0))
    read = torch.load(path, weights_only=True, mmap=True)
    assert read.numel() == length and not read[-4096:].any()
    assert torch.load(path, weights_only=True).numel() == length


def test_strides_are_those_of_torch() -> None:
    """Those of a tensor without elements as well, which nothing depends on."""
    for shape in SHAPES:
        payload = bytes(math.prod(shape) * 4)
        read = torch.load(io.BytesIO(archive_of("float32", shape, payload)), weights_only=True)
        assert read.stride() == torch.empty(shape).stride()


def test_a_mapped_file_has_aligned_elements(tmp_path: Path) -> None:
    (tmp_path / "t.pt").write_bytes(archive_of("float64", (33, 7), bytes(range(256)) * 7 + bytes(56)))
    read = torch.load(tmp_path / "t.pt", weights_only=True, mmap=True)
    assert read.data_ptr() % ALIGNMENT == 0
