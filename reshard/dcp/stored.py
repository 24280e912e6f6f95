"""What a DCP checkpoint holds, before a byte of its tensors is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.errors import CheckpointUnsound
from reshard.formats import dcp_metadata


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
    def open(cls, folder: Path) -> StoredState:
        """Reads ``.metadata``; no tensor, and nothing that is not on the allow-list.

        Raises:
            CheckpointUnsound: it is absent, damaged, or names what it should not.
        """
        metadata = dcp_metadata.read(folder)
        index = metadata.index
        tensors = {
            key: TensorSpec(torch.Size(shape), _dtype(dtype, key, folder))
            for key, dtype, shape in zip(index.names, index.dtypes, index.shapes, strict=True)
        }
        return cls(folder, tensors, frozenset(index.objects), metadata.paths)

    @property
    def keys(self) -> set[str]:
        return set(self.tensors) | self.objects


def _dtype(name: str, key: str, folder: Path) -> torch.dtype:
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
