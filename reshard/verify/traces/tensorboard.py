"""A loss trace as TensorBoard event files; the only module that needs the tensorboard package.

A file is a sequence of records, little-endian:

    uint64 length | uint32 checksum of the length | the record | uint32 checksum of the record

The checksum is a masked CRC-32C, and each record is an `Event`: a step and, by tag, values. Scalars are read in their
old form (`simple_value`) and in the new one (a tensor without axes); pictures, histograms and text are passed over. The
tags are the columns, beside the column `step`. Numbers are float32, unless a trainer asked for more, so a loss has 24
bits: one that was computed in more was rounded, and a trace that holds it in full differs by up to 6e-8 of the loss.

Each attempt of a run writes a file of its own into the same folder, and they are read in the order in which they were
begun. Within a file, values belong together by their step, whenever they were written: what counts samples or epochs
where others count steps meets no loss there, and is passed over. A last record that a kill cut short is left out.

The records are read here and not by the package. Its reader ends at damage as it does at the end of the file, and loads
TensorFlow where that is installed.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.verify.traces.table import Columns, Record, Table

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_STEP = "step"

# By `TensorProto.dtype`: float32, float64, int32, int64.
_CONTENTS = {1: struct.Struct("<f"), 2: struct.Struct("<d"), 3: struct.Struct("<i"), 9: struct.Struct("<q")}


@dataclass
class _Attempt:
    """The scalars of one event file: by tag, the steps and the values in the order they were written."""

    path: str
    begun_s: float = 0.0
    tags: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)


def is_event_file(head: bytes) -> bool:
    """Whether a file that begins with these bytes, 12 or more, is made of records."""
    if len(head) < _HEAD.size:
        return False
    _, checksum = _HEAD.unpack_from(head)
    return bool(_masked_crc32c(head[:8]) == checksum)


def event_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The event files directly in a folder."""
    return sorted(path for path in Path(folder).iterdir() if "tfevents" in path.name and path.is_file())


def open_event_files(path: str | os.PathLike[str], files: Sequence[str | os.PathLike[str]]) -> Table:
    """The event files of one run as a table.

    Args:
        path: what the user named, for errors.
        files: the attempts, in any order.

    Raises:
        UsageError: the tensorboard package is not installed, or a file is damaged.
    """
    attempts = sorted((_read(file) for file in files), key=lambda attempt: (attempt.begun_s, attempt.path))
    names = dict.fromkeys(name for attempt in attempts for name in attempt.tags)
    # A scalar may be called step as well; what an event says of itself is what counts.
    names.pop(_STEP, None)
    return Table(os.fspath(path), (_STEP, *names) if names else (), partial(_records, attempts))


def _records(attempts: Sequence[_Attempt], columns: Columns) -> Iterator[Record]:
    (loss,) = columns["loss"]
    others = [name for names in columns.values() for name in names if name not in (loss, _STEP)]
    for attempt in attempts:
        if loss not in attempt.tags:
            continue
        beside = {name: dict(zip(*attempt.tags[name], strict=True)) for name in others if name in attempt.tags}
        for step, value in zip(*attempt.tags[loss], strict=True):
            cells: dict[str, object] = {name: values.get(step) for name, values in beside.items()}
            cells[_STEP], cells[loss] = step, value
            yield f"{attempt.path}: step {step}", cells


def _read(path: str | os.PathLike[str]) -> _Attempt:
    event_type, decode_error = _protocol()
    attempt = _Attempt(os.fspath(path))
    for offset, record in _file_records(path):
        try:
            event = event_type.FromString(record)
        except decode_error as error:
            raise _damaged(path, offset, "a record that is not a TensorBoard event") from error
        # The first event of every file says when it was begun, more finely than the file's name.
        attempt.begun_s = attempt.begun_s or event.wall_time
        for value in event.summary.value:
            number = _scalar(value)
            if number is not None:
                if value.tag not in attempt.tags:
                    attempt.tags[value.tag] = (array("q"), array("d"))
                steps, numbers = attempt.tags[value.tag]
                steps.append(event.step)
                numbers.append(number)
    return attempt


def _protocol() -> tuple[Any, type[Exception]]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise UsageError(
            "reading TensorBoard event files needs tensorboard", hint="pip install 'reshard[tensorboard]'"
        ) from error
    return Event, DecodeError


def _scalar(value: Any) -> float | None:
    """The number that a `Summary.Value` holds, or None where it is a picture, a histogram, a text or the like."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    # The name of the plugin stands with the first value of a tag only, or nowhere.
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    tensor = value.tensor
    if tensor.tensor_shape.dim or tensor.dtype not in _CONTENTS:
        return None
    layout = _CONTENTS[tensor.dtype]
    if len(tensor.tensor_content) == layout.size:
        return float(layout.unpack(tensor.tensor_content)[0])
    numbers = [*tensor.float_val, *tensor.double_val, *tensor.int_val, *tensor.int64_val]
    return float(numbers[0]) if len(numbers) == 1 else None


def _file_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Every whole record and the offset of its head in bytes."""
    with Path(path).open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        offset = 0
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, _ = _HEAD.unpack(head)
            if not is_event_file(head):
                raise _damaged(path, offset, "the length of a record does not match its checksum")
            end = offset + _HEAD.size + length + _CHECKSUM.size
            if end > file_bytes:
                return
            record = file.read(length)
            if file.read(_CHECKSUM.size) != _CHECKSUM.pack(_masked_crc32c(record)):
                raise _damaged(path, offset, "a record does not match its checksum")
            yield offset, record
            offset = end


def _damaged(path: str | os.PathLike[str], offset: int, what: str) -> UsageError:
    return UsageError(what, path=path, key=f"byte {offset}", hint="copy the file anew from where it is whole")


def _crc_table() -> tuple[int, ...]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    # The mask of the format, which keeps the checksum of data that has checksums in it from being degenerate.
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
