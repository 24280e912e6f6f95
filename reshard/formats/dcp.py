"""Opens a DCP checkpoint folder: ``.metadata`` beside ``.distcp`` files, with or without a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reshard.errors import CheckpointUnsound
from reshard.formats import dcp_metadata, manifest
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp_payloads import DcpPayloads
from reshard.storage.byte_ranges import SourceFiles

NAME = "dcp"


def open_dcp(folder: Path, also: Sequence[Path] = ()) -> Checkpoint:
    """Opens the checkpoint in a folder.

    Args:
        folder: has the ``.metadata``.
        also: further folders with some of its files, as nodes with disks of their own leave them.

    Raises:
        CheckpointUnsound: the metadata or the manifest is missing or damaged, or the files are compressed.
        StorageError: the file system failed to read them.
    """
    metadata = dcp_metadata.read(folder)
    if metadata.transforms:
        raise CheckpointUnsound(
            "its bytes went through stream transforms",
            path=folder,
            found=", ".join(sorted(metadata.transforms)),
            hint="load and save it with stock torch and the same extension, without compression",
        )
    index = metadata.index
    files = SourceFiles([_find(name, folder, also) for name in index.files])
    payloads = DcpPayloads(index, files)
    return Checkpoint(
        path=folder,
        format=NAME,
        index=index,
        manifest=manifest.read(folder) if manifest.exists(folder) else None,
        paths=metadata.paths,
        files=files,
        payloads=payloads.known,
        locate=payloads.locate,
        metadata_files=(dcp_metadata.FILE_NAME, manifest.FILE_NAME),
    )


def _find(name: str, folder: Path, also: Sequence[Path]) -> Path:
    places = [folder / name, *(other / name for other in also)]
    return next((place for place in places if place.exists()), places[0])
