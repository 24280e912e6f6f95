"""The headers of a zip archive with stored records, as `reshard.formats.torch_archive` describes them."""

from __future__ import annotations

import struct

FOLDER = "archive"
_MASK32 = 0xFFFFFFFF
# From here on the place of the central headers, if not yet the size, does not fit the 32 bits of the plain zip format.
ZIP64_BYTES = _MASK32 - (1 << 16)


def local_header(name: str, crc: int, length_bytes: int, flags: int, extra: bytes) -> bytes:
    """What stands before a record's data; with flag 8, CRC and length are zero here and follow the data."""
    path = f"{FOLDER}/{name}".encode()
    header = struct.pack(
        "<4s5HIIIHH", b"PK\x03\x04", 0, flags, 0, 0, 0, crc, length_bytes, length_bytes, len(path), len(extra)
    )
    return header + path + extra


def descriptor(crc: int, length_bytes: int) -> bytes:
    """What follows the data of a record with flag 8."""
    sizes = "<4sIQQ" if length_bytes >= ZIP64_BYTES else "<4sIII"
    return struct.pack(sizes, b"PK\x07\x08", crc, length_bytes, length_bytes)


def central_header(name: str, crc: int, length_bytes: int, position: int, flags: int) -> bytes:
    """A record's entry in the directory; ``position`` is that of its local header."""
    path = f"{FOLDER}/{name}".encode()
    fields: list[int] = [value for value in (length_bytes, length_bytes) if length_bytes >= ZIP64_BYTES]
    fields += [position] if position >= ZIP64_BYTES else []
    extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
    stated = _MASK32 if length_bytes >= ZIP64_BYTES else length_bytes
    place = _MASK32 if position >= ZIP64_BYTES else position
    header = struct.pack(
        "<4s6HIII5HII",
        b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, stated, stated, len(path), len(extra), 0, 0, 0, 0, place,
    )  # fmt: skip
    return header + path + extra


def end_of_directory(count: int, directory_bytes: int, start: int, is_large: bool) -> bytes:
    """What stands at the end of the archive.

    Args:
        count: records.
        directory_bytes, start: of all central headers.
        is_large: whether ``start`` may not fit 32 bits, or ``count`` not 16.
    """
    if not is_large:
        return struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, count, count, directory_bytes, start, 0)
    short = min(count, 0xFFFF)
    plain = struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, short, short, min(directory_bytes, _MASK32), _MASK32, 0)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, directory_bytes, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + directory_bytes, 1)
    return end64 + locator + plain
