"""For tests of other tools' checkpoints: the files of ranks of any world, made in one process, and read by stock torch.

``fake_rank`` gives a process group in which collectives do nothing, enough to make and save the DTensors of a rank.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """This process as a rank of a job without other ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """This rank's part of a tensor, cut by ``torch.chunk`` alone, and in storage as FSDP2 has it: padded."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = tensor
    # FSDP over tensor parallelism: the inner axis cuts first.
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard))
    for axis in axes:
        placement = placements[axis]
        if isinstance(placement, (Shard, _StridedShard)):
            pieces = local.chunk(mesh.size(axis), placement.dim) if local.shape[placement.dim] else ()
            empty = local.narrow(placement.dim, 0, 0)
            local = pieces[coordinate[axis]] if coordinate[axis] < len(pieces) else empty
    return DTensor.from_local(
        _in_padded_storage(local), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _in_padded_storage(local: torch.Tensor) -> torch.Tensor:
    storage = torch.full((local.numel() + 5,), 77, dtype=torch.float32).to(local.dtype)
    return storage[: local.numel()].view(local.shape).copy_(local)


def write_ranks(
    folder: Path, world: int, content: Callable[[DeviceMesh, int], Mapping[str, Any]], axes: Sequence[int] = ()
) -> Path:
    """Saves what every rank has.

    Args:
        content: from the mesh and the rank to what is saved, by the name of the file; ``{world}`` and ``{rank}`` are
            filled in.
        axes: of the mesh; by default one.
    """
    shape = tuple(axes) or (world,)
    assert math.prod(shape) == world
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with fake_rank(rank, world):
            mesh = DeviceMesh("cpu", torch.arange(world).reshape(shape), mesh_dim_names=tuple("abc"[: len(shape)]))
            for name, value in content(mesh, rank).items():
                torch.save(value, folder / name.format(world=world, rank=rank))
    return folder
