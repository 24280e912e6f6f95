"""An opened checkpoint of any format: its index, and its tensors by slice."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.manifest import Manifest
from reshard.geometry.box import Box, row_major_strides
from reshard.index.dtypes import item_bytes, raw
from reshard.index.index import RAW, Index, Int, Payloads
from reshard.storage.byte_ranges import SourceFiles

if TYPE_CHECKING:
    import torch

Part = Box | slice | Sequence[slice] | None
Observer = Callable[[int, memoryview], None]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What `reshard.open_checkpoint` gives. Holds open files; use it as a context manager, or `close` it.

    Attributes:
        path: the folder or file.
        format: ``dcp``, ``safetensors`` or ``torch``.
        index: every tensor, and where its bytes lie.
        manifest: the content of ``reshard.json``; None where there is none, or none that can be read.
        manifest_fault: why it cannot be read.
        paths: key -> path in the nested state that was saved, where it is known.
        values: key -> what is not a tensor and is kept as a value in this format.
        object_content: key -> the bytes of an object, as stored; for the keys of ``index.objects``.
        files: the files of the index, to read from.
        payloads: where the elements of chunks lie, as far as it is known.
        locate: makes ``payloads`` known for an array of chunk rows.
        metadata_files: what describes the tensors: to be there, and referenced by nothing.
        version: of the format, where the files record it.
        notes: what was found on opening that the user should know.
        holds_archives: whether each file is one archive of ``torch.save``, with many tensors.
    """

    path: Path
    format: str
    index: Index
    manifest: Manifest | None
    paths: dict[str, tuple[str | int, ...]]
    files: SourceFiles
    payloads: Payloads
    locate: Callable[[Int], None]
    values: dict[str, Any] = field(default_factory=dict)
    metadata_files: tuple[str, ...] = ()
    manifest_fault: CheckpointUnsound | None = None
    version: str | None = None
    notes: tuple[str, ...] = ()
    holds_archives: bool = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self.files.close()

    def require_manifest(self) -> Manifest | None:
        """The manifest, or None where there is none.

        Raises:
            CheckpointUnsound: there is one, and it is damaged.
        """
        if self.manifest_fault is not None:
            raise self.manifest_fault
        return self.manifest

    @property
    def keys(self) -> list[str]:
        """The names of all tensors."""
        return self.index.names

    @functools.cached_property
    def first_in_record(self) -> Int | None:
        """For each chunk, the first one of the same stored record, whose checksum is theirs all; None: each its own."""
        if self.index.packing != RAW:
            return None
        places = np.column_stack([self.index.file, self.payloads.record_start_bytes])
        _, first, record = np.unique(places, axis=0, return_index=True, return_inverse=True)
        rows: Int = first.astype(np.int64)[record.reshape(-1)]
        # What lies in no record has no checksum.
        return np.where(self.payloads.record_start_bytes < 0, np.arange(len(rows)), rows)

    def read(self, name: str, part: Part = None) -> torch.Tensor:
        """A tensor or a part of it, as a torch tensor in memory of its own.

        Reads the byte ranges of that part only.

        Args:
            name: its key.
            part: a `Box`, or slices of the leading dims without steps; all of it by default.

        Raises:
            UsageError: no such tensor, or not a part of it.
            CheckpointUnsound: its bytes are missing, damaged or incomplete.
        """
        import torch

        elements = self.read_array(name, part)
        dtype = getattr(torch, self.index.dtypes[self.index.number[name]])
        return (
            torch.frombuffer(elements, dtype=torch.uint8).view(dtype).reshape(elements.shape)
            if elements.size
            else (torch.empty(elements.shape, dtype=dtype))
        )

    def read_array(self, name: str, part: Part = None) -> NDArray[np.generic]:
        """As `read`, without torch: the elements in row-major order, as opaque numbers of their width.

        `reshard.index.dtypes.values` makes them numbers to compute with.
        """
        number = self._number(name)
        box = Box.within(self.index.shapes[number], part)
        dtype = self.index.dtypes[number]
        item_bytes(dtype, name, self.path)
        out = _room(box.sizes, raw(dtype), self.path, name)
        covered = 0
        rows = self._overlapping(number, box)
        self.locate(rows)
        for row in rows.tolist():
            chunk = self.index.box(row)
            shared = chunk.intersection(box)
            inside = shared.relative_to(box.offsets)
            place = tuple(slice(low, low + size) for low, size in zip(inside.offsets, inside.sizes, strict=True))
            out[place] = self.read_chunk(row, shared.relative_to(chunk.offsets))
            covered += shared.elements
        if covered != box.elements:
            raise CheckpointUnsound(
                "the chunks do not hold this part exactly once",
                path=self.path,
                key=name,
                expected=f"{box.elements} elements of {box}",
                found=covered,
            )
        return out

    def read_chunk(self, row: int, box: Box, observe: Observer | None = None) -> NDArray[np.generic]:
        """A part of one located chunk, counted from the chunk's own start, as opaque numbers in row-major order."""
        index = self.index
        dtype = raw(index.dtypes[int(index.owner[row])])
        sizes = index.box(row).sizes
        strides = self.payloads.strides.get(row) or row_major_strides(sizes)
        start = int(self.payloads.start_bytes[row])
        if start < 0:
            raise ValueError(f"chunk {row} was not located")
        file = int(index.file[row])
        return read_strided(self.files, file, start, dtype, strides, box, observe)

    def object_bytes(self, key: str) -> bytes:
        """The stored bytes of what is not a tensor: in DCP, a ``torch.save`` archive."""
        place = self.index.objects[key]
        file = self.index.file_number[place.file]
        return bytes(self.files.read(file, place.start_bytes, place.length_bytes))

    def _number(self, name: str) -> int:
        try:
            return self.index.number[name]
        except KeyError:
            near = [key for key in self.index.names if key.endswith(name) or name.endswith(key)][:3]
            hint = f"did you mean {', '.join(near)}" if near else "`reshard inspect --tree` lists what there is"
            raise UsageError("no such tensor", path=self.path, key=name, hint=hint) from None

    def _overlapping(self, number: int, box: Box) -> Int:
        """Rows of the chunks that share elements with a box."""
        index = self.index
        first, last = int(index.first[number]), int(index.first[number + 1])
        dims = len(box.sizes)
        low = index.offsets[first:last, :dims]
        high = low + index.sizes[first:last, :dims]
        shared = np.minimum(high, np.array(box.ends)) - np.maximum(low, np.array(box.offsets))
        return first + np.flatnonzero((shared > 0).all(axis=1))


def all_known(rows: Int) -> None:
    """To locate chunks of a format whose index says where every element lies, or of which all were found before."""


def _room(shape: Sequence[int], dtype: np.dtype[np.generic], path: Path, key: str) -> NDArray[np.generic]:
    try:
        return np.empty(shape, dtype=dtype)
    except (MemoryError, ValueError) as error:
        raise UsageError("too large for this machine's memory", path=path, key=key, found=error) from error


def read_strided(
    files: SourceFiles,
    file: int,
    start: int,
    dtype: np.dtype[np.generic],
    strides: Sequence[int],
    box: Box,
    observe: Observer | None = None,
) -> NDArray[np.generic]:
    """A box of elements that lie in a file at the given strides (in elements), in row-major order.

    Stretches that lie together are read at once, in file order. Where they are short and the gaps between them are no
    longer than a cache line, the gaps are read as well, in blocks; longer gaps never are. An element that stands in
    many places, for its strides are 0, is read once.

    Args:
        start: byte of the element at the origin.
        box: counted from the origin.
        observe: told of each stretch or block that is read, gaps included: byte of the file, content. In file order,
            and of what strides that overlap make it read twice, only the first time.
    """
    width = dtype.itemsize
    if not box.elements:
        return np.empty(box.sizes, dtype=dtype)
    begin = start + width * sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    # Dims in memory order, without those that do not lead on to other bytes.
    dims = sorted((dim for dim, size in enumerate(box.sizes) if size > 1 and strides[dim]), key=lambda d: -strides[d])
    content = np.empty([box.sizes[dim] for dim in dims], dtype=dtype)
    told = begin

    def read_into(at: int, view: memoryview) -> None:
        nonlocal told
        files.read_into(file, at, [view])
        if observe is not None and told < at + len(view):
            observe(max(at, told), view[max(0, told - at) :])
            told = at + len(view)

    _gather(content, begin, [strides[dim] for dim in dims], read_into)
    # Back to the order of the tensor.
    ordered = content.transpose([dims.index(dim) for dim in sorted(dims)])
    kept = [size if dim in dims else 1 for dim, size in enumerate(box.sizes)]
    # Of 0 dims, numpy makes 1.
    return np.ascontiguousarray(np.broadcast_to(ordered.reshape(kept), box.sizes)).reshape(box.sizes)


def _gather(
    content: NDArray[np.generic], begin: int, strides: Sequence[int], read_into: Callable[[int, memoryview], None]
) -> None:
    """Fills an array with the elements at descending strides from byte ``begin`` on, in as few reads as make sense."""
    width = content.itemsize
    # Each read has all of the dims from `level` on, which `reach` over so many elements, and some positions of the dim
    # before it, one after the other. Where what it reads is what it fills, it is read into place.
    level, together, reach, is_dense = content.ndim, 1, 1, True
    while level:
        size, stride = content.shape[level - 1], strides[level - 1]
        joined = reach + (size - 1) * stride
        gap_bytes = (stride - reach) * width
        if not (is_dense and gap_bytes == 0):
            if gap_bytes > _GAP_BYTES or (is_dense and gap_bytes > 0 and reach * width >= _LONG_BYTES):
                break
            if joined * width > _BLOCK_BYTES:
                together = max(1, 1 + (_BLOCK_BYTES // width - reach) // stride)
                is_dense = is_dense and together == 1
                break
            is_dense = False
        level, reach = level - 1, joined
    outer = (1, *content.shape[:level])
    steps = (0, *strides[:level])
    inside = content.reshape(-1, outer[-1], *content.shape[level:])
    block = np.empty((together - 1) * steps[-1] + reach, dtype=content.dtype) if not is_dense else None
    grid = (*outer[:-1], -(-outer[-1] // together))
    reads = math.prod(grid)
    for low in range(0, reads, _PLANNED_READS):
        places = np.unravel_index(np.arange(low, min(low + _PLANNED_READS, reads)), grid)
        starts = np.zeros(len(places[0]), dtype=np.int64)
        for place, step in zip(places, (*steps[:-1], steps[-1] * together), strict=True):
            starts += place * step
        for number, first in enumerate(starts.tolist(), low):
            row, position = divmod(number, grid[-1])
            part = inside[row, position * together : (position + 1) * together]
            if block is None:
                read_into(begin + first * width, part.reshape(-1).view(np.uint8).data)
                continue
            span = block[: (len(part) - 1) * steps[-1] + reach]
            read_into(begin + first * width, span.view(np.uint8).data)
            byte_strides = [stride * width for stride in (steps[-1], *strides[level:])]
            part[...] = np.lib.stride_tricks.as_strided(span, part.shape, byte_strides, writeable=False)


# A gap within a cache line is read as well: a call for each element would take a thousand times as long.
_GAP_BYTES = 64
_LONG_BYTES = 4096
_BLOCK_BYTES = 1 << 20
_PLANNED_READS = 1 << 12
