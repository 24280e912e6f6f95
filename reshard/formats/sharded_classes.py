"""What stands for the sharded tensors in a rank's pickle: the boxes of a tensor that this rank holds.

Three kinds occur in place of a plain tensor. All are pickled by a REDUCE of ``_rebuild_from_type_v2(function, type,
arguments, state)``, with ``_rebuild_wrapper_subclass`` as the function and ``(type, dtype, size, ...)`` as arguments::

    DTensor          state: {"_local_tensor": tensor, "_spec": DTensorSpec}, perhaps the second of a pair (slots)
        DTensorSpec  {"mesh": DeviceMesh, "placements": (Shard | Replicate | _StridedShard | Partial, ...), ...}
        DeviceMesh   up to 2.8 {"mesh": tensor of ranks, ...}; then {"_layout": _MeshLayout, "_rank_map": tensor, ...}.
                     All have "_coordinate_on_dim", where this rank sits along each mesh axis
        _MeshLayout  {"axes": (_FlatLayout{"shape": (n,), "stride": (s,)}, ...)}, or {"shape", "stride"} of all axes
        placements   {"dim": int}, and "split_factor" where strided; of ``torch.distributed._tensor`` up to 2.4
    ShardedTensor    state: ([Shard{"tensor", "metadata": ShardMetadata}, ...], ShardedTensorMetadata{"shards_metadata",
                     "size"}, process group state, sharding spec, has RRefs); its local shards may be none
        ShardMetadata {"shard_offsets", "shard_sizes", "placement": _remote_device{"_rank": int}}

torch itself reads a ShardedTensor only within a process group of the rank and size that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.formats.torch_archive import TENSOR_CLASSES, Stored
from reshard.formats.unpickle import StandIn
from reshard.geometry.placements import Cut, rows_after


class Unknown(StandIn):
    """An object of a class that is not needed to read tensors. Nothing of it was imported or run.

    Attributes:
        class_name: with its module.
        arguments: that it was made with; other attributes are as the file gives them.
    """

    class_name = "?"
    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({name: value for name, value in part.items() if isinstance(name, str)})

    def __setitem__(self, key: Any, value: Any) -> None:
        """What a subclass of dict would keep."""

    def append(self, value: Any) -> None:
        """What a subclass of list would keep."""

    def extend(self, values: Any) -> None:
        """Likewise."""


class Held(NamedTuple):
    """A tensor of which a rank's file has some boxes.

    Attributes:
        dtype: torch's name.
        shape: of the whole tensor.
        boxes: offsets, and the elements from there on.
        all_boxes: (offsets, sizes, rank) of the boxes of all ranks, where this file lists them.
        fault: why the boxes are not known.
    """

    dtype: str | None
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], Stored], ...]
    all_boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], int | None], ...] = ()
    fault: str | None = None


class _DTensor(Unknown):
    pass


class _ShardedTensor(Unknown):
    pass


class _Shard(Unknown):
    dim: int


class _StridedShard(_Shard):
    split_factor: int


class _Replicate(Unknown):
    pass


class _Partial(Unknown):
    pass


def _wrapper_subclass(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def _rebuild(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """What ``_rebuild_from_type_v2`` makes."""
    if kind is _DTensor:
        return _held_of_dtensor(arguments, state)
    if kind is _ShardedTensor:
        return _held_of_sharded_tensor(arguments, state)
    # A parameter, or a plain tensor that somebody gave attributes.
    return function(*arguments)


def _rebuild_v1(kind: Any, arguments: Any, state: Any) -> Any:
    raise TypeError(f"a {getattr(kind, 'class_name', kind)} as torch before 1.10 pickled it")


def _held_of_dtensor(arguments: Any, state: Any) -> Held:
    _, dtype, shape, *_ = arguments
    state = next(part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict))
    local, spec = state["_local_tensor"], state["_spec"]
    if isinstance(local, Held):
        return local._replace(fault="sharded twice")
    shape = _counts(shape)
    mesh = _Mesh.of(spec.mesh)
    offsets, fault = [0] * len(shape), None
    for placement in spec.placements:
        if not isinstance(placement, (_Shard, _Replicate)):
            fault = f"a placement {getattr(placement, 'class_name', placement)}, of which no rank has the values"
    by_dim: dict[int, list[Cut]] = {}
    if fault is None and mesh.coordinate is None:
        fault = "no record of where this rank sits in the mesh"
    elif fault is None:
        for parts, part, placement in zip(mesh.shape, mesh.coordinate or (), spec.placements, strict=True):
            if isinstance(placement, _Shard):
                by_dim.setdefault(placement.dim % len(shape), []).append(
                    Cut(parts, part, getattr(placement, "split_factor", 1))
                )
    for dim, cuts in by_dim.items():
        rows = rows_after(shape[dim], cuts)
        if rows is None:
            fault = f"a placement of dim {dim} that gives this rank rows which do not follow one another"
        elif rows[1] != local.shape[dim]:
            fault = f"{local.shape[dim]} rows of dim {dim}, where its placements give this rank {rows[1]}"
        else:
            offsets[dim] = rows[0]
    boxes = ((tuple(offsets), local),) if math.prod(local.shape) or 0 in shape else ()
    return Held(dtype if isinstance(dtype, str) else local.dtype, shape, boxes, fault=fault)


class _Mesh(NamedTuple):
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    @classmethod
    def of(cls, mesh: Any) -> _Mesh:
        coordinate = getattr(mesh, "_coordinate_on_dim", None)
        if (layout := getattr(mesh, "_layout", None)) is None:
            shape = _counts(mesh.mesh.shape)
        elif (axes := getattr(layout, "axes", None)) is not None:
            shape = tuple(math.prod(_flat(axis.shape)) for axis in axes)
        else:
            shape = tuple(math.prod(_flat(size)) for size in _sequence(layout.shape))
        return cls(shape, None if coordinate is None else _counts(coordinate))


def _held_of_sharded_tensor(arguments: Any, state: Any) -> Held:
    _, dtype, *_ = arguments
    shards, metadata, *_ = state
    boxes = tuple((_counts(shard.metadata.shard_offsets), shard.tensor) for shard in shards)
    everybodys = tuple(
        (_counts(part.shard_offsets), _counts(part.shard_sizes), getattr(part.placement, "_rank", None))
        for part in metadata.shards_metadata
    )
    return Held(dtype if isinstance(dtype, str) else None, _counts(metadata.size), boxes, everybodys)


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    counts = tuple(values)
    if not all(type(count) is int and count >= 0 for count in counts):
        raise TypeError("a shape or an offset that is not one")
    return counts


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _flat(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else [number for part in value for number in _flat(part)]


def _getattr(owner: Any, name: Any) -> Any:
    """What ``getattr`` is allowed to do: to name something within a class, which stays as unknown as that."""
    return unknown(getattr(owner, "class_name", "?"), str(name))


def unknown(module: str, name: str) -> type[Unknown]:
    """A class that stands for one that nobody needs."""
    return type(name, (Unknown,), {"class_name": f"{module}.{name}"})


_API = "torch.distributed._shard.sharded_tensor"
_PLACEMENTS = {"Shard": _Shard, "_StridedShard": _StridedShard, "Replicate": _Replicate, "Partial": _Partial}

SHARDED_CLASSES: Mapping[tuple[str, str], Any] = {
    **TENSOR_CLASSES,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild,
    ("torch._tensor", "_rebuild_from_type"): _rebuild_v1,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper_subclass,
    ("torch.distributed.tensor", "DTensor"): _DTensor,
    ("torch.distributed.tensor._api", "DTensor"): _DTensor,
    ("torch.distributed._tensor.api", "DTensor"): _DTensor,
    ("torch.distributed._tensor", "DTensor"): _DTensor,
    (f"{_API}.api", "ShardedTensor"): _ShardedTensor,
    (_API, "ShardedTensor"): _ShardedTensor,
    **{
        (f"torch.distributed.{package}.placement_types", name): kind
        for package in ("tensor", "_tensor")
        for name, kind in _PLACEMENTS.items()
    },
    ("builtins", "getattr"): _getattr,
    ("__builtin__", "getattr"): _getattr,
}
