"""Recognises archives that are alike.

The archives of chunks of one shape and dtype differ in CRCs and content only. Where all else is byte for byte that of
one whose directory was read and found sound, the records lie where they lie in that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.formats.torch_archive import Record, read_directory

_CENTRAL_HEADER = b"PK\x01\x02"
_CENTRAL_HEADER_BYTES = 46
_CRC_AT = 16
_LOCAL_HEADER_AT = 42
_MOST_OF_A_LENGTH = 8


@dataclass(frozen=True)
class _Layout:
    """An archive whose like may follow.

    Attributes:
        fixed: the headers in front of records, the directory and the end, all without CRCs, by place.
        records: name, start, length, and the place of the CRC in the directory.
    """

    fixed: tuple[tuple[int, bytes], ...]
    records: tuple[tuple[str, int, int, int], ...]

    def fits(self, archive: bytes) -> bool:
        return all(archive.startswith(part, start) for start, part in self.fixed)

    def of(self, archive: bytes) -> dict[str, Record]:
        return {
            name: Record(start, length, int.from_bytes(archive[crc_at : crc_at + 4], "little"))
            for name, start, length, crc_at in self.records
        }


class Layouts:
    """The layouts met so far. For one thread."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Layout]] = {}

    def records(self, archive: bytes) -> dict[str, Record]:
        """As `read_directory`, for an archive in memory.

        Raises:
            CheckpointUnsound: as there.
        """
        known = self._known.setdefault(len(archive), [])
        for layout in known:
            if layout.fits(archive):
                return layout.of(archive)
        records = read_directory(lambda start, length: archive[start : start + length], len(archive))
        if (new := _layout(archive, records)) is not None:
            known.insert(0, new)
            del known[_MOST_OF_A_LENGTH:]
        return records


def _layout(archive: bytes, records: dict[str, Record]) -> _Layout | None:
    """The layout of a sound archive; None where it is not built in the usual way."""
    position = max((record.start_bytes + record.length_bytes for record in records.values()), default=0)
    fixed: list[tuple[int, bytes]] = []
    places: list[tuple[str, int, int, int]] = []
    last: int | None = None
    for name, record in records.items():
        position = archive.find(_CENTRAL_HEADER, position)
        crc_at, header_at = position + _CRC_AT, position + _LOCAL_HEADER_AT
        header_start = int.from_bytes(archive[header_at : header_at + 4], "little")
        crc = int.from_bytes(archive[crc_at : crc_at + 4], "little")
        if position < 0 or header_start >= record.start_bytes or crc != record.crc:
            return None
        last = position if last is None else last
        fixed += [(header_start, archive[header_start : record.start_bytes]), (last, archive[last:crc_at])]
        places.append((name, record.start_bytes, record.length_bytes, crc_at))
        last = crc_at + 4
        position += _CENTRAL_HEADER_BYTES
    if last is None:
        return None
    return _Layout((*fixed, (last, archive[last:])), tuple(places))
