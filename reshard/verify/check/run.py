"""Is a checkpoint what it says it is? The check behind ``reshard check``, for every format.

Always: chunks that tile their tensors, files that are there and long enough, archives whose records lie where the
index says and hold what it says, the commit, the manifest, and whether all files are of one save. With ``deep`` every
byte is read as well: checksums, NaN and infinities, replicas. A fault does not end the check: whatever it does not
affect is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.errors import CheckpointUnsound, ReshardError, UsageError
from reshard.formats import dcp_metadata
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import NAME as DCP
from reshard.formats.file_lengths import FileFault, file_faults
from reshard.formats.fingerprint import object_records
from reshard.formats.opening import open_checkpoint
from reshard.index.index import ARCHIVE, Index, Int
from reshard.verify.check import one_save
from reshard.verify.check.content import Progress, read_content
from reshard.verify.check.finite import Position, verdicts
from reshard.verify.check.replicas import replica_faults
from reshard.verify.check.report import Fault, Report, faults_of
from reshard.verify.check.spans import Content
from reshard.verify.structure import files_beside

# So many are located at once: what is held of each meanwhile takes some hundred bytes.
_BATCH = 1 << 14
# A file with more faults is not looked at further.
_MOST_FAULTS_PER_FILE = 100


def check(
    path: str | os.PathLike[str],
    also: Sequence[str | os.PathLike[str]] = (),
    *,
    deep: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Checks a checkpoint and reports every fault.

    Args:
        path: what `open_checkpoint` takes.
        also: further folders with some of its files.
        deep: read all bytes.
        progress: told of the bytes as they are read.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        UsageError: a folder of ``also`` is none.
        StorageError: the file system refused, so that nothing can be said.
    """
    for folder in also:
        if not Path(folder).expanduser().is_dir():
            raise UsageError("not a folder", path=folder, key="--in")
    report = Report(path=os.fspath(path), deep=deep)
    try:
        checkpoint = open_checkpoint(path, also)
    except CheckpointUnsound as error:
        report.faults += _without_opening(Path(path).expanduser(), error)
        report.notes.append("it could not be opened, so that its contents were not looked at")
        return report
    with checkpoint:
        _describe(report, checkpoint)
        _check(report, checkpoint, progress)
        report.read_bytes = checkpoint.files.bytes_read
    return report


def _without_opening(path: Path, error: CheckpointUnsound) -> Iterator[Fault]:
    """What can be said where the manifest, or the metadata, cannot be read."""
    yield from one_save.commit_faults(path)
    yield from faults_of(error)
    try:
        index = dcp_metadata.read(path).index
    except CheckpointUnsound:
        return
    yield from _tiling_faults(index)
    for fault in file_faults(index, [index.path(number) for number in range(len(index.files))]):
        yield _file_fault(fault)


def _describe(report: Report, checkpoint: Checkpoint) -> None:
    index = checkpoint.index
    report.path = str(checkpoint.path)
    report.format = checkpoint.format
    report.tensors = len(index.names)
    report.chunks = len(index.file)
    report.objects = len(index.objects)
    report.files = len(index.files)
    objects_bytes = sum(place.length_bytes for place in index.objects.values())
    report.stored_bytes = int(index.length_bytes.sum()) + objects_bytes


def _check(report: Report, checkpoint: Checkpoint, progress: Progress | None) -> None:
    report.faults += one_save.commit_faults(checkpoint.path)
    if checkpoint.manifest_fault is not None:
        report.faults += faults_of(checkpoint.manifest_fault)
    report.faults += one_save.manifest_faults(checkpoint)
    report.faults += _tiling_faults(checkpoint.index)
    report.faults += one_save.path_faults(checkpoint)
    files = _Files.of(checkpoint)
    report.faults += files.faults
    located = _located(checkpoint, files)
    report.faults += located.faults
    report.faults += one_save.fingerprint_faults(checkpoint, located.whole_files(checkpoint.index, files))
    counters = one_save.Counters(checkpoint)
    report.faults += counters.faults()
    report.notes += counters.notes()
    report.notes += one_save.late_files_note(checkpoint)
    report.notes += _unreferenced(checkpoint)
    if report.deep:
        _check_content(report, checkpoint, files, located, progress)


def _tiling_faults(index: Index) -> Iterator[Fault]:
    for key, fault in sorted(index.tiling_faults()):
        yield Fault(fault, key=key, hint="a part of the ranks did not save, or two wrote the same rows")


@dataclass
class _Files:
    """The files of the index, as they are found.

    Attributes:
        length_bytes: by number; 0 where a file is missing or cannot be read.
    """

    length_bytes: Int
    faults: list[Fault]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Files:
        short = {
            fault.file: fault
            for fault in file_faults(checkpoint.index, checkpoint.files.paths, checkpoint.files.in_memory)
        }
        missing = [number for number, fault in short.items() if fault.found_bytes is None]
        hint = one_save.absent_hint(checkpoint, missing)
        faults = [_file_fault(fault, hint) for fault in short.values()]
        length_bytes = np.zeros(len(checkpoint.files.paths), dtype=np.int64)
        for number, path in enumerate(checkpoint.files.paths):
            if number in missing:
                continue
            try:
                length_bytes[number] = checkpoint.files.size_bytes(number)
            except ReshardError as error:
                if number not in short:
                    faults.append(Fault.of(error, path))
        return cls(length_bytes, faults)


def _file_fault(fault: FileFault, missing_hint: str | None = None) -> Fault:
    if fault.found_bytes is None:
        expected = f"{fault.expected_bytes} bytes with {fault.lost}"
        return Fault.at(fault.path, fault.what, expected=expected, found="no file", hint=missing_hint)
    return Fault.at(
        fault.path,
        fault.what,
        expected=f"at least {fault.expected_bytes} bytes",
        found=f"{fault.found_bytes}; lost: {fault.lost}",
    )


@dataclass
class _Located:
    """What of the chunks and objects is where the index says.

    Attributes:
        rows: located chunks.
        objects: keys of objects that are sound archives, where they are archives.
        spoilt: files, by number, in which something is not.
    """

    rows: Int
    objects: list[str]
    spoilt: set[int]
    faults: list[Fault]

    def whole_files(self, index: Index, files: _Files) -> list[int]:
        """The files, by number, in which everything is where it should be."""
        ends = index.start_bytes + index.length_bytes
        short = set(index.file[ends > files.length_bytes[index.file]].tolist())
        missing = set(np.flatnonzero(files.length_bytes == 0).tolist())
        return [file for file in range(len(index.files)) if file not in self.spoilt | short | missing]


def _located(checkpoint: Checkpoint, files: _Files) -> _Located:
    """Locates every chunk and object that lies within its file, one fault for each that cannot be."""
    index = checkpoint.index
    located = _Located(np.zeros(0, dtype=np.int64), [], set(), [])
    within = np.flatnonzero(index.start_bytes + index.length_bytes <= files.length_bytes[index.file])
    order = within[np.lexsort((index.start_bytes[within], index.file[within]))]
    met = np.zeros(len(index.files), dtype=np.int64)
    is_faulty = np.zeros(len(index.file), dtype=bool)
    parts = [order[begin : begin + _BATCH] for begin in range(0, len(order), _BATCH)][::-1]
    while parts:
        part = parts.pop()
        part = part[met[index.file[part]] < _MOST_FAULTS_PER_FILE]
        try:
            checkpoint.locate(part)
        except ReshardError as error:
            if len(part) > 1:
                # One chunk is at fault, and which one the error may not say.
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            file = int(index.file[part[0]])
            met[file] += 1
            is_faulty[part[0]] = True
            located.faults.append(Fault.of(error, checkpoint.files.paths[file], index.names[int(index.owner[part[0]])]))
            if met[file] == _MOST_FAULTS_PER_FILE:
                located.faults.append(Fault.at(checkpoint.files.paths[file], "too many faults: the rest was not read"))
    is_known = checkpoint.payloads.start_bytes[order] >= 0
    is_silent = ~is_known & ~is_faulty[order] & (met[index.file[order]] < _MOST_FAULTS_PER_FILE)
    for row in order[is_silent].tolist():
        # What was not looked at must not pass for sound.
        path, key = checkpoint.files.paths[int(index.file[row])], index.names[int(index.owner[row])]
        located.faults.append(Fault.at(path, "its elements were not found", key=key))
    located.rows = order[is_known]
    located.spoilt = set(index.file[order[~is_known]].tolist())
    _locate_objects(checkpoint, files, located)
    return located


def _locate_objects(checkpoint: Checkpoint, files: _Files, located: _Located) -> None:
    index = checkpoint.index
    for key, place in index.objects.items():
        file = index.file_number[place.file]
        if place.start_bytes + place.length_bytes > files.length_bytes[file]:
            located.spoilt.add(file)
            continue
        try:
            if index.packing == ARCHIVE:
                object_records(checkpoint.files, file, place, key)
        except ReshardError as error:
            located.spoilt.add(file)
            located.faults.append(Fault.of(error, checkpoint.files.paths[file], key))
            continue
        located.objects.append(key)


def _unreferenced(checkpoint: Checkpoint) -> Iterator[str]:
    if not checkpoint.path.is_dir():
        return
    suffixes = {Path(name).suffix for name in checkpoint.index.files} - {""}
    suffixes |= {".distcp"} if checkpoint.format == DCP else set()
    named = {*checkpoint.index.files, *checkpoint.metadata_files}
    for name, length_bytes in files_beside(checkpoint.path, named, suffixes):
        yield f"{checkpoint.path / name}: {length_bytes} bytes that nothing refers to, left by an earlier save"


def _check_content(
    report: Report, checkpoint: Checkpoint, files: _Files, located: _Located, progress: Progress | None
) -> None:
    index = checkpoint.index
    replicas = index.replicas
    is_there = replicas[:, 3] + index.length_bytes[replicas[:, 1]] <= files.length_bytes[replicas[:, 2]]
    is_there &= checkpoint.payloads.start_bytes[replicas[:, 1]] >= 0
    replicas = replicas[is_there]
    content = read_content(checkpoint, located.rows, replicas, located.objects, progress)
    report.verified_records = content.verified_records
    report.faults += content.faults
    report.notes += _checksum_notes(content)
    for verdict in verdicts(index, content.not_finite):
        file = checkpoint.files.paths[int(index.file[_row_at(index, verdict.number, verdict.at)])]
        key = index.names[verdict.number]
        if verdict.is_fault:
            report.faults.append(Fault.at(file, verdict.what, key=key, expected="finite elements", found=verdict.found))
        else:
            report.notes.append(f"{file}: {key}: {verdict.what}: {verdict.found}, as masks have")
    report.faults += replica_faults(checkpoint, replicas)


def _checksum_notes(content: Content) -> Iterator[str]:
    if content.without_checksums:
        share = f"{content.without_checksums} of {content.pieces} chunks and objects"
        yield f"saved without checksums ({share}): flipped bits in them cannot be seen"


def _row_at(index: Index, number: int, position: Position) -> int:
    """The chunk that holds an element."""
    first, last = int(index.first[number]), int(index.first[number + 1])
    place = np.array(position, dtype=np.int64)
    low = index.offsets[first:last, : len(place)]
    holds = (low <= place) & (place < low + index.sizes[first:last, : len(place)])
    return first + int(holds.all(axis=1).argmax())
