"""CRC-32 of pieces, put together: the checksum of ``a + b`` from those of ``a`` and ``b``.

A CRC is the remainder of a polynomial over GF(2), so that appending n bytes multiplies it by x**(8n). The method is
that of zlib's ``crc32_combine``; the bits of a CRC-32 are reflected, so x**0 is the highest bit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

from reshard.errors import CheckpointUnsound

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


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
    """Checksums of parts of records, until they add up to a whole record that can be compared with what is recorded.

    Parts may come from any thread and in any order; one that comes twice counts once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}
        self._bytes: dict[int, int] = {}

    def add(self, record: int, start: int, length: int, crc: int, whole_bytes: int) -> int | None:
        """Notes a part; the CRC of the whole record once it is complete, which then is forgotten."""
        with self._lock:
            parts = self._parts.setdefault(record, {})
            known_bytes, _ = parts.get(start, (0, 0))
            parts[start] = (length, crc)
            self._bytes[record] = self._bytes.get(record, 0) + length - known_bytes
            if self._bytes[record] < whole_bytes:
                return None
            del self._parts[record], self._bytes[record]
        return combined((start, *part) for start, part in parts.items())

    def take(self) -> dict[int, list[tuple[int, int, int]]]:
        """The parts (start, length, CRC) of the records that are not complete, which are then forgotten."""
        with self._lock:
            taken = {record: [(start, *part) for start, part in parts.items()] for record, parts in self._parts.items()}
            self._parts.clear()
            self._bytes.clear()
        return taken


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
