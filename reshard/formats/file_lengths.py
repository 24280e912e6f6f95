"""Are the files of an index there, and as long as it says? Looks at their sizes, and opens none that is right."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.errors import StorageError
from reshard.formats.unpickle import missing_data
from reshard.index.index import Index, Int


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


def file_faults(index: Index, paths: Sequence[Path], in_memory: Container[int] = ()) -> Iterator[FileFault]:
    """Each file of the index that is missing, or shorter than the index says.

    Args:
        paths: where the files are, by number.
        in_memory: numbers of those that are none.

    Raises:
        StorageError: the file system refused.
    """
    for file, expected_bytes in enumerate(_needed_bytes(index).tolist()):
        if expected_bytes < 0 or file in in_memory:
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
    for place in index.objects.values():
        file_number = index.file_number[place.file]
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


def _reason(path: Path) -> str:
    if not path.is_file():
        return "not a file"
    with path.open("rb") as file:
        return missing_data(file.read(100)) or "cut short"
