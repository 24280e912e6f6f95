"""Writes the ``torch.save`` archive of one tensor, as the bytes before its elements and those behind them.

Both have a length that follows from dtype, dims and bytes alone, so that every file is laid out before a byte of it is
written; what is behind the elements has their CRC-32, which is known once they have passed. The format is described in
`reshard.formats.torch_archive`. In the order of the file::

    data.pkl, byteorder, version        small records, with sizes and CRC in their local headers
    local header of data/0              padded so that the elements start at a multiple of 64 in the archive
    the elements
    data descriptor                     PK 7 8, CRC-32, sizes
    zeros                               so that the archive is a multiple of 64 bytes long, and the next one aligned
    central headers, end

Numbers in the pickle all take 8 bytes (LONG1), since a shorter form would make the length depend on the value.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

from reshard.geometry.box import row_major_strides
from reshard.index.dtypes import ITEM_BYTES
from reshard.storage.crc32 import crc32

ALIGNMENT = 64
_FOLDER = "archive"
_NAMES = ("data.pkl", "byteorder", "version", "data/0")
_SMALL = {"byteorder": b"little", "version": b"3\n"}
_CRC_IN_CENTRAL_HEADER = 16
_MASK32 = 0xFFFFFFFF
# From here on the place of the central headers, if not yet the size, does not fit the 32 bits of the plain zip format.
ZIP64_BYTES = _MASK32 - (1 << 16)

_STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}  # fmt: skip


@functools.cache
def head_bytes(dtype: str, dims: int, is_large: bool) -> int:
    """Length of what precedes the elements; ``is_large`` from `ZIP64_BYTES` of elements on."""
    return len(head(dtype, (0,) * dims, ZIP64_BYTES if is_large else 0))


def tail_bytes(is_large: bool) -> int:
    """Length of what follows the elements, without the zeros that make the archive a multiple of 64."""
    return _descriptor_bytes(is_large) + _directory_bytes(is_large)


@functools.lru_cache(maxsize=4096)
def head(dtype: str, shape: tuple[int, ...], length_bytes: int) -> bytes:
    """Everything before the elements."""
    records = []
    for name, content in (("data.pkl", _pickle(dtype, shape)), *_SMALL.items()):
        crc = crc32(content)
        records += [_local(name, crc, len(content), 0, b""), content]
    start = sum(map(len, records))
    zip64 = struct.pack("<HHQQ", 1, 16, 0, 0) if length_bytes >= ZIP64_BYTES else b""
    bare = start + len(_local(_NAMES[-1], 0, 0, 8, zip64)) + 4
    padding = -bare % ALIGNMENT
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return b"".join([*records, _local(_NAMES[-1], 0, 0, 8, extra)])


def tail(dtype: str, shape: tuple[int, ...], length_bytes: int, crc: int, pad_bytes: int) -> bytes:
    """Everything after the elements; `pad_bytes` zeros before the central headers."""
    pattern, place = _tail_pattern(dtype, shape, length_bytes, pad_bytes)
    stated = crc.to_bytes(4, "little")
    return b"".join([pattern[:4], stated, pattern[8:place], stated, pattern[place + 4 :]])


@functools.lru_cache(maxsize=4096)
def _tail_pattern(dtype: str, shape: tuple[int, ...], length_bytes: int, pad_bytes: int) -> tuple[bytes, int]:
    """A tail with the CRC 0, and where in it the central header states the CRC; the descriptor does so at byte 4."""
    is_large = length_bytes >= ZIP64_BYTES
    sizes = "<4sIQQ" if is_large else "<4sIII"
    descriptor = struct.pack(sizes, b"PK\x07\x08", 0, length_bytes, length_bytes)
    contents = {"data.pkl": _pickle(dtype, shape), **_SMALL}
    central = []
    position = 0
    for name in _NAMES[:-1]:
        content = contents[name]
        central.append(_central(name, crc32(content), len(content), position, 0))
        position += len(_local(name, 0, 0, 0, b"")) + len(content)
    place = len(descriptor) + pad_bytes + sum(map(len, central)) + _CRC_IN_CENTRAL_HEADER
    central.append(_central(_NAMES[-1], 0, length_bytes, position, 8))
    directory = b"".join(central)
    start = len(head(dtype, shape, length_bytes)) + length_bytes + len(descriptor) + pad_bytes
    return b"".join([descriptor, bytes(pad_bytes), directory, _end(len(directory), start, is_large)]), place


def _pickle(dtype: str, shape: Sequence[int]) -> bytes:
    """``_rebuild_tensor_v2(storage 0, 0, shape, strides, False, OrderedDict())``, or v3 with a dtype."""
    typed = _STORAGES.get(dtype)
    # An untyped storage is as long as its bytes.
    length = math.prod(shape) * (1 if typed else ITEM_BYTES[dtype])
    storage = b"ctorch\n" + typed.encode() + b"\n" if typed else b"ctorch.storage\nUntypedStorage\n"
    function = b"_rebuild_tensor_v2" if typed else b"_rebuild_tensor_v3"
    parts = [
        b"\x80\x02ctorch._utils\n" + function + b"\n((",
        _text("storage") + storage + _text("0") + _text("cpu") + _number(length),
        b"tQ" + _number(0),
        b"(" + b"".join(map(_number, shape)) + b"t",
        b"(" + b"".join(map(_number, row_major_strides([max(1, size) for size in shape]))) + b"t",
        b"\x89ccollections\nOrderedDict\n)R",
        b"" if typed else b"ctorch\n" + dtype.encode() + b"\n",
        b"tR.",
    ]
    return b"".join(parts)


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _local(name: str, crc: int, length_bytes: int, flags: int, extra: bytes) -> bytes:
    path = f"{_FOLDER}/{name}".encode()
    header = struct.pack(
        "<4s5HIIIHH", b"PK\x03\x04", 0, flags, 0, 0, 0, crc, length_bytes, length_bytes, len(path), len(extra)
    )
    return header + path + extra


def _central(name: str, crc: int, length_bytes: int, position: int, flags: int) -> bytes:
    path = f"{_FOLDER}/{name}".encode()
    is_large = length_bytes >= ZIP64_BYTES
    extra = struct.pack("<HHQQ", 1, 16, length_bytes, length_bytes) if is_large else b""
    stated = _MASK32 if is_large else length_bytes
    header = struct.pack(
        "<4s6HIII5HII",
        b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, stated, stated, len(path), len(extra), 0, 0, 0, 0, position,
    )  # fmt: skip
    return header + path + extra


def _end(directory_bytes: int, start: int, is_large: bool) -> bytes:
    count = len(_NAMES)
    plain = struct.pack(
        "<4s4HIIH", b"PK\x05\x06", 0, 0, count, count, directory_bytes, _MASK32 if is_large else start, 0
    )
    if not is_large:
        return plain
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, directory_bytes, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + directory_bytes, 1)
    return end64 + locator + plain


def _descriptor_bytes(is_large: bool) -> int:
    return 24 if is_large else 16


@functools.cache
def _directory_bytes(is_large: bool) -> int:
    length = ZIP64_BYTES if is_large else 0
    central = sum(len(_central(name, 0, length if name == _NAMES[-1] else 0, 0, 0)) for name in _NAMES)
    return central + len(_end(0, 0, is_large))
