"""What one rank holds of a state dict, taken apart: shards, objects, and the path of each key."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reshard.dcp.flat import FlatState, Steps
from reshard.dcp.shards import Shard, shards_of


@dataclass(frozen=True)
class LocalState:
    """A rank's part of a state.

    Attributes:
        shards: of its tensors.
        objects: key -> what is not a tensor.
        paths: key -> the steps to it in the nested state dict, for all keys.
    """

    shards: list[Shard]
    objects: dict[str, Any]
    paths: Mapping[str, Steps]

    @classmethod
    def of(cls, flat: FlatState) -> LocalState:
        """Of a flat state dict; shares its memory.

        Raises:
            UsageError: a tensor that cannot be stored.
        """
        objects = {key: value for key, value in flat.values.items() if not isinstance(value, torch.Tensor)}
        return cls(shards_of(flat.values), objects, flat.paths)


class HostCopies:
    """Copies of states in host memory, which is used again for the next one: first touching it costs more than copying.

    Where there are GPUs the memory is pinned, so that they copy into it at full speed.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copy(self, state: LocalState) -> LocalState:
        """A copy that later changes of the state do not reach. The copy before is overwritten."""
        before, self._buffers = self._buffers, []
        shards = []
        with torch.no_grad():
            for number, shard in enumerate(state.shards):
                room = before[number] if number < len(before) else None
                shards.append(shard._replace(tensor=self._copied(shard.tensor, room)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return LocalState(shards, copy.deepcopy(state.objects), dict(state.paths))

    def _copied(self, tensor: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        room.copy_(tensor, non_blocking=True)
        self._buffers.append(room)
        return room
