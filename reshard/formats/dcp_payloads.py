"""Where the elements of DCP's chunks lie: finds them in the containers that ``.metadata`` points at.

A chunk's byte range is a ``torch.save`` archive. Its elements, strides and CRC-32 are found from the archive's first
kilobyte (the pickle, the local headers) and its last (the central headers); what lies between is not read. Archives of
chunks of one shape and dtype differ in nothing but CRCs and content, so the second one is
recognised by comparing bytes.

Where ``.distcp`` files are written in the safetensors serialization, all tensors of one file share one safetensors blob
behind the objects: every chunk's range then starts at the blob and is as long as its elements, and the blob's header
finds them by flat key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from reshard.errors import CheckpointUnsound
from reshard.formats.safetensors_header import Header, read_header
from reshard.formats.torch_archive import LOCAL_HEADER, ArchivedTensor, read_tensor
from reshard.geometry.box import is_row_major
from reshard.index.index import Index, Int, Payloads
from reshard.storage.byte_ranges import SourceFiles

_HEAD_BYTES = 1024
_TAIL_BYTES = 1024
# Reading on through a gap costs less than another call; what is read at once stays in cache.
_GAP_BYTES = 8192
_RUN_BYTES = 1 << 20
_CENTRAL_HEADER = b"PK\x01\x02"
_CRC_IN_CENTRAL_HEADER = 16
_MOST_TEMPLATES = 8
# Kept contents take at most some 16 MiB, and save reading the pages of tiny chunks again.
_TINY_BYTES = 64
_MOST_CONTENTS = 100_000


@dataclass(frozen=True)
class _Template:
    """An archive whose like may follow.

    Attributes:
        head: all bytes before the content: the pickle is in them.
        mask, fixed: the central headers and the end, as one number each: which bits have to be alike, and their values.
            CRCs may differ.
        crc_at: place in the tail of the CRC of the content; None where this cannot recognise anything.
    """

    head: bytes
    tail_bytes: int
    mask: int
    fixed: int
    crc_at: int | None
    tensor: ArchivedTensor
    is_strided: bool

    def masked(self, tail: bytes) -> int:
        """What of a tail has to be alike."""
        return int.from_bytes(tail, "little") & self.mask


class DcpPayloads:
    """Finds the elements of chunks, and remembers where they are.

    Attributes:
        known: what has been found, by chunk row.
    """

    def __init__(self, index: Index, files: SourceFiles) -> None:
        self.known = Payloads.unknown(len(index.file))
        self._index = index
        self._files = files
        self._lock = threading.Lock()
        self._templates: dict[int, list[_Template]] = {}
        self._blobs: dict[tuple[int, int], dict[str, tuple[str, tuple[int, ...], int, int]]] = {}

    def locate(self, rows: Int) -> None:
        """Fills in `known` for these rows; what is known already is not read again.

        Raises:
            CheckpointUnsound: an archive is damaged, or holds another dtype or shape than the metadata says.
            UnsafePickle: it holds something else than a plain tensor.
            StorageError: the file system failed to read it.
        """
        # One thread at a time: the others would read the same ends again.
        with self._lock:
            rows = rows[self.known.start_bytes[rows] < 0]
            order = np.lexsort((self._index.start_bytes[rows], self._index.file[rows]))
            for window in self._windows(rows[order]):
                self._locate(window)

    def _windows(self, rows: Int) -> Iterator[_Window]:
        """Each row with the ends of its archive in memory; ends that lie close together are read at once."""
        index = self._index
        runs: list[list[int]] = []
        windows: list[tuple[_Window, int, int]] = []
        columns = (rows, index.file[rows], index.start_bytes[rows], index.length_bytes[rows])
        for row, file, start, length in zip(*(column.tolist() for column in columns), strict=True):
            within = []
            for low, high in _ends(start, length):
                last = runs[-1] if runs else [-1, 0, 0]
                if last[0] == file and low - last[2] <= _GAP_BYTES and high - last[1] <= _RUN_BYTES:
                    last[2] = max(last[2], high)
                else:
                    runs.append([file, low, high])
                within.append(len(runs) - 1)
            windows.append((_Window(self._files, row, file, start, length), within[0], within[-1]))
        loaded: dict[int, tuple[int, bytes]] = {}
        for window, first, last_run in windows:
            if first not in loaded or last_run not in loaded:
                loaded = {run: block for run, block in loaded.items() if run >= first}
                for run in {first, last_run} - loaded.keys():
                    file, low, high = runs[run]
                    loaded[run] = (low, bytes(self._files.read(file, low, high - low)))
            window.blocks = loaded[first], loaded[last_run]
            yield window

    def _locate(self, window: _Window) -> None:
        if window.read(0, 4) != LOCAL_HEADER and self._locate_in_blob(window):
            return
        template, crc = self._recognised(window) or self._parsed(window)
        tensor = template.tensor
        self._check(window, tensor.dtype, tensor.shape)
        known, row = self.known, window.row
        length = tensor.record.length_bytes
        known.crc[row] = crc if crc or length == 0 else -1
        known.record_start_bytes[row] = window.start + tensor.record.start_bytes
        known.record_bytes[row] = length
        if template.is_strided:
            known.strides[row] = tensor.strides
        if length <= _TINY_BYTES and len(known.contents) < _MOST_CONTENTS:
            known.contents[row] = window.read(tensor.record.start_bytes, length)
        known.start_bytes[row] = window.start + tensor.start_bytes

    def _parsed(self, window: _Window) -> tuple[_Template, int]:
        tensor = read_tensor(window.read, window.length, window.path, self._key(window.row))
        record = tensor.record
        head = window.read(0, record.start_bytes) if record.start_bytes <= _HEAD_BYTES else b""
        tail_bytes = min(_TAIL_BYTES, window.length - record.start_bytes - record.length_bytes)
        template = _template(head, window.read(window.length - tail_bytes, tail_bytes), tensor)
        if template.crc_at is not None:
            templates = self._templates.setdefault(window.length, [])
            templates.insert(0, template)
            del templates[_MOST_TEMPLATES:]
        return template, record.crc

    def _recognised(self, window: _Window) -> tuple[_Template, int] | None:
        for template in self._templates.get(window.length, ()):
            if window.read(0, len(template.head)) != template.head:
                continue
            tail = window.read(window.length - template.tail_bytes, template.tail_bytes)
            if template.crc_at is not None and template.masked(tail) == template.fixed:
                return template, int.from_bytes(tail[template.crc_at : template.crc_at + 4], "little")
        return None

    def _locate_in_blob(self, window: _Window) -> bool:
        place = (window.file, window.start)
        if place not in self._blobs:
            header = self._header(window)
            if header is None:
                return False
            self._blobs[place] = header.tensors
        key = self._key(window.row)
        if key not in self._blobs[place]:
            raise CheckpointUnsound("not in the file that the metadata names", path=window.path, key=key)
        dtype, shape, start, _ = self._blobs[place][key]
        self._check(window, dtype, shape)
        self.known.start_bytes[window.row] = window.start + start
        return True

    def _header(self, window: _Window) -> Header | None:
        rest_bytes = self._files.size_bytes(window.file) - window.start
        try:
            return read_header(
                lambda start, length: self._files.read(window.file, window.start + start, length), rest_bytes
            )
        except CheckpointUnsound as error:
            error.path = error.path or str(window.path)
            raise

    def _check(self, window: _Window, dtype: str, shape: tuple[int, ...]) -> None:
        index = self._index
        number = int(index.owner[window.row])
        sizes = tuple(index.sizes[window.row, : len(shape)].tolist())
        if dtype != index.dtypes[number] or shape != sizes or len(shape) != len(index.shapes[number]):
            box = index.box(window.row)
            raise CheckpointUnsound(
                "not the chunk that the metadata names; the file is of another save",
                path=window.path,
                key=index.names[number],
                expected=f"{index.dtypes[number]} of {box.sizes} at {box.offsets}",
                found=f"{dtype} of {shape}",
            )

    def _key(self, row: int) -> str:
        return self._index.names[int(self._index.owner[row])]


class _Window:
    """The archive of a chunk, of which the ends are in memory already.

    Attributes:
        blocks: (start in the file, bytes) that hold its head and its tail.
    """

    __slots__ = ("_files", "blocks", "file", "length", "row", "start")

    def __init__(self, files: SourceFiles, row: int, file: int, start: int, length: int) -> None:
        self.row = row
        self.file = file
        self.start = start
        self.length = length
        self.blocks: tuple[tuple[int, bytes], ...] = ()
        self._files = files

    @property
    def path(self) -> Path:
        return self._files.paths[self.file]

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the archive."""
        position = self.start + start
        for block_start, block in self.blocks:
            inside = position - block_start
            if inside >= 0 and inside + length <= len(block):
                return block[inside : inside + length]
        return bytes(self._files.read(self.file, position, length))


def _ends(start: int, length: int) -> list[tuple[int, int]]:
    """The byte ranges that hold all but an archive's content."""
    if length <= _HEAD_BYTES + _TAIL_BYTES + _GAP_BYTES:
        return [(start, start + length)]
    return [(start, start + _HEAD_BYTES), (start + length - _TAIL_BYTES, start + length)]


def _template(head: bytes, tail: bytes, tensor: ArchivedTensor) -> _Template:
    """The pattern of an archive; of no use where its ends were not in memory in full."""
    is_strided = not is_row_major(tensor.shape, tensor.strides)
    starts = []
    position = tail.find(_CENTRAL_HEADER)
    while position >= 0:
        starts.append(position)
        position = tail.find(_CENTRAL_HEADER, position + 46)
    crc_at = None
    mask = bytearray(len(tail))
    for start, end in zip(starts, [*starts[1:], len(tail)], strict=True):
        at = start + _CRC_IN_CENTRAL_HEADER
        mask[start:end] = b"\xff" * (end - start)
        mask[at : at + 4] = bytes(4)
        name_bytes = int.from_bytes(tail[start + 28 : start + 30], "little")
        if head and b"/data/" in tail[start + 46 : start + 46 + name_bytes]:
            crc_at = at
    template = _Template(head, len(tail), int.from_bytes(mask, "little"), 0, crc_at, tensor, is_strided)
    return replace(template, fixed=template.masked(tail))
