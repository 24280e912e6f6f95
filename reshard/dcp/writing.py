"""Writing a state dict as a DCP checkpoint: every rank its own file, each box once.

The ranks agree on who writes what and where (`reshard.dcp.save_plan`); each streams its shards through a few blocks
into its file; rank 0 writes ``.metadata`` last, by a rename. Until then the folder holds what it held before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from reshard.dcp.local_state import LocalState
from reshard.dcp.memory import in_memory
from reshard.dcp.objects import object_to_bytes
from reshard.dcp.ranks import Ranks
from reshard.dcp.save_plan import lay_out, plan_save
from reshard.engine.blocks import BlockFile
from reshard.engine.run import Budget, finish, segments_of, write_segments
from reshard.engine.segment import Outcome, Segment
from reshard.engine.spans import Job
from reshard.environment import ranks_per_node
from reshard.errors import CheckpointUnsound, ReshardError, StorageError
from reshard.formats import dcp_metadata
from reshard.formats.fingerprint import Fingerprint, written_fingerprints
from reshard.index.index import Int
from reshard.storage.durable import (
    fsync_file,
    make_folder,
    require_space,
    storage_errors,
    temporary_target,
    write_atomic,
)
from reshard.storage.visibility import VISIBILITY_TIMEOUT_S, wait_until_seen

# Blocks through which a rank's bytes pass: all the memory it needs, beside the state.
STAGING_BYTES = 64 << 20

_DATA_FILE = re.compile(r"__[0-9]+_([0-9]+)\.distcp")


def write_state(
    state: LocalState, folder: Path, ranks: Ranks, *, visibility_timeout_s: float = VISIBILITY_TIMEOUT_S
) -> dict[str, Fingerprint]:
    """Writes what the ranks hold of a state into a folder, which rank 0 makes where it is not there. Collective.

    Of small plain tensors and of objects that several ranks have under one key, the lowest rank's are written. A plain
    tensor of 1 MiB and more is taken to be the same on all ranks that have it, and so are the replicas of a shard: each
    of the holders writes a part.

    Args:
        visibility_timeout_s: how long what another rank has written may stay unseen.

    Returns:
        The fingerprint of every file, on every rank.

    Raises:
        UsageError: an object cannot be stored, or the shards do not make up whole tensors.
        StorageError: the file system refused, or the ranks do not see each other's files.
        ReshardError: on every rank, if any failed. The folder then still holds what it held before.
    """
    generation = 0
    with ranks.together():
        if ranks.rank == 0:
            make_folder(folder)
        wait_until_seen(folder, {}, visibility_timeout_s)
        if ranks.rank == 0:
            _sweep_leftovers(folder)
            generation = next_generation(folder)
    generation = ranks.broadcast(generation)
    plan = plan_save(state, ranks)
    names: list[str] = []
    try:
        marks: dict[str, Fingerprint] = {}
        with ranks.together():
            if ranks.rank == 0:
                require_space(folder / dcp_metadata.FILE_NAME, plan.total_bytes)
        with ranks.together():
            content = {key: object_to_bytes(key, state.objects[key]) for key in plan.objects}
            job, files = lay_out(in_memory(folder, plan.cut(state.shards), content), ranks.rank, generation)
            names.extend(files.output.names)
            marks = written_fingerprints(
                files.output, content, job.source.files, write_files(job, folder, ranks_per_node(ranks.size))
            )
        written = ranks.collect((marks, files.objects))
        with ranks.together():
            if written is not None:
                marks = {name: mark for theirs, _ in written for name, mark in theirs.items()}
                wait_until_seen(folder, {name: mark.length_bytes for name, mark in marks.items()}, visibility_timeout_s)
    except ReshardError:
        _remove(folder, names)
        raise
    with ranks.together():
        if written is not None:
            places = {key: place for _, theirs in written for key, place in theirs.items()}
            _publish(folder, plan.metadata(places, generation), marks.keys())
    if ranks.rank == 0:
        sweep(folder, marks.keys())
    return ranks.broadcast(marks)


def _publish(folder: Path, metadata: bytes, names: Collection[str]) -> None:
    """Replaces the metadata, from when on the folder holds what these files do; removes them where that failed."""
    path = folder / dcp_metadata.FILE_NAME
    before = _identity(path)
    try:
        write_atomic(path, metadata)
    except StorageError:
        # Where it was the last flush that failed, the metadata is the new one already, and the files are its.
        if _identity(path) == before:
            _remove(folder, names)
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def write_files(job: Job, folder: Path, processes: int) -> Int:
    """Writes the files of a job that reads from memory, durably, and returns the CRC-32 of each payload.

    Args:
        processes: how many do so on this machine at once.

    Raises:
        StorageError: the file system refused.
    """
    outcomes: dict[Segment, Outcome] = {}
    paths = [folder / name for name in job.output.names]
    for path, length_bytes in zip(paths, job.output.length_bytes.tolist(), strict=True):
        BlockFile(path, length_bytes, create=True).close()
    budget = Budget.of(STAGING_BYTES, processes)
    write_segments(job, folder, segments_of(job), budget, outcomes.update)
    crcs = finish(job, folder, outcomes.values())
    for path in paths:
        fsync_file(path)
    return crcs


def _names(folder: Path) -> list[str]:
    with storage_errors("list the folder", folder):
        return [path.name for path in folder.iterdir()]


def next_generation(folder: Path) -> int:
    """A number that no file there has: what is there stays as it is until the new metadata is.

    Raises:
        StorageError: the folder cannot be listed.
    """
    taken = {int(match[1]) for name in _names(folder) if (match := _DATA_FILE.fullmatch(name))}
    # The smallest, so that saves into one folder take turns between two numbers, and both plans are known.
    return next(number for number in itertools.count() if number not in taken)


def _sweep_leftovers(folder: Path) -> None:
    """Removes what saves left behind that did not end, or there might be no room beside it."""
    if any(_DATA_FILE.fullmatch(name) for name in _names(folder)):
        is_described = (folder / dcp_metadata.FILE_NAME).exists()
        # Metadata that cannot be read may be of another kind, and then its files are not ours to remove.
        with suppress(CheckpointUnsound):
            sweep(folder, dcp_metadata.read(folder).index.files if is_described else ())


def sweep(folder: Path, kept: Collection[str]) -> None:
    """Removes the data files of saves before, or of ones that did not end. What stays behind harms nobody."""
    with suppress(StorageError):
        for name in _names(folder):
            is_half_written = temporary_target(name) == dcp_metadata.FILE_NAME
            if is_half_written or (_DATA_FILE.fullmatch(name) and name not in kept):
                _remove(folder, [name])


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
