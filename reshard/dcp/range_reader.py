"""The storage plug-in for stock ``dcp.load``: reads the byte ranges that a rank needs, and verifies what it reads."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from reshard.dcp.in_folder import InFolder
from reshard.dcp.light_items import LightItems
from reshard.dcp.objects import object_from_bytes
from reshard.dcp.shards import TensorSink, as_array, dtype_name
from reshard.dcp.stored import torch_dtype
from reshard.engine.fill import Pieces, Target, Verify, fill
from reshard.environment import local_processes
from reshard.errors import CheckpointUnsound
from reshard.formats import dcp_metadata
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import opened
from reshard.formats.dcp_metadata import DcpMetadata


class RangeReader(InFolder, StorageReader):
    """For ``torch.distributed.checkpoint.load(..., storage_reader=RangeReader(path))``.

    Stock reads every chunk that a rank needs anything of as a whole, one after the other; this reads the ranges, in
    the order of the files and several at once, into the tensors themselves where they allow it. ``.metadata`` and
    objects go through an allow-list, and checksums are compared.

    Args:
        path: the checkpoint folder.
        verify: which records are compared with their checksums: ``whole``, those that a rank reads the whole of;
            ``always``, for which the rest of the others is read as well; ``never``.
    """

    def __init__(self, path: str | os.PathLike[str], verify: Verify = "whole") -> None:
        super().__init__(path)
        self.verify = verify
        self._metadata: tuple[DcpMetadata, str] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forgets the checkpoint, and turns to another one if it is given."""
        super().reset(checkpoint_id)
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, as stock objects made from what is known of it here.

        Raises:
            CheckpointUnsound: it is missing or damaged.
            UnsafePickle: it names what it should not.
        """
        # Stock gives it only to a parameter of the name ``kwargs``, where there is no metadata of all ranks.
        rank = kwargs.get("rank")
        path = self.path / (dcp_metadata.FILE_NAME if rank is None else f"__{rank}{dcp_metadata.FILE_NAME}")
        if not path.exists():
            raise CheckpointUnsound("missing", path=path, hint="the save was not finished, or this is another folder")
        self._metadata = dcp_metadata.read_file(path), path.name
        return _as_stock(self._metadata[0])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: what a plan does not name is not looked at."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is, to travel lightly: to rank 0 and back."""
        return dataclasses.replace(plan, items=cast("list[ReadItem]", LightItems.of(plan.items)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what a plan asks for.

        Raises:
            CheckpointUnsound: a file is missing, cut short or damaged.
            UnsafePickle: an object is not plain data; it was not run.
            StorageError: the file system refused.
        """
        if self._metadata is None:
            self.read_metadata()
        assert self._metadata is not None
        metadata, described_by = self._metadata
        with opened(self.path, metadata, [described_by]) as source:
            items = list(plan.items)
            tensors = [item for item in items if item.type == LoadItemType.TENSOR]
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            pieces = _pieces(source, tensors, [dtype_name(target.dtype) for target in targets], targets)
            fill(source, pieces, verify=self.verify, processes=local_processes())
            for item, target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
            for item in items:
                if item.type == LoadItemType.BYTE_IO:
                    key = item.storage_index.fqn
                    content = source.object_bytes(key)
                    # The stock planner would run what a pickle says: what passes here is plain data.
                    object_from_bytes(key, content, self.path / source.index.objects[key].file)
                    planner.load_bytes(item, io.BytesIO(content))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _as_stock(metadata: DcpMetadata) -> Metadata:
    """What stock's planner plans with: all but the places in the files, which are this reader's own affair."""
    index = metadata.index
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets[:dims]), torch.Size(sizes[:dims]))
        for offsets, sizes, dims in zip(
            index.offsets.tolist(),
            index.sizes.tolist(),
            np.array([len(shape) for shape in index.shapes], dtype=np.int64)[index.owner].tolist(),
            strict=True,
        )
    ]
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            TensorProperties(torch_dtype(dtype, key, index.folder)), torch.Size(shape), chunks[first:last]
        )
        for key, dtype, shape, first, last in zip(
            index.names, index.dtypes, index.shapes, index.first.tolist(), index.first[1:].tolist(), strict=False
        )
    }
    entries |= {key: BytesStorageMetadata() for key in index.objects}
    return Metadata(entries, metadata.paths or None, storage_meta=StorageMeta())


def _pieces(source: Checkpoint, items: Sequence[ReadItem], dtypes: Sequence[str], targets: Sequence[Any]) -> Pieces:
    index = source.index
    found: dict[str, dict[tuple[int, ...], int]] = {}
    rows = [_row(source, item.storage_index, found) for item in items]
    offsets = np.zeros((len(items), index.dims), dtype=np.int64)
    sizes = np.ones_like(offsets)
    memory: list[Target] = []
    for number, (item, row, dtype, target) in enumerate(zip(items, rows, dtypes, targets, strict=True)):
        offsets[number, : len(item.storage_offsets)] = item.storage_offsets
        sizes[number, : len(item.lengths)] = item.lengths
        stored = index.dtypes[int(index.owner[row])]
        array = as_array(target) if dtype == stored else None
        memory.append(TensorSink(target, stored) if array is None else array)
    return Pieces(np.array(rows, dtype=np.int64), offsets, sizes, memory)


def _row(source: Checkpoint, wanted: MetadataIndex, found: dict[str, dict[tuple[int, ...], int]]) -> int:
    """The chunk that stock's own metadata names."""
    index, key = source.index, wanted.fqn
    if key not in found:
        number = index.number[key]
        chunks = range(int(index.first[number]), int(index.first[number + 1]))
        found[key] = {index.box(row).offsets: row for row in chunks}
    try:
        return found[key][tuple(wanted.offset)] if wanted.offset is not None else min(found[key].values())
    except KeyError:
        raise CheckpointUnsound(
            "changed while it was read: a chunk is gone", path=source.path, key=key, found=wanted.offset
        ) from None
