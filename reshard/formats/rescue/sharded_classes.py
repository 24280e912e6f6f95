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
    class_name = "Partial"


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
    shape = _shape(shape)
    dtype = dtype if isinstance(dtype, str) else None
    if isinstance(local, Held):
        return Held(dtype, shape, (), fault="sharded twice")
    if not isinstance(local, Stored):
        raise TypeError(f"a DTensor whose local part is a {type(local).__name__}")
    offsets, fault = _place(shape, local.shape, _Mesh.of(spec.mesh), spec.placements)
    boxes = ((offsets, local),) if 0 not in local.shape or 0 in shape else ()
    return Held(dtype or local.dtype, shape, boxes, fault=fault)


def _place(
    shape: tuple[int, ...], held: tuple[int, ...], mesh: _Mesh, placements: Sequence[Any]
) -> tuple[tuple[int, ...], str | None]:
    """Where the elements that a rank holds begin; or why that is not known."""
    offsets, sizes = [0] * len(shape), list(shape)
    by_dim: dict[int, list[Cut]] = {}
    for placement in placements:
        if not isinstance(placement, (_Shard, _Replicate)):
            name = getattr(placement, "class_name", placement)
            return tuple(offsets), f"a placement {name}, of which no rank has the values"
    if mesh.coordinate is None:
        # A rank outside the mesh holds nothing.
        return tuple(offsets), None if 0 in held else "no record of where this rank sits in the mesh"
    for parts, part, placement in zip(mesh.shape, mesh.coordinate, placements, strict=True):
        if isinstance(placement, _Shard):
            cut = Cut(parts, part, getattr(placement, "split_factor", 1))
            by_dim.setdefault(placement.dim % len(shape), []).append(cut)
    for dim, cuts in by_dim.items():
        if (rows := rows_after(shape[dim], cuts)) is None:
            return tuple(offsets), f"a placement of dim {dim} with rows which do not follow one another"
        offsets[dim], sizes[dim] = rows
    fits = held == tuple(sizes) or (0 in held and 0 in sizes)
    return tuple(offsets), None if fits else f"a part of {held}, where its placements give this rank {tuple(sizes)}"


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
    shape = _shape(metadata.size)
    boxes = tuple((_counts(shard.metadata.shard_offsets), shard.tensor) for shard in shards)
    for offsets, part in boxes:
        if not isinstance(part, Stored) or not len(offsets) == len(part.shape) == len(shape):
            raise TypeError(f"a shard that is no part of a tensor of {shape}")
    everybodys = tuple(
        (_counts(part.shard_offsets), _counts(part.shard_sizes), getattr(part.placement, "_rank", None))
        for part in metadata.shards_metadata
    )
    return Held(dtype if isinstance(dtype, str) else None, shape, boxes, everybodys)


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    counts = tuple(values)
    if not all(type(count) is int and count >= 0 for count in counts):
        raise TypeError("a shape or an offset that is not one")
    return counts


def is_possible(shape: Sequence[int]) -> bool:
    """Whether a tensor can have it: no more dims than torch has, and a number of elements whose bytes fit 64 bits."""
    return len(shape) <= _MOST_DIMS and math.prod(max(1, size) for size in shape) < _TOO_LARGE


def _shape(values: Sequence[int]) -> tuple[int, ...]:
    shape = _counts(values)
    if not is_possible(shape):
        raise TypeError(f"no tensor has {len(shape)} dims of {shape[:_MOST_DIMS]}")
    return shape


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _flat(value: Any) -> list[int]:
    # Nothing but tuples, which are weighed as they are built: lists of lists could unfold without end.
    return [number for part in value for number in _flat(part)] if isinstance(value, tuple) else [*_counts((value,))]


def _getattr(owner: Any, name: Any) -> Any:
    """What ``getattr`` is allowed to do: to name something within a class, which stays as unknown as that."""
    return unknown(getattr(owner, "class_name", "?"), str(name))


def unknown(module: str, name: str) -> type[Unknown]:
    """A class that stands for one that nobody needs."""
    return type(name, (Unknown,), {"class_name": f"{module}.{name}"})


_MOST_DIMS = 64
_TOO_LARGE = 1 << 58

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
    # What the arguments of a wrapper subclass name besides.
    **{key: unknown(*key) for key in (("torch.serialization", "_get_layout"), ("torch", "Tensor"))},
    ("builtins", "getattr"): _getattr,
    ("__builtin__", "getattr"): _getattr,
}
