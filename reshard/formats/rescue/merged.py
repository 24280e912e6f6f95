"""Several opened checkpoints as one: what a tool keeps in a folder for the model and another for the optimizer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.manifest import Manifest
from reshard.index.index import ARCHIVE, Index, Int, Payloads, Place
from reshard.storage.byte_ranges import SourceFiles


def merged(
    path: Path, format: str, parts: Sequence[Checkpoint], manifest: Manifest | None = None, version: str | None = None
) -> Checkpoint:
    """One checkpoint with the tensors and objects of all parts, which it takes over.

    Raises:
        CheckpointUnsound: two parts have an entry of the same key.
    """
    keys = [key for part in parts for key in (*part.index.names, *part.index.objects)]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CheckpointUnsound("two parts have an entry of this key", path=path, key=twice)
    in_memory = {}
    for part, base in zip(parts, _bases([len(part.files.paths) for part in parts]), strict=False):
        in_memory.update({base + number: content for number, content in part.files.in_memory.items()})
    located = _Located(parts)
    return Checkpoint(
        path=path,
        format=format,
        index=_index(path, parts),
        manifest=manifest,
        paths={key: steps for part in parts for key, steps in part.paths.items()},
        files=SourceFiles([file for part in parts for file in part.files.paths], in_memory),
        payloads=located.payloads,
        locate=located.locate,
        values={key: value for part in parts for key, value in part.values.items()},
        metadata_files=tuple(os.path.relpath(part.path / name, path) for part in parts for name in part.metadata_files),
        version=version,
        notes=tuple(note for part in parts for note in part.notes),
        holds_archives=all(part.holds_archives for part in parts),
    )


class _Located:
    """Where elements lie, as each part finds it."""

    def __init__(self, parts: Sequence[Checkpoint]) -> None:
        self._parts = parts
        self._bases = _bases([len(part.index.file) for part in parts])
        self.payloads = Payloads.unknown(self._bases[-1])
        for number, part in enumerate(parts):
            self._take(number, np.arange(len(part.index.file)))

    def locate(self, rows: Int) -> None:
        """Makes it known for some rows."""
        for number, part in enumerate(self._parts):
            own = rows[(rows >= self._bases[number]) & (rows < self._bases[number + 1])] - self._bases[number]
            if len(own):
                part.locate(own)
                part.files.close()
                self._take(number, own)

    def _take(self, number: int, rows: Int) -> None:
        """Takes over what a part knows of some rows."""
        base, found = self._bases[number], self._parts[number].payloads
        for name in ("start_bytes", "crc", "record_start_bytes", "record_bytes"):
            getattr(self.payloads, name)[base + rows] = getattr(found, name)[rows]
        chosen = set(rows.tolist())
        self.payloads.strides.update({base + row: value for row, value in found.strides.items() if row in chosen})
        self.payloads.contents.update({base + row: value for row, value in found.contents.items() if row in chosen})


def _bases(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]


def _index(path: Path, parts: Sequence[Checkpoint]) -> Index:
    indexes = [part.index for part in parts]
    rows, tensors = _bases([len(index.file) for index in indexes]), _bases([len(index.names) for index in indexes])
    files = _bases([len(part.files.paths) for part in parts])
    names = _distinct([os.path.relpath(file, path) for part in parts for file in part.files.paths])
    dims = max(index.dims for index in indexes)
    objects: dict[str, Place] = {}
    for index, base in zip(indexes, files, strict=False):
        for key, place in index.objects.items():
            objects[key] = place._replace(file=names[base + index.file_number[place.file]])
    replicas = [
        index.replicas + np.array([tensor, row, file, 0], dtype=np.int64)
        for index, tensor, row, file in zip(indexes, tensors, rows, files, strict=False)
    ]
    return Index(
        folder=path,
        files=names,
        packing=ARCHIVE if any(index.packing == ARCHIVE for index in indexes) else indexes[0].packing,
        names=[name for index in indexes for name in index.names],
        dtypes=[dtype for index in indexes for dtype in index.dtypes],
        shapes=[shape for index in indexes for shape in index.shapes],
        first=np.concatenate([[0], *(index.first[1:] + base for index, base in zip(indexes, rows, strict=False))]),
        offsets=np.concatenate([_padded(index.offsets, dims, 0) for index in indexes]),
        sizes=np.concatenate([_padded(index.sizes, dims, 1) for index in indexes]),
        file=np.concatenate([index.file + base for index, base in zip(indexes, files, strict=False)]).astype(np.int32),
        start_bytes=np.concatenate([index.start_bytes for index in indexes]),
        length_bytes=np.concatenate([index.length_bytes for index in indexes]),
        objects=objects,
        replicas=np.concatenate(replicas),
    )


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of files; what several parts made in memory is called alike."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return distinct


def _padded(boxes: Int, dims: int, value: int) -> Int:
    return np.pad(boxes, ((0, 0), (0, dims - boxes.shape[1])), constant_values=value)
