"""The index: every tensor that a checkpoint holds, and where each byte of it lies.

A *chunk* is a box of a tensor and a byte range of a file. Chunks are rows of a few numpy arrays, sorted by tensor, so
that millions of them cost some tens of bytes each and are planned without a loop over them::

    tensor t      names[t]  dtypes[t]  shapes[t]            rows first[t] .. first[t + 1] are its chunks
    chunk row     offsets[row, dim]  sizes[row, dim]        padded to the largest number of dims with 0 and 1
                  file[row]  start_bytes[row]  length_bytes[row]

Two ways of packing: ``RAW``, the byte range is the chunk's elements; ``ARCHIVE``, it is a container of its own that
holds one tensor (the ``torch.save`` archives of DCP), and where in it the elements lie, with what strides and CRC-32,
is read when they are wanted. What is known of that is kept in `Payloads`, by row.

A format may store a box more than once (the replicas of data parallelism). The index lists one copy as the chunk and
the others in ``replicas``.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointUnsound
from reshard.geometry.box import Box
from reshard.geometry.tiling import inexact_tensors, tiling_fault

Int = NDArray[np.int64]

RAW = "raw"
ARCHIVE = "archive"

# Elements are numbered in 64 bits, in plans those of all tensors in one row space.
_MOST_ELEMENTS = 1 << 62


class Chunk(NamedTuple):
    """A box of a tensor and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start_bytes: int
    length_bytes: int


class Extent(NamedTuple):
    """A byte range of one file, and the key whose bytes it holds."""

    start_bytes: int
    length_bytes: int
    key: str


class Place(NamedTuple):
    """Where the bytes of an object lie."""

    file: str
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Tensor:
    """One tensor of an index: torch's name of its dtype, its global shape, its chunks in the order recorded."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass
class Payloads:
    """Where the elements of chunks lie, by chunk row; filled as it becomes known.

    Attributes:
        start_bytes: of the elements in their file; -1 where it is not known yet.
        crc: the CRC-32 that the file records for the whole stored payload; -1 where it has none.
        record_bytes: how many bytes that CRC covers, from ``record_start_bytes`` on.
        strides: elements to step over per dim, for the rows whose elements do not lie in row-major order.
        contents: the stored records of some tiny chunks, which were in memory anyhow when they were found.
    """

    start_bytes: Int
    crc: Int
    record_start_bytes: Int
    record_bytes: Int
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def unknown(cls, rows: int) -> Payloads:
        """Nothing is known of any row."""
        start, crc, record_start, record = (np.full(rows, -1, dtype=np.int64) for _ in range(4))
        return cls(start, crc, record_start, record)


@dataclass(frozen=True, eq=False)
class Index:
    """What a checkpoint holds; see the module for the columns.

    Attributes:
        folder: what ``files`` are relative to.
        files: names, by number.
        packing: ``RAW`` or ``ARCHIVE``.
        objects: key -> the bytes of what is not a tensor.
        replicas: (rows, 4) further copies: tensor, row of the chunk that they repeat, file, start; of equal length.
    """

    folder: Path
    files: list[str]
    packing: str
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    first: Int
    offsets: Int
    sizes: Int
    file: NDArray[np.int32]
    start_bytes: Int
    length_bytes: Int
    objects: Mapping[str, Place] = field(default_factory=dict)
    replicas: Int = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))

    @functools.cached_property
    def number(self) -> dict[str, int]:
        """Name -> number of the tensor."""
        return {name: number for number, name in enumerate(self.names)}

    @functools.cached_property
    def file_number(self) -> dict[str, int]:
        """Name -> number of the file."""
        return {name: number for number, name in enumerate(self.files)}

    @property
    def dims(self) -> int:
        """Columns of the box arrays: the largest number of dims, at least 1."""
        return int(self.offsets.shape[1])

    @functools.cached_property
    def owner(self) -> Int:
        """The tensor of each chunk."""
        return np.repeat(np.arange(len(self.names), dtype=np.int64), np.diff(self.first))

    @functools.cached_property
    def padded_shapes(self) -> Int:
        """(tensors, dims), padded with 1."""
        padded = np.ones((len(self.names), self.dims), dtype=np.int64)
        for number, shape in enumerate(self.shapes):
            padded[number, : len(shape)] = shape
        return padded

    def tensor(self, name: str) -> Tensor:
        """One tensor with its chunks, as plain values."""
        number = self.number[name]
        shape = self.shapes[number]
        rows = range(int(self.first[number]), int(self.first[number + 1]))
        return Tensor(name, self.dtypes[number], shape, tuple(self._chunk(row, len(shape)) for row in rows))

    def box(self, row: int) -> Box:
        """The box of a chunk, in the dims of its tensor."""
        dims = len(self.shapes[int(self.owner[row])])
        return Box(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))

    def path(self, file: int) -> Path:
        """Where a file lies."""
        return self.folder / self.files[file]

    def extents(self) -> dict[str, list[Extent]]:
        """File -> its byte ranges in order, tensors and objects. A loop over all chunks."""
        extents: dict[str, list[Extent]] = {}
        columns = (self.owner, self.file, self.start_bytes, self.length_bytes)
        for owner, file, start, length in zip(*(column.tolist() for column in columns), strict=True):
            extents.setdefault(self.files[file], []).append(Extent(start, length, self.names[owner]))
        for owner, row, file, start in self.replicas.tolist():
            extent = Extent(start, int(self.length_bytes[row]), self.names[owner])
            extents.setdefault(self.files[file], []).append(extent)
        for key, place in self.objects.items():
            extents.setdefault(place.file, []).append(Extent(place.start_bytes, place.length_bytes, key))
        for ranges in extents.values():
            ranges.sort()
        return extents

    def tiling_faults(self) -> Iterator[tuple[str, str]]:
        """Each tensor whose chunks do not hold every element exactly once, and where they fail to."""
        for number in inexact_tensors(self.padded_shapes, self.first, self.offsets, self.sizes).tolist():
            rows = range(int(self.first[number]), int(self.first[number + 1]))
            fault = tiling_fault(self.shapes[number], [self.box(row) for row in rows])
            yield self.names[number], fault or "the chunks do not tile it"

    def _chunk(self, row: int, dims: int) -> Chunk:
        return Chunk(
            tuple(self.offsets[row, :dims].tolist()),
            tuple(self.sizes[row, :dims].tolist()),
            self.files[int(self.file[row])],
            int(self.start_bytes[row]),
            int(self.length_bytes[row]),
        )


class IndexBuilder:
    """Collects an index, tensor by tensor; every chunk belongs to the tensor begun last."""

    def __init__(self, folder: Path, packing: str) -> None:
        self.folder = folder
        self.packing = packing
        self.objects: dict[str, Place] = {}
        self._names: list[str] = []
        self._dtypes: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._first = array("q", [0])
        self._boxes = array("q")
        self._places = array("q")
        self._replicas = array("q")
        self._file_numbers: dict[str, int] = {}

    @property
    def files(self) -> list[str]:
        """File names, by number."""
        return list(self._file_numbers)

    def file(self, name: str) -> int:
        """The number of a file, given to it when it is first named."""
        return self._file_numbers.setdefault(name, len(self._file_numbers))

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Begins a tensor."""
        self._names.append(name)
        self._dtypes.append(dtype)
        self._shapes.append(shape)
        self._first.append(self._first[-1])

    def chunk(self, offsets: tuple[int, ...], sizes: tuple[int, ...], place: tuple[int, int, int]) -> int:
        """Adds a chunk at (file number, start, length) and returns its row."""
        self._boxes.extend(offsets)
        self._boxes.extend(sizes)
        self._places.extend(place)
        self._first[-1] += 1
        return self._first[-1] - 1

    def replica(self, row: int, place: tuple[int, int, int]) -> None:
        """Adds a further copy of a chunk of the tensor begun last."""
        self._replicas.extend((len(self._names) - 1, row, place[0], place[1]))

    def build(self) -> Index:
        """The index of all that was added.

        Raises:
            CheckpointUnsound: the tensors have more elements than can be counted in 64 bits.
        """
        elements = 0
        for name, shape in zip(self._names, self._shapes, strict=True):
            elements += math.prod(shape)
            if elements > _MOST_ELEMENTS:
                raise CheckpointUnsound(
                    "larger than any checkpoint",
                    path=self.folder,
                    key=name,
                    expected=f"at most {_MOST_ELEMENTS} elements in all",
                    found=f"{elements} with those of the shape {shape}"[:200],
                )
        first = np.array(self._first, dtype=np.int64)
        places = np.array(self._places, dtype=np.int64).reshape(-1, 3)
        offsets, sizes = self._padded_boxes(first)
        return Index(
            folder=self.folder,
            files=self.files,
            packing=self.packing,
            names=self._names,
            dtypes=self._dtypes,
            shapes=self._shapes,
            first=first,
            offsets=offsets,
            sizes=sizes,
            file=places[:, 0].astype(np.int32),
            start_bytes=places[:, 1].copy(),
            length_bytes=places[:, 2].copy(),
            objects=self.objects,
            replicas=np.array(self._replicas, dtype=np.int64).reshape(-1, 4),
        )

    def _padded_boxes(self, first: Int) -> tuple[Int, Int]:
        flat = np.frombuffer(self._boxes, dtype=np.int64) if self._boxes else np.zeros(0, dtype=np.int64)
        dims = np.array([len(shape) for shape in self._shapes], dtype=np.int64)
        chunk_dims = np.repeat(dims, np.diff(first))
        position = np.concatenate([[0], np.cumsum(2 * chunk_dims)])[:-1]
        columns = max(1, int(dims.max(initial=0)))
        offsets = np.zeros((len(chunk_dims), columns), dtype=np.int64)
        sizes = np.ones((len(chunk_dims), columns), dtype=np.int64)
        for dim in range(columns):
            rows = np.flatnonzero(chunk_dims > dim)
            offsets[rows, dim] = flat[position[rows] + dim]
            sizes[rows, dim] = flat[position[rows] + chunk_dims[rows] + dim]
        return offsets, sizes
