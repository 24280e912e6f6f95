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

from reshard.formats.zip_parts import ZIP64_BYTES, central_header, descriptor, end_of_directory, local_header
from reshard.geometry.box import row_major_strides
from reshard.index.dtypes import ITEM_BYTES
from reshard.storage.crc32 import crc32

ALIGNMENT = 64
_NAMES = ("data.pkl", "byteorder", "version", "data/0")
_SMALL = {"byteorder": b"little", "version": b"3\n"}
_CRC_IN_CENTRAL_HEADER = 16

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
    return len(descriptor(0, ZIP64_BYTES if is_large else 0)) + _directory_bytes(is_large)


@functools.lru_cache(maxsize=4096)
def head(dtype: str, shape: tuple[int, ...], length_bytes: int) -> bytes:
    """Everything before the elements."""
    records = []
    for name, content in (("data.pkl", _pickle(dtype, shape)), *_SMALL.items()):
        crc = crc32(content)
        records += [local_header(name, crc, len(content), 0, b""), content]
    start = sum(map(len, records))
    zip64 = struct.pack("<HHQQ", 1, 16, 0, 0) if length_bytes >= ZIP64_BYTES else b""
    bare = start + len(local_header(_NAMES[-1], 0, 0, 8, zip64)) + 4
    padding = -bare % ALIGNMENT
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return b"".join([*records, local_header(_NAMES[-1], 0, 0, 8, extra)])


def tail(dtype: str, shape: tuple[int, ...], length_bytes: int, crc: int, pad_bytes: int) -> bytes:
    """Everything after the elements; `pad_bytes` zeros before the central headers."""
    pattern, place = _tail_pattern(dtype, shape, length_bytes, pad_bytes)
    stated = crc.to_bytes(4, "little")
    return b"".join([pattern[:4], stated, pattern[8:place], stated, pattern[place + 4 :]])


@functools.lru_cache(maxsize=4096)
def _tail_pattern(dtype: str, shape: tuple[int, ...], length_bytes: int, pad_bytes: int) -> tuple[bytes, int]:
    """A tail with the CRC 0, and where in it the central header states the CRC; the descriptor does so at byte 4."""
    is_large = length_bytes >= ZIP64_BYTES
    behind = descriptor(0, length_bytes)
    contents = {"data.pkl": _pickle(dtype, shape), **_SMALL}
    central = []
    position = 0
    for name in _NAMES[:-1]:
        content = contents[name]
        central.append(central_header(name, crc32(content), len(content), position, 0))
        position += len(local_header(name, 0, 0, 0, b"")) + len(content)
    place = len(behind) + pad_bytes + sum(map(len, central)) + _CRC_IN_CENTRAL_HEADER
    central.append(central_header(_NAMES[-1], 0, length_bytes, position, 8))
    directory = b"".join(central)
    start = len(head(dtype, shape, length_bytes)) + length_bytes + len(behind) + pad_bytes
    end = end_of_directory(len(_NAMES), len(directory), start, is_large)
    return b"".join([behind, bytes(pad_bytes), directory, end]), place


def _pickle(dtype: str, shape: Sequence[int]) -> bytes:
    return b"\x80\x02" + tensor_instructions(dtype, shape, "0") + b"."


def tensor_instructions(dtype: str, shape: Sequence[int], storage_key: str) -> bytes:
    """The instructions of a pickle that leave a dense tensor on the stack, the only one in its storage.

    ``_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())``, or v3 with a dtype.
    """
    typed = _STORAGES.get(dtype)
    # An untyped storage is as long as its bytes.
    length = math.prod(shape) * (1 if typed else ITEM_BYTES[dtype])
    storage = b"ctorch\n" + typed.encode() + b"\n" if typed else b"ctorch.storage\nUntypedStorage\n"
    function = b"_rebuild_tensor_v2" if typed else b"_rebuild_tensor_v3"
    parts = [
        b"ctorch._utils\n" + function + b"\n((",
        text_instruction("storage") + storage + text_instruction(storage_key) + text_instruction("cpu"),
        _number(length) + b"tQ" + _number(0),
        b"(" + b"".join(map(_number, shape)) + b"t",
        b"(" + b"".join(map(_number, row_major_strides([max(1, size) for size in shape]))) + b"t",
        b"\x89ccollections\nOrderedDict\n)R",
        b"" if typed else b"ctorch\n" + dtype.encode() + b"\n",
        b"tR",
    ]
    return b"".join(parts)


def text_instruction(text: str) -> bytes:
    """The instruction that leaves a text on the stack."""
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


@functools.cache
def _directory_bytes(is_large: bool) -> int:
    length = ZIP64_BYTES if is_large else 0
    central = sum(len(central_header(name, 0, length if name == _NAMES[-1] else 0, 0, 0)) for name in _NAMES)
    return central + len(end_of_directory(len(_NAMES), 0, 0, is_large))
