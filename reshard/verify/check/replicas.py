"""Do the copies of a chunk that a checkpoint stores more than once agree?

Data-parallel replicas hold the same values, unless the run had diverged without anyone seeing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Checkpoint, read_strided
from reshard.formats.torch_archive import read_tensor
from reshard.geometry.box import row_major_strides
from reshard.index.dtypes import FLOATS, raw, values
from reshard.index.index import ARCHIVE, Int
from reshard.verify.check.finite import slabs
from reshard.verify.check.report import Fault


class _Copy(NamedTuple):
    """Where one copy of a chunk lies; its CRC-32 with the bytes that this covers, where it is known."""

    file: int
    start_bytes: int
    strides: Sequence[int]
    crc: tuple[int, int] | None


def replica_faults(checkpoint: Checkpoint, replicas: Int) -> Iterator[Fault]:
    """Each replica that differs from the chunk that it repeats, and by how much.

    Two that have one and the same verified checksum are not read again.

    Args:
        replicas: rows of ``index.replicas`` whose bytes, and those of the chunk, are there and located.
    """
    index = checkpoint.index
    for tensor, row, file, start in replicas.tolist():
        key, path = index.names[tensor], checkpoint.files.paths[file]
        try:
            fault = _difference(checkpoint, row, _chunk(checkpoint, row), _replica(checkpoint, row, file, start))
        except ReshardError as error:
            yield Fault.of(error, path, key)
            continue
        if fault is not None:
            yield Fault.at(
                path,
                f"a replica differs from that in {checkpoint.files.paths[int(index.file[row])]}",
                key=key,
                expected=f"the same elements at {index.box(row)}",
                found=fault,
                hint="the ranks had diverged, or one file is of another save",
            )


def _chunk(checkpoint: Checkpoint, row: int) -> _Copy:
    payloads = checkpoint.payloads
    crc = int(payloads.crc[row])
    return _Copy(
        int(checkpoint.index.file[row]),
        int(payloads.start_bytes[row]),
        payloads.strides.get(row) or row_major_strides(checkpoint.index.box(row).sizes),
        None if crc < 0 else (crc, int(payloads.record_bytes[row])),
    )


def _replica(checkpoint: Checkpoint, row: int, file: int, start: int) -> _Copy:
    index = checkpoint.index
    if index.packing != ARCHIVE:
        return _Copy(file, start, row_major_strides(index.box(row).sizes), None)
    key = index.names[int(index.owner[row])]
    tensor = read_tensor(
        lambda begin, length: checkpoint.files.read(file, start + begin, length),
        int(index.length_bytes[row]),
        checkpoint.files.paths[file],
        key,
    )
    crc = (tensor.record.crc, tensor.record.length_bytes) if tensor.record.crc else None
    return _Copy(file, start + tensor.start_bytes, tensor.strides, crc)


def _difference(checkpoint: Checkpoint, row: int, one: _Copy, other: _Copy) -> str | None:
    """How two copies differ; None where they do not."""
    if one.crc is not None and one.crc == other.crc and tuple(one.strides) == tuple(other.strides):
        return None
    index = checkpoint.index
    dtype = index.dtypes[int(index.owner[row])]
    differing, largest = 0, 0.0
    for slab in slabs(index.box(row).sizes):
        left, right = (
            read_strided(checkpoint.files, copy.file, copy.start_bytes, raw(dtype), copy.strides, slab).reshape(-1)
            for copy in (one, other)
        )
        unequal = left.view(np.uint8).reshape(len(left), -1) != right.view(np.uint8).reshape(len(right), -1)
        places = np.flatnonzero(unequal.any(axis=1))
        if not len(places):
            continue
        differing += len(places)
        with np.errstate(all="ignore"):
            wide = "complex128" if dtype.startswith("complex") else "float64"
            distance = np.abs(values(left[places], dtype).astype(wide) - values(right[places], dtype).astype(wide))
        # Bits that differ and values that do not, such as two sorts of NaN, leave the largest distance as it was.
        largest = max(largest, float(np.nanmax(distance, initial=0.0)))
    if not differing:
        return None
    measure = "largest |a - b|" if dtype in FLOATS else "largest difference"
    return f"{differing} elements that differ, {measure} {largest:.6g}"
