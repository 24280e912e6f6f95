"""Lays out the ``.distcp`` files of a DCP checkpoint, one per rank, and the index that its ``.metadata`` records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.formats import archive_parts
from reshard.formats.archive_parts import ALIGNMENT
from reshard.formats.output import Output, first_records
from reshard.formats.zip_parts import ZIP64_BYTES
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


@dataclass(frozen=True, eq=False)
class _Archives:
    """Frames of ``torch.save``."""

    source: Index
    layout: Layout
    dtypes: Sequence[str]
    box: Int
    payload_bytes: Int
    pad_bytes: Int

    def head(self, record: int) -> bytes:
        if (box := int(self.box[record])) < 0:
            return b""
        return archive_parts.head(*self._tensor(box), int(self.payload_bytes[record]))

    def tail(self, record: int, crc: int) -> bytes:
        if (box := int(self.box[record])) < 0:
            return b""
        length, pad = int(self.payload_bytes[record]), int(self.pad_bytes[record])
        return archive_parts.tail(*self._tensor(box), length, crc, pad)

    def closing(self, crcs: Int) -> list[tuple[int, int, bytes]]:
        return []

    def _tensor(self, box: int) -> tuple[str, tuple[int, ...]]:
        number = int(self.layout.tensor[box])
        dims = len(self.source.shapes[number])
        return self.dtypes[number], tuple(self.layout.sizes[box, :dims].tolist())


def lay_out_dcp(
    source: Index,
    layout: Layout,
    dtypes: Sequence[str],
    objects: Mapping[str, Place],
    objects_rank: int = 0,
    generation: int = 0,
) -> DcpFiles:
    """Places every box of a layout in its rank's file, and the objects behind those of one rank.

    Args:
        source: the index that the layout is of.
        dtypes: of each tensor of ``source`` as it is to be written.
        objects: stored objects to copy, by key.
        objects_rank: into whose file.
        generation: the second number in the names of the files.
    """
    # A dtype that cannot be written is that of a tensor which is not in the layout.
    widths = np.array([ITEM_BYTES.get(dtype, 0) for dtype in dtypes], dtype=np.int64)
    payload = layout.elements * widths[layout.tensor]
    head, tail = _frame_bytes(source, layout, dtypes, payload)
    archive = -(-(head + payload + tail) // ALIGNMENT) * ALIGNMENT
    copied = np.array([place.length_bytes for place in objects.values()], dtype=np.int64)
    count = len(copied)

    boxes = len(layout.tensor)
    rank = np.concatenate([layout.rank, np.full(count, objects_rank)])
    order = np.argsort(rank, kind="stable")
    ranks, file = np.unique(rank[order], return_inverse=True)
    length = np.concatenate([archive, copied])[order]
    taken = -(-length // ALIGNMENT) * ALIGNMENT
    first = first_records(file, len(ranks))
    start = np.cumsum(taken) - taken
    start -= start[first[:-1]][file] if len(file) else start
    heads = np.concatenate([head, np.zeros(count, dtype=np.int64)])[order]
    payloads = np.concatenate([payload, copied])[order]
    box = np.concatenate([np.arange(boxes), np.full(count, -1)])[order]
    tails = np.concatenate([tail, np.zeros(count, dtype=np.int64)])[order]
    pads = length - heads - payloads - tails
    ends = start + length
    names = [f"__{number}_{generation}.distcp" for number in ranks.tolist()]
    record_of = np.empty(len(order), dtype=np.int64)
    record_of[order] = np.arange(len(order))
    copies = {
        record: (source.file_number[place.file], place.start_bytes)
        for record, place in zip(record_of[boxes:].tolist(), objects.values(), strict=True)
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
        dtypes=dtypes,
        frames=_Archives(source, layout, dtypes, box, payloads, pads),
        copies=copies,
    )
    written = {
        key: Place(names[int(file[record])], int(start[record]), int(length[record]))
        for key, record in zip(objects, record_of[boxes:].tolist(), strict=True)
    }
    index = _index(source, layout, dtypes, output, record_of[:boxes], written)
    return DcpFiles(output, index, written)


def _frame_bytes(source: Index, layout: Layout, dtypes: Sequence[str], payload: Int) -> tuple[Int, Int]:
    """Bytes before and behind the elements of each box: the same for all boxes of a tensor, below 4 GiB."""
    is_large = payload >= ZIP64_BYTES
    head = np.zeros((len(source.names), 2), dtype=np.int64)
    for number in np.unique(layout.tensor).tolist():
        for large in (False, True):
            head[number, int(large)] = archive_parts.head_bytes(dtypes[number], len(source.shapes[number]), large)
    tail = np.where(is_large, archive_parts.tail_bytes(True), archive_parts.tail_bytes(False))
    return head[layout.tensor, is_large.astype(np.int64)], tail


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
