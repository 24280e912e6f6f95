"""What a DCP checkpoint holds, before a byte of its tensors is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's global shape and dtype, as recorded."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredState:
    """The flat keys of a checkpoint.

    Attributes:
        folder: where it lies.
        tensors: key -> shape and dtype.
        objects: keys of what is not a tensor.
        paths: key -> the path in the nested state dict that was saved, where it was recorded.
    """

    folder: Path
    tensors: Mapping[str, TensorSpec]
    objects: frozenset[str]
    paths: Mapping[str, tuple[str | int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> StoredState:
        """The keys of an opened checkpoint.

        Raises:
            CheckpointUnsound: a dtype that this torch does not have.
        """
        index, folder = checkpoint.index, checkpoint.path
        tensors = {
            key: TensorSpec(torch.Size(shape), torch_dtype(dtype, key, folder))
            for key, dtype, shape in zip(index.names, index.dtypes, index.shapes, strict=True)
        }
        return cls(folder, tensors, frozenset(index.objects), checkpoint.paths)

    @property
    def keys(self) -> set[str]:
        return set(self.tensors) | self.objects


def torch_dtype(name: str, key: str, folder: Path) -> torch.dtype:
    """The dtype of a name.

    Raises:
        CheckpointUnsound: this torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointUnsound(
            "a dtype that this torch does not have",
            path=folder,
            key=key,
            found=name,
            hint=f"this is torch {torch.__version__}: load it with the release that wrote it, or a later one",
        )
    return dtype


def is_lossy(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether casting may change a value. Between kinds (int and float) it always may."""
    if source == target:
        return False
    if number_kind(source) != number_kind(target):
        return True
    try:
        if source.is_floating_point or source.is_complex:
            a, b = torch.finfo(source), torch.finfo(target)
            return b.eps > a.eps or b.max < a.max or b.smallest_normal > a.smallest_normal
        whole, other = torch.iinfo(source), torch.iinfo(target)
    except TypeError:
        return True
    return other.max < whole.max or other.min > whole.min


def number_kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Whether it is a float, a complex number, a truth value; none of them: an integer."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def nested(values: Mapping[tuple[str | int, ...], Any]) -> Any:
    """The value with these leaves by path: dictionaries by name, lists by number; an empty path is the value itself."""
    if () in values:
        return values[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for (first, *rest), value in values.items():
        below.setdefault(first, {})[tuple(rest)] = value
    if all(isinstance(key, int) for key in below):
        return [nested(below[key]) for key in sorted(below, key=int)]
    return {key: nested(entries) for key, entries in below.items()}
