"""Files to be written, laid out before a byte of them is: what an engine needs to know of a format.

A file is a sequence of records. A record is a payload, perhaps with bytes of the format before and behind it; between
records there may be zeros. Every place and length is known beforehand, so that any number of threads and processes can
write any part of any file. Only the bytes behind a payload may depend on it, by its CRC-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Index, Int, Place
from reshard.plan import Layout


class Frames(Protocol):
    """The bytes that a format puts around a payload."""

    def head(self, record: int) -> bytes:
        """What lies between the record's start and its payload."""

    def tail(self, record: int, crc: int) -> bytes:
        """What lies between the payload and the record's end."""

    def closing(self, crcs: Int) -> list[tuple[int, int, bytes]]:
        """What depends on the CRC-32 of all payloads: file, position, and bytes to replace those that were written."""


@dataclass(frozen=True, eq=False)
class Output:
    """Records, as columns, sorted by file and start.

    Attributes:
        names: of the files, relative to the folder that is written.
        length_bytes: of each file.
        first: (files + 1,) the records of file f are first[f] to first[f + 1].
        file, start, payload_start, payload_bytes, end: of each record, bytes in its file.
        box: row of the layout whose elements the payload is; -1 for a copy of stored bytes.
        dtypes: of each tensor of the source, as its elements are written.
        copies: record -> (file of the source, start) of the stored bytes that it copies.
        frames: gives the bytes around payloads.
    """

    names: Sequence[str]
    length_bytes: Int
    first: Int
    file: Int
    start: Int
    payload_start: Int
    payload_bytes: Int
    end: Int
    box: Int
    dtypes: Sequence[str]
    frames: Frames
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return int(self.length_bytes.sum())


class Files(Protocol):
    """Laid out files of a format, and where the objects among them will lie."""

    @property
    def output(self) -> Output: ...
    @property
    def objects(self) -> dict[str, Place]: ...


def whole_boxes(source: Index, tensors: Int, files: Int, dtypes: Sequence[str]) -> tuple[Layout, Int, Int]:
    """Tensors that are not cut, for formats without shards.

    Args:
        tensors: numbers in the index, in the order of the records.
        files: the file of each.

    Returns:
        The layout; of each record, its row in that, and its bytes.
    """
    # Layouts are sorted by tensor.
    order = np.argsort(tensors, kind="stable")
    row = np.empty(len(tensors), dtype=np.int64)
    row[order] = np.arange(len(tensors))
    chosen = tensors[order]
    sizes = source.padded_shapes[chosen]
    layout = Layout(chosen, np.zeros_like(sizes), sizes, files[order])
    widths = np.array([ITEM_BYTES.get(dtype, 0) for dtype in dtypes], dtype=np.int64)
    return layout, row, source.padded_shapes[tensors].prod(axis=1) * widths[tensors]


def first_records(file: Int, files: int) -> Int:
    """Where the records of each file begin, for records sorted by file."""
    return np.searchsorted(file, np.arange(files + 1)).astype(np.int64)
