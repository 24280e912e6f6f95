"""An opened checkpoint of any format: its index, and its tensors by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from reshard.index.index import Index, Int, Payloads
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
        file = self.index.files.index(place.file)
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

    Stretches that lie together are read at once, in file order, and nothing between them.

    Args:
        start: byte of the element at the origin.
        box: counted from the origin.
        observe: told of each stretch: byte of the file, content.
    """
    width = dtype.itemsize
    if not box.elements:
        return np.empty(box.sizes, dtype=dtype)
    # Dims in memory order, those of one element left out; then the trailing ones that are dense are one stretch.
    dims = sorted((dim for dim, size in enumerate(box.sizes) if size > 1), key=lambda dim: -strides[dim])
    stretch = 1
    outer = list(dims)
    while outer and strides[outer[-1]] == stretch:
        stretch *= box.sizes[outer.pop()]
    begin = start + width * sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    starts = np.zeros(1, dtype=np.int64)
    for dim in outer:
        starts = (starts[:, None] + np.arange(box.sizes[dim], dtype=np.int64) * strides[dim]).ravel()
    content = np.empty(len(starts) * stretch, dtype=dtype)
    view = content.view(np.uint8).data
    step = stretch * width
    for number, offset in enumerate(starts.tolist()):
        stretch_bytes = view[number * step : (number + 1) * step]
        files.read_into(file, begin + offset * width, [stretch_bytes])
        if observe is not None:
            observe(begin + offset * width, stretch_bytes)
    # The stretches are the last dims in memory order; back to the order of the tensor.
    in_memory = content.reshape([box.sizes[dim] for dim in dims])
    back = [dims.index(dim) for dim in sorted(dims)]
    return np.ascontiguousarray(in_memory.transpose(back)).reshape(box.sizes)


def chunks_of(checkpoint: Checkpoint, name: str) -> Iterator[tuple[int, Box]]:
    """Row and box of each chunk of a tensor."""
    number = checkpoint.index.number[name]
    for row in range(int(checkpoint.index.first[number]), int(checkpoint.index.first[number + 1])):
        yield row, checkpoint.index.box(row)
