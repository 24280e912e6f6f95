"""CRC-32 of pieces, put together: the checksum of ``a + b`` from those of ``a`` and ``b``.

A CRC is the remainder of a polynomial over GF(2), so that appending n bytes multiplies it by x**(8n). The method is
that of zlib's ``crc32_combine``; the bits of a CRC-32 are reflected, so x**0 is the highest bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint
from reshard.storage.byte_ranges import SourceFiles
from reshard.storage.crc32 import crc32

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_BLOCK_BYTES = 4 << 20


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two pieces one after the other; the first may be empty, with the CRC 0."""
    if first == 0:
        return second
    return _multiply(_power(second_bytes), first) ^ second


@functools.lru_cache(maxsize=1 << 16)
def _power(length_bytes: int) -> int:
    """x ** (8 * length) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8  # 1 and x**8
    while length_bytes:
        if length_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


class Ledger:
    """Checksums of parts of records, put together until they are those of whole records.

    Parts may come in any order. Neighbours become one, so that what is read in order takes one entry a record.
    """

    def __init__(self) -> None:
        self._ends: dict[int, dict[int, tuple[int, int]]] = {}
        self._starts: dict[int, dict[int, int]] = {}

    def add(self, record: int, start: int, length: int, crc: int, whole_bytes: int) -> int | None:
        """Notes a part; the CRC of the whole record once it is complete, which then is forgotten.

        A part that overlaps others is not put together with them; such a record is never complete.
        """
        ends, starts = self._ends.setdefault(record, {}), self._starts.setdefault(record, {})
        if starts.get(start, -1) >= start + length:
            return None
        end = start + length
        if (before := ends.pop(start, None)) is not None:
            starts.pop(before[0], None)
            start, crc = before[0], combine(before[1], crc, length)
        after_end = starts.pop(end, -1)
        if (after := ends.get(after_end)) is not None and after[0] == end:
            del ends[after_end]
            crc, end = combine(crc, after[1], after_end - end), after_end
        if start == 0 and end == whole_bytes:
            del self._ends[record], self._starts[record]
            return crc
        ends[end], starts[start] = (start, crc), end
        return None

    def take(self) -> dict[int, list[tuple[int, int, int]]]:
        """The parts (start, length, CRC) of the records that are not complete, which are then forgotten."""
        taken = {
            record: [(start, end - start, crc) for end, (start, crc) in ends.items()]
            for record, ends in self._ends.items()
        }
        self._ends.clear()
        self._starts.clear()
        return taken


def crc_of(files: SourceFiles, file: int, start: int, length: int) -> int:
    """The CRC-32 of a byte range of a file, read in blocks.

    Raises:
        CheckpointUnsound: the file is missing or ends before.
        StorageError: the file system failed to read it.
    """
    crc = 0
    while length:
        data = files.read(file, start, min(length, _BLOCK_BYTES))
        crc = crc32(data, crc)
        start, length = start + len(data), length - len(data)
    return crc


def chained(parts: Iterable[tuple[int, int, int]], length: int) -> int | None:
    """The CRC of parts (start, length, CRC) that follow one another from 0 to ``length``; None where they do not.

    Parts may come several times.
    """
    by_start = {part[0]: part for part in parts}
    crc = position = 0
    while position < length:
        if position not in by_start:
            return None
        _, step, part = by_start[position]
        crc = combine(crc, part, step) if position else part
        position += step
    return crc if position == length else None


def crc_around(files: SourceFiles, file: int, start: int, length: int, parts: Iterable[tuple[int, int, int]]) -> int:
    """The CRC-32 of a byte range of which some parts are known: reads the rest, or all where parts overlap.

    Args:
        parts: start, counted from that of the range, length and CRC of each.

    Raises:
        CheckpointUnsound: the file is missing or ends before.
        StorageError: the file system failed to read it.
    """
    crc = position = 0
    for begin, part_bytes, part in [*sorted(parts), (length, 0, 0)]:
        if begin < position:
            return crc_of(files, file, start, length)
        if begin > position:
            gap = crc_of(files, file, start + position, begin - position)
            crc = combine(crc, gap, begin - position) if position else gap
        if part_bytes:
            crc = combine(crc, part, part_bytes) if begin else part
        position = begin + part_bytes
    return crc


def combined(parts: Iterable[tuple[int, int, int]]) -> int:
    """The CRC of parts (start, length, CRC) put together in order.

    Raises:
        CheckpointUnsound: they do not follow one another.
    """
    crc = position = 0
    for start, length, part in sorted(parts):
        if start != position:
            raise CheckpointUnsound("checksums of parts do not follow one another", expected=position, found=start)
        crc = combine(crc, part, length) if position else part
        position += length
    return crc


def require_crc(source: Checkpoint, row: int, found: int, expected: int | None = None) -> None:
    """Passes where a stored record has the checksum that its file states.

    Args:
        expected: what it states, where the chunk was not located here.

    Raises:
        CheckpointUnsound: it has not.
    """
    expected = int(source.payloads.crc[row]) if expected is None else expected
    if found != expected:
        index = source.index
        raise CheckpointUnsound(
            f"damaged: the checksum of the chunk {index.box(row)} is wrong",
            path=source.files.paths[int(index.file[row])],
            key=index.names[int(index.owner[row])],
            expected=f"CRC-32 {expected:08x}",
            found=f"{found:08x}",
            hint="copy the file again, or use another step",
        )
