"""What this rank holds of each tensor of a state dict: boxes of the global tensor, and the memory of each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor import Shard as ShardPlacement

from reshard.dcp.torch_private import ShardedTensor, StridedShard, is_traceable_wrapper_subclass, local_box
from reshard.errors import UsageError
from reshard.geometry.box import Box
from reshard.index.dtypes import ITEM_BYTES

# Elements are moved as opaque words of their width.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Shard(NamedTuple):
    """A box of a tensor, in this rank's memory.

    Attributes:
        key: flat key of the tensor.
        shape: of the whole tensor.
        offsets, sizes: the box.
        tensor: its elements, of the shape ``sizes``, on any device and with any strides.
        is_part: whether the state dict says that other ranks hold other boxes; a plain tensor is whole everywhere.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor
    is_part: bool

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype."""
        return dtype_name(self.tensor.dtype)

    @property
    def description(self) -> str:
        """Text that is the same for the same box only."""
        return f"{self.key}\0{self.dtype}{self.shape}{self.offsets}{self.sizes}"

    @property
    def length_bytes(self) -> int:
        """How many bytes its elements are."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def rows(self) -> int:
        """The size of dim 0, or 1."""
        return self.sizes[0] if self.sizes else 1


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def shards_of(values: Mapping[str, Any]) -> list[Shard]:
    """The shards of a flat state dict in its order, empty ones included; what is not a tensor has none.

    Raises:
        UsageError: a tensor that has no such boxes, or none that can be stored.
    """
    shards: list[Shard] = []
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    with torch.no_grad():
        for key, value in values.items():
            if isinstance(value, ShardedTensor):
                shape = tuple(value.metadata().size)
                for part in value.local_shards():
                    box = part.metadata
                    shards.append(
                        Shard(key, shape, tuple(box.shard_offsets), tuple(box.shard_sizes), part.tensor.detach(), True)
                    )
            elif isinstance(value, DTensor):
                shape = tuple(value.shape)
                place = (value.device_mesh, value.placements, shape)
                if place not in known:
                    known[place] = _box_of(key, *place)
                sizes, offsets = known[place]
                if offsets or not shape:
                    shards.append(Shard(key, shape, offsets, sizes, value.to_local().detach(), True))
            elif isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                shards.append(Shard(key, shape, (0,) * len(shape), shape, value.detach(), False))
    for shard in shards:
        _require_dense(shard)
    return shards


def _box_of(
    key: str, mesh: Any, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if any(isinstance(placement, Partial) for placement in placements):
        raise UsageError(
            "a partial sum, of which no rank has the values",
            key=key,
            found=placements,
            hint="redistribute it to Replicate() or Shard(dim) first",
        )
    for dim in {placement.dim for placement in placements if isinstance(placement, StridedShard)}:
        if not _follow_one_another(shape[dim], mesh, placements, dim):
            raise UsageError(
                "a placement that gives this rank rows which do not follow one another",
                key=key,
                found=placements,
                hint="redistribute it to Shard(dim) first",
            )
    return local_box(shape, mesh, placements)


def _follow_one_another(length: int, mesh: Any, placements: tuple[Placement, ...], dim: int) -> bool:
    """Whether what this rank has of a dim is a range of it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return True
    rows = torch.arange(length)
    for axis, (placement, part) in enumerate(zip(placements, coordinate, strict=True)):
        if isinstance(placement, StridedShard) and placement.dim == dim:
            stripes = rows.chunk(int(placement.split_factor))
            rows = torch.cat([_chunk(stripe, mesh.size(axis), part) for stripe in stripes])
        elif isinstance(placement, ShardPlacement) and placement.dim == dim:
            rows = _chunk(rows, mesh.size(axis), part)
    return not len(rows) or int(rows[-1] - rows[0]) + 1 == len(rows)


def _chunk(rows: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    """One of the parts of ``torch.chunk``, which may be fewer than was asked for."""
    chunks = rows.chunk(parts)
    return chunks[part] if part < len(chunks) else rows[:0]


def _require_dense(shard: Shard) -> None:
    tensor = shard.tensor
    fault = None
    if tensor.is_meta:
        fault = "one on the meta device"
    elif tensor.layout != torch.strided:
        fault = str(tensor.layout)
    elif is_traceable_wrapper_subclass(tensor):
        fault = type(tensor).__name__
    elif shard.dtype not in ITEM_BYTES:
        fault = str(tensor.dtype)
    elif tuple(tensor.shape) != shard.sizes:
        fault = f"{tuple(tensor.shape)} for the box {Box(shard.offsets, shard.sizes)}"
    if fault is not None:
        raise UsageError(
            "a tensor that cannot be saved or loaded as it is",
            key=shard.key,
            expected="a dense tensor with memory",
            found=fault,
            hint="give it memory (to_empty), make it dense, or dequantise it; or leave it out of the state",
        )


def as_array(tensor: torch.Tensor) -> NDArray[np.generic] | None:
    """The memory of a CPU tensor as opaque words, any strides; None for one that is elsewhere."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    words: NDArray[np.generic] = tensor.view(_WORDS[tensor.element_size()]).numpy()
    return words


class TensorSink:
    """A tensor that takes elements of a dtype, perhaps another than its own, and perhaps on a device."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self._tensor = tensor
        self._dtype: torch.dtype = getattr(torch, dtype)

    def put(self, box: Box, elements: NDArray[np.generic]) -> None:
        """Copies elements into a box of the tensor, and converts them."""
        place = tuple(slice(low, high) for low, high in zip(box.offsets, box.ends, strict=True))
        self._tensor[place].copy_(torch.from_numpy(np.require(elements, requirements="W")).view(self._dtype))
