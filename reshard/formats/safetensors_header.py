"""The header of a safetensors file.

::

    8 bytes      little-endian length N of the header
    N bytes      UTF-8 JSON, one object: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, offsets
                 counted from the end of the header; "__metadata__" -> {str: str}
    the rest     the tensors' elements, little-endian, row-major

The format forbids duplicate names, gaps between tensors, and bytes that no tensor has; a reader here insists on what
makes bytes ambiguous (duplicates, overlaps, wrong lengths), and lets a gap pass.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.index.dtypes import ITEM_BYTES

MOST_HEADER_BYTES = 100_000_000

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
HEADER_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


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
    start = bytes(read(0, 9))
    (header_bytes,) = struct.unpack_from("<Q", start)
    if start[8:] != b"{" or not 2 <= header_bytes <= MOST_HEADER_BYTES:
        return None
    if 8 + header_bytes > length_bytes:
        raise CheckpointUnsound(
            "cut short inside the safetensors header", expected=f"{8 + header_bytes} bytes", found=length_bytes
        )
    try:
        fields = json.loads(bytes(read(8, header_bytes)).decode("utf-8"), object_pairs_hook=_unique)
        return _header(fields, 8 + header_bytes, length_bytes)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise CheckpointUnsound("not a sound safetensors header", found=f"{type(error).__name__}: {error}") from error


def _header(fields: dict[str, Any], data_start: int, length_bytes: int) -> Header:
    metadata = fields.pop("__metadata__", None) or {}
    if not all(type(key) is str and type(value) is str for key, value in metadata.items()):
        raise ValueError("__metadata__ holds something other than strings")
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in fields.items():
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in TORCH_NAMES:
            raise ValueError(f"{name}: unknown dtype {entry['dtype']!r}")
        dtype = TORCH_NAMES[entry["dtype"]]
        if dtype == "float4_e2m1fn_x2" and shape:
            # Counted here in elements of half a byte, and by torch in pairs.
            shape = (*shape[:-1], shape[-1] // 2)
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)):
            raise ValueError(f"{name}: a size or an offset that is not one")
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name twice")
    return fields
