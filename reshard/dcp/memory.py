"""The shards of a rank as a checkpoint in memory: what the copy engine reads when a state is saved.

Each box is a chunk of its own, in a "file" of its own; behind them come the objects. So a save is a rewrite whose
source is memory, and needs no engine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.dcp.shards import Shard, as_array
from reshard.formats.checkpoint import Checkpoint, all_known
from reshard.index.index import RAW, Index, Payloads, Place
from reshard.storage.byte_ranges import SourceFiles

Bytes = NDArray[np.uint8]


class MemoryFiles(SourceFiles):
    """Tensors and objects as numbered files, in the order of their elements whatever their strides."""

    def __init__(self, folder: Path, tensors: Sequence[torch.Tensor], objects: Sequence[bytes]) -> None:
        super().__init__([folder] * (len(tensors) + len(objects)))
        self._tensors = tensors
        self._contents: list[Bytes | None] = [_contiguous(tensor) for tensor in tensors]
        self._contents += [np.frombuffer(content, dtype=np.uint8) for content in objects]

    def read_into(self, file: int, start: int, pieces: Sequence[memoryview]) -> None:
        """Fills ``pieces`` one after the other with the bytes from ``start`` on."""
        content = self._contents[file]
        for piece in pieces:
            end = start + len(piece)
            # Through numpy, which lets other threads run meanwhile.
            out = np.frombuffer(piece, dtype=np.uint8)
            out[:] = content[start:end] if content is not None else _gathered(self._tensors[file], start, end)
            start = end

    def size_bytes(self, file: int) -> int:
        """How long the file is."""
        content = self._contents[file]
        return len(content) if content is not None else self._tensors[file].nbytes


def _contiguous(tensor: torch.Tensor) -> Bytes | None:
    """The bytes of a tensor where they lie in memory as a file would have them."""
    array = as_array(tensor) if tensor.is_contiguous() else None
    return None if array is None else array.reshape(-1).view(np.uint8)


def _gathered(tensor: torch.Tensor, start: int, end: int) -> Bytes:
    """Some bytes of a tensor that is on a device or has strides: its rows that have them, brought over and in order."""
    rows = tensor if tensor.ndim else tensor.reshape(1)
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    first, last = start // row_bytes, -(-end // row_bytes)
    part = rows[first:last].resolve_conj().resolve_neg().contiguous().cpu()
    array = as_array(part)
    assert array is not None
    return array.reshape(-1).view(np.uint8)[start - first * row_bytes : end - first * row_bytes]


def in_memory(folder: Path, shards: Sequence[Shard], objects: Mapping[str, bytes]) -> Checkpoint:
    """A checkpoint of shards and objects; ``folder`` is only what errors name."""
    count = len(shards)
    dims = max([1, *(len(shard.shape) for shard in shards)])
    offsets = np.zeros((count, dims), dtype=np.int64)
    sizes = np.ones((count, dims), dtype=np.int64)
    for row, shard in enumerate(shards):
        offsets[row, : len(shard.offsets)] = shard.offsets
        sizes[row, : len(shard.sizes)] = shard.sizes
    lengths = np.array([shard.tensor.numel() * shard.tensor.element_size() for shard in shards], dtype=np.int64)
    names = [*(f"tensor {number}" for number in range(count)), *(f"object {key}" for key in objects)]
    places = {
        key: Place(name, 0, len(content)) for name, (key, content) in zip(names[count:], objects.items(), strict=True)
    }
    zeros = np.zeros(count, dtype=np.int64)
    index = Index(
        folder=folder,
        files=names,
        packing=RAW,
        names=[shard.key for shard in shards],
        dtypes=[shard.dtype for shard in shards],
        shapes=[shard.shape for shard in shards],
        first=np.arange(count + 1, dtype=np.int64),
        offsets=offsets,
        sizes=sizes,
        file=np.arange(count, dtype=np.int32),
        start_bytes=zeros,
        length_bytes=lengths,
        objects=places,
    )
    return Checkpoint(
        path=folder,
        format="memory",
        index=index,
        manifest=None,
        paths={},
        files=MemoryFiles(folder, [shard.tensor for shard in shards], list(objects.values())),
        payloads=Payloads(zeros, zeros - 1, zeros, lengths),
        locate=all_known,
    )
