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

from reshard.index.index import Int


class Frames(Protocol):
    """The bytes that a format puts around a payload."""

    def head(self, record: int) -> bytes:
        """What lies between the record's start and its payload."""

    def tail(self, record: int, crc: int) -> bytes:
        """What lies between the payload and the record's end."""


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


def first_records(file: Int, files: int) -> Int:
    """Where the records of each file begin, for records sorted by file."""
    return np.searchsorted(file, np.arange(files + 1)).astype(np.int64)
