"""A whole state in one file of ``torch.save``.

The file is the zip archive of `reshard.formats.torch_archive` with any number of storages. ``data.pkl`` holds nested
dicts, lists and tuples; here every tensor in them gets the steps to it, joined by dots, as its key, and so does every
value that is not a tensor. Lists are entered where they hold a tensor or a dict, as DCP does it, so that the same state
has the same keys in both formats; empty containers, which DCP drops, are values.

Tensors that share a storage are chunks that share bytes: tied weights, and views with an offset and strides.

Up to torch 1.5 the file was a series of pickles, with a number of its own in front, or a tar archive; neither says
where a tensor's bytes lie without being run through to the end, and both are refused.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats import unpickle
from reshard.formats.checkpoint import Checkpoint, all_known
from reshard.formats.plain_values import MOST_LEVELS, VALUE_CLASSES, Attributes, Budget, NotPlain, entries, plain
from reshard.formats.torch_archive import (
    LOCAL_HEADER,
    TENSOR_CLASSES,
    ArchivedTensor,
    Record,
    Stored,
    locate,
    persistent_storage,
    read_directory,
    require_little_endian,
)
from reshard.formats.unpickle import missing_data
from reshard.geometry.box import is_row_major
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import RAW, IndexBuilder, Payloads
from reshard.storage.byte_ranges import SourceFiles

NAME = "torch"

HEAD_BYTES = 512
_PICKLED_MAGIC_NUMBER = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_TAR_MAGIC_AT = 257

# As many dims as torch has, and a number of elements whose bytes fit 64 bits.
_MOST_DIMS = 64
_TOO_LARGE = 1 << 58

Steps = tuple["str | int", ...]
"""The way to a leaf: text for a dict, whatever its key was, as DCP has it, and numbers for lists and tuples."""


def looks_like_archive(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a zip archive."""
    return head.startswith(LOCAL_HEADER)


def looks_old(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is one that torch before 1.6 wrote, or a bare pickle or tar file."""
    return head[2:].startswith(_PICKLED_MAGIC_NUMBER) or _is_pickle(head) or head[_TAR_MAGIC_AT:].startswith(b"ustar")


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def open_torch_file(path: Path) -> Checkpoint:
    """Opens the file: reads its directory and its pickle, no tensor.

    Raises:
        CheckpointUnsound: it is missing, empty, damaged, of an old format, big-endian, or holds no state.
        UnsafePickle: its pickle names something that a state does not need.
        StorageError: the file system failed to read it.
    """
    files = SourceFiles([path])
    try:
        records = archive_records(files, 0)
        record = records["data.pkl"]
        content = bytes(files.read(0, record.start_bytes, record.length_bytes))
        root = unpickle.read(io.BytesIO(content), _ALLOWED, path=path, persistent=persistent_storage)
        return _checkpoint(root, len(content), records, files)
    except CheckpointUnsound as error:
        error.path = error.path or str(path)
        raise
    finally:
        # Reading opens it again; nobody would close it where this raises.
        files.close()


def archive_records(files: SourceFiles, file: int) -> Mapping[str, Record]:
    """The records of a file of ``torch.save``, ``data.pkl`` among them.

    Raises:
        CheckpointUnsound: it is missing, empty, damaged, of an old format, big-endian, or another kind of file.
        StorageError: the file system failed to read it.
    """
    path = files.paths[file]

    def read(start: int, length: int) -> bytearray:
        return files.read(file, start, length)

    length_bytes = files.size_bytes(file)
    head = bytes(files.read(file, 0, min(length_bytes, HEAD_BYTES)))
    if (reason := missing_data(head)) is not None:
        raise CheckpointUnsound(reason, path=path)
    if not looks_like_archive(head):
        raise CheckpointUnsound(
            "a file of torch before 1.6, or a bare pickle" if looks_old(head) else "not a file of torch.save",
            path=path,
            expected="a zip archive",
            found=f"{length_bytes} bytes that begin with {head[:8]!r}",
            hint="where torch.load reads it, save it again: torch.save(torch.load(old, weights_only=True), new)",
        )
    records = read_directory(read, length_bytes)
    if "data.pkl" not in records:
        raise CheckpointUnsound(
            "a zip archive that torch.save did not write",
            path=path,
            expected="a record data.pkl in a top folder",
            found=", ".join(sorted(filter(None, records))[:5]) or "none",
        )
    require_little_endian(read, records, path)
    return records


def _checkpoint(root: Any, pickle_bytes: int, records: Mapping[str, Record], files: SourceFiles) -> Checkpoint:
    path = files.paths[0]
    builder = IndexBuilder(path.parent, RAW)
    file = builder.file(path.name)
    paths: dict[str, Steps] = {}
    values: dict[str, Any] = {}
    located: list[ArchivedTensor] = []
    for steps, leaf in _Leaves(path, pickle_bytes).of(root):
        key = ".".join(map(str, steps))
        if key in paths:
            raise CheckpointUnsound(
                "two entries have this key",
                path=path,
                key=key,
                found=f"{list(paths[key])} and {list(steps)}" if paths[key] != steps else "it as text and as a number",
                hint="load it with torch, rename one of them, and save it again",
            )
        paths[key] = steps
        if not isinstance(leaf, Stored):
            values[key] = leaf
            continue
        tensor = _located(leaf, records, path, key)
        located.append(tensor)
        builder.tensor(key, tensor.dtype, tensor.shape)
        builder.chunk((0,) * len(tensor.shape), tensor.shape, (file, tensor.start_bytes, _span_bytes(tensor)))
    return Checkpoint(
        path=path,
        format=NAME,
        index=builder.build(),
        manifest=None,
        paths=paths,
        files=files,
        payloads=_payloads(located),
        locate=all_known,
        values=values,
        holds_archives=True,
    )


def _located(leaf: Stored, records: Mapping[str, Record], path: Path, key: str) -> ArchivedTensor:
    try:
        if len(leaf.shape) > _MOST_DIMS or math.prod(leaf.shape) >= _TOO_LARGE:
            raise CheckpointUnsound("no tensor has this shape", found=f"{leaf.shape}"[:200])
        return locate(leaf, records)
    except CheckpointUnsound as error:
        error.path, error.key = str(path), key
        raise


def _span_bytes(tensor: ArchivedTensor) -> int:
    """From the first element to the end of the last one in memory."""
    if 0 in tensor.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return (last + 1) * ITEM_BYTES[tensor.dtype]


def _payloads(tensors: list[ArchivedTensor]) -> Payloads:
    payloads = Payloads.unknown(len(tensors))
    for row, tensor in enumerate(tensors):
        record = tensor.record
        payloads.start_bytes[row] = tensor.start_bytes
        payloads.crc[row] = record.crc if record.crc or not record.length_bytes else -1
        payloads.record_start_bytes[row] = record.start_bytes
        payloads.record_bytes[row] = record.length_bytes
        if not is_row_major(tensor.shape, tensor.strides):
            payloads.strides[row] = tensor.strides
    return payloads


class _Leaves:
    """Walks what the pickle gave, which may hold anything that its classes can hold, itself included."""

    def __init__(self, file: Path, pickle_bytes: int) -> None:
        self._file = file
        # Without repetition, no entry takes less than a byte.
        self._budget = Budget(pickle_bytes + _MOST_REPEATED_ENTRIES)
        self._is_entered: dict[int, bool] = {}

    def of(self, root: Any) -> Iterator[tuple[Steps, Any]]:
        """Every tensor and every plain value that is not entered, with the steps to it.

        Raises:
            CheckpointUnsound: something among them cannot be named or is not plain.
        """
        if not self._enters(root, 0):
            kind = "a tensor" if isinstance(root, Stored) else f"a {type(root).__name__}"
            hint = "save a dict of tensors by name"
            raise CheckpointUnsound("holds nothing that has a name", path=self._file, found=kind, hint=hint)
        yield from self._below((), root)

    def _below(self, steps: Steps, value: Any) -> Iterator[tuple[Steps, Any]]:
        try:
            self._budget.spend(len(steps))
            if isinstance(value, Stored):
                yield steps, value
                return
            if not self._enters(value, len(steps)):
                yield steps, plain(value, self._budget, len(steps))
                return
        except NotPlain as fault:
            key = ".".join(map(str, steps[:_SHOWN_STEPS]))
            raise CheckpointUnsound(str(fault), path=self._file, key=key or None) from None
        if isinstance(value, (list, tuple)):
            for number, entry in enumerate(value):
                yield from self._below((*steps, number), entry)
            return
        for key, entry in entries(value):
            yield from self._below((*steps, str(key)), entry)

    def _enters(self, value: Any, level: int) -> bool:
        """Whether the entries have keys of their own, rather than being one value."""
        if isinstance(value, (dict, Attributes)):
            return bool(keys := [key for key, _ in entries(value)]) and {type(key) for key in keys} <= _STEP_TYPES
        if type(value) not in (list, tuple):
            return False
        if level > MOST_LEVELS:
            raise CheckpointUnsound(f"nested more than {MOST_LEVELS} levels deep, or in itself", path=self._file)
        if id(value) not in self._is_entered:
            self._is_entered[id(value)] = any(
                isinstance(entry, (Stored, dict, Attributes)) or self._enters(entry, level + 1) for entry in value
            )
        return self._is_entered[id(value)]


_MOST_REPEATED_ENTRIES = 1 << 17
_SHOWN_STEPS = 6
_STEP_TYPES = {str, int, float, bool, type(None)}
_ALLOWED = {**TENSOR_CLASSES, **VALUE_CLASSES}
