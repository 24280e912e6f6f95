"""What a DCP checkpoint holds, before a byte of its tensors is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.dcp.stock import read_metadata


@dataclass(frozen=True)
class StoredTensor:
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
    tensors: Mapping[str, StoredTensor]
    objects: frozenset[str]
    paths: Mapping[str, tuple[str | int, ...]]

    @classmethod
    def open(cls, folder: Path) -> StoredState:
        """Reads ``.metadata``; no tensor, and nothing that is not on the allow-list.

        Raises:
            CheckpointUnsound: it is absent, damaged, or names what it should not.
        """
        metadata = read_metadata(folder)
        tensors = {
            key: StoredTensor(entry.size, entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return cls(
            folder,
            tensors,
            frozenset(metadata.state_dict_metadata.keys() - tensors.keys()),
            dict(metadata.planner_data or {}),
        )

    @property
    def keys(self) -> set[str]:
        return set(self.tensors) | self.objects


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
