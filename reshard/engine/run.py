"""Runs a job: cuts its files into segments, writes them in threads within a memory budget, and puts them together.

A segment that is done and durable is handed to the caller, who may record it; a later run that is given what was
recorded writes only the rest. Several processes may each write some of the segments of one folder; one of them then
calls `finish` with what all of them left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.engine.blocks import PAGE_BYTES, BlockFile, aligned_buffer
from reshard.engine.crc import Ledger, combined, crc_around, require_crc
from reshard.engine.segment import Cancelled, Outcome, Parts, Segment, SegmentWriter
from reshard.engine.spans import Job, rows_of
from reshard.errors import ReshardError, UsageError
from reshard.index.index import Int
from reshard.storage.durable import fsync_tree

SEGMENT_BYTES = 64 << 20
BLOCK_BYTES = 8 << 20
# What a crash can cost: a resumed run writes again what was written since.
SETTLE_S = 3.0
# Each keeps its file open.
_MOST_UNSETTLED = 16
LEAST_MEMORY_BYTES = 4 << 20
# What a thread needs beside its block: a band and its rearranged copy.
_SCRATCH_BYTES = 4 << 20
_SMALL_CHUNK_BYTES = 1 << 14


@dataclass(frozen=True)
class Budget:
    """How many threads, and how large a block each, fit a memory budget."""

    threads: int
    block_bytes: int

    @classmethod
    def of(cls, memory_bytes: int, processes: int = 1) -> Budget:
        """Divides ``memory_bytes``; more threads than cores, for some always wait for a disk.

        Raises:
            UsageError: less memory than `LEAST_MEMORY_BYTES`.
        """
        if memory_bytes < LEAST_MEMORY_BYTES:
            least = f"at least {LEAST_MEMORY_BYTES >> 20}M"
            raise UsageError("too little memory to copy with", key="--memory", expected=least, found=memory_bytes)
        wanted = max(2, min(16, 2 * (os.cpu_count() or 1) // processes))
        threads = max(1, min(wanted, memory_bytes // (BLOCK_BYTES + _SCRATCH_BYTES)))
        room = memory_bytes // threads - min(_SCRATCH_BYTES, memory_bytes // threads // 2)
        return cls(threads, min(BLOCK_BYTES, room // PAGE_BYTES * PAGE_BYTES))


def segments_of(job: Job) -> list[Segment]:
    """The segments of all files, in order: always the same for the same job."""
    segments = []
    for file, length in enumerate(job.output.length_bytes.tolist()):
        for start in range(0, length, SEGMENT_BYTES):
            segments.append(Segment(file, start, min(start + SEGMENT_BYTES, length)))
    return segments


def create_files(job: Job, folder: Path) -> None:
    """Creates the files, durably: a segment that is noted as done must not be lost with the name of its file.

    Raises:
        StorageError: the file system refused.
    """
    for file in range(len(job.output.names)):
        BlockFile(folder / job.output.names[file], int(job.output.length_bytes[file]), create=True).close()
    fsync_tree(folder)


def write_segments(
    job: Job,
    folder: Path,
    segments: Sequence[Segment],
    budget: Budget,
    done: Callable[[Sequence[tuple[Segment, Outcome]]], None],
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes segments into the files of a folder, which exists.

    Args:
        done: told of segments that are durable, every few seconds and at the end, by any thread but one at a time.
        progress: told of bytes written, by any thread.

    Raises:
        ReshardError: the first failure of any thread; the others have stopped by then.
    """
    _locate_small_chunks(job, segments)
    cancelled = threading.Event()
    turn = threading.Lock()
    waiting = list(reversed(segments))
    written = _Written(done)

    def work() -> None:
        buffer = aligned_buffer(budget.block_bytes)
        while not cancelled.is_set():
            with turn:
                if not waiting:
                    return
                segment = waiting.pop()
            target = _open(job, folder, segment.file)
            try:
                outcome = SegmentWriter(job, segment, target, buffer, progress, cancelled.is_set).run()
            except BaseException as error:
                target.close()
                if isinstance(error, Cancelled):
                    return
                raise
            written.add(segment, outcome, target)

    with ThreadPoolExecutor(budget.threads, thread_name_prefix="reshard-copy") as pool:
        futures = [pool.submit(work) for _ in range(min(budget.threads, len(segments)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # All are done, or one has failed, or the wait was interrupted.
            cancelled.set()
    try:
        for future in futures:
            future.result()
    except BaseException:
        # What the others have done is to be found by the next run all the same.
        with suppress(ReshardError):
            written.settle()
        raise
    written.settle()


class _Written:
    """Segments that are written and not yet known to be durable: to flush after each would stop the disk each time."""

    def __init__(self, done: Callable[[Sequence[tuple[Segment, Outcome]]], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._segments: list[tuple[Segment, Outcome, BlockFile]] = []
        self._settled_s = time.monotonic()

    def add(self, segment: Segment, outcome: Outcome, target: BlockFile) -> None:
        """Takes over a segment, and its file until it is flushed: an error of a write may be told only then."""
        with self._lock:
            self._segments.append((segment, outcome, target))
            is_late = time.monotonic() - self._settled_s >= SETTLE_S
            is_due = is_late or len(self._segments) >= _MOST_UNSETTLED
            if is_due:
                self._settled_s = time.monotonic()
        if is_due:
            self.settle()

    def settle(self) -> None:
        """Flushes the files, and tells of the segments."""
        with self._flushing:
            with self._lock:
                segments, self._segments = self._segments, []
            with ExitStack() as files:
                for _, _, target in segments:
                    files.callback(target.close)
                for target in {segment.file: target for segment, _, target in segments}.values():
                    target.sync()
            if segments:
                self._done([(segment, outcome) for segment, outcome, _ in segments])


def _locate_small_chunks(job: Job, segments: Sequence[Segment]) -> None:
    """Finds the elements of small chunks before the segments do: those of many lie in each page that is read for it."""
    index = job.source.index
    for file in {segment.file for segment in segments}:
        records = range(int(job.output.first[file]), int(job.output.first[file + 1]))
        rows = rows_of(job, records)
        job.source.locate(rows[index.length_bytes[rows] <= _SMALL_CHUNK_BYTES])


def finish(job: Job, folder: Path, outcomes: Iterable[Outcome]) -> Int:
    """Completes the files once every segment is written: records that segments cut, lengths, checksums of the source.

    Args:
        outcomes: of all segments.

    Returns:
        The CRC-32 of each record's payload.

    Raises:
        CheckpointUnsound: a stored record that was read in several segments has a wrong checksum.
        StorageError: the file system refused.
    """
    cut: Parts = {}
    sources: Parts = {}
    crcs = np.zeros(len(job.output.box), dtype=np.int64)
    for outcome in outcomes:
        crcs[list(outcome.whole)] = list(outcome.whole.values())
        for record, parts in outcome.cut.items():
            cut.setdefault(record, []).extend(parts)
        for row, parts in outcome.sources.items():
            sources.setdefault(row, []).extend(parts)
    _check_sources(job, sources)
    for file in range(len(job.output.names)):
        target = _open(job, folder, file)
        try:
            target.cut_to_length()
            for record in range(int(job.output.first[file]), int(job.output.first[file + 1])):
                if record in cut:
                    crcs[record] = combined(set(cut[record]))
                    _complete(job, target, record, int(crcs[record]))
        finally:
            target.close()
    for file, position, content in job.output.frames.closing(crcs):
        target = _open(job, folder, file)
        try:
            target.patch(content, position)
        finally:
            target.close()
    return crcs


def _complete(job: Job, target: BlockFile, record: int, crc: int) -> None:
    output = job.output
    behind = int(output.payload_start[record]) + int(output.payload_bytes[record])
    target.patch(output.frames.tail(record, crc), behind)


def _check_sources(job: Job, sources: Parts) -> None:
    """Verifies the stored records that no segment has read as a whole."""
    payloads = job.source.payloads
    ledger = Ledger()
    for row, parts in sources.items():
        job.source.locate(np.array([row]))
        for part in sorted(set(parts)):
            if (found := ledger.add(row, *part, whole_bytes=int(payloads.record_bytes[row]))) is not None:
                require_crc(job.source, row, found)
    # Parts overlap where segments share a band, and some are missing where a record holds more than what was copied.
    for row, known in ledger.take().items():
        start, length = int(payloads.record_start_bytes[row]), int(payloads.record_bytes[row])
        file = int(job.source.index.file[row])
        require_crc(job.source, row, crc_around(job.source.files, file, start, length, known))


def _open(job: Job, folder: Path, file: int) -> BlockFile:
    return BlockFile(folder / job.output.names[file], int(job.output.length_bytes[file]))
