"""Stock ``dcp.save`` and ``dcp.load``, with what they do unsafely or obscurely put right.

Stock reads ``.metadata`` with plain pickle and objects with ``weights_only=False``; both go through allow-lists here.
Stock raises ``CheckpointException``, which ``except Exception`` does not catch and whose first line says nothing; here
it becomes a ``ReshardError`` that names the rank and the cause.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from reshard.dcp.torch_private import METADATA_CLASSES
from reshard.errors import CheckpointUnsound, ReshardError, StorageError, UnsafePickle
from reshard.formats import unpickle

METADATA_FILE = ".metadata"


def save(state_dict: dict[str, Any], folder: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Writes a nested state dict as a DCP checkpoint. Collective.

    Args:
        state_dict: tensors, DTensors, ShardedTensors and objects; objects are taken from rank 0.
        folder: exists and is empty.
        process_group: moves plans between ranks; None without distributed.

    Raises:
        ReshardError: on every rank, if any failed.
    """
    with _faults_named(folder):
        state_dict_saver.save(
            state_dict,
            storage_writer=FileSystemWriter(folder, sync_files=True, overwrite=False),
            process_group=process_group,
            no_dist=process_group is None,
        )


def load(state_dict: dict[str, Any], folder: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Fills a flat state dict in place: its tensors from the stored ones of the same key, its objects replaced.

    Collective. After an error the tensors are undefined.

    Raises:
        ReshardError: on every rank, if any failed.
    """
    with _faults_named(folder):
        state_dict_loader.load(
            state_dict,
            storage_reader=_SafeReader(folder),
            planner=_SafePlanner(folder),
            process_group=process_group,
            no_dist=process_group is None,
        )


def read_metadata(folder: Path) -> Metadata:
    """The torch ``Metadata`` of a checkpoint, unpickled through an allow-list."""
    path = Path(folder) / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = unpickle.load(file, METADATA_CLASSES, path=path)
    except FileNotFoundError as fault:
        raise CheckpointUnsound(
            "no .metadata: not a DCP checkpoint, or one whose save was not finished",
            path=folder,
            hint="name a step-<n> folder, or resume from an earlier step",
        ) from fault
    if not isinstance(metadata, Metadata):
        raise CheckpointUnsound("not DCP metadata", path=path, expected="Metadata", found=type(metadata).__name__)
    return metadata


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _SafePlanner(DefaultLoadPlanner):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.original_state_dict[key] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as fault:
            raise UnsafePickle(
                "an object that is not plain data; it was not run",
                path=self.folder,
                key=key,
                hint="save it as plain Python numbers and strings",
                details=str(fault).splitlines()[:3],
            ) from fault


@contextlib.contextmanager
def _faults_named(folder: Path) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Without a process group, stock guesses aloud that a single process was meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as fault:
        raise _translated(fault, folder) from fault
    except OSError as fault:
        raise StorageError(fault.strerror or str(fault), path=fault.filename or folder) from fault


def _translated(fault: CheckpointException, folder: Path) -> ReshardError:
    rank, cause = min((rank, _cause(entry)) for rank, entry in fault.failures.items())
    if isinstance(cause, ReshardError):
        return cause
    if isinstance(cause, OSError):
        return StorageError(cause.strerror or str(cause), path=cause.filename or folder, rank=rank)
    return CheckpointUnsound(f"{type(cause).__name__}: {cause}", path=folder, rank=rank)


def _cause(entry: Any) -> BaseException:
    return entry[0] if isinstance(entry, tuple) else entry  # type: ignore[no-any-return]
