"""Whichever code computes it, a CRC-32 is zlib's."""

import subprocess
import sys
import zlib

from hypothesis import given
from hypothesis import strategies as st

from reshard.storage.crc32 import crc32

WITHOUT = """
import sys
sys.modules["isal"] = None  # as where it is not installed
import zlib
from reshard.storage.crc32 import crc32
assert crc32 is zlib.crc32
"""


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_checksum_is_that_of_zlib(data: bytes, start: int) -> None:
    assert crc32(data, start) == zlib.crc32(data, start)
    assert crc32(memoryview(bytearray(data))) == zlib.crc32(data)


def test_checksum_of_a_large_block_is_that_of_zlib() -> None:
    data = bytes(range(251)) * 40_000
    assert crc32(data) == zlib.crc32(data)


def test_zlib_serves_where_nothing_faster_is_installed() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)
