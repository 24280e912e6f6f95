"""The cheap soundness check of a DCP checkpoint: reads the metadata and the sizes of files, no tensor.

What it can see: files that are missing, cut short or not fetched, tensors with elements that no chunk or two chunks
hold, a manifest that is damaged or belongs to another step. What it cannot: flipped bits inside the files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from reshard.errors import CheckpointUnsound
from reshard.formats import dcp_metadata, manifest
from reshard.formats.file_lengths import file_faults
from reshard.index.index import Index
from reshard.storage.durable import storage_errors
from reshard.storage.steps import step_number


def structure_faults(folder: str | os.PathLike[str], index: Index | None = None) -> list[str]:
    """Every structural fault of a checkpoint folder, a line each; an empty list where it is sound.

    Args:
        index: what its metadata says, where that has been read already.

    Raises:
        StorageError: the file system refused, so that nothing can be said.
    """
    try:
        index = index or dcp_metadata.read(folder).index
    except CheckpointUnsound as error:
        return [*_lines(error), *_manifest_faults(Path(folder))]
    paths = [index.path(number) for number in range(len(index.files))]
    return [
        *sorted(map(str, file_faults(index, paths))),
        *_tiling_faults(index),
        *_manifest_faults(Path(folder)),
    ]


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
