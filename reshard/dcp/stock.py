"""Stock ``dcp.save`` and ``dcp.load``, with what they do unsafely or obscurely put right.

Stock reads ``.metadata`` with plain pickle and objects with ``weights_only=False``; both go through allow-lists here.
Stock raises ``CheckpointException``, which ``except Exception`` does not catch and whose first line says nothing; here
it becomes a ``ReshardError`` that names the rank and the cause. Where ranks hold different values under one key, stock
keeps that of whichever rank had the least to write; here it is always the lowest rank's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from reshard.dcp.torch_private import METADATA_CLASSES, OBJECT_CLASSES
from reshard.errors import CheckpointUnsound, ReshardError, StorageError, UnsafePickle, UsageError
from reshard.formats import dcp_metadata, unpickle
from reshard.formats.fingerprint import Fingerprint, fingerprint_written
from reshard.storage.durable import storage_errors

ZIP_HEAD = b"PK\x03\x04"


def save(
    state_dict: dict[str, Any], folder: Path, process_group: dist.ProcessGroup | None = None
) -> dict[str, Fingerprint]:
    """Writes a nested state dict as a DCP checkpoint. Collective.

    Args:
        state_dict: tensors, DTensors, ShardedTensors and objects. Of plain tensors and objects that several ranks
            have under one key, the lowest rank's are written.
        folder: exists and is empty.
        process_group: moves plans between ranks; None without distributed.

    Returns:
        What this rank wrote: file -> fingerprint.

    Raises:
        UsageError: an object that could not be read back without running what a pickle says.
        ReshardError: on every rank, if any failed.
    """
    writer = _TellingWriter(folder, sync_files=True, overwrite=False)
    with _faults_named(folder, ReshardError):
        state_dict_saver.save(
            state_dict,
            storage_writer=writer,
            planner=_LowestRankPlanner(),
            process_group=process_group,
            no_dist=process_group is None,
        )
    return writer.fingerprints


def load(state_dict: dict[str, Any], folder: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Fills a flat state dict in place: its tensors from the stored ones of the same key, its objects replaced.

    Collective. After an error the tensors are undefined.

    Raises:
        ReshardError: on every rank, if any failed.
    """
    with _faults_named(folder, CheckpointUnsound):
        state_dict_loader.load(
            state_dict,
            storage_reader=_SafeReader(folder),
            planner=_SafePlanner(folder),
            process_group=process_group,
            no_dist=process_group is None,
        )


class _LowestRankPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        for key, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                _require_readable(key, value)
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # Replicas of a shard are equal and stay spread over the ranks; counters, buffers, flags need not be.
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.type == WriteItemType.SHARD or item.index not in seen]
            seen.update(item.index for item in items)
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)


def _require_readable(key: str, value: Any) -> None:
    """Refuses at the save what a load would refuse: then the state is still there to be changed."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        _read_object(content)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as fault:
        raise UsageError(
            "an object that could not be loaded again",
            key=key,
            found=f"{type(value).__module__}.{type(value).__qualname__}",
            hint="make it of plain Python numbers, strings, lists and dicts, or of tensors",
            details=_refused(fault),
        ) from fault


def _read_object(content: io.BytesIO) -> Any:
    with torch.serialization.safe_globals(list(OBJECT_CLASSES)):
        return torch.load(content, weights_only=True)


def _refused(fault: Exception) -> list[str]:
    # Torch's own message advises to load without the check.
    if named := re.search(r"GLOBAL ([\w.]+)", str(fault)):
        return [f"it names {named[1]}"]
    return [] if isinstance(fault, pickle.UnpicklingError) else [str(fault)]


class _TellingWriter(FileSystemWriter):
    """Says which file could not be written, and why. Of a full disk, torch tells "unexpected pos 704 vs 598".

    Attributes:
        fingerprints: of the files that this rank has written.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fingerprints: dict[str, Fingerprint] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._refusals(f"{plan.storage_data.prefix}0.distcp"):
            written = super().write_data(plan, planner)
            archives: dict[str, list[tuple[int, int, bool]]] = {}
            for result in written.wait():
                place, is_tensor = result.storage_data, result.index.offset is not None
                archives.setdefault(place.relative_path, []).append((place.offset, place.length, is_tensor))
            for name, places in archives.items():
                self.fingerprints[name] = fingerprint_written(Path(self.path) / name, places)
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._refusals(dcp_metadata.FILE_NAME):
            super().finish(metadata, results)

    @contextlib.contextmanager
    def _refusals(self, name: str) -> Iterator[None]:
        path = Path(self.path) / name
        try:
            yield
        except Exception as fault:
            # Here, on the rank that met it: what an error was raised from does not travel.
            cause: BaseException | None = fault
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            written_bytes = path.stat().st_size if path.exists() else 0
            with storage_errors(f"write beyond {written_bytes} bytes", path):
                raise cause from fault


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / dcp_metadata.FILE_NAME
        with storage_errors("read", path), path.open("rb") as file:
            metadata: Metadata = unpickle.read(file, METADATA_CLASSES, path=path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # Stock reads file by file too, but its errors do not say which.
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner).wait()
            except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as fault:
                keys = sorted({item.dest_index.fqn for item in items})
                raise CheckpointUnsound(
                    "damaged: a tensor in it cannot be read",
                    path=Path(self.path) / name,
                    found=str(fault).partition("\n")[0],
                    hint="copy the file again, or use another step",
                    details=[
                        f"read from it: {', '.join(keys[:5])}" + (f" and {len(keys) - 5} more" if keys[5:] else "")
                    ],
                ) from fault
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _SafePlanner(DefaultLoadPlanner):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        if not value.getbuffer()[: len(ZIP_HEAD)] == ZIP_HEAD:
            raise CheckpointUnsound(
                "damaged: no torch.save archive where this object should be", path=self.folder, key=key
            )
        try:
            self.original_state_dict[key] = _read_object(value)
        except pickle.UnpicklingError as fault:
            raise UnsafePickle(
                "an object that is not plain data; it was not run",
                path=self.folder,
                key=key,
                hint="save it as plain Python numbers and strings",
                details=_refused(fault),
            ) from fault


@contextlib.contextmanager
def _faults_named(folder: Path, kind: type[ReshardError]) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Without a process group, stock guesses aloud that a single process was meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as fault:
        raise _translated(fault, folder, kind) from fault
    except OSError as fault:
        raise StorageError(fault.strerror or str(fault), path=fault.filename or folder) from fault


def _translated(fault: CheckpointException, folder: Path, kind: type[ReshardError]) -> ReshardError:
    rank, cause = min((rank, _cause(entry)) for rank, entry in fault.failures.items())
    if isinstance(cause, ReshardError):
        return cause
    if isinstance(cause, (KeyboardInterrupt, SystemExit)):
        raise cause
    if isinstance(cause, OSError):
        return StorageError(cause.strerror or str(cause), path=cause.filename or folder, rank=rank)
    return kind(f"{type(cause).__name__}: {cause}", path=folder, rank=rank)


def _cause(entry: Any) -> BaseException:
    return entry[0] if isinstance(entry, tuple) else entry  # type: ignore[no-any-return]
