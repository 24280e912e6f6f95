"""The storage plug-in for stock ``dcp.save``: what our own save writes with, under stock's plan."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from reshard.dcp.in_folder import InFolder
from reshard.dcp.memory import in_memory
from reshard.dcp.save_plan import lay_out
from reshard.dcp.shards import Shard
from reshard.dcp.torch_private import StorageInfo
from reshard.dcp.writing import next_generation, sweep, write_files
from reshard.environment import local_processes
from reshard.errors import UsageError
from reshard.formats import dcp_metadata
from reshard.storage.durable import make_folder, write_atomic


class _File(NamedTuple):
    """Which file a plan is for: ``__<rank>_<generation>.distcp``."""

    rank: int
    generation: int


class RangeWriter(InFolder, StorageWriter):
    """For ``torch.distributed.checkpoint.save(..., storage_writer=RangeWriter(path))``.

    Shards stream through a few aligned blocks, in threads and past the page cache, with their checksums; what is
    written is durable before ``.metadata`` appears, and until then what the folder held before is whole. Files of a
    save before are removed afterwards.

    Args:
        path: the checkpoint folder; made where it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._rank: int | None = None
        self._use_collectives = True

    def storage_meta(self) -> StorageMeta | None:
        """Where it is saved."""
        return StorageMeta(checkpoint_id=os.fspath(self.path))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the rank, where every rank writes metadata of its own."""
        # Stock gives them only to a parameter of the name ``kwargs``.
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder."""
        make_folder(self.path)
        if self._use_collectives or self._rank is None:
            return plan
        if (earlier := self.path / dcp_metadata.FILE_NAME).exists():
            raise UsageError(
                "describes the checkpoint that is there, and no rank alone can replace it",
                path=earlier,
                rank=self._rank,
                hint="save without collectives into a folder that has none",
            )
        return dataclasses.replace(plan, storage_data=_File(self._rank, next_generation(self.path)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the files, by numbers that no file there has."""
        generation = next_generation(self.path)
        return [
            dataclasses.replace(plan, storage_data=_File(rank, generation)) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file.

        Raises:
            StorageError: the file system refused.
        """
        file: _File = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        others = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        shards = [_shard(item, planner) for item in tensors]
        content = {item.index.fqn: _bytes(item, planner) for item in others}
        job, files = lay_out(in_memory(self.path, shards, content), file.rank, file.generation)
        write_files(job, self.path, local_processes())
        index = files.index
        places = (column.tolist() for column in (index.file, index.start_bytes, index.length_bytes))
        results = [
            _result(item, index.files[number], start, length)
            for item, number, start, length in zip(tensors, *places, strict=True)
        ]
        for item in others:
            results.append(_result(item, *files.objects[item.index.fqn]))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata, last, and removes files to which it does not refer.

        Raises:
            StorageError: the file system refused.
        """
        storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata = dataclasses.replace(metadata, storage_data=storage_data, storage_meta=self.storage_meta())
        prefix = "" if self._use_collectives else f"__{self._rank}"
        write_atomic(self.path / f"{prefix}{dcp_metadata.FILE_NAME}", pickle.dumps(metadata))
        if self._use_collectives:
            sweep(self.path, {place.relative_path for place in storage_data.values()})


def _shard(item: WriteItem, planner: SavePlanner) -> Shard:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    return Shard(item.index.fqn, tuple(item.tensor_data.size), offsets, sizes, tensor.detach(), is_part=True)


def _bytes(item: WriteItem, planner: SavePlanner) -> bytes:
    content = planner.resolve_data(item)
    assert isinstance(content, io.BytesIO)
    return content.getvalue()


def _result(item: WriteItem, file: str, start: int, length: int) -> WriteResult:
    return WriteResult(item.index, length, StorageInfo(file, start, length))
