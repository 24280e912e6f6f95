"""The private symbols of torch that this project leans on, each with the reason why no public one will do.

Tested with torch 2.13. A test holds that no other module of ``reshard`` names an underscored torch symbol.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_box
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "OBJECT_CLASSES",
    "ShardedTensor",
    "StorageInfo",
    "StridedShard",
    "empty_sharded_like",
    "is_traceable_wrapper_subclass",
    "local_box",
    "object_to_tensor",
    "tensor_to_object",
]

# ``local_box(shape, mesh, placements)``: sizes and offsets of this rank's part of a DTensor; () for the offsets where
# it has none. Public code can learn them only from methods of DTensor that are private as well.

# ``StridedShard(dim, split_factor=)``: what FSDP2 makes of a dim that tensor parallelism cuts as well. ``local_box``
# says where the first of its rows lies, and nothing of whether the others follow.

# Where a chunk lies, in ``.metadata``: what a storage plug-in has to return, and it has no public name.
StorageInfo = filesystem._StorageInfo

# What torch's collectives of objects send, for collectives that take fewer turns (`reshard.dcp.messages`). As there,
# what comes from another rank of the same job is trusted.


def object_to_tensor(value: object) -> torch.Tensor:
    """Pickled, as bytes."""
    content: torch.Tensor = distributed_c10d._object_to_tensor(  # type: ignore[no-untyped-call]
        value, torch.device("cpu"), None
    )[0]
    return content


def tensor_to_object(content: torch.Tensor) -> Any:
    """What was pickled; bytes behind it do not matter."""
    return distributed_c10d._tensor_to_object(content, content.numel(), None)  # type: ignore[no-untyped-call]


# ``is_traceable_wrapper_subclass(tensor)``: whether it is made of other tensors, as quantised weights are. Nothing
# public tells.


# What objects may hold beyond torch's own list for ``weights_only``: NumPy values, which schedules written with NumPy
# leave in the learning rate, and the buffers that some layers give as their extra state. None of them runs code.
OBJECT_CLASSES: tuple[Any, ...] = (
    io.BytesIO,
    np.dtype,
    np.ndarray,
    np.float64(0).__reduce__()[0],
    np.zeros(0).__reduce__()[0],
    *(type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"),
)


def empty_sharded_like(reference: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    """An uninitialised ShardedTensor in the layout of another.

    FSDP1 without a device mesh keeps its sharded state in this class. It has no ``empty_like``, and its public
    constructor is a collective that gathers the layout anew for each tensor.
    """
    known = reference.metadata()
    properties = type(known.tensor_properties)(
        dtype=dtype,
        layout=known.tensor_properties.layout,
        requires_grad=False,
        memory_format=known.tensor_properties.memory_format,
        pin_memory=False,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in reference.local_shards()],
        type(known)(known.shards_metadata, known.size, properties),
        process_group=reference._process_group,
    )
