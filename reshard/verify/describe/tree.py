"""Every tensor and object of a checkpoint, with the places of its bytes, in the order in which people count."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Index, Place, Tensor
from reshard.index.kinds import kinds_of

_DIGITS = re.compile(r"(\d+)")


class Branch(NamedTuple):
    """A tensor."""

    tensor: Tensor
    kind: str
    length_bytes: int


def tensors(index: Index) -> Iterator[Branch]:
    """The tensors by name, ``layers.2`` before ``layers.10``."""
    kinds = dict(zip(index.names, kinds_of(index.names, index.shapes), strict=True))
    for name in sorted(index.names, key=_natural):
        tensor = index.tensor(name)
        length_bytes = math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 1)
        yield Branch(tensor, kinds[name], length_bytes)


def objects(index: Index) -> Iterator[tuple[str, Place]]:
    """The objects by name."""
    for key in sorted(index.objects, key=_natural):
        yield key, index.objects[key]


def tree_json(index: Index) -> dict[str, object]:
    """The same as JSON: ``tree`` and ``tree_objects``."""
    return {
        "tree": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": length_bytes,
                "kind": kind,
                "chunks": [chunk._asdict() for chunk in tensor.chunks],
            }
            for tensor, kind, length_bytes in tensors(index)
        ],
        "tree_objects": [{"name": key, **place._asdict()} for key, place in objects(index)],
    }


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in _DIGITS.split(name)]
