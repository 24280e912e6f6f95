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

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.errors import CheckpointUnsound
from reshard.formats.safetensors_header import read_header
from reshard.formats.torch_archive import LOCAL_HEADER, ArchivedTensor, read_tensor
from reshard.geometry.box import is_row_major
from reshard.index.dtypes import item_bytes
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


@dataclass(frozen=True)
class _Template:
    """An archive whose like may follow.

    Attributes:
        head: all bytes before the content: the pickle is in them.
        fixed: the central headers and the end, without their CRCs, by place in the tail.
        crc_at: place in the tail of the CRC of the content.
    """

    head: bytes
    tail_bytes: int
    fixed: tuple[tuple[int, bytes], ...]
    crc_at: int
    tensor: ArchivedTensor


class DcpPayloads:
    """Finds the elements of chunks, and remembers where they are.

    Attributes:
        known: what has been found, by chunk row.
    """

    def __init__(self, index: Index, files: SourceFiles) -> None:
        self.known = Payloads.unknown(len(index.file))
        self._index = index
        self._files = files
        self._templates: dict[int, list[_Template]] = {}
        self._blobs: dict[tuple[int, int], dict[str, tuple[str, tuple[int, ...], int, int]]] = {}

    def locate(self, rows: Int) -> None:
        """Fills in `known` for these rows; what is known already is not read again.

        Raises:
            CheckpointUnsound: an archive is damaged, or holds another dtype or shape than the metadata says.
            UnsafePickle: it holds something else than a plain tensor.
            StorageError: the file system failed to read it.
        """
        rows = rows[self.known.start_bytes[rows] < 0]
        order = np.lexsort((self._index.start_bytes[rows], self._index.file[rows]))
        for row, window in self._windows(rows[order]):
            self._locate(row, window)

    def _windows(self, rows: Int) -> Iterator[tuple[int, _Window]]:
        """Each row with the ends of its archive in memory; ends that lie close together are read at once."""
        index = self._index
        columns = (index.file[rows], index.start_bytes[rows], index.length_bytes[rows])
        places = list(zip(rows.tolist(), *(column.tolist() for column in columns), strict=True))
        runs: list[list[int]] = []
        first_runs: list[int] = []
        for _, file, start, length in places:
            for number, (low, high) in enumerate(_ends(start, length)):
                last = runs[-1] if runs else [-1, 0, 0]
                if last[0] == file and low - last[2] <= _GAP_BYTES and high - last[1] <= _RUN_BYTES:
                    last[2] = max(last[2], high)
                else:
                    runs.append([file, low, high])
                if number == 0:
                    first_runs.append(len(runs) - 1)
        loaded: dict[int, tuple[int, bytes]] = {}
        for (row, file, start, length), first, after in zip(
            places, first_runs, [*first_runs, len(runs)][1:], strict=False
        ):
            # A large archive's tail is in the run after that of its head, where the next archive's head may be as well.
            end = min(first + 2, len(runs)) if after > first else first + 1
            loaded = {run: block for run, block in loaded.items() if run >= first}
            for run in range(first, end):
                if run not in loaded:
                    run_file, low, high = runs[run]
                    loaded[run] = (
                        (low, bytes(self._files.read(run_file, low, high - low))) if run_file == file else (0, b"")
                    )
            yield row, _Window(self._files, file, start, length, list(loaded.values()))
            loaded = {run: block for run, block in loaded.items() if block[1]}

    def _locate(self, row: int, window: _Window) -> None:
        if window.read(0, 4) != LOCAL_HEADER and self._locate_in_blob(row, window):
            return
        found = self._recognised(window)
        if found is None:
            tensor = self._parsed(row, window)
            found = tensor, tensor.record.crc
        self._remember(row, window, *found)

    def _parsed(self, row: int, window: _Window) -> ArchivedTensor:
        key = self._index.names[int(self._index.owner[row])]
        tensor = read_tensor(window.read, window.length, window.path, key)
        record = tensor.record
        head = window.read(0, record.start_bytes) if record.start_bytes <= _HEAD_BYTES else b""
        tail_bytes = min(_TAIL_BYTES, window.length - record.start_bytes - record.length_bytes)
        tail = window.read(window.length - tail_bytes, tail_bytes)
        if head and (template := _template(head, tail, tensor)) is not None:
            templates = self._templates.setdefault(window.length, [])
            templates.insert(0, template)
            del templates[_MOST_TEMPLATES:]
        return tensor

    def _recognised(self, window: _Window) -> tuple[ArchivedTensor, int] | None:
        for template in self._templates.get(window.length, ()):
            if window.read(0, len(template.head)) != template.head:
                continue
            tail = window.read(window.length - template.tail_bytes, template.tail_bytes)
            if all(tail[start : start + len(part)] == part for start, part in template.fixed):
                return template.tensor, int.from_bytes(tail[template.crc_at : template.crc_at + 4], "little")
        return None

    def _remember(self, row: int, window: _Window, tensor: ArchivedTensor, crc: int) -> None:
        self._check(row, window, tensor.dtype, tensor.shape)
        known = self.known
        known.crc[row] = crc if crc or tensor.record.length_bytes == 0 else -1
        known.record_start_bytes[row] = window.start + tensor.record.start_bytes
        known.record_bytes[row] = tensor.record.length_bytes
        if not is_row_major(tensor.shape, tensor.strides):
            known.strides[row] = tensor.strides
        known.start_bytes[row] = window.start + tensor.start_bytes

    def _locate_in_blob(self, row: int, window: _Window) -> bool:
        place = (window.file, window.start)
        if place not in self._blobs:
            rest = self._files.size_bytes(window.file) - window.start
            header = read_header(
                lambda start, length: self._files.read(window.file, window.start + start, length), rest
            )
            if header is None:
                return False
            self._blobs[place] = header.tensors
        key = self._index.names[int(self._index.owner[row])]
        if key not in self._blobs[place]:
            raise CheckpointUnsound("not in the file that the metadata names", path=window.path, key=key)
        dtype, shape, start, _ = self._blobs[place][key]
        self._check(row, window, dtype, shape)
        self.known.start_bytes[row] = window.start + start
        return True

    def _check(self, row: int, window: _Window, dtype: str, shape: tuple[int, ...]) -> None:
        index = self._index
        number = int(index.owner[row])
        box = index.box(row)
        if dtype != index.dtypes[number] or shape != box.sizes:
            raise CheckpointUnsound(
                "not the chunk that the metadata names; the file is of another save",
                path=window.path,
                key=index.names[number],
                expected=f"{index.dtypes[number]} of {box.sizes} at {box.offsets}",
                found=f"{dtype} of {shape}",
            )
        item_bytes(dtype, index.names[number], window.path)


class _Window:
    """An archive, of which the ends are in memory already."""

    def __init__(self, files: SourceFiles, file: int, start: int, length: int, blocks: list[tuple[int, bytes]]) -> None:
        self.file = file
        self.start = start
        self.length = length
        self._files = files
        self._blocks = blocks

    @property
    def path(self) -> Path:
        return self._files.paths[self.file]

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the archive."""
        position = self.start + start
        for block_start, block in self._blocks:
            inside = position - block_start
            if inside >= 0 and inside + length <= len(block):
                return block[inside : inside + length]
        return bytes(self._files.read(self.file, position, length))


def _ends(start: int, length: int) -> list[tuple[int, int]]:
    """The byte ranges that hold all but an archive's content."""
    if length <= _HEAD_BYTES + _TAIL_BYTES + _GAP_BYTES:
        return [(start, start + length)]
    return [(start, start + _HEAD_BYTES), (start + length - _TAIL_BYTES, start + length)]


def _template(head: bytes, tail: bytes, tensor: ArchivedTensor) -> _Template | None:
    """The pattern of an archive; None where its central headers lie before the tail."""
    starts = []
    position = tail.find(_CENTRAL_HEADER)
    while position >= 0:
        starts.append(position)
        position = tail.find(_CENTRAL_HEADER, position + 46)
    crc_at = None
    fixed = []
    for start, end in zip(starts, [*starts[1:], len(tail)], strict=True):
        at = start + _CRC_IN_CENTRAL_HEADER
        fixed += [(start, tail[start:at]), (at + 4, tail[at + 4 : end])]
        name_bytes = int.from_bytes(tail[start + 28 : start + 30], "little")
        if b"/data/" in tail[start + 46 : start + 46 + name_bytes]:
            crc_at = at
    return None if crc_at is None else _Template(head, len(tail), tuple(fixed), crc_at, tensor)
