"""A DCP checkpoint saved with ``use_collectives=False``: a ``__<rank>.metadata`` per rank and no ``.metadata``.

Each is a whole metadata file (see `reshard.formats.dcp_metadata`) of what its rank wrote, with the global shapes of the
tensors, but only the rank's own chunks. No rank knew of the others: a tensor that is not sharded, and every object, was
written by each. Here the lowest rank's copy counts, as in a save with collectives, and the others are replicas.

Nothing records how many ranks there were. A rank of which nothing is left is seen by the hole in the tensors that it
had a part of; one whose files are there without its metadata did not finish.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import CheckpointUnsound
from reshard.formats import dcp_metadata
from reshard.formats.dcp_metadata import DcpMetadata
from reshard.index.index import ARCHIVE, Index, IndexBuilder, Place, Tensor
from reshard.storage.durable import storage_errors

_METADATA_NAME = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")
_DATA_NAME = re.compile(r"__(0|[1-9]\d{0,8})_\d+\.distcp")


@dataclass
class _Merged:
    """A tensor as far as it has been read: the places of each of its boxes, the lowest rank's first."""

    rank: int
    tensor: Tensor
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Place]] = field(default_factory=dict)


def is_rank_metadata(name: str) -> bool:
    """Whether a file of this name is the metadata of one rank."""
    return _METADATA_NAME.fullmatch(name) is not None


def metadata_files(folders: Iterable[Path]) -> dict[int, Path]:
    """The metadata file of each rank, ascending; of several folders, as nodes with disks of their own leave them."""
    return _by_rank(folders, _METADATA_NAME)


def read(folder: Path, files: Mapping[int, Path]) -> DcpMetadata:
    """Merges the metadata of all ranks.

    Args:
        folder: what the index is to call its folder.
        files: rank -> its metadata file.

    Raises:
        CheckpointUnsound: a rank's metadata is missing or damaged, ranks contradict each other, or the chunks of all
            of them do not hold every element once.
        UnsafePickle: one names classes that are not part of DCP.
        StorageError: the file system failed to read them.
    """
    _require_all_ranks(folder, files)
    merged: dict[str, _Merged] = {}
    objects: dict[str, Place] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    transforms: set[str] = set()
    version = None
    for rank, path in sorted(files.items()):
        metadata = dcp_metadata.read_file(path)
        for name in metadata.index.names:
            _merge(
                merged.setdefault(name, _Merged(rank, metadata.index.tensor(name))), metadata.index, name, rank, path
            )
        for key, place in metadata.index.objects.items():
            objects.setdefault(key, place)
        paths = {**metadata.paths, **paths}
        transforms |= metadata.transforms
        version = version or metadata.version
        if both := next((key for key in objects if key in merged), None):
            raise CheckpointUnsound("a tensor on one rank and another object on another", path=path, key=both)
    index = _built(folder, merged, objects)
    _require_tiling(folder, index, len(files))
    return DcpMetadata(index, paths, frozenset(transforms), version)


def _by_rank(folders: Iterable[Path], pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for folder in folders:
        with storage_errors("list the files", folder):
            names = [path.name for path in folder.iterdir()]
        for name in names:
            if (match := pattern.fullmatch(name)) is not None:
                found.setdefault(int(match[1]), folder / name)
    return dict(sorted(found.items()))


def _require_all_ranks(folder: Path, files: Mapping[int, Path]) -> None:
    written = _by_rank(sorted({path.parent for path in files.values()} | {folder}), _DATA_NAME)
    last = max(*files, *written)
    lost = next((rank for rank in range(last + 1) if rank not in files), None)
    if lost is not None:
        raise CheckpointUnsound(
            "missing",
            path=folder / f"__{lost}.metadata",
            rank=lost,
            expected=f"one for each of the ranks 0 to {last}",
            found=len(files),
            hint="that rank did not finish its save, or its files are on another machine's disk: copy them here",
        )


def _merge(merged: _Merged, index: Index, name: str, rank: int, path: Path) -> None:
    tensor = index.tensor(name)
    if (tensor.dtype, tensor.shape) != (merged.tensor.dtype, merged.tensor.shape):
        raise CheckpointUnsound(
            "ranks disagree about a tensor; their files are of different saves",
            path=path,
            key=name,
            rank=rank,
            expected=f"{merged.tensor.dtype} of {merged.tensor.shape} as on rank {merged.rank}",
            found=f"{tensor.dtype} of {tensor.shape}",
        )
    for chunk in tensor.chunks:
        place = Place(chunk.file, chunk.start_bytes, chunk.length_bytes)
        merged.places.setdefault((chunk.offsets, chunk.sizes), []).append(place)


def _built(folder: Path, merged: Mapping[str, _Merged], objects: Mapping[str, Place]) -> Index:
    builder = IndexBuilder(folder, ARCHIVE)
    for name, entry in merged.items():
        builder.tensor(name, entry.tensor.dtype, entry.tensor.shape)
        for (offsets, sizes), (first, *others) in entry.places.items():
            row = builder.chunk(offsets, sizes, (builder.file(first.file), first.start_bytes, first.length_bytes))
            for other in others:
                # The index has room for copies of equal length; archives of one box and dtype have it.
                if other.length_bytes == first.length_bytes:
                    builder.replica(row, (builder.file(other.file), other.start_bytes, other.length_bytes))
    for key, place in objects.items():
        builder.file(place.file)
        builder.objects[key] = place
    return builder.build()


def _require_tiling(folder: Path, index: Index, ranks: int) -> None:
    faults = list(index.tiling_faults())
    if faults:
        key, fault = faults[0]
        raise CheckpointUnsound(
            f"the chunks of its {ranks} ranks do not hold every element once ({fault})",
            path=folder,
            key=key,
            hint="the files of a rank are missing, or some are left of another save: bring together those of one save",
            details=[f"{name}: {what}" for name, what in faults[1:]],
        )
