"""The deep part of a check: reads every byte once and judges it, in bounded memory.

Each archive's records are compared with the CRC-32s in its directory, and in the same pass the elements of floating
tensors are searched for NaN and infinities. Archives that lie close together are read at once; a large one goes through
a buffer block by block. Several threads take the spans of bytes in file order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.torch_archive import read_directory
from reshard.index.dtypes import FLOATS
from reshard.index.index import Int
from reshard.storage.crc32 import crc32
from reshard.verify.check.finite import ElementScan, NotFinite, is_finite
from reshard.verify.check.layouts import Layouts
from reshard.verify.check.report import Fault
from reshard.verify.check.spans import Content, Part, Parts, has_checksums

BLOCK_BYTES = 4 << 20
MOST_THREADS = 4
# An archive up to this length is taken out of the buffer as a whole.
_SMALL_BYTES = 1 << 16

Advance = Callable[[int], None]
Progress = Callable[[int], AbstractContextManager[Advance | None]]
"""Given how many bytes will be read; what it enters is called with each count of bytes that were."""


def read_content(
    checkpoint: Checkpoint, rows: Int, replicas: Int, objects: list[str], progress: Progress | None = None
) -> Content:
    """Reads and judges the bytes of chunks, their replicas and objects.

    Args:
        rows: chunk rows that are located, in files that are long enough.
        replicas: rows of ``index.replicas`` whose bytes are there.
        objects: keys of objects whose bytes are there.
    """
    parts = Parts(checkpoint, rows, replicas, objects)
    with nullcontext() if progress is None else progress(parts.total_bytes) as advance:
        reading = _Reading(checkpoint, advance)
        _in_threads(parts.spans(reading.content, BLOCK_BYTES), reading)
    reading.content.faults.sort(key=lambda fault: (fault.file or "", fault.key or ""))
    return reading.content


def _in_threads(spans: Iterator[list[Part]], reading: _Reading) -> None:
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        worker = _Worker(memoryview(bytearray(BLOCK_BYTES)), Layouts())
        while not stopped.is_set():
            with lock:
                span = next(spans, None)
            if span is None:
                return
            reading.take(span, worker)

    threads = min(MOST_THREADS, (os.cpu_count() or 1) + 1)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for running in [pool.submit(work) for _ in range(threads)]:
                running.result()
        finally:
            stopped.set()


class _Worker(NamedTuple):
    """What a thread has for itself."""

    buffer: memoryview
    layouts: Layouts


class _Reading:
    """Judges parts, from several threads."""

    def __init__(self, checkpoint: Checkpoint, advance: Advance | None) -> None:
        self.content = Content()
        self._checkpoint = checkpoint
        self._advance = advance
        self._lock = threading.Lock()

    def take(self, span: list[Part], worker: _Worker) -> None:
        """Reads and judges the parts of a span."""
        first, length = span[0], span[-1].end_bytes - span[0].start_bytes
        held: memoryview | None = None
        if length <= len(worker.buffer):
            # Where the span cannot be read as one, its parts are tried on their own, and the one at fault is named.
            with suppress(ReshardError):
                self._checkpoint.files.read_into(first.file, first.start_bytes, [worker.buffer[:length]])
                held = worker.buffer[:length]
        for part in span:
            read = _Reader(self._checkpoint, part.file, held, first.start_bytes, worker.buffer)
            try:
                faults = self._judge(part, read, worker.layouts)
            except ReshardError as error:
                faults = [Fault.of(error, self._checkpoint.files.paths[part.file], part.key)]
            with self._lock:
                self.content.faults += faults
                if self._advance is not None:
                    self._advance(part.length_bytes)

    def _judge(self, part: Part, read: _Reader, layouts: Layouts) -> list[Fault]:
        if not part.is_archive:
            if not self._checkpoint.holds_archives:
                with self._lock:
                    self.content.pieces += 1
                    self.content.without_checksums += part.crc is None
            fault = self._judge_range(part, part.start_bytes, part.length_bytes, part.crc, part.rows, read, part.key)
            return [] if fault is None else [fault]
        small = bytes(read.at(part.start_bytes, part.length_bytes)) if part.length_bytes <= _SMALL_BYTES else None
        if small is not None:
            records = layouts.records(small)
        else:
            records = read_directory(
                lambda start, length: bytes(read.at(part.start_bytes + start, length)), part.length_bytes
            )
        is_checked = has_checksums(records)
        starts = self._checkpoint.payloads.record_start_bytes
        faults, verified = [], 0
        for name, record in records.items():
            start = part.start_bytes + record.start_bytes
            rows = tuple(row for row in part.rows if starts[row] == start) if record.length_bytes else ()
            crc = record.crc if is_checked else None
            if small is not None and self._is_sound(
                small[record.start_bytes : record.start_bytes + record.length_bytes], crc, rows
            ):
                verified += crc is not None
                continue
            fault = self._judge_range(part, start, record.length_bytes, crc, rows, read, name)
            if fault is not None:
                faults.append(fault)
        with self._lock:
            self.content.pieces += 1
            self.content.without_checksums += not is_checked
            self.content.verified_records += verified
        return faults

    def _is_sound(self, record: bytes, crc: int | None, rows: tuple[int, ...]) -> bool:
        """Whether there is nothing to say of a record, which is nearly always so."""
        if crc is not None and crc32(record) != crc:
            return False
        index = self._checkpoint.index
        return all(is_finite(record, index.dtypes[int(index.owner[row])]) for row in rows)

    def _judge_range(
        self,
        part: Part,
        start: int,
        length: int,
        crc: int | None,
        rows: tuple[int, ...],
        read: _Reader,
        name: str,
    ) -> Fault | None:
        index = self._checkpoint.index
        scans = [ElementScan(self._checkpoint, row) for row in rows if index.dtypes[int(index.owner[row])] in FLOATS]
        found = 0
        for position, block in read.blocks(start, length):
            if crc is not None:
                found = crc32(block, found)
            for scan in scans:
                scan.feed(position, block)
        if crc is not None and found != crc:
            return Fault.at(
                self._checkpoint.files.paths[part.file],
                f"damaged: the checksum of {name} is not the one that was saved",
                key=part.key,
                expected=f"{crc:08x}",
                found=f"{found:08x}",
            )
        found_in = [(int(index.owner[scan.row]), scan.result()) for scan in scans]
        with self._lock:
            self.content.verified_records += crc is not None
            for number, not_finite in found_in:
                if not_finite:
                    self.content.not_finite.setdefault(number, NotFinite()).add(not_finite)
        return None


class _Reader:
    """Bytes of a file by position, out of memory where they are held."""

    def __init__(
        self, checkpoint: Checkpoint, file: int, held: memoryview | None, held_start: int, buffer: memoryview
    ) -> None:
        self._files = checkpoint.files
        self._file = file
        self._held = held
        self._held_start = held_start
        self._buffer = buffer

    def at(self, start: int, length: int) -> memoryview | bytearray:
        if self._held is not None:
            return self._held[start - self._held_start : start - self._held_start + length]
        return self._files.read(self._file, start, length)

    def blocks(self, start: int, length: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes [start, start + length) and the position of each block of them."""
        if self._held is not None:
            yield start, memoryview(self.at(start, length))
            return
        for position in range(start, start + length, len(self._buffer)):
            block = self._buffer[: min(len(self._buffer), start + length - position)]
            self._files.read_into(self._file, position, [block])
            yield position, block
