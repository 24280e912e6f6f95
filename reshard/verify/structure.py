"""The cheap soundness check of a DCP checkpoint: reads the metadata and the sizes of files, no tensor.

What it can see: files that are missing, cut short or not fetched, tensors with elements that no chunk or two chunks
hold, a manifest that is damaged or belongs to another step. What it cannot: flipped bits inside the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard.errors import CheckpointUnsound, StorageError
from reshard.formats import dcp_metadata, manifest
from reshard.formats.dcp_metadata import DcpMetadata, Extent, StoredTensor
from reshard.formats.unpickle import missing_data
from reshard.storage.steps import step_number


def structure_faults(folder: str | os.PathLike[str]) -> list[str]:
    """Every structural fault of a checkpoint folder, a line each; an empty list where it is sound.

    Raises:
        StorageError: the file system refused, so that nothing can be said.
    """
    try:
        metadata = dcp_metadata.read(folder)
    except CheckpointUnsound as error:
        return [*_lines(error), *_manifest_faults(Path(folder))]
    return [*_file_faults(Path(folder), metadata), *_tiling_faults(metadata), *_manifest_faults(Path(folder))]


def unreferenced_files(folder: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Name and bytes of each ``.distcp`` file that the metadata does not name: left by an earlier save, and harmless.

    Raises:
        CheckpointUnsound: the metadata cannot be read, so that nothing is known of any file.
        StorageError: the file system refused.
    """
    named = dcp_metadata.read(folder).extents
    unnamed = [path for path in sorted(Path(folder).glob("*.distcp")) if path.name not in named]
    try:
        return [(path.name, path.stat().st_size) for path in unnamed]
    except OSError as error:
        raise StorageError("cannot be read", path=folder, found=error) from error


def _lines(error: CheckpointUnsound) -> list[str]:
    first, *details = str(error).splitlines()
    return [first, *(detail.strip() for detail in details)]


def _manifest_faults(folder: Path) -> Iterator[str]:
    if not manifest.exists(folder):
        return
    try:
        found = manifest.read(folder).step
    except CheckpointUnsound as error:
        yield from _lines(error)
        return
    # A link such as latest has no step in its own name.
    named = step_number(folder.resolve().name)
    if named is not None and named != found:
        yield f"{folder / manifest.FILE_NAME}: step: expected {named} as the folder's name says, found {found}"


def _file_faults(folder: Path, metadata: DcpMetadata) -> Iterator[str]:
    for name, extents in sorted(metadata.extents.items()):
        if (fault := _file_fault(folder / name, extents)) is not None:
            yield f"{folder / name}: {fault}"


def _file_fault(path: Path, extents: Sequence[Extent]) -> str | None:
    last = max(extents, key=lambda extent: extent.offset_bytes + extent.length_bytes)
    expected_bytes = last.offset_bytes + last.length_bytes
    try:
        found_bytes = path.stat().st_size
        if found_bytes >= expected_bytes and path.is_file():
            return None
        reason = _reason(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"missing: expected {expected_bytes} bytes with {_keys(extents)}"
    except OSError as error:
        raise StorageError("cannot be read", path=path, found=error) from error
    lost = [extent for extent in extents if extent.offset_bytes + extent.length_bytes > found_bytes]
    return f"{reason}: expected at least {expected_bytes} bytes, found {found_bytes}; lost: {_keys(lost)}"


def _reason(path: Path) -> str:
    if not path.is_file():
        return "not a file"
    with path.open("rb") as file:
        return missing_data(file.read(100)) or "cut short"


def _keys(extents: Sequence[Extent]) -> str:
    first = extents[0].key if extents else "nothing"
    return first if len(extents) < 2 else f"{first} and {len(extents) - 1} more"


class _Box(NamedTuple):
    low: tuple[int, ...]
    high: tuple[int, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.low, self.high, strict=True)) + "]"

    def cut(self, dim: int, low: int, high: int) -> _Box:
        """The slab of this box between two positions along a dim."""
        return _Box((*self.low[:dim], low, *self.low[dim + 1 :]), (*self.high[:dim], high, *self.high[dim + 1 :]))


def _tiling_faults(metadata: DcpMetadata) -> Iterator[str]:
    for key, tensor in sorted(metadata.tensors.items()):
        if (fault := _tiling_fault(tensor)) is not None:
            yield f"{key}: {fault}"


def _tiling_fault(tensor: StoredTensor) -> str | None:
    """What keeps the chunks from tiling the tensor exactly once."""
    whole = _Box((0,) * len(tensor.shape), tensor.shape)
    boxes = [
        _Box(chunk.offsets, tuple(map(sum, zip(chunk.offsets, chunk.shape, strict=True))))
        for chunk in tensor.chunks
        if 0 not in chunk.shape
    ]
    for box in boxes:
        if any(end > limit for end, limit in zip(box.high, tensor.shape, strict=True)):
            return f"the chunk {box} sticks out of the shape {tensor.shape}"
    if 0 in tensor.shape:
        return None
    # Slabs that no box crosses are independent. Any grid comes apart along its cuts, a dim after the other, down to
    # single boxes: n log n, and the place of a fault is known.
    regions = [(whole, boxes)]
    while regions:
        region, inside = regions.pop()
        if len(inside) < 2:
            if (hole := _hole(region, inside)) is not None:
                return f"no chunk holds {hole} of the shape {tensor.shape}"
            continue
        slabs = _slabs(region, inside)
        if slabs is None:
            if (fault := _knot_fault(region, inside)) is not None:
                return f"{fault} of the shape {tensor.shape}"
            continue
        regions.extend(reversed(slabs))
    return None


def _hole(region: _Box, inside: list[_Box]) -> _Box | None:
    """A part of the region that its only box does not hold."""
    if not inside:
        return region
    box = inside[0]
    for dim in range(len(region.low)):
        if region.low[dim] < box.low[dim]:
            return region.cut(dim, region.low[dim], box.low[dim])
        if box.high[dim] < region.high[dim]:
            return region.cut(dim, box.high[dim], region.high[dim])
    return None


def _slabs(region: _Box, inside: list[_Box]) -> list[tuple[_Box, list[_Box]]] | None:
    """The region cut wherever no box crosses, along the first dim that has such a cut; gaps are slabs without a box."""
    for dim in range(len(region.low)):
        slabs: list[tuple[_Box, list[_Box]]] = []
        reached = region.low[dim]
        for low, high, group in _runs(inside, dim):
            if low > reached:
                slabs.append((region.cut(dim, reached, low), []))
            slabs.append((region.cut(dim, low, high), group))
            reached = high
        if reached < region.high[dim]:
            slabs.append((region.cut(dim, reached, region.high[dim]), []))
        if len(slabs) > 1:
            return slabs
    return None


def _runs(boxes: list[_Box], dim: int) -> list[tuple[int, int, list[_Box]]]:
    """The boxes grouped by the stretches that they cover together along a dim, in order."""
    runs: list[tuple[int, int, list[_Box]]] = []
    for box in sorted(boxes, key=lambda box: box.low[dim]):
        if runs and box.low[dim] < runs[-1][1]:
            low, high, group = runs[-1]
            group.append(box)
            runs[-1] = (low, max(high, box.high[dim]), group)
        else:
            runs.append((box.low[dim], box.high[dim], [box]))
    return runs


def _knot_fault(region: _Box, inside: list[_Box]) -> str | None:
    """For boxes that no cut separates: they overlap, or are wound around each other like a pinwheel."""
    active: list[_Box] = []
    for box in sorted(inside):
        active = [other for other in active if not box.low or other.high[0] > box.low[0]]
        for other in active:
            both = _Box(tuple(map(max, other.low, box.low)), tuple(map(min, other.high, box.high)))
            if all(low < high for low, high in zip(both.low, both.high, strict=True)):
                return f"two chunks hold {both}"
        active.append(box)
    if sum(map(_elements, inside)) != _elements(region):
        return f"no chunk holds a part of {region}"
    return None


def _elements(box: _Box) -> int:
    return math.prod(high - low for low, high in zip(box.low, box.high, strict=True))
