"""What is stored beside the tensors, compared: numbers, strings and the containers that hold them.

Two ``torch.save`` archives of one object need not be the same bytes: releases of torch order and align records
differently. So archives that differ are decoded, into plain values and without importing what they name, and the values
are compared. Where an archive names something that is not on the list below, its pickle and its records are compared
byte by byte instead.
"""

from __future__ import annotations

import io
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import CheckpointUnsound, UnsafePickle
from reshard.formats import unpickle
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.plain_values import VALUE_CLASSES, Attributes, Budget, NotPlain, entries, plain
from reshard.formats.torch_archive import (
    TENSOR_CLASSES,
    Record,
    Stored,
    locate,
    persistent_storage,
    read_directory,
    require_little_endian,
)
from reshard.index.dtypes import ITEM_BYTES, raw

# Objects are settings and positions. One beyond this is equal in its bytes, or different, and no more is said of it.
MOST_OBJECT_BYTES = 16 << 20
_MOST_ENTRIES = 1 << 20
_BLOCK_BYTES = 1 << 20


class Difference(NamedTuple):
    """A place within a value, and what stands there in either; None for what is not there."""

    where: str
    a: str | None
    b: str | None


def object_differences(a: Checkpoint, b: Checkpoint, a_key: str, b_key: str) -> list[Difference]:
    """How an object of one checkpoint differs from one of another; empty where they are equal.

    Raises:
        CheckpointUnsound: the bytes of one of them are missing or damaged.
    """
    if a_key in a.index.objects and b_key in b.index.objects and _same_bytes(a, b, a_key, b_key):
        return []
    first, second = _read(a, a_key), _read(b, b_key)
    if isinstance(first, _Undecoded) or isinstance(second, _Undecoded):
        if isinstance(first, _Undecoded) and isinstance(second, _Undecoded) and first.content == second.content:
            return [] if first.content else [Difference("", first.reason, second.reason)]
        return [Difference("", _shown(first), _shown(second))]
    return list(value_differences(first, second))


def value_differences(a: Any, b: Any, where: str = "") -> Iterator[Difference]:
    """Every place where two plain values differ, in type or in value; NaN equals NaN."""
    if type(a) is not type(b):
        yield Difference(where, _shown(a), _shown(b))
    elif isinstance(a, dict):
        for key in (*a, *(key for key in b if key not in a)):
            place = f"{where}.{key}".removeprefix(".") if isinstance(key, str) else f"{where}[{_shown(key)}]"
            if key in a and key in b:
                yield from value_differences(a[key], b[key], place)
            else:
                yield Difference(place, _shown(a[key]) if key in a else None, _shown(b[key]) if key in b else None)
    elif isinstance(a, (list, tuple)) and len(a) == len(b):
        for position, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            yield from value_differences(item_a, item_b, f"{where}[{position}]")
    elif not _are_equal(a, b):
        yield Difference(where, _shown(a), _shown(b))


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        # Tells zeros by their sign, and no NaN from another.
        return bool(a.hex() == b.hex())
    if isinstance(a, np.ndarray):
        same_type: bool = a.dtype == b.dtype and a.shape == b.shape
        return same_type and a.tobytes() == b.tobytes()
    return bool(a == b)


@dataclass(frozen=True)
class _Undecoded:
    """An object that was left as bytes: why, and the parts of its archive that mean something; none if too large."""

    reason: str
    content: Mapping[str, bytes]

    def __repr__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class _Tensor:
    """A tensor within an object."""

    dtype: str
    shape: tuple[int, ...]
    elements: bytes

    def __repr__(self) -> str:
        return f"a tensor of {self.dtype} {self.shape}"


def _same_bytes(a: Checkpoint, b: Checkpoint, a_key: str, b_key: str) -> bool:
    places = [(checkpoint, checkpoint.index.objects[key]) for checkpoint, key in ((a, a_key), (b, b_key))]
    (_, first), (_, second) = places
    if first.length_bytes != second.length_bytes:
        return False
    for start in range(0, first.length_bytes, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, first.length_bytes - start)
        blocks = [
            checkpoint.files.read(checkpoint.index.file_number[place.file], place.start_bytes + start, length)
            for checkpoint, place in places
        ]
        if blocks[0] != blocks[1]:
            return False
    return True


def _read(checkpoint: Checkpoint, key: str) -> Any:
    if key in checkpoint.values:
        return checkpoint.values[key]
    place = checkpoint.index.objects[key]
    if place.length_bytes > MOST_OBJECT_BYTES:
        return _Undecoded(f"an object of {place.length_bytes} bytes", {})
    path = checkpoint.files.paths[checkpoint.index.file_number[place.file]]
    data = checkpoint.object_bytes(key)
    try:
        return _decoded(data, path)
    except CheckpointUnsound as error:
        error.path, error.key = str(path), key
        raise


def _decoded(data: bytes, path: Path) -> Any:
    def read(start: int, length: int) -> bytes:
        return data[start : start + length]

    records = read_directory(read, len(data))
    if "data.pkl" not in records:
        raise CheckpointUnsound("not an object that torch.save wrote: no data.pkl")
    require_little_endian(read, records, path)
    content = {name: read(record.start_bytes, record.length_bytes) for name, record in records.items()}
    try:
        value = unpickle.read(io.BytesIO(content["data.pkl"]), _ALLOWED, path=path, persistent=persistent_storage)
        return _plain(value, lambda stored: _tensor(stored, records, data), Budget(_MOST_ENTRIES), 0)
    except (UnsafePickle, NotPlain) as reason:
        why = reason.what if isinstance(reason, UnsafePickle) else str(reason)
    # The records beside these say how the file was written.
    kept = {name: part for name, part in content.items() if name == "data.pkl" or name.startswith("data/")}
    return _Undecoded(f"an object of {len(data)} bytes that is not decoded ({why})", kept)


def _plain(value: Any, tensor: Callable[[Stored], _Tensor], budget: Budget, level: int) -> Any:
    """As `reshard.formats.plain_values.plain`, with tensors."""
    if isinstance(value, Stored):
        return tensor(value)
    budget.spend(level)
    if isinstance(value, (dict, Attributes)):
        return {plain(key, budget, level + 1): _plain(item, tensor, budget, level + 1) for key, item in entries(value)}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, tensor, budget, level + 1) for item in value)
    return plain(value, budget, level)


def _tensor(stored: Stored, records: Mapping[str, Record], data: bytes) -> _Tensor:
    place = locate(stored, records)
    width = ITEM_BYTES[place.dtype]
    if math.prod(place.shape) * width > MOST_OBJECT_BYTES:
        # With a stride of zero, a few bytes make a tensor of any size.
        raise CheckpointUnsound("a tensor larger than the object that holds it", found=f"{place.dtype} {place.shape}")
    elements = np.frombuffer(data, dtype=np.uint8)[place.start_bytes :]
    whole = elements[: len(elements) // width * width].view(raw(place.dtype))
    strides = [stride * width for stride in place.strides]
    view = np.lib.stride_tricks.as_strided(whole, place.shape, strides, writeable=False)
    return _Tensor(place.dtype, place.shape, view.tobytes())


_ALLOWED: Mapping[tuple[str, str], Any] = {**VALUE_CLASSES, **TENSOR_CLASSES}


_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother = 80, 200


def _shown(value: Any) -> str:
    return _repr.repr(value)
