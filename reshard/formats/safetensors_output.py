"""Lays out safetensors files of whole tensors, as Hugging Face has them: one, or numbered ones and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.formats.output import Output, first_records, whole_boxes
from reshard.formats.safetensors_header import header_bytes
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Index, Int, Place
from reshard.plan import Layout

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Without it, transformers refuses the file.
_METADATA = {"format": "pt"}


@dataclass(frozen=True, eq=False)
class SafetensorsFiles:
    """Files to be written.

    Attributes:
        output: the files, for the engine.
        layout: the tensors, whole; their ranks are the numbers of the files.
        described: name -> content of the file that lists the others, where there are several.
        objects: none: the format has tensors only.
    """

    output: Output
    layout: Layout
    described: dict[str, bytes]
    objects: dict[str, Place]


@dataclass(frozen=True, eq=False)
class _Headers:
    """Frames of safetensors: a header before the first tensor of each file."""

    headers: dict[int, bytes]

    def head(self, record: int) -> bytes:
        return self.headers.get(record, b"")

    def tail(self, record: int, crc: int) -> bytes:
        return b""

    def closing(self, crcs: Int) -> list[tuple[int, int, bytes]]:
        return []


def lay_out_safetensors(
    source: Index,
    tensors: Int,
    names: Mapping[int, str],
    dtypes: Sequence[str],
    most_file_bytes: int | None,
    tied: Mapping[str, int] | None = None,
) -> SafetensorsFiles:
    """Places tensors in files.

    Args:
        source: the index that they are of.
        tensors: their numbers.
        names: of each, as it is to be written.
        dtypes: of every tensor of ``source`` as it is to be written.
        most_file_bytes: begin another file rather than exceed it; None for one file.
        tied: further names of tensors, recorded in the headers under ``tied``.

    Raises:
        UsageError: the format has no name for a dtype.
    """
    groups = _grouped(source, tensors, dtypes, most_file_bytes)
    file_names = _file_names(len(groups))
    headers: dict[int, bytes] = {}
    order: list[int] = []
    file: list[int] = []
    places: list[int] = []
    for number, group in enumerate(groups):
        # Wide elements first, so that all are aligned.
        group.sort(key=lambda tensor: -ITEM_BYTES[dtypes[tensor]])
        named = [(names[tensor], dtypes[tensor], source.shapes[tensor]) for tensor in group]
        others = {name: names[tensor] for name, tensor in (tied or {}).items() if tensor in group}
        metadata = _METADATA | {"tied": json.dumps(others)} if others else _METADATA
        header, begins = header_bytes(named, metadata)
        headers[len(order)] = header
        order += group
        file += [number] * len(group)
        places += begins
    layout, box, payload_bytes = whole_boxes(source, np.array(order, dtype=np.int64), np.array(file), dtypes)
    payload_start = np.array(places, dtype=np.int64)
    start = payload_start.copy()
    start[list(headers)] = 0
    end = payload_start + payload_bytes
    first = first_records(np.array(file, dtype=np.int64), len(groups))
    output = Output(
        names=file_names,
        length_bytes=end[first[1:] - 1],
        first=first,
        file=np.array(file, dtype=np.int64),
        start=start,
        payload_start=payload_start,
        payload_bytes=payload_bytes,
        end=end,
        box=box,
        dtypes=dtypes,
        frames=_Headers(headers),
    )
    weight_map = {names[tensor]: file_names[number] for tensor, number in zip(order, file, strict=True)}
    listing = {"metadata": {"total_size": int(payload_bytes.sum())}, "weight_map": dict(sorted(weight_map.items()))}
    described = {} if len(groups) == 1 else {INDEX_NAME: json.dumps(listing, indent=2).encode()}
    return SafetensorsFiles(output, layout, described, {})


def _grouped(source: Index, tensors: Int, dtypes: Sequence[str], most_bytes: int | None) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    filled = 0
    for tensor in tensors.tolist():
        length = ITEM_BYTES[dtypes[tensor]] * int(np.prod(source.shapes[tensor], dtype=np.int64))
        if groups[-1] and most_bytes is not None and filled + length > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += length
    return groups


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WHOLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
