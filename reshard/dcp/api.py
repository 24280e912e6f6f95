"""``load``, ``save`` and ``async_save`` with the signatures of ``torch.distributed.checkpoint``.

A script that uses these changes one import. Planners, readers and writers that stock's defaults do not cover go to the
stock functions, with `RangeReader` and `RangeWriter` where it names no storage of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import async_save as stock_async_save
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from reshard.dcp.background import Background
from reshard.dcp.filling import open_on, plan_filling
from reshard.dcp.flat import FlatState
from reshard.dcp.local_state import LocalState
from reshard.dcp.range_reader import RangeReader
from reshard.dcp.range_writer import RangeWriter
from reshard.dcp.ranks import Ranks, alone, ranks_of
from reshard.dcp.writing import write_state
from reshard.engine.fill import Verify
from reshard.errors import UsageError
from reshard.formats import dcp_metadata

_Id = str | os.PathLike[str]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Id | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    verify: Verify = "whole",
    allow_cast: bool = False,
) -> None:
    """Fills a nested state dict from a DCP checkpoint, in place, at any world size. Every rank of the group calls it.

    Args:
        state_dict: tensors, DTensors and ShardedTensors are filled, objects replaced; what has ``state_dict`` and
            ``load_state_dict`` is loaded through them.
        checkpoint_id: the folder.
        storage_reader: names the folder instead; one of another kind than files is left to stock torch.
        planner: the default one with any options; another kind is left to stock torch.
        process_group: whose ranks load; by default all.
        no_dist: this process alone.
        verify: which records are compared with their checksums: ``whole``, those that a rank reads the whole of;
            ``always``, for which the rest of the others is read as well; ``never``. By default as a
            `RangeReader` has it.
        allow_cast: round values into a dtype that cannot hold all of them.

    Raises:
        StateMismatch: a key is not there, or has another shape or dtype; nothing was changed.
        CheckpointUnsound: the checkpoint has holes (nothing was changed), or files are damaged (undefined then).
        ReshardError: on every rank, if any failed.
    """
    own_kinds = (type(None), FileSystemReader, RangeReader)
    if type(storage_reader) not in own_kinds or type(planner) not in (type(None), DefaultLoadPlanner):
        reader = storage_reader or RangeReader(_folder(checkpoint_id, None), verify)
        stock_load(state_dict, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist)
        return
    ranks = _ranks(process_group, no_dist)
    folder = _folder(checkpoint_id, storage_reader)
    if isinstance(storage_reader, RangeReader) and verify == "whole":
        verify = storage_reader.verify
    unpacked: dict[str, Any] = {}
    flat = FlatState()
    with ranks.together():
        unpacked = _unpacked(state_dict)
        flat = FlatState.of(unpacked, nested=getattr(planner, "flatten_state_dict", True))
    with open_on(folder, ranks) as source:
        values = flat.values
        if getattr(planner, "allow_partial_load", False):
            known = {*source.index.names, *source.index.objects}
            values = {key: value for key, value in values.items() if key in known}
        plan_filling(values, source, ranks, allow_cast=allow_cast).run(verify)
    for key, value in values.items():
        flat.replace(key, value)
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(unpacked[key])
        else:
            state_dict[key] = unpacked[key]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Id | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> None:
    """Writes a nested state dict as a DCP checkpoint that stock torch loads. Every rank of the group calls it.

    Until ``.metadata`` is replaced, at the very end and by a rename, a checkpoint that is in the folder stays whole.

    Args:
        state_dict: as ``load`` takes it. See `reshard.dcp.writing.write_state` for what several ranks hold.
        checkpoint_id: the folder; made where it is not there.
        storage_writer: names the folder instead; one of another kind than files is left to stock torch.
        planner: the default one; another kind is left to stock torch.
        use_collectives: taken for the sake of the signature: the ranks always agree, which costs little here.

    Raises:
        UsageError: something in the state cannot be stored, or the shards do not make up whole tensors.
        ReshardError: on every rank, if any failed; or a save before, in the background, did.
    """
    if _is_for_stock(storage_writer, planner):
        writer = storage_writer or RangeWriter(_folder(checkpoint_id, None))
        stock_save(
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return
    ranks = _ranks(process_group, no_dist)
    folder = _folder(checkpoint_id, storage_writer)
    # Into the same folder, the two would take the same names for their files.
    Background.of(ranks).finish()
    write_state(_taken_apart(state_dict, planner, folder, storage_writer, ranks), folder, ranks)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Id | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **options: Any,
) -> Future[None]:
    """As ``save``, in the background: returns as soon as the state is copied to host memory. Every rank calls it.

    A second one waits for the first. A failure is raised by the next call, by ``result()`` of what is returned, and
    logged when the process ends.

    Args:
        options: those of stock's ``async_save``; they go to it where a planner or writer is left to it, and mean
            nothing here.
    """
    if _is_for_stock(storage_writer, planner):
        writer = storage_writer or RangeWriter(_folder(checkpoint_id, None))
        saved: Any = stock_async_save(
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            **options,
        )
        return saved  # type: ignore[no-any-return]
    ranks = _ranks(process_group, no_dist)
    background = Background.of(ranks)
    folder = _folder(checkpoint_id, storage_writer)
    background.finish()
    taken = _taken_apart(state_dict, planner, folder, storage_writer, ranks)
    state = taken
    with ranks.together():
        state = background.copy(taken)
    return background.start(lambda ranks: write_state(state, folder, ranks))


def _taken_apart(
    state_dict: Mapping[str, Any], planner: SavePlanner | None, folder: Path, writer: StorageWriter | None, ranks: Ranks
) -> LocalState:
    state: LocalState | None = None
    with ranks.together():
        is_nested = getattr(planner, "flatten_state_dict", True)
        state = LocalState.of(FlatState.of(_unpacked(state_dict), nested=is_nested))
        is_kept = ranks.rank == 0 and not getattr(writer, "overwrite", True)
        if is_kept and (folder / dcp_metadata.FILE_NAME).exists():
            raise UsageError("there is a checkpoint already", path=folder, hint="choose another folder")
    assert state is not None
    return state


def _is_for_stock(writer: StorageWriter | None, planner: SavePlanner | None) -> bool:
    own_kinds = (type(None), FileSystemWriter, RangeWriter)
    if isinstance(writer, FileSystemWriter) and (
        writer.transforms.extensions or writer.serialization_format != SerializationFormat.TORCH_SAVE
    ):
        # Compressed, encrypted or of another format: to leave that out would be worse than to be slow.
        return True
    return type(writer) not in own_kinds or type(planner) not in (type(None), DefaultSavePlanner)


def _unpacked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}


def _folder(checkpoint_id: _Id | None, storage: StorageReader | StorageWriter | None) -> Path:
    named = checkpoint_id if checkpoint_id is not None else getattr(storage, "path", None)
    if named is None:
        raise UsageError("no folder to load from or save to", key="checkpoint_id", hint="name it")
    if "://" in os.fspath(named):
        raise UsageError(
            "not a folder of this machine",
            key="checkpoint_id",
            found=named,
            hint="give a storage_reader or storage_writer for it, such as torch's FsspecReader",
        )
    return Path(named)


def _ranks(process_group: dist.ProcessGroup | None, no_dist: bool) -> Ranks:
    return alone() if no_dist or not dist.is_initialized() else ranks_of(process_group)
