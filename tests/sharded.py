"""DCP checkpoints of several ranks without the ranks: dim-0 shards in stock's own archives and metadata classes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def archive(value: Any) -> bytes:
    """What ``torch.save`` makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_sharded(
    folder: Path, tensors: Mapping[str, torch.Tensor], world: int, objects: Mapping[str, Any] | None = None
) -> Path:
    """Writes ``__R_0.distcp`` of every rank and the ``.metadata``.

    Tensors are cut along dim 0 as FSDP2 cuts them; those without dims, and objects, go to the ranks in turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = [bytearray() for _ in range(world)]
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}

    def put(rank: int, place: MetadataIndex, value: Any) -> None:
        data = archive(value)
        storage[place] = _StorageInfo(f"__{rank}_0.distcp", len(contents[rank]), len(data))
        contents[rank] += data

    turn = 0
    for key, tensor in tensors.items():
        chunks = []
        if tensor.dim():
            row = 0
            for rank, part in enumerate(tensor.chunk(world)):
                offsets = torch.Size([row, *[0] * (tensor.dim() - 1)])
                chunks.append(ChunkStorageMetadata(offsets, part.shape))
                # Cloned with its strides, as DCP does it: a part of a storage would be saved with all of it.
                put(rank, MetadataIndex(key, offsets), part.clone())
                row += len(part)
        else:
            chunks.append(ChunkStorageMetadata(torch.Size(), torch.Size()))
            put(turn % world, MetadataIndex(key, torch.Size()), tensor.clone())
            turn += 1
        entries[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    for key, value in (objects or {}).items():
        entries[key] = BytesStorageMetadata()
        put(turn % world, MetadataIndex(key), value)
        turn += 1
    paths: dict[str, Any] = {key: (key,) for key in entries}
    metadata = Metadata(entries, planner_data=paths, storage_data=storage)
    for rank, content in enumerate(contents):
        (folder / f"__{rank}_0.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def places(folder: Path) -> dict[tuple[str, tuple[int, ...] | None], _StorageInfo]:
    """(key, offsets) -> where its archive lies."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    return {
        (place.fqn, None if place.offset is None else tuple(place.offset)): info
        for place, info in metadata.storage_data.items()
    }


def training_state(step: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights and step counters of twelve parameters, some without rows for the last ranks, and moments of four."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in {"a": (12, 5), "b": (7,), "c": (2, 3), "d": (9, 4)}.items():
        state[f"model.{name}"] = torch.randn(shape, generator=generator)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optim.state.{name}.{moment}"] = torch.randn(shape, generator=generator)
        state[f"optim.state.{name}.step"] = torch.tensor(float(step))
    for name in "efghijkl":
        state[f"model.{name}"] = torch.randn(1, generator=generator)
        state[f"optim.state.{name}.step"] = torch.tensor(float(step))
    return state
