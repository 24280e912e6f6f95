"""Puts a checkpoint together from what the files of single ranks hold: boxes, flat ranges, and values made here.

A tensor's pieces come from any number of files, in any order; a box that several ranks hold is one chunk and its
replicas. What no file holds as it is wanted (a step counter for each parameter where the source keeps one, objects) is
kept in memory, as the bytes of one more file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint, all_known
from reshard.formats.manifest import Manifest
from reshard.formats.object_archive import object_archive
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import ArchivedTensor, Stored
from reshard.geometry.box import Box, is_row_major, row_major_strides
from reshard.geometry.flat import boxes_of_range
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import RAW, IndexBuilder, Payloads, Place
from reshard.index.kinds import nested_path
from reshard.storage.byte_ranges import SourceFiles

MADE_HERE = "(made here)"


class _Piece(NamedTuple):
    """Elements of a box, and where they lie."""

    box: Box
    file: int
    start_bytes: int
    strides: tuple[int, ...]
    record_start_bytes: int
    record_bytes: int
    crc: int


@dataclass
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    pieces: list[_Piece] = field(default_factory=list)


class Assembly:
    """Collects pieces.

    Args:
        folder: the checkpoint; what errors name.
        paths: its files.

    Attributes:
        files: these, and what is made here.
        paths: key -> path in the nested state.
        values: key -> what is not a tensor and has no place among the objects.
        notes: what the user should know.
    """

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        self.folder = folder
        self._made = bytearray()
        self._made_file = len(paths)
        self.files = SourceFiles([*paths, folder / MADE_HERE], {len(paths): self._made})
        self._tensors: dict[str, _Tensor] = {}
        self._objects: dict[str, Place] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []

    @property
    def keys(self) -> Iterable[str]:
        """Of the tensors so far."""
        return self._tensors.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor that was added."""
        return self._tensors[key].shape

    def add_tensor(self, key: str, value: Stored | Held, source: RankFile) -> None:
        """Adds what a rank's file has of a tensor: all of it, or boxes.

        Raises:
            CheckpointUnsound: the file does not say where the boxes belong, or ranks disagree on the tensor.
        """
        if isinstance(value, Stored):
            self.add_box(key, value.shape, (0,) * len(value.shape), value, source)
            return
        if value.fault is not None:
            raise CheckpointUnsound(value.fault, path=source.path, key=key, hint="redistribute it before saving")
        for offsets, part in value.boxes:
            self.add_box(key, value.shape, offsets, part, source)
        if value.dtype is not None:
            self._tensor(key, value.dtype, value.shape, source.path)

    def add_box(
        self, key: str, shape: tuple[int, ...], offsets: tuple[int, ...], part: Stored, source: RankFile
    ) -> None:
        """Adds elements from an offset on.

        Raises:
            CheckpointUnsound: they are not in the file, or ranks disagree on the tensor.
        """
        found = source.locate(part, key)
        tensor = self._tensor(key, found.dtype, shape, source.path)
        tensor.pieces.append(_piece(Box(offsets, found.shape), found, found.start_bytes, found.strides, source.file))

    def add_range(
        self,
        key: str,
        shape: tuple[int, ...],
        begin: int,
        flat: Stored,
        source: RankFile,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Adds elements that follow one another in row-major order.

        Args:
            begin: the first of them, of the tensor.
            flat: a tensor of one dim that has them, one after the other.
            first, count: where in ``flat`` they begin, and how many; by default all.

        Raises:
            CheckpointUnsound: they are not in the file, or leave the tensor.
        """
        found = source.locate(flat, key)
        if len(found.shape) != 1 or not is_row_major(found.shape, found.strides):
            raise CheckpointUnsound("not a flat tensor", path=source.path, key=key, found=found.shape)
        count = found.shape[0] - first if count is None else count
        if not 0 <= first <= first + count <= found.shape[0] or not 0 <= begin <= begin + count <= math.prod(shape):
            raise CheckpointUnsound(
                "a range that leaves its tensor",
                path=source.path,
                key=key,
                expected=f"within {math.prod(shape)} elements of {shape} and {found.shape[0]} stored ones",
                found=f"{count} from {begin} on, stored from {first} on",
            )
        tensor = self._tensor(key, found.dtype, shape, source.path)
        for done, box in boxes_of_range(shape, begin, begin + count):
            start = found.start_bytes + (first + done) * ITEM_BYTES[found.dtype]
            tensor.pieces.append(_piece(box, found, start, row_major_strides(box.sizes), source.file))

    def add_made(self, key: str, dtype: str, shape: tuple[int, ...], content: bytes) -> None:
        """Adds a whole tensor whose bytes are known here."""
        tensor = self._tensor(key, dtype, shape, self.folder)
        start = self._keep(content)
        tensor.pieces.append(
            _Piece(Box.whole(shape), self._made_file, start, row_major_strides(shape), start, len(content), -1)
        )

    def add_alias(self, key: str, other: str) -> None:
        """Adds a tensor of the same elements as another."""
        self._tensors[key] = self._tensors[other]

    def add_object(self, key: str, value: Any, path: tuple[str | int, ...]) -> None:
        """Adds a plain value, as stock DCP stores it: an archive of ``torch.save``."""
        content = object_archive(value)
        self._objects[key] = Place(MADE_HERE, self._keep(content), len(content))
        self.paths[key] = path

    def build(
        self, format: str, manifest: Manifest | None = None, version: str | None = None, holds_archives: bool = True
    ) -> Checkpoint:
        """The checkpoint of all that was added.

        Args:
            holds_archives: whether each file is one archive of ``torch.save``.
        """
        builder = IndexBuilder(self.folder, RAW)
        for path in self.files.paths:
            builder.file(os.path.relpath(path, self.folder))
        rows: list[_Piece] = []
        for key, tensor in self._tensors.items():
            builder.tensor(key, tensor.dtype, tensor.shape)
            known: dict[Box, int] = {}
            for piece in sorted(tensor.pieces, key=lambda piece: piece.box):
                place = (piece.file, piece.start_bytes, _span_bytes(piece, tensor.dtype))
                if piece.box in known:
                    builder.replica(known[piece.box], place)
                elif piece.box.elements or 0 in tensor.shape:
                    known[piece.box] = builder.chunk(*piece.box, place)
                    rows.append(piece)
            if 0 in tensor.shape and not known:
                whole = Box.whole(tensor.shape)
                rows.append(_Piece(whole, self._made_file, 0, row_major_strides(tensor.shape), 0, 0, -1))
                builder.chunk(*whole, (self._made_file, 0, 0))
            self.paths.setdefault(key, nested_path(key))
        builder.objects.update(self._objects)
        return Checkpoint(
            path=self.folder,
            format=format,
            index=builder.build(),
            manifest=manifest,
            paths=self.paths,
            files=self.files,
            payloads=_payloads(rows),
            locate=all_known,
            values=self.values,
            version=version,
            notes=tuple(self.notes),
            holds_archives=holds_archives,
        )

    def _tensor(self, key: str, dtype: str, shape: tuple[int, ...], path: Path) -> _Tensor:
        tensor = self._tensors.setdefault(key, _Tensor(dtype, shape))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise CheckpointUnsound(
                "the ranks disagree on this tensor",
                path=path,
                key=key,
                expected=f"{tensor.dtype} of {tensor.shape}, as in another file",
                found=f"{dtype} of {shape}",
                hint="files of different checkpoints are mixed: name one of them",
            )
        return tensor

    def _keep(self, content: bytes) -> int:
        # Numbers of any width are read where they lie.
        self._made.extend(bytes(-len(self._made) % 16))
        start = len(self._made)
        self._made.extend(content)
        return start


def _piece(box: Box, found: ArchivedTensor, start: int, strides: tuple[int, ...], file: int) -> _Piece:
    record = found.record
    crc = record.crc if record.crc or not record.length_bytes else -1
    return _Piece(box, file, start, strides, record.start_bytes, record.length_bytes, crc)


def _span_bytes(piece: _Piece, dtype: str) -> int:
    if not piece.box.elements:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(piece.box.sizes, piece.strides, strict=True))
    return (last + 1) * ITEM_BYTES[dtype]


def _payloads(pieces: Sequence[_Piece]) -> Payloads:
    payloads = Payloads.unknown(len(pieces))
    for row, piece in enumerate(pieces):
        payloads.start_bytes[row] = piece.start_bytes
        payloads.crc[row] = piece.crc
        payloads.record_start_bytes[row] = piece.record_start_bytes
        payloads.record_bytes[row] = piece.record_bytes
        if not is_row_major(piece.box.sizes, piece.strides):
            payloads.strides[row] = piece.strides
    return payloads
