"""The archive that ``torch.save`` writes, by byte range and without torch: read for one tensor, and written for one.

A zip file of stored (never compressed) records, all in one folder of any name. A tensor's archive has::

    data.pkl                     the object; a storage in it is a persistent id ("storage", type, key, device, elements)
    byteorder                    "little" or "big"; since torch 2.1
    data/<key>                   the bytes of a storage; starts at a multiple of 64 within the archive
    version                      "3"
    .format_version, .storage_alignment, .data/serialization_id       newer releases; not needed to read it

    local header     PK 3 4, version, flags, method, time, date, CRC-32, sizes, name and extra lengths, name, extra
                     With flag 8, as torch writes it, CRC and sizes are zero here and follow the data (PK 7 8). The
                     extra field "FB" holds the padding before the data.
    central header   PK 1 2 ..., with CRC-32, sizes and the offset of the local header; zip64 extra (id 1) past 4 GiB
    end              (PK 6 6, PK 6 7 for zip64,) PK 5 6: number of records, length and offset of the central headers

All offsets count from the archive's start, which in a ``.distcp`` file is anywhere. A CRC-32 of zero on a record that
is not all zero means that the file was saved without checksums (``set_crc32_options(False)``).

data.pkl is ``torch._utils._rebuild_tensor_v2(storage, storage offset, size, stride, requires_grad, hooks)``, where the
storage's type says the dtype (``torch.BFloat16Storage``); ``_rebuild_tensor_v3`` with a dtype and an UntypedStorage for
types without such a class; ``_rebuild_parameter`` around either.
"""

from __future__ import annotations

import io
import itertools
import reprlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.errors import CheckpointUnsound
from reshard.formats import unpickle
from reshard.index.dtypes import ITEM_BYTES, REFUSED

LOCAL_HEADER = b"PK\x03\x04"
_CENTRAL_HEADER = b"PK\x01\x02"
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_LOCATOR64 = b"PK\x06\x07"

_LOCAL = struct.Struct("<4s5HIIIHH")
_CENTRAL = struct.Struct("<4s6HIII5HII")
_END_FIELDS = struct.Struct("<4s4HIIH")
_END64_FIELDS = struct.Struct("<4sQHHIIQQQQ")

_MASK32 = 0xFFFFFFFF
# Flags of records that are encrypted or patches, and of directories that are.
_NOT_PLAIN = 1 | 1 << 5 | 1 << 6 | 1 << 13
# The attribute, in DOS's terms, of a folder: readers find no data in it.
_FOLDER = 0x10
# Central headers of one tensor's archive take some 500 bytes; a folder name could make them longer.
MOST_DIRECTORY_BYTES = 1 << 26
# Of one tensor it takes some hundred bytes.
_MOST_PICKLE_BYTES = 1 << 20

Reader = Callable[[int, int], "bytes | bytearray"]
"""Reads (start, length) within the archive."""


class Record(NamedTuple):
    """One record: where its data lies within the archive, and the CRC-32 that the directory states."""

    start_bytes: int
    length_bytes: int
    crc: int


@dataclass(frozen=True)
class ArchivedTensor:
    """The one tensor of an archive.

    Attributes:
        dtype, shape, strides: as the pickle says; strides in elements.
        record: the storage that it lies in.
        start_bytes: of its first element, within the archive.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    record: Record
    start_bytes: int


class _Fault(Exception):
    """What is wrong with the archive, in words."""


def read_directory(read: Reader, length_bytes: int) -> dict[str, Record]:
    """The records by name, without the archive's folder.

    Raises:
        CheckpointUnsound: not a whole zip archive of stored records, or it contradicts itself. Without a path: the
            caller knows where it lies.
    """
    try:
        return _directory(read, length_bytes)
    except (_Fault, struct.error) as fault:
        raise CheckpointUnsound(f"not a sound torch.save archive ({fault})") from fault


def read_tensor(read: Reader, length_bytes: int, path: Path, key: str) -> ArchivedTensor:
    """What the archive of a single tensor holds.

    Raises:
        CheckpointUnsound: it is damaged, holds something other than one plain tensor, or is big-endian.
        UnsafePickle: its pickle names a class that a plain tensor does not need, such as a quantised subclass.
    """
    try:
        records = _directory(read, length_bytes)
        tensor = _unpickled(read, records, path)
        return _archived(tensor, records)
    except (_Fault, struct.error) as fault:
        raise CheckpointUnsound(f"not the archive of one tensor ({fault})", path=path, key=key) from fault
    except CheckpointUnsound as error:
        error.path, error.key = error.path or str(path), error.key or key
        raise


class Stored(NamedTuple):
    """A tensor in a pickle: which storage it lies in and how."""

    storage: StoredStorage
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class StoredStorage(NamedTuple):
    """What a persistent id says."""

    key: str
    dtype: str | None
    elements: int


def persistent_storage(pid: Any) -> StoredStorage:
    """The storage that a persistent id names."""
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
        raise CheckpointUnsound("the pickle refers to something that is not a storage", found=reprlib.repr(pid)[:100])
    _, kind, key, _, elements = pid
    if not (isinstance(kind, _StorageType) and isinstance(key, str) and type(elements) is int and elements >= 0):
        raise CheckpointUnsound("the pickle refers to a storage that is not one", found=reprlib.repr(pid)[:100])
    return StoredStorage(key, kind.dtype, elements)


class _StorageType(NamedTuple):
    dtype: str | None


def _rebuild_v2(storage: Any, offset: Any, shape: Any, strides: Any, *_: object) -> Stored:
    if not isinstance(storage, StoredStorage) or storage.dtype is None:
        raise TypeError("a tensor without a typed storage")
    return _stored(storage, offset, shape, strides, storage.dtype)


def _rebuild_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Stored:
    dtype = rest[2]
    if not isinstance(storage, StoredStorage) or not isinstance(dtype, str):
        raise TypeError("a tensor without a storage and a dtype")
    return _stored(storage, offset, shape, strides, dtype)


def _stored(storage: StoredStorage, offset: Any, shape: Any, strides: Any, dtype: str) -> Stored:
    for numbers in (shape, strides, (offset,)):
        if type(numbers) is not tuple or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise TypeError("a tensor with an offset, size or stride that is not one")
    if len(shape) != len(strides):
        raise TypeError("a tensor with as many strides as it has no dims")
    return Stored(storage, offset, shape, strides, dtype)


def _rebuild_parameter(data: Any, *_: object) -> Any:
    return data


_STORAGE_TYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}  # fmt: skip

TENSOR_CLASSES: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", f"{name}Storage"): _StorageType(dtype) for name, dtype in _STORAGE_TYPES.items()},
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch", "UntypedStorage"): _StorageType(None),
    **{("torch", name): name for name in (*ITEM_BYTES, *REFUSED)},
}


def _unpickled(read: Reader, records: Mapping[str, Record], path: Path) -> Stored:
    if "data.pkl" not in records:
        raise _Fault("no data.pkl")
    require_little_endian(read, records, path)
    record = records["data.pkl"]
    if record.length_bytes > _MOST_PICKLE_BYTES:
        raise _Fault(f"a data.pkl of {record.length_bytes} bytes")
    data = io.BytesIO(bytes(read(record.start_bytes, record.length_bytes)))
    tensor = unpickle.read(data, TENSOR_CLASSES, path=path, persistent=persistent_storage)
    if not isinstance(tensor, Stored):
        raise _Fault(f"holds a {type(tensor).__name__}")
    return tensor


def require_little_endian(read: Reader, records: Mapping[str, Record], path: Path) -> None:
    """Refuses the archive of a big-endian machine.

    Raises:
        CheckpointUnsound: it says so.
    """
    record = records.get("byteorder")
    if record is not None and record.length_bytes < 16:
        order = bytes(read(record.start_bytes, record.length_bytes))
        if order != b"little":
            raise CheckpointUnsound("elements in another byte order", path=path, expected="little", found=order)


def locate(tensor: Stored, records: Mapping[str, Record]) -> ArchivedTensor:
    """Where a tensor of a pickle lies in the archive's records.

    Raises:
        CheckpointUnsound: its storage is missing, shorter than it says, or does not hold all elements.
    """
    try:
        return _archived(tensor, records)
    except _Fault as fault:
        raise CheckpointUnsound(str(fault)) from fault


def _archived(tensor: Stored, records: Mapping[str, Record]) -> ArchivedTensor:
    record = records.get(f"data/{tensor.storage.key}")
    if record is None:
        raise _Fault(f"no record data/{tensor.storage.key}")
    if tensor.dtype not in ITEM_BYTES:
        raise _Fault(f"quantised or packed elements, {tensor.dtype}: dequantise before saving")
    width = ITEM_BYTES[tensor.dtype]
    last = tensor.storage_offset + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    if 0 not in tensor.shape and (last + 1) * width > record.length_bytes:
        raise _Fault(f"the tensor ends at byte {(last + 1) * width} of a storage of {record.length_bytes}")
    start = record.start_bytes + (0 if 0 in tensor.shape else tensor.storage_offset * width)
    return ArchivedTensor(tensor.dtype, tensor.shape, tensor.strides, record, start)


def _directory(read: Reader, length_bytes: int) -> dict[str, Record]:
    count, directory_bytes, directory_start = _end(read, length_bytes)
    if directory_start + directory_bytes > length_bytes or directory_bytes > MOST_DIRECTORY_BYTES:
        raise _Fault(f"a directory of {directory_bytes} bytes at {directory_start} of {length_bytes}")
    data = bytes(read(directory_start, directory_bytes))
    records: dict[str, Record] = {}
    spans: list[tuple[int, int]] = []
    position = 0
    for _ in range(count):
        name, header_start, record, position = _central(data, position)
        record = _checked_local(read, name, header_start, record, directory_start)
        spans.append((header_start, record.start_bytes + record.length_bytes))
        _, is_in_folder, inner = name.partition("/")
        if not is_in_folder:
            raise _Fault(f"the record {name!r} lies in no folder")
        if inner in records:
            raise _Fault(f"the record {name!r} twice")
        records[inner] = record
    spans.sort()
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end:
            raise _Fault("records overlap")
    return records


def _end(read: Reader, length_bytes: int) -> tuple[int, int, int]:
    """Number of records, bytes of the central headers, their offset."""
    if length_bytes < _END_FIELDS.size:
        raise _Fault(f"{length_bytes} bytes")
    tail_bytes = min(length_bytes, 98)
    tail = bytes(read(length_bytes - tail_bytes, tail_bytes))
    fields = _END_FIELDS.unpack(tail[-_END_FIELDS.size :])
    if fields[0] != _END:
        raise _Fault("does not end as a zip file does")
    _, disk, directory_disk, count_here, count, directory_bytes, directory_start, comment_bytes = fields
    if comment_bytes or disk not in (0, 0xFFFF) or directory_disk != disk:
        raise _Fault("a comment, or several disks")
    locator = tail[: -_END_FIELDS.size][-20:]
    if len(locator) == 20 and locator[:4] == _LOCATOR64:
        (end64_start,) = struct.unpack_from("<Q", locator, 8)
        if end64_start + _END64_FIELDS.size > length_bytes:
            raise _Fault("the zip64 end lies outside")
        fields64 = _END64_FIELDS.unpack(bytes(read(end64_start, _END64_FIELDS.size)))
        if fields64[0] != _END64 or fields64[1] < _END64_FIELDS.size - 12:
            raise _Fault("no zip64 end where the locator says")
        (disks,) = struct.unpack_from("<I", locator, 16)
        if disks != 1 or fields64[4] or fields64[5]:
            raise _Fault("several disks")
        count_here, count, directory_bytes, directory_start = fields64[6:]
    if count_here != count:
        raise _Fault(f"{count_here} of its {count} records on this disk")
    return count, directory_bytes, directory_start


def _central(data: bytes, position: int) -> tuple[str, int, Record, int]:
    fields = _CENTRAL.unpack_from(data, position)
    if fields[0] != _CENTRAL_HEADER:
        raise _Fault("no record where the directory should have one")
    flags, method, crc, packed, length = fields[3], fields[4], fields[7], fields[8], fields[9]
    name_bytes, extra_bytes, comment_bytes, header_start = fields[10], fields[11], fields[12], fields[16]
    start = position + _CENTRAL.size
    end = start + name_bytes + extra_bytes + comment_bytes
    if end > len(data):
        raise _Fault("the directory is cut short")
    name = data[start : start + name_bytes].decode("utf-8", "replace")
    extra = data[start + name_bytes : start + name_bytes + extra_bytes]
    length, packed, header_start = _zip64(extra, length, packed, header_start)
    if method != 0 or packed != length:
        raise _Fault(f"the record {name!r} is compressed or lies about its size")
    if flags & _NOT_PLAIN or fields[13] or fields[15] & _FOLDER:
        raise _Fault(f"the record {name!r} is encrypted, on another disk or a folder")
    return name, header_start, Record(-1, length, crc), end


def _zip64(extra: bytes, *fields: int) -> list[int]:
    """The fields, where they are all ones replaced by those of the zip64 extra, which has just these in order."""
    values = list(fields)
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1:
            inside = position
            for number, value in enumerate(values):
                if value == _MASK32:
                    (values[number],) = struct.unpack_from("<Q", extra[: position + length], inside)
                    inside += 8
        position += length
    return values


def _checked_local(read: Reader, name: str, start: int, record: Record, directory_start: int) -> Record:
    """The record with the place of its data, once its local header agrees with the directory."""
    if start + _LOCAL.size > directory_start:
        raise _Fault(f"the record {name!r} lies outside")
    fields = _LOCAL.unpack(bytes(read(start, _LOCAL.size)))
    flags, method, crc, packed, length, name_bytes, extra_bytes = fields[2], fields[3], *fields[6:]
    if fields[0] != LOCAL_HEADER or method != 0:
        raise _Fault(f"no stored record {name!r} where the directory says")
    data_start = start + _LOCAL.size + name_bytes + extra_bytes
    if data_start + record.length_bytes > directory_start:
        raise _Fault(f"the record {name!r} of {record.length_bytes} bytes does not fit before the directory")
    if bytes(read(start + _LOCAL.size, name_bytes)).decode("utf-8", "replace") != name:
        raise _Fault(f"the record {name!r} has another name in its own header")
    is_plain = not flags & 8 and _MASK32 not in (packed, length)
    if is_plain and (packed != record.length_bytes or length != record.length_bytes or crc != record.crc):
        raise _Fault(f"the record {name!r} has another size or CRC in its own header")
    return record._replace(start_bytes=data_start)
