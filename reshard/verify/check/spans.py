"""What a deep check reads: the byte ranges of a checkpoint that are judged as one each, in file order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.torch_archive import Record, read_directory
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import ARCHIVE, Int
from reshard.verify.check.finite import NotFinite
from reshard.verify.check.report import Fault

# Reading on through a gap costs less than another call.
_GAP_BYTES = 1 << 16
_BATCH = 8192


@dataclass
class Content:
    """What the pass over all bytes found.

    Attributes:
        not_finite: tensor number -> its elements that are NaN or infinite, where there are any.
        pieces: archives, and ranges of elements outside of any, that were looked at.
        without_checksums: how many of them have no CRC-32 recorded.
    """

    faults: list[Fault] = field(default_factory=list)
    not_finite: dict[int, NotFinite] = field(default_factory=dict)
    pieces: int = 0
    without_checksums: int = 0
    verified_records: int = 0


class Part(NamedTuple):
    """Bytes that are judged together: an archive, or one record or range of elements.

    Attributes:
        is_archive: whether it is a whole archive, whose directory says what is in it.
        rows: chunks whose elements lie in it.
        crc: of all of it, where it is a record on its own; None where nothing is recorded.
    """

    file: int
    start_bytes: int
    length_bytes: int
    key: str
    is_archive: bool
    rows: tuple[int, ...] = ()
    crc: int | None = None

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.length_bytes


class Parts:
    """All parts of a checkpoint, in file order."""

    def __init__(self, checkpoint: Checkpoint, rows: Int, replicas: Int, objects: list[str]) -> None:
        self._checkpoint = checkpoint
        index, payloads = checkpoint.index, checkpoint.payloads
        elements = index.sizes[rows].prod(axis=1)
        widths = np.array([ITEM_BYTES.get(dtype, 0) for dtype in index.dtypes], dtype=np.int64)
        in_archive = payloads.record_start_bytes[rows] >= 0
        start = np.where(in_archive, payloads.record_start_bytes[rows], payloads.start_bytes[rows])
        length = np.where(in_archive, payloads.record_bytes[rows], elements * widths[index.owner[rows]])
        # A chunk that is a container of its own begins before its record; others lie within one that several share.
        self._is_archive = in_archive & (payloads.record_start_bytes[rows] > index.start_bytes[rows])
        start = np.where(self._is_archive, index.start_bytes[rows], start)
        length = np.where(self._is_archive, index.length_bytes[rows], length)
        self._rows = rows
        self._objects = [(key, index.objects[key]) for key in objects] if index.packing == ARCHIVE else []
        # Elsewhere a replica has no checksum to compare it with.
        self._replicas = replicas if index.packing == ARCHIVE else replicas[:0]
        object_places = np.array(
            [(index.file_number[place.file], place.start_bytes, place.length_bytes) for _, place in self._objects],
            dtype=np.int64,
        ).reshape(-1, 3)
        replica_places = np.column_stack(
            [self._replicas[:, 2], self._replicas[:, 3], index.length_bytes[self._replicas[:, 1]]]
        )
        places = np.concatenate([np.column_stack([index.file[rows], start, length]), object_places, replica_places])
        self._file, self._start, self._length = places.T
        self._order = np.lexsort((self._start, self._file))
        is_other = np.ones(len(places), dtype=bool)
        is_other[1:] = (np.diff(places[self._order], axis=0) != 0).any(axis=1)
        self.total_bytes = int(self._length[self._order][is_other].sum())

    def spans(self, content: Content, most_bytes: int) -> Iterator[list[Part]]:
        """Parts of a file that lie close together, up to so many bytes in all; or one large part."""
        parts = self._records(content) if self._checkpoint.holds_archives else self._parts()
        span: list[Part] = []
        for part in parts:
            if span and (
                part.file != span[0].file
                or part.start_bytes - span[-1].end_bytes > _GAP_BYTES
                or part.end_bytes - span[0].start_bytes > most_bytes
            ):
                yield span
                span = []
            span.append(part)
        if span:
            yield span

    def _parts(self) -> Iterator[Part]:
        last: Part | None = None
        for begin in range(0, len(self._order), _BATCH):
            order = self._order[begin : begin + _BATCH]
            columns = (order, self._file[order], self._start[order], self._length[order])
            for number, *place in zip(*(column.tolist() for column in columns), strict=True):
                part = self._part(number, *place)
                if last is not None and last[:3] == part[:3]:
                    # Ranks without rows of a tensor all refer to one chunk.
                    part = part._replace(rows=last.rows + part.rows)
                elif last is not None:
                    yield last
                last = part
        if last is not None:
            yield last

    def _part(self, number: int, file: int, start: int, length: int) -> Part:
        names, owner = self._checkpoint.index.names, self._checkpoint.index.owner
        if number < len(self._rows):
            row = int(self._rows[number])
            is_archive = bool(self._is_archive[number])
            stated = int(self._checkpoint.payloads.crc[row])
            crc = stated if stated >= 0 and not is_archive else None
            return Part(file, start, length, names[int(owner[row])], is_archive, (row,), crc)
        number -= len(self._rows)
        if number < len(self._objects):
            return Part(file, start, length, self._objects[number][0], True)
        tensor = int(self._replicas[number - len(self._objects), 0])
        return Part(file, start, length, names[tensor], True)

    def _records(self, content: Content) -> Iterator[Part]:
        """The records of files that are one archive each; tensors may share a record."""
        checkpoint = self._checkpoint
        rows_at: dict[tuple[int, int], list[int]] = {}
        for row in self._rows.tolist():
            place = int(checkpoint.index.file[row]), int(checkpoint.payloads.record_start_bytes[row])
            rows_at.setdefault(place, []).append(row)
        for file, path in enumerate(checkpoint.files.paths):
            if file in checkpoint.files.in_memory:
                continue
            try:
                records = _directory(checkpoint, file)
            except ReshardError as error:
                content.faults.append(Fault.of(error, path))
                continue
            is_checked = has_checksums(records)
            content.pieces += 1
            content.without_checksums += not is_checked
            for name, record in sorted(records.items(), key=lambda item: item[1].start_bytes):
                rows = rows_at.get((file, record.start_bytes), []) if record.length_bytes else []
                keys = [checkpoint.index.names[int(checkpoint.index.owner[row])] for row in rows[:1]]
                crc = record.crc if is_checked else None
                yield Part(file, record.start_bytes, record.length_bytes, (keys or [name])[0], False, tuple(rows), crc)


def _directory(checkpoint: Checkpoint, file: int) -> dict[str, Record]:
    return read_directory(
        lambda start, length: checkpoint.files.read(file, start, length), checkpoint.files.size_bytes(file)
    )


def has_checksums(records: dict[str, Record]) -> bool:
    return any(record.crc for record in records.values())
