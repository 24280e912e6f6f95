"""Payloads whose bytes have to be rearranged, in bands: boxes of some rows, which follow one another in the payload."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from reshard.engine.spans import Job
from reshard.geometry.box import Box
from reshard.index.dtypes import ITEM_BYTES, cast, raw
from reshard.index.index import Int
from reshard.plan import piece_boxes

BAND_BYTES = 1 << 20

Observer = Callable[[int, int, memoryview], None]
"""Told of (chunk row, byte of the file, content) of what is read."""


def banded(job: Job, record: int, start: int, end: int, observe: Observer) -> Iterator[memoryview]:
    """The bytes [start, end) of a record's payload, a band at a time.

    Raises:
        CheckpointUnsound, StorageError: the source cannot be read.
    """
    source, layout = job.source, job.layout
    box_row = int(job.output.box[record])
    number = int(layout.tensor[box_row])
    dims = len(source.index.shapes[number])
    whole = Box(tuple(layout.offsets[box_row, :dims].tolist()), tuple(layout.sizes[box_row, :dims].tolist()))
    width = ITEM_BYTES[job.output.dtypes[number]]
    pieces = slice(int(job.plan.first[box_row]), int(job.plan.first[box_row + 1]))
    low, sizes = (columns[:, :dims] for columns in piece_boxes(source.index, layout, job.plan, pieces))
    rows = job.plan.source[pieces].tolist()
    element = start // width
    while element * width < end:
        first, band = band_at(whole.sizes, element, BAND_BYTES // max(width, ITEM_BYTES[source.index.dtypes[number]]))
        place = Box(tuple(a + b for a, b in zip(whole.offsets, band.offsets, strict=True)), band.sizes)
        # A band that two segments share is told of by the first of them.
        told = observe if first * width >= start else None
        content = _assembled(job, number, place, rows, low, sizes, told)
        if source.index.dtypes[number] != job.output.dtypes[number]:
            content = cast(content, source.index.dtypes[number], job.output.dtypes[number])
        view = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
        yield view[max(0, start - first * width) : end - first * width]
        element = first + band.elements


def band_at(shape: Sequence[int], element: int, most_elements: int) -> tuple[int, Box]:
    """The band with a row-major element, and the number of its first element.

    Bands are boxes of at most ``most_elements`` elements that follow one another in row-major order, always the same
    for a shape and a limit.
    """
    inner = math.prod(shape)
    dim = 0
    while dim < len(shape) and inner > max(most_elements, 1):
        inner //= shape[dim]
        dim += 1
    if dim == 0:
        return 0, Box.whole(shape)
    # Dims before this one are walked position by position; of this one a band has as many as fit.
    dim -= 1
    together = max(1, most_elements // inner)
    position: list[int] = []
    rest = element // inner
    for size in reversed(shape[: dim + 1]):
        rest, at = divmod(rest, size)
        position.insert(0, at)
    position[dim] -= position[dim] % together
    count = min(together, shape[dim] - position[dim])
    offsets = (*position, *(0,) * (len(shape) - dim - 1))
    sizes = (*(1,) * dim, count, *shape[dim + 1 :])
    first = 0
    for size, offset in zip(shape, offsets, strict=True):
        first = first * size + offset
    return first, Box(offsets, sizes)


def _assembled(
    job: Job,
    number: int,
    place: Box,
    rows: Sequence[int],
    low: Int,
    sizes: Int,
    observe: Observer | None,
) -> NDArray[np.generic]:
    """The elements of a box of a tensor, from the chunks that hold them."""
    index = job.source.index
    out = np.empty(place.sizes, dtype=raw(index.dtypes[number]))
    shared = np.minimum(low + sizes, place.ends) > np.maximum(low, place.offsets)
    for piece in np.flatnonzero(shared.all(axis=1)).tolist():
        row = rows[piece]
        part = Box(tuple(low[piece].tolist()), tuple(sizes[piece].tolist())).intersection(place)
        inside = part.relative_to(place.offsets)
        target = tuple(slice(a, a + size) for a, size in zip(inside.offsets, inside.sizes, strict=True))
        chunk = part.relative_to(index.box(row).offsets)
        out[target] = job.source.read_chunk(row, chunk, functools.partial(observe, row) if observe else None)
    return out
