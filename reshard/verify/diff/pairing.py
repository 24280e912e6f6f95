"""Which entries of two checkpoints belong together.

Those with the same key do. But a file of bare weights (``layers.0.weight``) holds the tensors of a training state
(``model.layers.0.weight``): where ``model.`` before the weights of one side finds more of them on the other, the keys
of that side are taken with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard.formats.checkpoint import Checkpoint
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Int
from reshard.index.kinds import WEIGHTS, kind_of
from reshard.verify.diff.elements import have_distance

MODEL_PREFIX = "model."


@dataclass(frozen=True)
class Side:
    """A tensor of one of the two."""

    checkpoint: Checkpoint
    name: str

    @functools.cached_property
    def number(self) -> int:
        """Its number in the index."""
        return self.checkpoint.index.number[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return self.checkpoint.index.shapes[self.number]

    @property
    def dtype(self) -> str:
        """torch's name of its dtype."""
        return self.checkpoint.index.dtypes[self.number]

    @property
    def rows(self) -> Int:
        """The rows of its chunks."""
        first = self.checkpoint.index.first
        return np.arange(first[self.number], first[self.number + 1])

    @property
    def length_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)

    @property
    def first_place(self) -> tuple[int, int]:
        """File and byte of its first chunk."""
        index, row = self.checkpoint.index, int(self.checkpoint.index.first[self.number])
        return (int(index.file[row]), int(index.start_bytes[row])) if row < len(index.file) else (-1, -1)


@dataclass(frozen=True)
class Keys:
    """Keys of two sides: (key, name in A, name in B) of those on both."""

    common: list[tuple[str, str, str]]
    only_a: list[str]
    only_b: list[str]


@dataclass(frozen=True)
class Pairs:
    """What belongs together.

    Attributes:
        prefixed: ``a`` or ``b``, the side whose weights are taken with ``model.`` before their names, if any.
        comparable: (key, tensor of A, tensor of B) of equal shapes, and types that can be compared; in file order of A.
        other_shapes, other_types: those of unequal shapes; those whose types have nothing in common.
    """

    prefixed: str | None
    tensors: Keys
    objects: Keys
    comparable: list[tuple[str, Side, Side]]
    other_shapes: list[tuple[str, Side, Side]]
    other_types: list[tuple[str, Side, Side]]

    @property
    def compared_bytes(self) -> int:
        """Bytes of the comparable tensors, of both sides."""
        return sum(one.length_bytes + other.length_bytes for _, one, other in self.comparable)


def pair(a: Checkpoint, b: Checkpoint, leave_out: str | None = None) -> Pairs:
    """Pairs the tensors and the objects of two checkpoints; those whose keys begin with ``leave_out`` are no part."""
    prefixed = "a" if _is_bare(a, b) else "b" if _is_bare(b, a) else None
    tensors = _match(_tensors(a, prefixed == "a"), _tensors(b, prefixed == "b"), leave_out)
    objects = _match(_objects(a, prefixed == "a"), _objects(b, prefixed == "b"), leave_out)
    both = [(key, Side(a, a_name), Side(b, b_name)) for key, a_name, b_name in tensors.common]
    both.sort(key=lambda entry: entry[1].first_place)
    alike = [entry for entry in both if entry[1].shape == entry[2].shape]
    return Pairs(
        prefixed,
        tensors,
        objects,
        comparable=[entry for entry in alike if _are_comparable(entry[1].dtype, entry[2].dtype)],
        other_shapes=[entry for entry in both if entry[1].shape != entry[2].shape],
        other_types=[entry for entry in alike if not _are_comparable(entry[1].dtype, entry[2].dtype)],
    )


def _is_bare(one: Checkpoint, other: Checkpoint) -> bool:
    others = other.index.number.keys()
    return len(_tensors(one, prefixed=True).keys() & others) > len(one.index.number.keys() & others)


def _tensors(checkpoint: Checkpoint, prefixed: bool) -> Mapping[str, str]:
    index = checkpoint.index
    shapes = zip(index.names, index.shapes, strict=True)
    return {_key(name, shape) if prefixed else name: name for name, shape in shapes}


def _objects(checkpoint: Checkpoint, prefixed: bool) -> Mapping[str, str]:
    names = [*checkpoint.index.objects, *(key for key in checkpoint.values if key not in checkpoint.index.objects)]
    return {_key(name, ()) if prefixed else name: name for name in names}


def _key(name: str, shape: tuple[int, ...]) -> str:
    return MODEL_PREFIX + name if kind_of(name, shape) == WEIGHTS else name


def _match(a: Mapping[str, str], b: Mapping[str, str], leave_out: str | None) -> Keys:
    if leave_out is not None:
        a, b = ({key: name for key, name in side.items() if not key.startswith(leave_out)} for side in (a, b))
    common = [(key, name, b[key]) for key, name in a.items() if key in b]
    return Keys(common, sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys()))


def _are_comparable(a_dtype: str, b_dtype: str) -> bool:
    if a_dtype == b_dtype:
        return True
    return a_dtype in ITEM_BYTES and b_dtype in ITEM_BYTES and have_distance(a_dtype, b_dtype)
