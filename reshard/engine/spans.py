"""What the payloads of some records are made of: byte ranges of source files, or boxes that have to be rearranged.

A piece whose elements lie together both in its chunk and in its box is a *span*: bytes that are moved as they are. All
of FSDP's resharding is spans. A record with any piece that is not (a column of tensor parallelism, a chunk saved
transposed, another dtype) is *banded*: it is assembled from bands of its rows, each small enough for a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.output import Output
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Int
from reshard.plan import Layout, Plan, piece_boxes


class Span(NamedTuple):
    """Bytes of a payload that lie together in a source file.

    Attributes:
        start: in the payload.
        length: bytes.
        file, place: number of the source file, and where they lie in it.
        row: the chunk that they belong to; -1 for a copy.
    """

    start: int
    length: int
    file: int
    place: int
    row: int


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that a copy needs: from an opened checkpoint, by a plan, into files."""

    source: Checkpoint
    layout: Layout
    plan: Plan
    output: Output


def spans_of(job: Job, records: range) -> dict[int, list[Span] | None]:
    """The spans of each record, in order; None for one that is banded. Finds the chunks' elements where it must.

    Raises:
        CheckpointUnsound, StorageError: a chunk's container is damaged or cannot be read.
    """
    output = job.output
    spans: dict[int, list[Span] | None] = {record: [] for record in records}
    for record in records:
        if record in output.copies:
            file, place = output.copies[record]
            spans[record] = [Span(0, int(output.payload_bytes[record]), file, place, -1)]
    box = output.box[records.start : records.stop]
    of_boxes = np.flatnonzero(box >= 0)
    pieces, owner = _pieces(job.plan, box[of_boxes], of_boxes + records.start)
    if not len(pieces):
        return spans
    rows = job.plan.source[pieces].astype(np.int64)
    job.source.locate(np.unique(rows))
    moves, source_start, start, length = _moves(job, pieces, rows)
    is_cast = np.array([a != b for a, b in zip(job.source.index.dtypes, output.dtypes, strict=True)], dtype=bool)
    moves &= ~is_cast[job.source.index.owner[rows]]
    for record in np.unique(owner[~moves]).tolist():
        spans[record] = None
    order = np.lexsort((start, owner))
    files = job.source.index.file[rows]
    places = job.source.payloads.start_bytes[rows] + source_start
    columns = (owner, start, length, files, places, rows)
    for record, *fields in zip(*(column[order].tolist() for column in columns), strict=True):
        if (known := spans[record]) is not None:
            known.append(Span(*fields))
    return spans


def rows_of(job: Job, records: range) -> Int:
    """The chunks that some records are made of, ascending."""
    box = job.output.box[records.start : records.stop]
    of_boxes = np.flatnonzero(box >= 0)
    pieces, _ = _pieces(job.plan, box[of_boxes], of_boxes)
    return np.unique(job.plan.source[pieces]).astype(np.int64)


def _pieces(plan: Plan, boxes: Int, records: Int) -> tuple[Int, Int]:
    """The pieces of some boxes, and the record that each belongs to."""
    counts = plan.first[boxes + 1] - plan.first[boxes]
    owner = np.repeat(records, counts)
    begin = np.repeat(plan.first[boxes] - (np.cumsum(counts) - counts), counts)
    return begin + np.arange(len(owner)), owner


def _moves(job: Job, pieces: Int, rows: Int) -> tuple[NDArray[np.bool_], Int, Int, Int]:
    """Which pieces are spans; and of each its first byte in its chunk, its first byte in its box, its bytes."""
    index, layout = job.source.index, job.layout
    wanted = job.plan.wanted[pieces]
    low, sizes = piece_boxes(index, layout, job.plan, pieces)
    # A dtype without a width is that of a tensor which is not copied.
    width = np.array([ITEM_BYTES.get(dtype, 0) for dtype in index.dtypes], dtype=np.int64)[index.owner[rows]]
    in_chunk = first_element(low - index.offsets[rows], index.sizes[rows])
    in_box = first_element(low - layout.offsets[wanted], layout.sizes[wanted])
    dense = lie_together(sizes, index.sizes[rows]) & lie_together(sizes, layout.sizes[wanted])
    if job.source.payloads.strides:
        dense &= ~np.isin(rows, np.array(list(job.source.payloads.strides), dtype=np.int64))
    return dense, in_chunk * width, in_box * width, sizes.prod(axis=1) * width


def first_element(position: Int, sizes: Int) -> Int:
    """Row-major number of the element at a position, in a box of these sizes."""
    number = np.zeros(len(position), dtype=np.int64)
    for dim in range(sizes.shape[1]):
        number = number * sizes[:, dim] + position[:, dim]
    return number


def lie_together(part: Int, whole: Int) -> NDArray[np.bool_]:
    """Whether the elements of a part follow one another in the row-major order of the whole."""
    together = np.ones(len(part), dtype=bool)
    begun = np.zeros(len(part), dtype=bool)
    for dim in range(part.shape[1]):
        together &= ~begun | (part[:, dim] == whole[:, dim])
        begun |= part[:, dim] > 1
    return together
