"""Lays out one file of ``torch.save``: a dict of tensors and plain values by key, each tensor with its own storage.

The archive is the one that `reshard.formats.torch_archive` reads. Its directory states the CRC-32 of every record, so
that it can be written only when all of them are.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from reshard.formats.archive_parts import ALIGNMENT, tensor_instructions, text_instruction
from reshard.formats.output import Output, whole_boxes
from reshard.formats.zip_parts import ZIP64_BYTES, central_header, descriptor, end_of_directory, local_header
from reshard.index.index import Index, Int, Place
from reshard.plan import Layout
from reshard.storage.crc32 import crc32

FILE_NAME = "pytorch_model.bin"
_WITH_DESCRIPTOR = 8


@dataclass(frozen=True, eq=False)
class TorchFile:
    """A file to be written; as `reshard.formats.safetensors_output.SafetensorsFiles`."""

    output: Output
    layout: Layout
    described: dict[str, bytes]
    objects: dict[str, Place]


class _Entry(NamedTuple):
    """A record of the directory; the CRC of those that the engine writes is not known yet."""

    name: str
    position: int
    length_bytes: int
    crc: int | None


@dataclass(frozen=True, eq=False)
class _Records:
    """Frames of one archive with many storages."""

    heads: list[bytes]
    entries: list[_Entry]
    directory_start: int
    directory_bytes: int
    payload_bytes: Int

    def head(self, record: int) -> bytes:
        return self.heads[record]

    def tail(self, record: int, crc: int) -> bytes:
        behind = descriptor(crc, int(self.payload_bytes[record]))
        return behind + bytes(self.directory_bytes) if record == len(self.heads) - 1 else behind

    def closing(self, crcs: Int) -> list[tuple[int, int, bytes]]:
        return [(0, self.directory_start, _directory(self.entries, crcs.tolist(), self.directory_start))]


def lay_out_torch(
    source: Index,
    tensors: Int,
    names: Mapping[int, str],
    dtypes: Sequence[str],
    values: Mapping[str, Any],
    tied: Mapping[str, int] | None = None,
) -> TorchFile:
    """Places tensors and values in a file.

    Args:
        source: the index that the tensors are of.
        tensors: their numbers.
        names: of each, as it is to be written.
        dtypes: of every tensor of ``source`` as it is to be written.
        values: plain values by key, written into the pickle.
        tied: further names of tensors, which share their storage.
    """
    layout, box, payload_bytes = whole_boxes(source, tensors, np.zeros(len(tensors), dtype=np.int64), dtypes)
    heads: list[bytes] = []
    entries: list[_Entry] = []
    payload_start: list[int] = []
    small = {
        "data.pkl": _pickle(source, tensors, names, dtypes, values, tied or {}),
        "byteorder": b"little",
        "version": b"3\n",
    }
    leading = b""
    for name, content in small.items():
        crc = crc32(content)
        entries.append(_Entry(name, len(leading), len(content), crc))
        leading += local_header(name, crc, len(content), 0, b"") + content
    position = 0
    for number, length in enumerate(payload_bytes.tolist()):
        name = f"data/{number}"
        entries.append(_Entry(name, position + len(leading), length, None))
        heads.append(leading + _aligned_header(name, length, position + len(leading)))
        leading = b""
        payload_start.append(position + len(heads[-1]))
        position = payload_start[-1] + length + len(descriptor(0, length))
    directory_bytes = len(_directory(entries, [0] * len(heads), position))
    ends = [*(start - len(head) for start, head in zip(payload_start[1:], heads[1:], strict=True))]
    ends.append(position + directory_bytes)
    starts = [0, *ends[:-1]]
    output = Output(
        names=[FILE_NAME],
        length_bytes=np.array([ends[-1]], dtype=np.int64),
        first=np.array([0, len(heads)], dtype=np.int64),
        file=np.zeros(len(heads), dtype=np.int64),
        start=np.array(starts, dtype=np.int64),
        payload_start=np.array(payload_start, dtype=np.int64),
        payload_bytes=payload_bytes,
        end=np.array(ends, dtype=np.int64),
        box=box,
        dtypes=dtypes,
        frames=_Records(heads, entries, position, directory_bytes, payload_bytes),
    )
    return TorchFile(output, layout, {}, {})


def _pickle(
    source: Index,
    tensors: Int,
    names: Mapping[int, str],
    dtypes: Sequence[str],
    values: Mapping[str, Any],
    tied: Mapping[str, int],
) -> bytes:
    parts = [b"\x80\x02}("]
    storage = {tensor: f"{number}" for number, tensor in enumerate(tensors.tolist())}
    for name, tensor in [*((names[tensor], tensor) for tensor in storage), *tied.items()]:
        parts += text_instruction(name), tensor_instructions(dtypes[tensor], source.shapes[tensor], storage[tensor])
    for key, value in values.items():
        # Without the protocol before it and the STOP behind; what it memoises, only it refers to.
        parts += text_instruction(key), pickle.dumps(value, protocol=2)[2:-1]
    return b"".join([*parts, b"u."])


def _aligned_header(name: str, length_bytes: int, position: int) -> bytes:
    zip64 = struct.pack("<HHQQ", 1, 16, 0, 0) if length_bytes >= ZIP64_BYTES else b""
    bare = position + len(local_header(name, 0, 0, _WITH_DESCRIPTOR, zip64)) + 4
    padding = -bare % ALIGNMENT
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return local_header(name, 0, 0, _WITH_DESCRIPTOR, extra)


def _directory(entries: Sequence[_Entry], crcs: Sequence[int], start: int) -> bytes:
    known = iter(crcs)
    content = b"".join(
        central_header(
            entry.name,
            entry.crc if entry.crc is not None else next(known),
            entry.length_bytes,
            entry.position,
            0 if entry.crc is not None else _WITH_DESCRIPTOR,
        )
        for entry in entries
    )
    is_large = start >= ZIP64_BYTES or len(entries) >= 0xFFFF
    return content + end_of_directory(len(entries), len(content), start, is_large)
