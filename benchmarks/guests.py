"""Contenders from the package registry, imported when they are first used: they may not be installed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from known_state import State, local
from libraries import Library, Waiting
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
)
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.tensor import DTensor

ITEM = "state"


@cache
def _manager(is_async: bool) -> Any:
    """Of torch_checkpointing, which exchanges what resharding needs over CUDA only: elsewhere it does without."""
    from torch_checkpointing import CheckpointManager, CheckpointStagerConfig, ItemSpec
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    if is_async:
        # Else the state must not change until a lock is free: later than when the call returns.
        config.save = AsyncCheckpointSaverConfig(staging_config=CheckpointStagerConfig(use_async_staging=False))
    config.default = ItemSpec(resharder=DefaultResharder() if torch.cuda.is_available() else None)
    # Its direct I/O writes what is not aligned, which ext4 refuses.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(config)


def _save_managed(state: State, folder: Path) -> None:
    _manager(False).save(str(folder), {ITEM: state})


def _load_managed(state: State, folder: Path) -> None:
    _manager(False).load(str(folder), into={ITEM: state})


def _start_managed(state: State, folder: Path) -> Waiting:
    saving = _manager(True).save(str(folder), {ITEM: state})
    return saving.result  # type: ignore[no-any-return]


class _Model:
    """What bytecheckpoint takes for one."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> State:
        return self._state

    def load_state_dict(self, state: State) -> None:
        """It is filled in place."""


def _save_bytes(state: State, folder: Path) -> None:
    import bytecheckpoint

    bytecheckpoint.save(str(folder), {"model": _Model(state)}, framework="fsdp2")


def _load_bytes(state: State, folder: Path) -> None:
    import bytecheckpoint

    bytecheckpoint.load(str(folder), {"model": _Model(state)}, framework="fsdp2")


def _as_sharded_tensors(state: State) -> dict[str, Any]:
    """The classes that torchsnapshot knows, with the same memory."""
    return {name: _sharded(tensor) if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def _sharded(tensor: DTensor) -> ShardedTensor:
    ranks, rows = dist.get_world_size(), tensor.shape[0]
    of_each = -(-rows // ranks)
    width = tuple(tensor.shape[1:])
    parts = [(min(rows, of_each * rank), min(rows, of_each * (rank + 1))) for rank in range(ranks)]
    boxes = {
        rank: ShardMetadata([first, *[0] * len(width)], [last - first, *width], f"rank:{rank}/{tensor.device}")
        for rank, (first, last) in enumerate(parts)
        if first < last
    }
    own = [Shard(local(tensor), box) for rank, box in boxes.items() if rank == dist.get_rank()]
    whole = ShardedTensorMetadata(list(boxes.values()), tensor.shape, TensorProperties(dtype=tensor.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole)


def _save_snapshot(state: dict[str, Any], folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    whole = [f"{ITEM}/{name}" for name, tensor in state.items() if not isinstance(tensor, ShardedTensor)]
    Snapshot.take(str(folder), {ITEM: StateDict(**state)}, replicated=whole)


def _load_snapshot(state: dict[str, Any], folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(folder)).restore({ITEM: StateDict(**state)})


GUESTS: dict[str, Library] = {
    "torch_checkpointing": Library(
        _save_managed, _load_managed, _start_managed, format="torch_checkpointing", is_durable=False
    ),
    "bytecheckpoint": Library(_save_bytes, _load_bytes, format="bytecheckpoint", is_durable=False),
    "torchsnapshot": Library(
        _save_snapshot, _load_snapshot, adapt=_as_sharded_tensors, format="torchsnapshot", is_durable=False
    ),
}
