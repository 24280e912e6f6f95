"""One rank's file of a legacy checkpoint: what ``torch.save`` wrote of its nested state, with no tensor read.

The archive is that of `reshard.formats.torch_archive`, the sharded tensors in it are those of
`reshard.formats.rescue.sharded_classes`. A class that is neither is not imported; something inert stands for its
objects, and its name is kept to be told.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats import unpickle
from reshard.formats.plain_values import VALUE_CLASSES
from reshard.formats.rescue.sharded_classes import SHARDED_CLASSES, Unknown, is_possible, unknown
from reshard.formats.torch_archive import ArchivedTensor, Record, Stored, locate, persistent_storage
from reshard.formats.torch_file import archive_records
from reshard.storage.byte_ranges import SourceFiles

_ALLOWED = {**SHARDED_CLASSES, **VALUE_CLASSES}


@dataclass(frozen=True, eq=False)
class RankFile:
    """What one file holds.

    Attributes:
        file: its number among the files of the checkpoint.
        root: what was saved: dicts, lists, values, and `Stored` or `Held` for tensors.
        records: of its archive.
        unknown: names of the classes that something inert stands for.
    """

    path: Path
    file: int
    root: Any
    records: Mapping[str, Record]
    unknown: frozenset[str]

    def locate(self, tensor: Stored, key: str) -> ArchivedTensor:
        """Where a tensor lies in the file.

        Raises:
            CheckpointUnsound: its storage is missing or too short, or no tensor has its shape.
        """
        try:
            if not is_possible(tensor.shape):
                raise CheckpointUnsound("no tensor has this shape", found=f"{tensor.shape}"[:200])
            return locate(tensor, self.records)
        except CheckpointUnsound as error:
            error.path, error.key = str(self.path), key
            raise


def open_rank_file(files: SourceFiles, file: int) -> RankFile:
    """Reads the directory and the pickle of a file.

    Raises:
        CheckpointUnsound: it is missing, empty, damaged, or not a file of ``torch.save``.
        StorageError: the file system failed to read it.
    """
    path = files.paths[file]
    met: set[str] = set()
    classes: dict[tuple[str, str], type[Unknown]] = {}

    def stand_in(module: str, name: str) -> type[Unknown]:
        met.add(f"{module}.{name}")
        return classes.setdefault((module, name), unknown(module, name))

    try:
        records = archive_records(files, file)
        record = records["data.pkl"]
        content = bytes(files.read(file, record.start_bytes, record.length_bytes))
        root = unpickle.read(io.BytesIO(content), _ALLOWED, path=path, persistent=persistent_storage, unknown=stand_in)
    except CheckpointUnsound as error:
        error.path = error.path or str(path)
        raise
    return RankFile(path, file, root, records, frozenset(met))


def open_rank_files(files: SourceFiles, numbers: Iterable[int]) -> list[RankFile]:
    """Opens several files of a checkpoint.

    Raises:
        CheckpointUnsound: some are damaged; each is named.
    """
    opened: list[RankFile] = []
    faults: list[CheckpointUnsound] = []
    for number in numbers:
        try:
            opened.append(open_rank_file(files, number))
        except CheckpointUnsound as fault:
            faults.append(fault)
    if faults:
        faults[0].details = (*faults[0].details, *map(str, faults[1:]))
        raise faults[0]
    return opened
