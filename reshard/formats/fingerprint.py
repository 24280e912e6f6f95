"""What a file of a checkpoint holds, in a few bytes: by it a file of another save with the same layout is found out.

The fingerprint of a file is its length, and the CRC-32 over the CRC-32s of all that the index places in it, as
little-endian 32-bit numbers in the order of their starts: of a chunk, that of its elements as the archive records it,
and 0 where it records none; of an object, that of its ``data.pkl``. So it changes with any element and costs no reading
of elements. The manifest keeps the fingerprints under ``files``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.manifest import Manifest
from reshard.formats.output import Output
from reshard.formats.tagged import Json
from reshard.formats.torch_archive import Record, read_directory
from reshard.index.index import ARCHIVE, Int, Place
from reshard.storage.byte_ranges import SourceFiles
from reshard.storage.crc32 import crc32

# An archive up to this length is read at once, rather than record by record.
_SMALL_BYTES = 1 << 16


class Fingerprint(NamedTuple):
    """A file's length, and 8 hex digits that stand for its content."""

    length_bytes: int
    records: str

    def to_json(self) -> Json:
        """As an entry of the manifest's field ``files``."""
        return {"bytes": self.length_bytes, "records": self.records}

    def __str__(self) -> str:
        return f"{self.length_bytes} bytes with records {self.records}"


def fingerprints(checkpoint: Checkpoint, files: Collection[int] | None = None) -> dict[str, Fingerprint]:
    """The fingerprint of each file of the index, or of those with these numbers.

    Raises:
        CheckpointUnsound: an archive in them is damaged.
        StorageError: the file system failed to read them.
    """
    index = checkpoint.index
    chosen = np.zeros(len(index.files), dtype=bool)
    chosen[list(range(len(index.files)) if files is None else files)] = True
    rows = np.flatnonzero(chosen[index.file])
    checkpoint.locate(rows)
    objects = _object_crcs(checkpoint, chosen.tolist()) if index.packing == ARCHIVE else []
    columns = np.array(objects, dtype=np.int64).reshape(-1, 3)
    file = np.concatenate([index.file[rows], columns[:, 0]])
    start = np.concatenate([index.start_bytes[rows], columns[:, 1]])
    crc = np.concatenate([np.maximum(checkpoint.payloads.crc[rows], 0), columns[:, 2]])
    order = np.lexsort((start, file))
    file, start = file[order], start[order]
    # Ranks without rows of a tensor all refer to one chunk.
    is_other = np.ones(len(order), dtype=bool)
    is_other[1:] = (np.diff(file) != 0) | (np.diff(start) != 0)
    crc = crc[order][is_other]
    bounds = np.searchsorted(file[is_other], np.arange(len(index.files) + 1)).tolist()
    return {
        index.files[number]: fingerprint(checkpoint.files.size_bytes(number), crc[bounds[number] : bounds[number + 1]])
        for number in np.flatnonzero(chosen).tolist()
    }


def fingerprint(length_bytes: int, crcs: NDArray[np.generic]) -> Fingerprint:
    """Of a file of this length, with the CRC-32s of its contents in the order of their starts."""
    return Fingerprint(length_bytes, f"{crc32(crcs.astype('<u4').tobytes()):08x}")


def written_fingerprints(
    output: Output, objects: Iterable[str], source: SourceFiles, crcs: Int
) -> dict[str, Fingerprint]:
    """Of files just written.

    Args:
        output: the files.
        objects: keys of the records that are copies, in their order.
        source: what these were copied from.
        crcs: of the payload of each record.
    """
    crcs = crcs.copy()
    # An object was copied as a whole; what stands for it is the CRC of the pickle in it.
    for key, (record, (file, start)) in zip(objects, output.copies.items(), strict=True):
        place = Place("", start, int(output.payload_bytes[record]))
        pickled = object_records(source, file, place, key).get("data.pkl")
        crcs[record] = 0 if pickled is None else pickled.crc
    first, lengths = output.first.tolist(), output.length_bytes.tolist()
    return {
        name: fingerprint(length, crcs[first[file] : first[file + 1]])
        for file, (name, length) in enumerate(zip(output.names, lengths, strict=True))
    }


def recorded(manifest: Manifest) -> dict[str, Fingerprint] | None:
    """The fingerprints that a manifest has; None where it has none."""
    if manifest.files is None:
        return None
    return {name: Fingerprint(entry["bytes"], entry["records"]) for name, entry in manifest.files.items()}


def object_records(files: SourceFiles, file: int, place: Place, key: str) -> dict[str, Record]:
    """The records of the ``torch.save`` archive that an object is stored as; their starts count from the archive's.

    Args:
        file: the number of the file of ``place``.

    Raises:
        CheckpointUnsound: it is not a whole archive, or its file is missing or too short.
        StorageError: the file system failed to read it.
    """
    start_bytes, length_bytes = place.start_bytes, place.length_bytes
    try:
        if length_bytes <= _SMALL_BYTES:
            data = files.read(file, start_bytes, length_bytes)
            return read_directory(lambda start, length: data[start : start + length], length_bytes)
        return read_directory(lambda start, length: files.read(file, start_bytes + start, length), length_bytes)
    except CheckpointUnsound as error:
        if error.path is not None:
            raise
        raise CheckpointUnsound(error.what, path=files.paths[file], key=key) from error


def _object_crcs(checkpoint: Checkpoint, chosen: list[bool]) -> list[tuple[int, int, int]]:
    """File, start and CRC of the ``data.pkl`` of each object in the chosen files."""
    crcs = []
    for key, place in checkpoint.index.objects.items():
        file = checkpoint.index.file_number[place.file]
        if chosen[file]:
            record = object_records(checkpoint.files, file, place, key).get("data.pkl")
            crcs.append((file, place.start_bytes, 0 if record is None else record.crc))
    return crcs
