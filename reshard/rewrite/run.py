"""Rewrites a checkpoint for another number of ranks, without any of them: open, plan, run, commit.

Every process of a launch opens and plans for itself, which is cheap and always gives the same; each writes its part of
the segments into a staged folder, and one of them commits. What was written is kept by a journal, so that a preempted
run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.engine.crc import crc_of
from reshard.engine.run import SEGMENT_BYTES, create_files, finish, segments_of, write_segments
from reshard.engine.segment import Outcome, Segment
from reshard.engine.spans import Job
from reshard.environment import control_timeout_s, launched_as
from reshard.errors import CheckpointUnsound, StorageError, UsageError
from reshard.formats import dcp_metadata, manifest
from reshard.formats.fingerprint import object_records, written_fingerprints
from reshard.rewrite.prepare import Prepared
from reshard.storage.durable import require_space, storage_errors, write_atomic
from reshard.storage.shared_work import SharedWork
from reshard.storage.steps import step_number

# Of what may be written as one file, or replaced as one.
FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

_PLAN_VERSION = 2


@dataclass(frozen=True)
class Summary:
    """What a rewrite did. Bytes and seconds are those of this launch's leading process, unless it says otherwise.

    Attributes:
        total_bytes: of the new checkpoint.
        written_bytes, read_bytes: by this process.
        continued_bytes: written by a launch before.
        seconds: from opening to commit.
        peak_bytes: of memory, resident, the interpreter included.
    """

    destination: Path
    total_bytes: int
    written_bytes: int
    read_bytes: int
    continued_bytes: int
    seconds: float
    peak_bytes: int
    rank: int
    ranks: int


def run(
    prepared: Prepared, destination: Path, *, force: bool = False, progress: Callable[[int], None] | None = None
) -> Summary:
    """Writes what was prepared. Every process of a launch (torchrun's ``RANK``, ``WORLD_SIZE``) calls it.

    The destination appears by one rename, whole and durable; after an error or a crash it is as it was before. The
    source is only read.

    Args:
        force: replace what is at the destination.
        progress: told of bytes that are written, by any thread; first of those that a launch before wrote.

    Raises:
        UsageError: the destination exists, or lies in the source.
        CheckpointUnsound: the source is damaged.
        StorageError: the file system refused, or has too little space.
    """
    advance: Callable[[int], None] = progress or (lambda count: None)
    rank, ranks, launch = launched_as()
    # A name of its own even where it was given as ".".
    destination = Path(os.path.abspath(destination))  # noqa: PTH100 (resolve would follow the link that is to be made)
    check_destination(prepared, destination, force=force)
    output = prepared.files.output
    with (
        prepared.checkpoint,
        SharedWork(destination, _job_name(prepared), rank, ranks, launch, control_timeout_s()) as work,
    ):
        segments = segments_of(prepared.job)
        if rank == 0:
            done = _done(prepared.job, work)
            require_space(destination, prepared.written_bytes - sum(segment.length_bytes for segment in done))
            create_files(prepared.job, work.folder)
            # One rank says what is done: the others may look when some have begun to write.
            work.launch.tell("may write", sorted(done))
        else:
            done = {Segment(*entry) for entry in work.launch.hear("may write", 0)}
        finished_bytes = sum(segment.length_bytes for segment in done)
        mine = _share([segment for segment in segments if segment not in done], rank, ranks)
        advance(finished_bytes // ranks)
        write_segments(
            prepared.job,
            work.folder,
            mine,
            prepared.budget,
            lambda written: work.note(*(_entry(segment, outcome) for segment, outcome in written)),
            advance,
        )
        work.launch.tell("written")
        if rank == 0:
            work.launch.gather("written")
            outcomes = {Segment(*entry["segment"]): _outcome(entry) for entry in work.noted()}
            _require_all(segments, outcomes, work.root)
            crcs = finish(prepared.job, work.folder, outcomes.values())
            _verify_objects(prepared)
            for path in prepared.beside:
                with storage_errors("copy", path):
                    shutil.copyfile(path, work.folder / path.name)
            for name, content in prepared.described.items():
                write_atomic(work.folder / name, content)
            if prepared.manifest is not None:
                marks = written_fingerprints(output, prepared.files.objects, prepared.checkpoint.files, crcs)
                files: dict[str, Any] = {name: mark.to_json() for name, mark in marks.items()}
                marked = replace(prepared.manifest, files=files)
                write_atomic(work.folder / manifest.FILE_NAME, manifest.to_bytes(marked))
        work.commit(prepared.only_file)
    return Summary(
        destination=destination,
        total_bytes=output.total_bytes,
        written_bytes=sum(segment.length_bytes for segment in mine),
        read_bytes=prepared.checkpoint.files.bytes_read,
        continued_bytes=finished_bytes,
        seconds=time.monotonic() - prepared.started_s,
        peak_bytes=_peak_bytes(),
        rank=rank,
        ranks=ranks,
    )


def check_destination(prepared: Prepared, destination: Path, *, force: bool) -> None:
    """Refuses a destination that would lose something or contradict what is written.

    Raises:
        UsageError: it exists and ``force`` is not set; it is the source, holds it or lies in it; or it is named as
            another step.
    """
    source, target = prepared.checkpoint.path.resolve(), destination.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise UsageError("the destination overlaps the source", path=destination, hint="write beside it")
    if os.path.lexists(destination) and not force:
        raise UsageError("exists already", path=destination, hint="choose another name, or replace it with --force")
    if force and os.path.lexists(destination) and not _may_be_replaced(destination):
        raise UsageError("there is something else than a checkpoint", path=destination, hint="move it away first")
    named = step_number(destination.name)
    if prepared.manifest is not None and named is not None and named != prepared.manifest.step:
        raise UsageError(
            "named as another step than the one it would hold",
            path=destination,
            expected=f"step-{prepared.manifest.step}",
            found=destination.name,
            hint="name it so, or not as a step at all",
        )


def _may_be_replaced(destination: Path) -> bool:
    """Whether it is a checkpoint, damaged or not, or an empty folder: a slip must not cost anything else."""
    with storage_errors("list the folder", destination):
        if not destination.is_dir():
            return destination.is_file() and destination.suffix in FILE_SUFFIXES
        names = {path.name for path in destination.iterdir()}
    known = {dcp_metadata.FILE_NAME, manifest.FILE_NAME}
    return not names or bool(names & known) or any(name.endswith((".distcp", *FILE_SUFFIXES)) for name in names)


def _job_name(prepared: Prepared) -> str:
    """Equal only for jobs that write the same bytes: from the same files as they are now, by the same plan."""
    checkpoint, output = prepared.checkpoint, prepared.files.output
    digest = hashlib.sha256()
    for name, content in prepared.described.items():
        digest.update(name.encode() + content)
    described: list[Any] = [_PLAN_VERSION, SEGMENT_BYTES, os.fspath(checkpoint.path.resolve())]
    for number, path in enumerate(checkpoint.files.paths):
        if number in checkpoint.files.in_memory:
            digest.update(checkpoint.files.in_memory[number])
            continue
        with storage_errors("read", path):
            status = path.stat()
        described.append([os.fspath(path), status.st_size, status.st_mtime_ns])
    if prepared.manifest is not None:
        digest.update(manifest.to_bytes(prepared.manifest))
    digest.update(json.dumps([*described, output.length_bytes.tolist()]).encode())
    return digest.hexdigest()


def _peak_bytes() -> int:
    # Not ru_maxrss: across exec, that keeps the peak of the launcher that this process was forked from.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def _share(segments: Sequence[Segment], rank: int, ranks: int) -> list[Segment]:
    """This rank's segments: neighbours, so that files are shared by as few ranks as can be."""
    return list(segments[len(segments) * rank // ranks : len(segments) * (rank + 1) // ranks])


def _done(job: Job, work: SharedWork) -> set[Segment]:
    """The segments that launches before have written; none if a file has been lost or cut since."""
    if not work.continued:
        return set()
    done = {Segment(*entry["segment"]) for entry in work.noted()}
    for segment in done:
        path = work.folder / job.output.names[segment.file]
        if not path.exists() or path.stat().st_size < segment.end:
            work.forget()
            return set()
    return done


def _entry(segment: Segment, outcome: Outcome) -> dict[str, Any]:
    return {"segment": list(segment), "cut": outcome.cut, "sources": outcome.sources, "whole": outcome.whole}


def _outcome(entry: dict[str, Any]) -> Outcome:
    cut, sources = (
        {int(number): [(start, length, crc) for start, length, crc in parts] for number, parts in entry[name].items()}
        for name in ("cut", "sources")
    )
    return Outcome(cut, sources, {int(record): crc for record, crc in entry["whole"].items()})


def _verify_objects(prepared: Prepared) -> None:
    """Verifies the objects that were copied: of each, its archive states checksums of its own.

    Raises:
        CheckpointUnsound: one is damaged.
    """
    source = prepared.checkpoint
    for key, place in prepared.selection.objects.items():
        file = source.index.file_number[place.file]
        for name, record in object_records(source.files, file, place, key).items():
            found = crc_of(source.files, file, place.start_bytes + record.start_bytes, record.length_bytes)
            # All zero means that the archive was saved without checksums.
            if record.crc not in (0, found):
                raise CheckpointUnsound(
                    f"damaged: the checksum of {name} is wrong",
                    path=source.files.paths[file],
                    key=key,
                    expected=f"CRC-32 {record.crc:08x}",
                    found=f"{found:08x}",
                )


def _require_all(segments: Sequence[Segment], outcomes: dict[Segment, Outcome], root: Path) -> None:
    missing = [segment for segment in segments if segment not in outcomes]
    if missing:
        raise StorageError(
            "parts that were written are not in the journals",
            path=root,
            expected=len(segments),
            found=len(segments) - len(missing),
            hint="the nodes do not share this file system, or it shows files late: start again",
        )
