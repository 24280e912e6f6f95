"""Lays out the ``.distcp`` files of a DCP checkpoint, one per rank, and the index that its ``.metadata`` records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.formats import archive_parts
from reshard.formats.archive_parts import ALIGNMENT, ZIP64_BYTES
from reshard.formats.output import Output, first_records
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import ARCHIVE, Index, Int, Place
from reshard.plan import Layout


@dataclass(frozen=True, eq=False)
class DcpFiles:
    """A DCP checkpoint to be written.

    Attributes:
        output: the files, for the engine.
        index: tensors and the archives of their chunks, as ``.metadata`` is to say.
        objects: where the archives of the objects will lie.
    """

    output: Output
    index: Index
    objects: dict[str, Place]


@dataclass(frozen=True)
class _Archives:
    """Frames of ``torch.save``."""

    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    payload_bytes: Sequence[int]
    pad_bytes: Sequence[int]

    def head(self, record: int) -> bytes:
        if not self.dtypes[record]:
            return b""
        return archive_parts.head(self.dtypes[record], self.shapes[record], self.payload_bytes[record])

    def tail(self, record: int, crc: int) -> bytes:
        if not self.dtypes[record]:
            return b""
        length = self.payload_bytes[record]
        return archive_parts.tail(self.dtypes[record], self.shapes[record], length, crc, self.pad_bytes[record])


def lay_out_dcp(source: Index, layout: Layout, dtypes: Sequence[str], objects: Mapping[str, Place]) -> DcpFiles:
    """Places every box of a layout in its rank's file, behind the objects, which all lie in the first.

    Args:
        source: the index that the layout is of.
        dtypes: of each tensor of ``source`` as it is to be written.
        objects: stored objects to copy, by key.
    """
    shapes, box_dtypes = _boxes(source, layout, dtypes)
    head, tail = _frame_bytes(shapes, box_dtypes, layout)
    payload = layout.elements * np.array([ITEM_BYTES[dtype] for dtype in box_dtypes], dtype=np.int64)
    archive = -(-(head + payload + tail) // ALIGNMENT) * ALIGNMENT
    copied = np.array([place.length_bytes for place in objects.values()], dtype=np.int64)
    count = len(copied)

    rank = np.concatenate([np.zeros(count, dtype=np.int64), layout.rank])
    order = np.argsort(rank, kind="stable")
    ranks, file = np.unique(rank[order], return_inverse=True)
    length = np.concatenate([copied, archive])[order]
    taken = -(-length // ALIGNMENT) * ALIGNMENT
    first = first_records(file, len(ranks))
    start = np.cumsum(taken) - taken
    start -= start[first[:-1]][file] if len(file) else start
    heads = np.concatenate([np.zeros(count, dtype=np.int64), head])[order]
    payloads = np.concatenate([copied, payload])[order]
    box = np.concatenate([np.full(count, -1), np.arange(len(layout.tensor))])[order]
    record_dtypes = [box_dtypes[number] if number >= 0 else "" for number in box.tolist()]
    record_shapes = [shapes[number] if number >= 0 else () for number in box.tolist()]
    tails = np.concatenate([np.zeros(count, dtype=np.int64), tail])[order]
    pads = length - heads - payloads - tails
    ends = start + length
    names = [f"__{number}_0.distcp" for number in ranks.tolist()]
    source_files = {name: number for number, name in enumerate(source.files)}
    places = list(objects.values())
    copies = {
        record: (source_files[places[number].file], places[number].start_bytes)
        for record, number in enumerate(order.tolist())
        if number < count
    }
    output = Output(
        names=names,
        length_bytes=ends[first[1:] - 1] if len(ends) else np.zeros(0, dtype=np.int64),
        first=first,
        file=file.astype(np.int64),
        start=start,
        payload_start=start + heads,
        payload_bytes=payloads,
        end=ends,
        box=box,
        dtypes=record_dtypes,
        frames=_Archives(record_dtypes, record_shapes, payloads.tolist(), pads.tolist()),
        copies=copies,
    )
    record_of = np.empty(len(order), dtype=np.int64)
    record_of[order] = np.arange(len(order))
    written = {
        key: Place(names[int(file[record])], int(start[record]), int(length[record]))
        for key, record in zip(objects, record_of[:count].tolist(), strict=True)
    }
    index = _index(source, layout, dtypes, output, record_of[count:], written)
    return DcpFiles(output, index, written)


def _boxes(source: Index, layout: Layout, dtypes: Sequence[str]) -> tuple[list[tuple[int, ...]], list[str]]:
    """Shape and dtype of each box, in the dims of its tensor."""
    tensors = layout.tensor.tolist()
    shapes = [
        tuple(sizes[: len(source.shapes[number])]) for sizes, number in zip(layout.sizes.tolist(), tensors, strict=True)
    ]
    return shapes, [dtypes[number] for number in tensors]


def _frame_bytes(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], layout: Layout) -> tuple[Int, Int]:
    known: dict[tuple[str, int, bool], int] = {}
    head = np.empty(len(shapes), dtype=np.int64)
    tail = np.empty(len(shapes), dtype=np.int64)
    for row, (shape, dtype, elements) in enumerate(zip(shapes, dtypes, layout.elements.tolist(), strict=True)):
        is_large = elements * ITEM_BYTES[dtype] >= ZIP64_BYTES
        kind = (dtype, len(shape), is_large)
        if kind not in known:
            known[kind] = archive_parts.head_bytes(*kind)
        head[row] = known[kind]
        tail[row] = archive_parts.tail_bytes(is_large)
    return head, tail


def _index(
    source: Index, layout: Layout, dtypes: Sequence[str], output: Output, record: Int, objects: dict[str, Place]
) -> Index:
    """What is written, with the boxes as chunks."""
    tensors, counts = np.unique(layout.tensor, return_counts=True)
    numbers = tensors.tolist()
    return Index(
        folder=Path(),
        files=list(output.names),
        packing=ARCHIVE,
        names=[source.names[number] for number in numbers],
        dtypes=[dtypes[number] for number in numbers],
        shapes=[source.shapes[number] for number in numbers],
        first=np.concatenate([[0], np.cumsum(counts)]),
        offsets=layout.offsets,
        sizes=layout.sizes,
        file=output.file[record].astype(np.int32),
        start_bytes=output.start[record],
        length_bytes=(output.end - output.start)[record],
        objects=objects,
    )
