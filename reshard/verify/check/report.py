"""What a check found: faults, which make a checkpoint unsound, and notes, which do not."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from reshard.errors import ReshardError

_RANK_FILE = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


def rank_of(file: str) -> int | None:
    """The rank that wrote a file, by its name; None where the name does not say."""
    match = _RANK_FILE.fullmatch(file.rpartition("/")[2])
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Fault:
    """One thing that is not as it should be, and where.

    Attributes:
        what: as a clause without a full stop.
        file: path of the file.
        key: the tensor, object or manifest field.
        rank: whose file it is.
        hint: what to do next, where there is more to say than to use another copy.
    """

    what: str
    file: str | None = None
    key: str | None = None
    rank: int | None = None
    expected: str | None = None
    found: str | None = None
    hint: str | None = None

    @classmethod
    def at(cls, file: str | os.PathLike[str], what: str, **fields: str | None) -> Fault:
        """A fault in a file; the rank is that of its name."""
        path = os.fspath(file)
        return cls(what, file=path, rank=rank_of(path), **fields)

    @classmethod
    def of(cls, error: ReshardError, file: str | os.PathLike[str] | None = None, key: str | None = None) -> Fault:
        """The fault that an error tells, at a file and key where it does not say these itself."""
        path = error.path or (None if file is None else os.fspath(file))
        return cls(
            what=error.what,
            file=path,
            key=error.key or key,
            rank=error.rank if error.rank is not None or path is None else rank_of(path),
            expected=None if error.expected is None else str(error.expected),
            found=None if error.found is None else str(error.found),
            hint=None if error.hint == error.usual_hint else error.hint,
        )

    def __str__(self) -> str:
        where = [place for place in (self.file, self.key) if place is not None]
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        line = ": ".join([*where, self.what])
        if self.expected is not None:
            line += f": expected {self.expected}, found {self.found}"
        elif self.found is not None:
            line += f": found {self.found}"
        return f"{line}; {self.hint}" if self.hint else line


def faults_of(error: ReshardError) -> Iterator[Fault]:
    """The fault of an error, and each of those that it lists as details."""
    yield Fault.of(error)
    yield from (Fault(detail, file=error.path) for detail in error.details)


@dataclass
class Report:
    """The result of a check.

    Attributes:
        format: None where the checkpoint could not be opened.
        deep: whether the bytes themselves were read.
        stored_bytes: of all chunks and objects, as the index says.
        verified_records: how many records have the checksum that was saved with them.
    """

    path: str
    deep: bool
    format: str | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: int = 0
    chunks: int = 0
    objects: int = 0
    files: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    verified_records: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def to_json(self) -> dict[str, object]:
        """All of it, as plain JSON."""
        return {"sound": self.is_sound, **dataclasses.asdict(self)}
