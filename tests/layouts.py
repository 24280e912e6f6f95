"""State dicts of known values in every layout that DCP scripts use; each rank builds its own part from the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "ten": ((10, 3), torch.float32),
    "six": ((6, 2), torch.bfloat16),
    "three": ((3,), torch.float32),
    "row": ((1, 7), torch.float64),
    "deep": ((9, 4, 2), torch.float16),
    "scalar": ((), torch.float32),
    "nothing": ((0, 4), torch.float32),
    "narrow": ((4, 0), torch.int32),
    "flags": ((5,), torch.bool),
    "counts": ((7, 2), torch.int64),
}


def whole(seed: int) -> dict[str, torch.Tensor]:
    """The unsharded tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 1 << 16, shape, generator=generator).to(dtype)
        if not dtype.is_floating_point
        else torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


@functools.cache
def _flat_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@functools.cache
def _square_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """Cut by hand and not by torch, whose cutting is a part of what is under test."""
    local = tensor
    strided = [placement for placement in placements if isinstance(placement, _StridedShard)]
    # The strided placement of FSDP over TP: the inner axis cuts first.
    order = range(mesh.ndim) if not strided else reversed(range(mesh.ndim))
    for axis in order:
        placement = placements[axis]
        if isinstance(placement, (Shard, _StridedShard)):
            parts = local.chunk(mesh.size(axis), placement.dim)
            rank = mesh.get_local_rank(axis)
            local = parts[rank] if rank < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _plain(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    return tensor.clone()


def _shard0(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return _sharded(tensor, mesh, [Shard(0) if tensor.dim() else Replicate()])


def _shard1(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return _sharded(tensor, mesh, [Shard(1) if tensor.dim() > 1 else Replicate()])


def _hsdp(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return _sharded(tensor, mesh, [Replicate(), Shard(0) if tensor.dim() else Replicate()])


def _tp_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """FSDP2 over a column-parallel layer."""
    if not tensor.dim():
        return _sharded(tensor, mesh, [Replicate(), Replicate()])
    return _sharded(tensor, mesh, [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)])


def _tp_columns(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """FSDP2 over a row-parallel layer."""
    if tensor.dim() < 2:
        return _hsdp(tensor, mesh)
    return _sharded(tensor, mesh, [Shard(0), Shard(1)])


def _transposed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Neither plain tensors nor local shards lie in row-major order."""
    dims = tuple(reversed(range(tensor.dim())))
    if tensor.dim() < 2 or not tensor.numel():
        # Every second element of memory twice as long.
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    if tensor.dtype == torch.float32:
        return tensor.permute(dims).contiguous().permute(dims)
    local = _shard0(tensor, mesh).to_local()
    local = local.permute(dims).contiguous().permute(dims)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def _sharded_tensor(tensor: torch.Tensor, mesh: Any) -> Any:
    """FSDP1 without a device mesh; what has no elements stays as it is, as there."""
    if not tensor.dim() or not tensor.numel():
        return tensor.clone()
    parts, rank = tensor.chunk(dist.get_world_size()), dist.get_rank()
    shards = []
    if rank < len(parts):
        offsets = [sum(len(part) for part in parts[:rank]), *[0] * (tensor.dim() - 1)]
        shards.append(LocalShard.from_tensor_and_offsets(parts[rank].clone(), offsets, rank))
    return init_from_local_shards(shards, *tensor.shape)


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], Callable[[], Any]]] = {
    "plain": (_plain, lambda: None),
    "shard0": (_shard0, _flat_mesh),
    "shard1": (_shard1, _flat_mesh),
    "transposed": (_transposed, _flat_mesh),
    "sharded tensor": (_sharded_tensor, lambda: None),
    "hsdp": (_hsdp, _square_mesh),
    "tp rows": (_tp_rows, _square_mesh),
    "tp columns": (_tp_columns, _square_mesh),
}


def layouts_at(world: int) -> list[str]:
    """Those that this many ranks can have."""
    even = world >= 4 and world % 2 == 0
    return [name for name, (_, mesh) in LAYOUTS.items() if mesh is not _square_mesh or even]


Pairs = list[tuple[str, str]]
"""(layout that was saved, layout that it is loaded into)"""

# (ranks that saved, ranks that load, pairs): every layout on both sides, more ranks and fewer, 8 on either side.
SOME: list[tuple[int, int, Pairs]] = [
    (4, 3, [("transposed", "plain"), ("hsdp", "shard0"), ("tp rows", "sharded tensor")]),
    (3, 4, [("plain", "tp columns"), ("sharded tensor", "hsdp"), ("shard1", "tp rows")]),
    (2, 8, [("shard0", "shard1")]),
    (8, 2, [("tp columns", "transposed")]),
    (1, 2, [("plain", "shard0")]),
]


class Written:
    """Checkpoints of every layout at every world size, each written when it is first asked for.

    Args:
        folder: where they go, by world size.
        save: run by all ranks, with the folder of their world size and the names of the layouts.
    """

    def __init__(self, folder: Path, save: Callable[[str, list[str]], None]) -> None:
        self._folder = folder
        self._save = save
        self._layouts: dict[int, set[str]] = {}

    def __call__(self, world: int, pairs: Pairs) -> Path:
        """The folder with the layouts that pairs begin with."""
        there = self._layouts.setdefault(world, set())
        folder = self._folder / str(world)
        if missing := sorted({source for source, _ in pairs} - there):
            run_ranks(world, self._save, str(folder), missing, timeout_s=240)
            there.update(missing)
        return folder


def all_pairs(saved: int, loaded: int) -> Pairs:
    """Those of every layout that ranks can save, with every one that ranks can load."""
    return [(source, target) for source in layouts_at(saved) for target in layouts_at(loaded)]


WORLDS = (1, 2, 3, 4, 8)
ALL = [(saved, loaded, all_pairs(saved, loaded)) for saved in WORLDS for loaded in WORLDS]


def state(layout: str, seed: int) -> dict[str, Any]:
    """This rank's nested state dict; collective."""
    place, make_mesh = LAYOUTS[layout]
    mesh = make_mesh()
    tensors = {name: place(tensor, mesh) for name, tensor in whole(seed).items()}
    moments = {name: place(tensor, mesh) for name, tensor in whole(seed + 1).items()}
    return {
        "model": tensors,
        "optim": {
            "state": {name: {"moment": moment, "step": torch.tensor(float(seed))} for name, moment in moments.items()},
            "param_groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.9 + seed), "params": ["ten", "six"]}, {"lr": seed}],
        },
        "step": seed,
        "note": f"run {seed}",
        "absent": None,
        "numbers": [1, 2.5, seed],
        "mixed": [{"x": place(whole(seed + 2)["ten"], mesh)}, {"y": [seed]}, torch.full((2, 3), seed)],
    }


def stock_planner(layout: str) -> DefaultLoadPlanner:
    """For stock's load; its own default loses the ShardedTensors of which a rank has no rows."""
    return DefaultLoadPlanner(flatten_sharded_tensors=layout != "sharded tensor")


def local_tensors(value: Any) -> list[torch.Tensor]:
    """The memory that this rank has of a tensor."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, DTensor):
        return [value.to_local()]
    return [value]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Path -> object, or (shape, dtype, bytes) of each local tensor."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, entry in value.items():
            found |= leaves(entry, f"{path}.{key}")
        return found
    if isinstance(value, list):
        return {key: leaf for n, entry in enumerate(value) for key, leaf in leaves(entry, f"{path}.{n}").items()}
    if isinstance(value, torch.Tensor):
        return {path: [(tuple(t.shape), t.dtype, raw(t) if t.numel() else b"") for t in local_tensors(value)]}
    return {path: value}


def addresses(value: Any) -> dict[str, Any]:
    """Path -> where each local tensor lies, which a load must not change."""
    found: dict[str, Any] = {}
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            found |= {f"{key}.{rest}": at for rest, at in addresses(entry).items()}
    elif isinstance(value, torch.Tensor):
        found[""] = [tensor.data_ptr() for tensor in local_tensors(value)]
    return found


def assert_leaves(found: Any, expected: Any) -> None:
    """Same leaves, bit for bit, on this rank."""
    ours, theirs = leaves(found), leaves(expected)
    assert ours.keys() == theirs.keys()
    wrong = [path for path in ours if ours[path] != theirs[path]]
    assert not wrong, f"{len(wrong)} of {len(ours)} differ: {wrong[:5]}"


def megabytes(count: int, mib: int, seed: int) -> dict[str, torch.Tensor]:
    """Plain float32 tensors of some MiB each, with an odd number of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = math.ceil(mib * (1 << 20) / 4 / 257)
    return {f"w{number}": torch.randn(rows, 257, generator=generator) for number in range(count)}
