"""The header of a safetensors file, read and written.

::

    8 bytes      little-endian length N of the header
    N bytes      UTF-8 JSON, one object: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, offsets
                 counted from the end of the header; "__metadata__" -> {str: str}
    the rest     the tensors' elements, little-endian, row-major

The format forbids duplicate names, gaps between tensors, and bytes that no tensor has; a reader here insists on what
makes bytes ambiguous (duplicates, overlaps, wrong lengths), and lets a gap pass. A writer pads the header with spaces,
so that the tensors begin at a multiple of 8. ``F4`` counts elements of half a byte in its last dim, torch counts pairs.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.index.dtypes import ITEM_BYTES

MOST_HEADER_BYTES = 100_000_000

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
HEADER_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}

METADATA_KEY = "__metadata__"
# Bytes of a file that `looks_like_header` has to see.
HEAD_BYTES = 9
# What torch and numpy can have; a header that says more would only cost memory.
_MOST_DIMS = 64
_HALF_BYTES = "float4_e2m1fn_x2"


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        tensors: name -> (torch's dtype, shape, first byte, end), counted from the start of the file.
        metadata: the strings under ``__metadata__``.
        data_start: where the tensors begin.
    """

    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]
    metadata: dict[str, str]
    data_start: int


def looks_like_header(head: bytes) -> bool:
    """Whether a file that begins with ``head`` may be a safetensors file."""
    return len(head) >= HEAD_BYTES and head[8:9] == b"{" and 2 <= _text_bytes(head) <= MOST_HEADER_BYTES


def _text_bytes(head: bytes) -> int:
    return int.from_bytes(head[:8], "little")


def read_header(read: Callable[[int, int], bytes | bytearray], length_bytes: int) -> Header | None:
    """Reads the header; None where the bytes do not begin like one.

    Args:
        read: reads (start, length).
        length_bytes: of the whole file.

    Raises:
        CheckpointUnsound: it begins like a header and is not a sound one.
    """
    if length_bytes < 10:
        return None
    head = bytes(read(0, HEAD_BYTES))
    if not looks_like_header(head):
        return None
    text_bytes = _text_bytes(head)
    if 8 + text_bytes > length_bytes:
        raise CheckpointUnsound(
            "cut short inside the safetensors header", expected=f"{8 + text_bytes} bytes", found=length_bytes
        )
    try:
        fields = json.loads(bytes(read(8, text_bytes)).decode("utf-8"), object_pairs_hook=unique_fields)
        return _header(fields, 8 + text_bytes, length_bytes)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise CheckpointUnsound("not a sound safetensors header", found=f"{type(error).__name__}: {error}") from error


def _header(fields: dict[str, Any], data_start: int, length_bytes: int) -> Header:
    metadata = fields.pop(METADATA_KEY, None) or {}
    if not all(type(key) is str and type(value) is str for key, value in metadata.items()):
        raise ValueError("__metadata__ holds something other than strings")
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in fields.items():
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in TORCH_NAMES:
            raise ValueError(f"{name}: unknown dtype {entry['dtype']!r}")
        dtype = TORCH_NAMES[entry["dtype"]]
        if len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)):
            raise ValueError(f"{name}: a size or an offset that is not one")
        if dtype == _HALF_BYTES:
            if not shape or shape[-1] % 2:
                raise ValueError(f"{name}: half a byte at the end of {shape} of {entry['dtype']}")
            shape = (*shape[:-1], shape[-1] // 2)
        if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name}: {end - begin} bytes for {shape} of {entry['dtype']}")
        if data_start + end > length_bytes:
            raise ValueError(f"{name}: ends at byte {data_start + end} of {length_bytes}")
        tensors[name] = (dtype, shape, data_start + begin, data_start + end)
    spans = sorted((start, end, name) for name, (_, _, start, end) in tensors.items() if start < end)
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{first} and {second} overlap")
    return Header(tensors, metadata, data_start)


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a JSON object, for ``object_pairs_hook``.

    Raises:
        ValueError: a name stands there twice; JSON itself would silently keep the last.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name twice")
    return fields


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """What stands before the tensors of a file, and the first byte of each in the file; they follow without gaps.

    Args:
        tensors: name, torch's dtype and shape, in the order of their bytes. Wide elements first keep all aligned.
        metadata: strings to put under ``__metadata__``.

    Raises:
        UsageError: a dtype or a name that the format does not have, a name twice, or more names than fit a header.
    """
    fields: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    begins: list[int] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in HEADER_NAMES or (dtype == _HALF_BYTES and not shape):
            hint = "leave it out, or convert to another format"
            raise UsageError("safetensors has no name for this dtype", key=name, found=f"{dtype} of {shape}", hint=hint)
        if name in fields or name == METADATA_KEY:
            raise UsageError("safetensors has no room for a second entry of this name", key=name)
        begins.append(end)
        end += math.prod(shape) * ITEM_BYTES[dtype]
        counted = [*shape[:-1], 2 * shape[-1]] if dtype == _HALF_BYTES else list(shape)
        fields[name] = {"dtype": HEADER_NAMES[dtype], "shape": counted, "data_offsets": [begins[-1], end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        raise UsageError(
            "too many tensors for one safetensors file",
            expected=f"a header of at most {MOST_HEADER_BYTES} bytes",
            found=len(text),
            hint="write several files, or convert to another format",
        )
    data_start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [data_start + begin for begin in begins]
