"""Who writes which boxes into which file, and the index of it all: agreed on once for a layout, then reused.

A run saves the same layout again and again. What was agreed on is kept by a digest of all that it depends on; where
every rank finds it, nothing is planned and nothing but that digest travels.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.dcp.flat import Steps
from reshard.dcp.local_state import LocalState
from reshard.dcp.memory import in_memory
from reshard.dcp.ranks import Ranks
from reshard.dcp.shards import Shard
from reshard.dcp.sharing import CUT_BYTES, Held, Shares, part_rows, share
from reshard.engine.spans import Job
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp_metadata_writer import metadata_bytes
from reshard.formats.dcp_output import DcpFiles, lay_out_dcp
from reshard.index.index import ARCHIVE, Index, IndexBuilder, Place
from reshard.plan import Layout, Plan

# Runs use one layout or two (weights alone, everything); evaluations in between may bring a third.
_MOST_PLANS = 8
_FAULTS_NAMED = 20

Ints = tuple[int, ...]


@dataclass(eq=False)
class SavePlan:
    """What this rank is to write.

    Attributes:
        parts: number of a shard, first and last row (exclusive) of it; -1 for the last means all of it.
        objects: keys.
        index: of the whole checkpoint but its objects, as in files of generation 0; on rank 0 only.
        paths: key -> path in the nested state, of all ranks' keys; on rank 0 only.
        total_bytes: of all files but for objects; on rank 0 only.
    """

    parts: list[tuple[int, int, int]]
    objects: list[str]
    index: Index | None = None
    paths: dict[str, Steps] | None = None
    total_bytes: int = 0
    _metadata: tuple[int, dict[str, Place], bytes] | None = None

    def metadata(self, objects: dict[str, Place], generation: int) -> bytes:
        """The content of ``.metadata``, with the objects in these places; for rank 0.

        It is made anew only where an object or the files have another place than at the save before.

        Args:
            generation: the second number in the files' names.
        """
        assert self.index is not None and self.paths is not None
        if self._metadata is None or self._metadata[:2] != (generation, objects):
            files = [name.replace("_0.", f"_{generation}.") for name in self.index.files]
            index = dataclasses.replace(self.index, files=files)
            self._metadata = generation, objects, metadata_bytes(index, objects, self.paths)
        return self._metadata[2]

    def cut(self, shards: Sequence[Shard]) -> list[Shard]:
        """The boxes to be written, of the shards that this rank holds."""
        return [
            shards[number] if last < 0 else _rows(shards[number], first, last) for number, first, last in self.parts
        ]


@dataclass(frozen=True, eq=False)
class _Written:
    """What one rank tells rank 0 of the boxes that it will write."""

    index: Index
    total_bytes: int
    paths: dict[str, Steps]
    objects: list[str]


def plan_save(state: LocalState, ranks: Ranks) -> SavePlan:
    """Agrees on who writes what. Collective.

    Raises:
        UsageError: on every rank, if the ranks disagree on a tensor or leave holes in one.
    """
    kept = [number for number, shard in enumerate(state.shards) if shard.tensor.numel() or 0 in shard.shape]
    held, digest = _described(state, kept, f"{ranks.rank} of {ranks.size}")
    # What this rank holds may be the same in several layouts: of small tensors it may have nothing at all.
    known = {world for mine, world in _plans if mine == digest}
    everybodys = ranks.gather((digest, known))
    world = hashlib.blake2b(b"".join(theirs for theirs, _ in everybodys), digest_size=16).digest()
    if all(world in theirs for _, theirs in everybodys):
        _plans.move_to_end((digest, world))
        return _plans[digest, world]
    plan = _agreed(state, kept, share(held, ranks), ranks)
    _plans[digest, world] = plan
    while len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)
    return plan


# By the digest of what this rank holds, and that of what all do.
_plans: OrderedDict[tuple[bytes, bytes], SavePlan] = OrderedDict()


def _described(state: LocalState, kept: Sequence[int], also: str) -> tuple[Held, bytes]:
    """What the ranks need to know of each other's boxes and objects, and a digest of all that a plan depends on."""
    digest = hashlib.blake2b(digest_size=16)
    texts, lengths, rows, is_dealt = [], [], [], []
    for number in kept:
        shard = state.shards[number]
        text, length = shard.description, shard.length_bytes
        dealt = bool(length) and (shard.is_part or length >= CUT_BYTES)
        digest.update(f"{number}\0{text}{dealt}{state.paths[shard.key]}\0".encode("utf-8", "surrogatepass"))
        texts.append(text)
        lengths.append(length)
        rows.append(shard.rows)
        is_dealt.append(dealt)
    for key in state.objects:
        digest.update(f"{key}\0{state.paths[key]}\0".encode("utf-8", "surrogatepass"))
    digest.update(also.encode())
    count = len(state.objects)
    held = Held.of(
        [*texts, *state.objects], [*lengths, *[0] * count], [*rows, *[1] * count], [*is_dealt, *[False] * count]
    )
    return held, digest.digest()


def _agreed(state: LocalState, kept: Sequence[int], shares: Shares, ranks: Ranks) -> SavePlan:
    parts = []
    for number, taker, group in zip(kept, shares.taker.tolist(), shares.group.tolist(), strict=False):
        if taker == ranks.rank:
            parts.append((number, 0, -1))
        elif taker < 0:
            holders = shares.groups[group]
            parts.append((number, *part_rows(state.shards[number].sizes[0], holders.index(ranks.rank), len(holders))))
    takers = shares.taker[len(kept) :].tolist()
    mine = SavePlan(parts, [key for key, taker in zip(state.objects, takers, strict=True) if taker == ranks.rank])
    files = lay_out(in_memory(Path(), mine.cut(state.shards), {}), ranks.rank, 0)[1]
    paths = {key: state.paths[key] for key in (*files.index.names, *mine.objects)}
    everybodys = ranks.collect(_Written(files.index, files.output.total_bytes, paths, mine.objects))
    with ranks.together():
        if everybodys is not None:
            merged = {key: path for theirs in everybodys for key, path in theirs.paths.items()}
            total_bytes = sum(theirs.total_bytes for theirs in everybodys)
            mine = SavePlan(mine.parts, mine.objects, _merged(everybodys), merged, total_bytes)
    return mine


def lay_out(source: Checkpoint, rank: int, generation: int) -> tuple[Job, DcpFiles]:
    """The file of a rank for what it has in memory, and the job that writes it."""
    index = source.index
    count = len(index.names)
    number = np.arange(count, dtype=np.int64)
    layout = Layout(number, index.offsets, index.sizes, np.full(count, rank, dtype=np.int64))
    plan = Plan(number.astype(np.int32), number.astype(np.int32), np.arange(count + 1, dtype=np.int64))
    files = lay_out_dcp(index, layout, index.dtypes, index.objects, rank, generation)
    return Job(source, layout, plan, files.output), files


def _rows(shard: Shard, first: int, last: int) -> Shard:
    return shard._replace(
        offsets=(shard.offsets[0] + first, *shard.offsets[1:]),
        sizes=(last - first, *shard.sizes[1:]),
        tensor=shard.tensor[first:last],
    )


def _merged(everybodys: Sequence[_Written]) -> Index:
    """The index of what all ranks write.

    Raises:
        UsageError: they disagree on a tensor, or what they hold of one does not make up the whole of it.
    """
    builder = IndexBuilder(Path(), ARCHIVE)
    tensors: dict[str, tuple[str, Ints, int, list[tuple[Ints, Ints, tuple[int, int, int]]]]] = {}
    objects = {key for theirs in everybodys for key in theirs.objects}
    for rank, theirs in enumerate(everybodys):
        index = theirs.index
        numbers = [builder.file(name) for name in index.files]
        columns = (index.offsets, index.sizes, index.file, index.start_bytes, index.length_bytes)
        rows = zip(index.names, index.dtypes, index.shapes, *(column.tolist() for column in columns), strict=True)
        for key, dtype, shape, offsets, sizes, file, start, length in rows:
            known = tensors.setdefault(key, (dtype, shape, rank, []))
            if (dtype, shape) != known[:2] or key in objects:
                first = f"{known[0]} of {known[1]} as on rank {known[2]}"
                raise UsageError(
                    "the ranks hold different things under one key",
                    key=key,
                    expected="an object, as on another rank" if key in objects else first,
                    found=f"{dtype} of {shape} on rank {rank}",
                )
            dims = len(shape)
            known[3].append((tuple(offsets[:dims]), tuple(sizes[:dims]), (numbers[file], start, length)))
    for key, (dtype, shape, _, chunks) in tensors.items():
        builder.tensor(key, dtype, shape)
        for chunk in sorted(chunks):
            builder.chunk(*chunk)
    index = builder.build()
    faults = [f"{key}: {fault}" for key, fault in index.tiling_faults()]
    if faults:
        raise UsageError(
            "what the ranks hold does not make up whole tensors",
            hint="every rank has to call save, with its own shards under the same keys",
            details=faults[:_FAULTS_NAMED],
        )
    return index
