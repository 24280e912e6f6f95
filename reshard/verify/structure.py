"""The cheap soundness check of a DCP checkpoint: reads the metadata and the sizes of files, no tensor.

What it can see: files that are missing, cut short or not fetched, tensors with elements that no chunk or two chunks
hold, a manifest that is damaged or belongs to another step. What it cannot: flipped bits inside the files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.errors import CheckpointUnsound, StorageError
from reshard.formats import dcp_metadata, manifest
from reshard.formats.unpickle import missing_data
from reshard.index.index import Index, Int
from reshard.storage.durable import storage_errors
from reshard.storage.steps import step_number


def structure_faults(folder: str | os.PathLike[str]) -> list[str]:
    """Every structural fault of a checkpoint folder, a line each; an empty list where it is sound.

    Raises:
        StorageError: the file system refused, so that nothing can be said.
    """
    try:
        metadata = dcp_metadata.read(folder)
    except CheckpointUnsound as error:
        return [*_lines(error), *_manifest_faults(Path(folder))]
    index = metadata.index
    paths = [index.path(number) for number in range(len(index.files))]
    return [
        *sorted(map(str, file_faults(index, paths))),
        *_tiling_faults(index),
        *_manifest_faults(Path(folder)),
    ]


class FileFault(NamedTuple):
    """A file that does not hold all that the index places in it.

    Attributes:
        file: its number.
        found_bytes: its length; None where it is missing.
        lost: what the bytes are that are missing, shortened.
    """

    file: int
    path: Path
    what: str
    expected_bytes: int
    found_bytes: int | None
    lost: str

    def __str__(self) -> str:
        if self.found_bytes is None:
            return f"{self.path}: {self.what}: expected {self.expected_bytes} bytes with {self.lost}"
        return (
            f"{self.path}: {self.what}: expected at least {self.expected_bytes} bytes, found {self.found_bytes}; "
            f"lost: {self.lost}"
        )


def file_faults(index: Index, paths: Sequence[Path]) -> Iterator[FileFault]:
    """Each file of the index that is missing, or shorter than the index says.

    Args:
        paths: where the files are, by number.

    Raises:
        StorageError: the file system refused.
    """
    for file, expected_bytes in enumerate(_needed_bytes(index).tolist()):
        if expected_bytes < 0:
            continue
        path = paths[file]
        found_bytes: int | None = None
        try:
            found_bytes = path.stat().st_size
            if found_bytes >= expected_bytes and path.is_file():
                continue
            what = _reason(path)
        except (FileNotFoundError, NotADirectoryError):
            what = "missing"
        except OSError as error:
            raise StorageError("cannot be read", path=path, found=error) from error
        yield FileFault(file, path, what, expected_bytes, found_bytes, _lost(index, file, found_bytes))


def _needed_bytes(index: Index) -> Int:
    """Where the last byte range of each file ends; -1 where nothing lies in it."""
    needed = np.full(len(index.files), -1, dtype=np.int64)
    np.maximum.at(needed, index.file, index.start_bytes + index.length_bytes)
    _, row, file, start = index.replicas.T
    np.maximum.at(needed, file, start + index.length_bytes[row])
    numbers = {name: number for number, name in enumerate(index.files)}
    for place in index.objects.values():
        file_number = numbers[place.file]
        needed[file_number] = max(needed[file_number], place.start_bytes + place.length_bytes)
    return needed


def _lost(index: Index, file: int, found_bytes: int | None) -> str:
    """The keys of the byte ranges of a file that end past the bytes found: the first, and how many more."""
    limit = -1 if found_bytes is None else found_bytes
    ends = index.start_bytes + index.length_bytes
    rows = np.flatnonzero((index.file == file) & (ends > limit))
    places = [(int(index.start_bytes[row]), index.names[int(index.owner[row])]) for row in rows.tolist()]
    for owner, row, _, start in index.replicas[index.replicas[:, 2] == file].tolist():
        if start + int(index.length_bytes[row]) > limit:
            places.append((start, index.names[owner]))
    for key, place in index.objects.items():
        if place.file == index.files[file] and place.start_bytes + place.length_bytes > limit:
            places.append((place.start_bytes, key))
    first = min(places)[1] if places else "nothing"
    return first if len(places) < 2 else f"{first} and {len(places) - 1} more"


def unreferenced_files(folder: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Name and bytes of each ``.distcp`` file that the metadata does not name: left by an earlier save, and harmless.

    Raises:
        CheckpointUnsound: the metadata cannot be read, so that nothing is known of any file.
        StorageError: the file system refused.
    """
    return files_beside(Path(folder), dcp_metadata.read(folder).index.files, {".distcp"})


def files_beside(folder: Path, named: Collection[str], suffixes: Collection[str]) -> list[tuple[str, int]]:
    """Name and bytes of each file of a folder that has one of the suffixes and is not among those named.

    Raises:
        StorageError: the file system refused.
    """
    known = frozenset(named)
    with storage_errors("list the folder", folder):
        unnamed = [path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.name not in known]
        return [(path.name, path.stat().st_size) for path in unnamed if path.is_file()]


def _lines(error: CheckpointUnsound) -> list[str]:
    first, *details = str(error).splitlines()
    return [first, *(detail.strip() for detail in details)]


def _manifest_faults(folder: Path) -> Iterator[str]:
    if not manifest.exists(folder):
        return
    try:
        found = manifest.read(folder).step
    except CheckpointUnsound as error:
        yield from _lines(error)
        return
    # A link such as latest has no step in its own name.
    named = step_number(folder.resolve().name)
    if named is not None and named != found:
        yield f"{folder / manifest.FILE_NAME}: step: expected {named} as the folder's name says, found {found}"


def _tiling_faults(index: Index) -> Iterator[str]:
    for key, fault in sorted(index.tiling_faults()):
        yield f"{key}: {fault}"


def _reason(path: Path) -> str:
    if not path.is_file():
        return "not a file"
    with path.open("rb") as file:
        return missing_data(file.read(100)) or "cut short"
