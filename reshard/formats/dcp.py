"""Opens a DCP checkpoint folder: ``.metadata``, or that of every rank, beside ``.distcp`` files; a manifest or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reshard.errors import CheckpointUnsound
from reshard.formats import dcp_metadata, dcp_ranks, manifest
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp_metadata import DcpMetadata
from reshard.formats.dcp_payloads import DcpPayloads
from reshard.formats.manifest import Manifest
from reshard.storage.byte_ranges import SourceFiles

NAME = "dcp"


def open_dcp(folder: Path, also: Sequence[Path] = ()) -> Checkpoint:
    """Opens the checkpoint in a folder.

    Args:
        folder: has the ``.metadata``, or a ``__<rank>.metadata`` where the save ran without collectives.
        also: further folders with some of its files, as nodes with disks of their own leave them.

    Raises:
        CheckpointUnsound: the metadata is missing or damaged, or the files are compressed.
        StorageError: the file system failed to read them.
    """
    return opened(folder, *read_metadata(folder, also), also)


def read_metadata(folder: Path, also: Sequence[Path] = ()) -> tuple[DcpMetadata, list[str]]:
    """What `open_dcp` reads before anything else, and the names of the files that it is from; raises likewise."""
    ranks = {} if (folder / dcp_metadata.FILE_NAME).exists() else dcp_ranks.metadata_files([folder, *also])
    metadata = dcp_ranks.read(folder, ranks) if ranks else dcp_metadata.read(folder)
    return metadata, [path.name for path in ranks.values()] or [dcp_metadata.FILE_NAME]


def opened(folder: Path, metadata: DcpMetadata, described_by: Sequence[str], also: Sequence[Path] = ()) -> Checkpoint:
    """As `open_dcp`, for metadata that is in memory already."""
    if metadata.transforms:
        raise CheckpointUnsound(
            "its bytes went through stream transforms",
            path=folder,
            found=", ".join(sorted(metadata.transforms)),
            hint="load and save it with stock torch and the same extension, without compression",
        )
    found, fault = _manifest(folder)
    index = metadata.index
    files = SourceFiles([_find(name, folder, also) for name in index.files])
    payloads = DcpPayloads(index, files)
    return Checkpoint(
        path=folder,
        format=NAME,
        index=index,
        manifest=found,
        manifest_fault=fault,
        paths=metadata.paths,
        files=files,
        payloads=payloads.known,
        locate=payloads.locate,
        version=metadata.version,
        metadata_files=(*described_by, manifest.FILE_NAME),
    )


def _manifest(folder: Path) -> tuple[Manifest | None, CheckpointUnsound | None]:
    """The manifest, or why it cannot be read: the tensors are there all the same, to be described and checked."""
    if not manifest.exists(folder):
        return None, None
    try:
        return manifest.read(folder), None
    except CheckpointUnsound as fault:
        return None, fault


def _find(name: str, folder: Path, also: Sequence[Path]) -> Path:
    places = [folder / name, *(other / name for other in also)]
    return next((place for place in places if place.exists()), places[0])
