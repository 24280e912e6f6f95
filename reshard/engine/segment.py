"""Writes one segment of a file, block by block, in one thread.

A segment is a range of a file that starts at a page, whatever records it cuts. Each block is filled in two steps: first
it is laid out (what surrounds payloads is put in place, reads are noted down), then the reads are done, in file order
and as few calls as possible, straight into place. Checksums follow: of every part that was read, the CRC-32 is computed
once, while it is in cache, and put together both for the record that is written and for the one that it comes from.
So what is written is a valid record, and what was read is compared with what its file says of it, at no further cost.

A record that the segment cuts cannot get the bytes behind its payload here, for they hold its checksum: they are left
zero, and the parts are returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.engine.bands import banded
from reshard.engine.blocks import PAGE_BYTES, BlockFile
from reshard.engine.crc import Ledger, combine, require_crc
from reshard.engine.spans import Job, Span, spans_of
from reshard.storage.byte_ranges import Read
from reshard.storage.crc32 import crc32

# From here on putting checksums together costs less than computing one twice.
_COMBINED_BYTES = 1 << 16


class Segment(NamedTuple):
    """A range of bytes of one output file."""

    file: int
    start: int
    end: int

    @property
    def length_bytes(self) -> int:
        """How many."""
        return self.end - self.start


Parts = dict[int, list[tuple[int, int, int]]]
"""Record -> parts of it: start in its payload, length, CRC-32."""


@dataclass
class Outcome:
    """What a segment leaves to be put together with others.

    Attributes:
        cut: parts of output records that the segment cuts.
        sources: parts of stored records, by the first chunk row in each, of which the segment read only some.
        whole: CRC-32 of the payload of each output record that lies in the segment.
    """

    cut: Parts = field(default_factory=dict)
    sources: Parts = field(default_factory=dict)
    whole: dict[int, int] = field(default_factory=dict)


class Cancelled(Exception):
    """Another thread failed; this one stopped at a block."""


class _Part(NamedTuple):
    """Bytes of a payload in the block: from a chunk at a place in its file, or (row -1) from elsewhere."""

    record: int
    view: memoryview
    row: int
    place: int


class _Tail(NamedTuple):
    """Room in the block for what follows a payload."""

    record: int
    view: memoryview


class SegmentWriter:
    """Writes one segment; see the module.

    Args:
        job: what is copied.
        segment: what is written.
        target: the segment's file.
        buffer: page-aligned, a multiple of the page long.
        progress: told of bytes written.
        is_cancelled: asked before every block.
    """

    def __init__(
        self,
        job: Job,
        segment: Segment,
        target: BlockFile,
        buffer: memoryview,
        progress: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._job = job
        self._segment = segment
        self._target = target
        self._buffer = buffer
        self._progress = progress
        self._is_cancelled = is_cancelled
        self._block_start = segment.start
        self._filled = 0
        self._reads: list[Read] = []
        self._pending: list[_Part | _Tail] = []
        self._crc: dict[int, int] = {}
        self._whole: dict[int, int] = {}
        self._ledger = Ledger()
        self._first_in_record = job.source.first_in_record

    def run(self) -> Outcome:
        """Writes the segment.

        Raises:
            CheckpointUnsound: the source is damaged or cut short, or its checksum is wrong.
            StorageError: the file system refused.
            Cancelled: `is_cancelled` said so.
        """
        output, segment = self._job.output, self._segment
        low, high = int(output.first[segment.file]), int(output.first[segment.file + 1])
        first = low + int(output.end[low:high].searchsorted(segment.start, side="right"))
        last = low + int(output.start[low:high].searchsorted(segment.end, side="left"))
        spans = spans_of(self._job, range(first, last))
        cut = {}
        for record in range(first, last):
            self._zeros_until(int(output.start[record]))
            if (part := self._record(record, spans.pop(record))) is not None:
                cut[record] = part
        self._zeros_until(segment.end)
        self._flush()
        outcome = Outcome(sources=self._ledger.take(), whole=self._whole)
        for record, (start, end) in cut.items():
            outcome.cut[record] = [(start, end - start, self._crc[record])]
        return outcome

    def _record(self, record: int, spans: list[Span] | None) -> tuple[int, int] | None:
        """Lays out what the segment has of a record. Of one that it cuts, returns which part of the payload it has."""
        output, segment = self._job.output, self._segment
        start, end = int(output.start[record]), int(output.end[record])
        payload, length = int(output.payload_start[record]), int(output.payload_bytes[record])
        if segment.start < payload:
            head = output.frames.head(record)
            self._literal(head[max(0, segment.start - start) : segment.end - start])
        low, high = max(0, segment.start - payload), min(length, segment.end - payload)
        if low < high and spans is not None:
            self._spans(record, spans, low, high)
        elif low < high:
            self._bands(record, low, high)
        if segment.start <= payload and end <= segment.end:
            self._crc.setdefault(record, 0)
            self._tail(record, end - payload - length)
            return None
        self._zeros_until(min(end, segment.end))
        # One without elements is cut as well, if anything behind the place of its payload lies in the next segment.
        if low < high or (length == 0 and segment.start <= payload < segment.end):
            self._crc.setdefault(record, 0)
            return low, max(low, high)
        return None

    def _spans(self, record: int, spans: list[Span], low: int, high: int) -> None:
        payloads = self._job.source.payloads
        contents = payloads.contents
        for span in spans:
            begin, end = max(low, span.start), min(high, span.start + span.length)
            while begin < end:
                view = self._room(end - begin)
                place = span.place + begin - span.start
                if (content := contents.get(span.row)) is not None:
                    inside = place - int(payloads.record_start_bytes[span.row])
                    view[:] = content[inside : inside + len(view)]
                else:
                    self._reads.append(Read(span.file, place, view))
                self._pending.append(_Part(record, view, span.row, place))
                begin += len(view)

    def _bands(self, record: int, low: int, high: int) -> None:
        for band in banded(self._job, record, low, high, self._note_source):
            done = 0
            while done < len(band):
                view = self._room(len(band) - done)
                view[:] = band[done : done + len(view)]
                self._pending.append(_Part(record, view, -1, -1))
                done += len(view)

    def _tail(self, record: int, length: int) -> None:
        if length > len(self._buffer) - self._filled:
            # It does not fit the block, and what is in the next block has to be known when that is laid out.
            self._settle()
            self._literal(self._tail_of(record))
        else:
            self._pending.append(_Tail(record, self._room(length)))

    def _tail_of(self, record: int) -> bytes:
        crc = self._whole[record] = self._crc.pop(record)
        return self._job.output.frames.tail(record, crc)

    def _literal(self, data: bytes) -> None:
        while data:
            view = self._room(len(data))
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def _zeros_until(self, position: int) -> None:
        while (count := position - self._block_start - self._filled) > 0:
            view = self._room(count)
            view[:] = bytes(len(view))

    def _room(self, wanted: int) -> memoryview:
        """The next bytes of the block, as many as wanted or as there are left in it; a full block is written first."""
        if self._filled == len(self._buffer):
            self._flush()
        view = self._buffer[self._filled : self._filled + wanted]
        self._filled += len(view)
        return view

    def _flush(self) -> None:
        self._settle()
        if self._is_cancelled():
            raise Cancelled
        length = self._filled
        if self._target.is_direct and length % PAGE_BYTES:
            # Only at the end of the file, which is cut to its length afterwards.
            padded = -(-length // PAGE_BYTES) * PAGE_BYTES
            self._buffer[length:padded] = bytes(padded - length)
            length = padded
        if length:
            self._target.write(self._buffer[:length], self._block_start)
        self._progress(self._filled)
        self._block_start += self._filled
        self._filled = 0

    def _settle(self) -> None:
        """Does the reads that were noted down, and whatever waits for their content."""
        self._job.source.files.read_all(self._reads)
        self._reads.clear()
        for item in self._pending:
            if isinstance(item, _Tail):
                item.view[:] = self._tail_of(item.record)
            else:
                self._sum(item)
        self._pending.clear()

    def _sum(self, part: _Part) -> None:
        before = self._crc.get(part.record)
        if part.row < 0:
            self._crc[part.record] = crc32(part.view, before or 0)
            return
        crc = crc32(part.view)
        self._note_source_crc(part.row, part.place, len(part.view), crc)
        if not before:
            self._crc[part.record] = crc
        elif len(part.view) < _COMBINED_BYTES:
            self._crc[part.record] = crc32(part.view, before)
        else:
            self._crc[part.record] = combine(before, crc, len(part.view))

    def _note_source(self, row: int, place: int, content: memoryview) -> None:
        if self._job.source.payloads.crc[row] >= 0:
            self._note_source_crc(row, place, len(content), crc32(content))

    def _note_source_crc(self, row: int, place: int, length: int, crc: int) -> None:
        payloads = self._job.source.payloads
        expected = int(payloads.crc[row])
        if expected < 0:
            return
        if self._first_in_record is not None:
            row = int(self._first_in_record[row])
        start = place - int(payloads.record_start_bytes[row])
        whole = int(payloads.record_bytes[row])
        found = crc if length == whole else self._ledger.add(row, start, length, crc, whole)
        if found is not None:
            require_crc(self._job.source, row, found)
