"""Reads pieces of a checkpoint into memory that is there already: the engine of every load.

Bytes that lie together, both in the file and in memory, are read straight into place: neighbours in one call, files in
their order, several at once. What has to be rearranged, converted or moved to a device comes in bands. The CRC-32 of
what is read is computed while it is in cache; a stored record that was read as a whole is compared with its checksum.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from reshard.engine.bands import BAND_BYTES, band_at
from reshard.engine.crc import Ledger, crc_of, require_crc
from reshard.engine.spans import first_element, lie_together
from reshard.formats.checkpoint import Checkpoint
from reshard.geometry.box import Box
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Int
from reshard.storage.byte_ranges import Read
from reshard.storage.crc32 import crc32

# What one thread reads at a time: enough for a disk, little enough to share out evenly.
_UNIT_BYTES = 8 << 20
_MOST_THREADS = 8

Verify = Literal["never", "whole", "always"]


class Sink(Protocol):
    """Memory that cannot be read into: on a device, or of another dtype."""

    def put(self, box: Box, elements: NDArray[np.generic]) -> None:
        """Takes the elements of a box, counted from the start of the piece: opaque, in row-major order."""


Target = NDArray[np.generic] | Sink


@dataclass(frozen=True, eq=False)
class Pieces:
    """Boxes of chunks, and where their elements belong.

    Attributes:
        rows: (pieces,) of the index.
        offsets, sizes: (pieces, dims), counted from the chunk's start, padded as in the index.
        targets: arrays of opaque elements with the piece's shape and any strides, or sinks.
    """

    rows: Int
    offsets: Int
    sizes: Int
    targets: Sequence[Target]


def fill(
    source: Checkpoint, pieces: Pieces, *, verify: Verify = "whole", processes: int = 1
) -> dict[int, PartialRecord]:
    """Reads all pieces.

    Args:
        verify: which stored records are compared with their checksums: those that the pieces have the whole of, all
            that the pieces touch (the rest of these is read as well), or none.
        processes: how many do so on this machine at once.

    Returns:
        By chunk row, the records of which only a part was read, to be put together with what others have read of them;
        none with ``never`` and with ``always``.

    Raises:
        CheckpointUnsound: a file is missing, cut short or damaged. The targets are undefined then.
        StorageError: the file system refused.
    """
    if not len(pieces.rows):
        return {}
    return _Filling(source, pieces, verify).run(max(1, min(_MOST_THREADS, 2 * (os.cpu_count() or 1) // processes)))


class PartialRecord(NamedTuple):
    """What was read of a stored record.

    Attributes:
        crc: of the whole record, as its file states it.
        length_bytes: of the whole record.
        parts: start, length and CRC-32 of each part.
    """

    crc: int
    length_bytes: int
    parts: list[tuple[int, int, int]]


class _Part(NamedTuple):
    """A byte range to be read into place; without a view, into nowhere, for the sake of its checksum."""

    file: int
    place: int
    length: int
    view: memoryview | None
    record: int


class _Filling:
    def __init__(self, source: Checkpoint, pieces: Pieces, verify: Verify) -> None:
        self._source = source
        self._pieces = pieces
        self._ledger = Ledger()
        self._lock = threading.Lock()
        index, payloads, rows = source.index, source.payloads, pieces.rows
        source.locate(np.unique(rows))
        widths = np.array([ITEM_BYTES.get(dtype, 0) for dtype in index.dtypes], dtype=np.int64)[index.owner[rows]]
        self._place = payloads.start_bytes[rows] + first_element(pieces.offsets, index.sizes[rows]) * widths
        self._length = pieces.sizes.prod(axis=1) * widths
        self._is_dense = lie_together(pieces.sizes, index.sizes[rows])
        if payloads.strides:
            self._is_dense &= ~np.isin(rows, np.array(list(payloads.strides), dtype=np.int64))
        self._is_complete = verify == "always"
        self._unverified: set[int] = set()
        self._partial: set[int] = set()
        if verify != "never":
            unique, inverse = np.unique(self._records(rows), return_inverse=True)
            self._unverified = set(unique[payloads.crc[unique] >= 0].tolist())
            if verify == "whole":
                found = np.bincount(inverse, self._length).astype(np.int64)
                self._partial = self._unverified.intersection(unique[found != payloads.record_bytes[unique]].tolist())

    def _records(self, rows: Int) -> Int:
        """The chunk that stands for the record of each."""
        first = self._source.first_in_record
        return rows if first is None else first[rows]

    def run(self, threads: int) -> dict[int, PartialRecord]:
        """Reads everything, and verifies what is to be verified."""
        direct, banded = self._sorted_out()
        if self._is_complete:
            direct += self._rests(direct, set(self._records(self._pieces.rows[banded]).tolist()))
        tasks: list[Callable[[], None]] = [self._reader(unit) for unit in _units(direct)]
        tasks += [task for piece in banded for task in self._banders(piece)]
        _run_all(tasks, threads)
        payloads = self._source.payloads
        for row in sorted(self._unverified - self._partial):
            file = int(self._source.index.file[row])
            start, length = int(payloads.record_start_bytes[row]), int(payloads.record_bytes[row])
            require_crc(self._source, row, crc_of(self._source.files, file, start, length))
        return {
            row: PartialRecord(int(payloads.crc[row]), int(payloads.record_bytes[row]), parts)
            for row, parts in self._ledger.take().items()
            if row in self._partial
        }

    def _sorted_out(self) -> tuple[list[_Part], list[int]]:
        """What can be read into place, and the numbers of the pieces that come in bands."""
        payloads, pieces = self._source.payloads, self._pieces
        files = self._source.index.file[pieces.rows].tolist()
        columns = (pieces.rows, self._records(pieces.rows), self._place, self._length, self._is_dense)
        direct: list[_Part] = []
        banded: list[int] = []
        for piece, (row, record, place, length, is_dense) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            target = pieces.targets[piece]
            if not length:
                continue
            if not is_dense or not isinstance(target, np.ndarray) or not target.flags.c_contiguous:
                banded.append(piece)
                continue
            view = target.reshape(-1).view(np.uint8).data
            if (content := payloads.contents.get(row)) is not None:
                inside = place - int(payloads.record_start_bytes[row])
                view[:] = content[inside : inside + length]
                self._check(record, place, view)
            else:
                direct.append(_Part(files[piece], place, length, view, record))
        return direct, banded

    def _rests(self, direct: Iterable[_Part], banded: set[int]) -> list[_Part]:
        """What else there is of the records that are to be verified."""
        payloads = self._source.payloads
        taken: dict[int, list[tuple[int, int]]] = {}
        for part in direct:
            taken.setdefault(part.record, []).append((part.place, part.place + part.length))
        rests = []
        for row in (self._unverified & taken.keys()) - banded:
            position = int(payloads.record_start_bytes[row])
            end = position + int(payloads.record_bytes[row])
            for start, stop in [*sorted(taken[row]), (end, end)]:
                if position < start:
                    rests.append(_Part(int(self._source.index.file[row]), position, start - position, None, row))
                position = max(position, stop)
        return rests

    def _reader(self, unit: Sequence[_Part]) -> Callable[[], None]:
        def read() -> None:
            views = [memoryview(bytearray(part.length)) if part.view is None else part.view for part in unit]
            parts = list(zip(unit, views, strict=True))
            self._source.files.read_all(Read(part.file, part.place, view) for part, view in parts)
            for part, view in parts:
                self._check(part.record, part.place, view)

        return read

    def _banders(self, piece: int) -> Iterator[Callable[[], None]]:
        """The tasks that read a piece in bands, some bands each."""
        index, pieces = self._source.index, self._pieces
        row, target = int(pieces.rows[piece]), pieces.targets[piece]
        dtype = index.dtypes[int(index.owner[row])]
        dims = len(index.shapes[int(index.owner[row])])
        whole = Box(tuple(pieces.offsets[piece, :dims].tolist()), tuple(pieces.sizes[piece, :dims].tolist()))
        # Bands of a transposed chunk would each read all of it.
        most_bytes = BAND_BYTES if row not in self._source.payloads.strides else _UNIT_BYTES
        most, at_once = most_bytes // ITEM_BYTES[dtype], _UNIT_BYTES // ITEM_BYTES[dtype]

        record = int(self._records(pieces.rows[piece : piece + 1])[0])

        def observe(place: int, content: memoryview) -> None:
            self._check(record, place, content)

        def read(bands: Sequence[Box]) -> None:
            for band in bands:
                place = Box(tuple(a + b for a, b in zip(whole.offsets, band.offsets, strict=True)), band.sizes)
                elements = self._source.read_chunk(row, place, observe)
                if isinstance(target, np.ndarray):
                    target[tuple(slice(a, b) for a, b in zip(band.offsets, band.ends, strict=True))] = elements
                else:
                    target.put(band, elements)

        bands: list[Box] = []
        begin = done = 0
        while done < whole.elements:
            bands.append(band_at(whole.sizes, done, most)[1])
            done += bands[-1].elements
            if done - begin >= at_once or done == whole.elements:
                yield functools.partial(read, bands)
                bands, begin = [], done

    def _check(self, record: int, place: int, content: memoryview) -> None:
        """Adds bytes that were read, from a place in the file on, to the checksum of their record."""
        if record not in self._unverified:
            return
        payloads = self._source.payloads
        crc, length, whole = crc32(content), len(content), int(payloads.record_bytes[record])
        found: int | None = crc
        if length != whole:
            with self._lock:
                found = self._ledger.add(record, place - int(payloads.record_start_bytes[record]), length, crc, whole)
        if found is not None:
            require_crc(self._source, record, found)
            self._unverified.discard(record)


def _units(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """What is read at a time: neighbours of a file, none longer than a unit."""
    unit: list[_Part] = []
    unit_bytes = 0
    for part in sorted(parts, key=lambda part: part[:2]):
        for start in range(0, part.length, _UNIT_BYTES):
            length = min(_UNIT_BYTES, part.length - start)
            view = part.view[start : start + length] if part.view is not None else None
            if unit and (unit[0].file != part.file or unit_bytes + length > _UNIT_BYTES):
                yield unit
                unit, unit_bytes = [], 0
            unit.append(_Part(part.file, part.place + start, length, view, part.record))
            unit_bytes += length
    if unit:
        yield unit


def _run_all(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Runs tasks in their order, several at a time; after a failure, none that has not begun.

    Raises:
        ReshardError: the first failure.
    """
    waiting = iter(tasks)
    turn = threading.Lock()
    failed = threading.Event()

    def work() -> None:
        while not failed.is_set():
            with turn:
                task = next(waiting, None)
            if task is None:
                return
            try:
                task()
            except BaseException:
                failed.set()
                raise

    if min(threads, len(tasks)) <= 1:
        work()
        return
    with ThreadPoolExecutor(min(threads, len(tasks)), thread_name_prefix="reshard-fill") as pool:
        futures = [pool.submit(work) for _ in range(min(threads, len(tasks)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            failed.set()
            raise
    for future in futures:
        future.result()
