"""The cheap soundness check of a DCP checkpoint: reads the metadata and the sizes of files, no tensor.

What it can see: files that are missing, cut short or not fetched, tensors with elements that no chunk or two chunks
hold, a manifest that is damaged or belongs to another step. What it cannot: flipped bits inside the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.errors import CheckpointUnsound, StorageError
from reshard.formats import dcp_metadata, manifest
from reshard.formats.unpickle import missing_data
from reshard.index.index import Extent, Index
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
    return [
        *_file_faults(Path(folder), metadata.index),
        *_tiling_faults(metadata.index),
        *_manifest_faults(Path(folder)),
    ]


def unreferenced_files(folder: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Name and bytes of each ``.distcp`` file that the metadata does not name: left by an earlier save, and harmless.

    Raises:
        CheckpointUnsound: the metadata cannot be read, so that nothing is known of any file.
        StorageError: the file system refused.
    """
    named = dcp_metadata.read(folder).index.files
    unnamed = [path for path in sorted(Path(folder).glob("*.distcp")) if path.name not in named]
    try:
        return [(path.name, path.stat().st_size) for path in unnamed]
    except OSError as error:
        raise StorageError("cannot be read", path=folder, found=error) from error


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


def _file_faults(folder: Path, index: Index) -> Iterator[str]:
    for name, extents in sorted(index.extents().items()):
        if (fault := _file_fault(folder / name, extents)) is not None:
            yield f"{folder / name}: {fault}"


def _file_fault(path: Path, extents: Sequence[Extent]) -> str | None:
    last = max(extents, key=lambda extent: extent.start_bytes + extent.length_bytes)
    expected_bytes = last.start_bytes + last.length_bytes
    try:
        found_bytes = path.stat().st_size
        if found_bytes >= expected_bytes and path.is_file():
            return None
        reason = _reason(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"missing: expected {expected_bytes} bytes with {_keys(extents)}"
    except OSError as error:
        raise StorageError("cannot be read", path=path, found=error) from error
    lost = [extent for extent in extents if extent.start_bytes + extent.length_bytes > found_bytes]
    return f"{reason}: expected at least {expected_bytes} bytes, found {found_bytes}; lost: {_keys(lost)}"


def _reason(path: Path) -> str:
    if not path.is_file():
        return "not a file"
    with path.open("rb") as file:
        return missing_data(file.read(100)) or "cut short"


def _keys(extents: Sequence[Extent]) -> str:
    first = extents[0].key if extents else "nothing"
    return first if len(extents) < 2 else f"{first} and {len(extents) - 1} more"
