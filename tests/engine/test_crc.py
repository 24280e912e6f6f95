from __future__ import annotations

import itertools
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.engine.crc import Ledger, combine, combined
from reshard.errors import CheckpointUnsound


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_pieces(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_long_pieces() -> None:
    data = random.Random(0).randbytes(1 << 20) * 9
    for cut in (1, 8 << 20, len(data) - 1):
        first, second = data[:cut], data[cut:]
        assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)), st.randoms())
def test_parts_in_any_order(data: bytes, cuts: list[int], chance: random.Random) -> None:
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parts = [(a, b - a, zlib.crc32(data[a:b])) for a, b in itertools.pairwise(edges)]
    chance.shuffle(parts)
    assert combined(parts) == zlib.crc32(data)
    ledger = Ledger()
    results = [ledger.add(7, *part, whole_bytes=len(data)) for part in [*parts[:1], *parts]]
    if parts and len(parts) > 1:
        assert results[:-1] == [None] * (len(results) - 1)
        assert results[-1] == zlib.crc32(data)
        assert ledger.take() == {}


def test_what_is_not_complete_is_handed_on() -> None:
    ledger = Ledger()
    assert ledger.add(1, 0, 3, 10, 9) is None
    assert ledger.add(1, 6, 3, 11, 9) is None
    assert ledger.add(2, 0, 1, 12, 2) is None
    assert ledger.take() == {1: [(0, 3, 10), (6, 3, 11)], 2: [(0, 1, 12)]}
    assert ledger.take() == {}


def test_parts_with_a_gap_are_refused() -> None:
    with pytest.raises(CheckpointUnsound, match="expected 3, found 4"):
        combined([(0, 3, 1), (4, 1, 2)])


def test_a_length_past_32_bits() -> None:
    """Zeros behind a piece, 2**33 of them: in one step, and as 256 pieces of which zlib knows the checksum."""
    piece_bytes = 1 << 25
    of_zeros = zlib.crc32(bytes(piece_bytes))
    expected = zlib.crc32(bytes(piece_bytes), zlib.crc32(b"piece"))
    assert combine(zlib.crc32(b"piece"), of_zeros, piece_bytes) == expected
    found, length = zlib.crc32(b"piece"), piece_bytes
    in_steps = found
    for _ in range(256):
        in_steps = combine(in_steps, of_zeros, piece_bytes)
    while length < 1 << 33:
        of_zeros = combine(of_zeros, of_zeros, length)
        length *= 2
    assert combine(found, of_zeros, length) == in_steps


@pytest.mark.parametrize("parts", [[(1, 2, 5)], [(0, 2, 5), (3, 1, 5)], [(0, 4, 5), (2, 4, 6)]])
def test_parts_with_a_gap_or_an_overlap(parts: list[tuple[int, int, int]]) -> None:
    with pytest.raises(CheckpointUnsound, match="follow one another"):
        combined(parts)


def test_of_nothing() -> None:
    assert combined([]) == zlib.crc32(b"") == 0
    assert combined([(0, 0, 0)]) == 0
