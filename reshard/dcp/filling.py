"""Filling a state dict from a checkpoint, at any world size: each rank works out and reads what it holds.

The ranks agree twice: before the first byte of a live tensor is written, so that a key that is missing or of another
shape on one rank stops all and changes nothing; and at the end, for what fails while bytes are read.
"""

from __future__ import annotations

import difflib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.dcp.exchange import exchange
from reshard.dcp.locating import locate
from reshard.dcp.objects import object_from_bytes
from reshard.dcp.ranks import Ranks
from reshard.dcp.shards import Shard, TensorSink, as_array, shards_of
from reshard.dcp.sharing import Held, Shares, part_rows, share
from reshard.dcp.stored import is_lossy, torch_dtype
from reshard.engine.crc import chained, require_crc
from reshard.engine.fill import PartialRecord, Pieces, Target, Verify, fill
from reshard.environment import ranks_per_node
from reshard.errors import StateMismatch
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import opened, read_metadata
from reshard.index.index import Int
from reshard.plan import Layout, make_plan, piece_boxes

_FAULTS_NAMED = 20
# Rank 0 puts checksums together at some 10 us each; of larger jobs, records are verified that one rank has read.
_MOST_PARTS = 1 << 17


def open_on(folder: Path, ranks: Ranks) -> Checkpoint:
    """The DCP checkpoint in a folder, on every rank; rank 0 alone reads the metadata. Collective.

    Raises:
        ReshardError: on every rank, if it cannot be read.
    """
    metadata = None
    with ranks.together():
        if ranks.rank == 0:
            metadata = read_metadata(folder)
    metadata = ranks.broadcast(metadata)
    checkpoint: Checkpoint | None = None
    with ranks.together():
        assert metadata is not None
        checkpoint = opened(folder, *metadata)
    assert checkpoint is not None
    return checkpoint


@dataclass(frozen=True, eq=False)
class Filling:
    """A load that is planned, with nothing of the state changed yet.

    Attributes:
        values: the flat state dict: tensors to be filled in place, objects to be replaced.
        pieces: what this rank reads.
    """

    values: dict[str, Any]
    source: Checkpoint
    ranks: Ranks
    shards: list[Shard]
    held: Held
    shares: Shares
    pieces: Pieces

    def run(self, verify: Verify = "whole") -> None:
        """Fills the state dict. Collective.

        Args:
            verify: see `reshard.engine.fill.fill`.

        Raises:
            ReshardError: on every rank, if any failed: files are damaged or missing, or the file system refused. The
                tensors are undefined then; the objects are as they were.
        """
        found: dict[str, Any] = {}
        partial: dict[int, PartialRecord] = {}
        with self.ranks.together():
            partial = fill(self.source, self.pieces, verify=verify, processes=ranks_per_node(self.ranks.size))
            for key, value in self.values.items():
                if not isinstance(value, torch.Tensor):
                    path = self.source.path / self.source.index.objects[key].file
                    found[key] = object_from_bytes(key, self.source.object_bytes(key), path)
        if verify == "whole":
            self._verify_together(partial)
        exchange(self.shards, self.held, self.shares, self.ranks)
        self.values.update(found)

    def _verify_together(self, partial: dict[int, PartialRecord]) -> None:
        """Verifies the records that no rank has read the whole of, but all together have. Collective."""
        if self.ranks.size == 1:
            return
        mine = sum(len(record.parts) for record in partial.values())
        everybodys = self.ranks.collect(partial if mine * self.ranks.size <= _MOST_PARTS else {})
        with self.ranks.together():
            if everybodys is not None:
                for row in sorted({row for theirs in everybodys for row in theirs}):
                    records = [theirs[row] for theirs in everybodys if row in theirs]
                    found = chained((part for record in records for part in record.parts), records[0].length_bytes)
                    if found is not None:
                        require_crc(self.source, row, found, records[0].crc)


def plan_filling(values: dict[str, Any], source: Checkpoint, ranks: Ranks, *, allow_cast: bool = False) -> Filling:
    """Holds a flat state dict against a checkpoint, and works out what this rank reads. Collective.

    Args:
        values: of this rank; other ranks may have other keys.
        allow_cast: round values into a dtype that cannot hold all of them.

    Raises:
        StateMismatch: a key is not in the checkpoint, or has another shape or dtype there.
        CheckpointUnsound: the stored tensors have holes, or the archives of some are damaged.
        ReshardError: on every rank, if any failed.
    """
    shards: list[Shard] = []
    with ranks.together():
        shards = shards_of(values)
        _require_match(values, shards, source, allow_cast)
    # What the ranks of a machine have in common is read by one of them: from disk once, from the others' memory then.
    node = socket.gethostname()
    held = Held.of(
        [f"{node}\0{shard.description}" for shard in shards],
        [shard.length_bytes for shard in shards],
        [shard.rows for shard in shards],
        [True] * len(shards),
    )
    shares = share(held, ranks)
    planned: _Planned | None = None
    with ranks.together():
        planned = _planned(source, shards, shares, ranks.rank)
    assert planned is not None
    # Now, while a damaged container changes nothing yet.
    locate(source, np.unique(planned.rows), ranks)
    return Filling(values, source, ranks, shards, held, shares, planned.pieces(source))


def _require_match(values: Mapping[str, Any], shards: Sequence[Shard], source: Checkpoint, allow_cast: bool) -> None:
    index = source.index
    stored = {key: number for number, key in enumerate(index.names)}
    faults: list[tuple[str, str, object, object, str]] = []
    kinds = ("a tensor", "an object")
    for key, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        if key not in stored and key not in index.objects:
            near = difflib.get_close_matches(key, [*stored, *index.objects], 1) if len(faults) < 3 else []
            hint = f"the checkpoint has {near[0]}" if near else "`reshard inspect --tree` lists what there is"
            faults.append((key, "not in the checkpoint", None, None, hint))
        elif is_tensor != (key in stored):
            faults.append(
                (key, "of another kind in the checkpoint", kinds[not is_tensor], kinds[is_tensor],
                 "load it into a state like the one that was saved")
            )  # fmt: skip
    for shard in shards:
        if (number := stored.get(shard.key)) is None:
            continue
        if any(size > 1 and step == 0 for size, step in zip(shard.sizes, shard.tensor.stride(), strict=True)):
            hint = "load into a tensor of its own memory, such as expanded.clone()"
            faults.append((shard.key, "one element in memory for several", None, shard.tensor.stride(), hint))
        if index.shapes[number] != shard.shape:
            faults.append(
                (shard.key, "of another shape in the checkpoint", shard.shape, index.shapes[number],
                 "build the model as it was when saved")
            )  # fmt: skip
        elif not allow_cast and is_lossy(torch_dtype(index.dtypes[number], shard.key, source.path), shard.tensor.dtype):
            faults.append(
                (shard.key, "a lossy cast", shard.dtype, index.dtypes[number],
                 "load into the stored dtype, or allow it with allow_cast=True")
            )  # fmt: skip
    if not faults:
        return
    faults = list({fault[0]: fault for fault in faults}.values())
    (key, what, expected, found, hint), *others = faults
    details = [f"{other[0]}: {other[1]}" for other in others[:_FAULTS_NAMED]]
    if len(others) > _FAULTS_NAMED:
        details.append(f"and {len(others) - _FAULTS_NAMED} more")
    raise StateMismatch(what, path=source.path, key=key, expected=expected, found=found, hint=hint, details=details)


class _Planned(NamedTuple):
    """What a rank reads: boxes of shards, and the pieces of chunks that they are made of.

    Attributes:
        wanted: shard and number of the tensor, of each box.
        of_wanted: the box of each piece.
        rows, low, sizes: chunk row and global box of each piece.
    """

    wanted: list[tuple[Shard, int]]
    of_wanted: Int
    rows: Int
    low: Int
    sizes: Int

    def pieces(self, source: Checkpoint) -> Pieces:
        """These, and the memory that they belong to."""
        targets = _targets(source.index.dtypes, self.wanted, self.of_wanted.tolist(), self.low, self.sizes)
        return Pieces(self.rows, self.low - source.index.offsets[self.rows], self.sizes, targets)


def _planned(source: Checkpoint, shards: Sequence[Shard], shares: Shares, rank: int) -> _Planned:
    """What this rank reads."""
    index = source.index
    wanted = []
    for number, (shard, taker, group) in enumerate(
        zip(shards, shares.taker.tolist(), shares.group.tolist(), strict=True)
    ):
        if taker == rank or group < 0:
            wanted.append((index.number[shard.key], shard.offsets, shard.sizes, number))
        elif taker < 0:
            holders = shares.groups[group]
            first, last = part_rows(shard.sizes[0], holders.index(rank), len(holders))
            begin = (shard.offsets[0] + first, *shard.offsets[1:])
            wanted.append((index.number[shard.key], begin, (last - first, *shard.sizes[1:]), number))
    wanted.sort(key=lambda box: box[:2])
    offsets = np.zeros((len(wanted), index.dims), dtype=np.int64)
    sizes = np.ones_like(offsets)
    for row, (_, begin, extent, _) in enumerate(wanted):
        offsets[row, : len(begin)] = begin
        sizes[row, : len(extent)] = extent
    tensor = np.array([box[0] for box in wanted], dtype=np.int64)
    layout = Layout(tensor, offsets, sizes, np.zeros(len(wanted), dtype=np.int64))
    plan = make_plan(index, layout)
    low, sizes = piece_boxes(index, layout, plan, slice(None))
    boxes = [(shards[box[3]], box[0]) for box in wanted]
    return _Planned(boxes, plan.wanted.astype(np.int64), plan.source.astype(np.int64), low, sizes)


def _targets(
    dtypes: Sequence[str], wanted: Sequence[tuple[Shard, int]], of_wanted: Sequence[int], low: Int, sizes: Int
) -> list[Target]:
    """The memory of each piece: a part of its shard's."""
    targets: list[Target] = []
    last, array = -1, None
    for number, start, size in zip(of_wanted, low.tolist(), sizes.tolist(), strict=True):
        shard, tensor_number = wanted[number]
        dtype = dtypes[tensor_number]
        if number != last:
            last, array = number, as_array(shard.tensor) if shard.dtype == dtype else None
        if tuple(size[: len(shard.sizes)]) == shard.sizes:
            targets.append(array if array is not None else TensorSink(shard.tensor, dtype))
            continue
        place = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, shard.offsets, size, strict=False))
        targets.append(array[place] if array is not None else TensorSink(shard.tensor[place], dtype))
    return targets
