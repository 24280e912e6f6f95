"""Every fault that a user can cause, as an exception.

    ReshardError
    ├── UsageError            the call or the command line is wrong: nothing was read
    │   └── BatchError        a batch arithmetic that does not come out even
    ├── CheckpointNotFound    nothing committed where a checkpoint was asked for
    ├── CheckpointUnsound     the files are there and not what they should be
    │   └── UnsafePickle      a pickle names something that the allow-list does not have
    ├── StateMismatch         the checkpoint is sound and does not fit the run
    ├── StorageError          the file system refused (full, read-only, not shared)
    └── Fenced                another attempt owns this run

The first line of each says where (file, key, rank), what, expected and found, and what to do next; further lines
list the rest. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class ReshardError(Exception):
    """A fault with its place and its way out.

    Args:
        what: the fault, as a clause without a full stop.
        path: the file or folder it concerns.
        key: the tensor or entry (an FQN, a manifest field, an option).
        rank: the rank that met it.
        expected: what should have been there.
        found: what was.
        hint: what to do next.
        details: further lines, one fault each, where there are several.
    """

    exit_code = 1
    usual_hint: str | None = None
    """What to do next where the place that raises knows nothing better."""
    is_shared = False
    """Whether all ranks raise this same error, so that it is enough if one tells it."""

    def __init__(
        self,
        what: str,
        *,
        path: str | os.PathLike[str] | None = None,
        key: str | None = None,
        rank: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.path = None if path is None else os.fspath(path)
        self.key = key
        self.rank = rank
        self.expected = expected
        self.found = found
        self.hint = hint or self.usual_hint
        self.details = tuple(details)

    def __str__(self) -> str:
        where = [str(place) for place in (self.path, self.key) if place is not None]
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        line = ": ".join([*where, self.what])
        if self.expected is not None:
            line += f": expected {self.expected}, found {self.found}"
        elif self.found is not None:
            line += f": found {self.found}"
        if self.hint:
            line += f"; {self.hint}"
        return "\n".join([line, *(f"  {detail}" for detail in self.details)])

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks; the default would call __init__ with the message alone. Values travel as the text
        # they are shown as: one that cannot be pickled would keep the whole error, and the other ranks, waiting.
        fields = dict(self.__dict__)
        for name in ("expected", "found"):
            fields[name] = None if fields[name] is None else str(fields[name])
        return (_rebuild, (type(self), fields))


def _rebuild(kind: type[ReshardError], fields: dict[str, object]) -> ReshardError:
    error = kind(str(fields["what"]))
    error.__dict__.update(fields)
    return error


class UsageError(ReshardError):
    """The call or the command line is wrong; nothing was read or written."""

    exit_code = 2


class BatchError(UsageError):
    """Global batch, micro-batch and ranks that do not fit together."""


class CheckpointNotFound(ReshardError):
    """Nothing committed where a checkpoint was asked for."""

    exit_code = 2


class CheckpointUnsound(ReshardError):
    """The checkpoint's files are incomplete, damaged or contradict each other."""

    usual_hint = "copy it anew from where it is whole, or use another step"


class UnsafePickle(CheckpointUnsound):
    """A pickle names a class or function that is not on the allow-list; it was not run."""


class StateMismatch(ReshardError):
    """A sound checkpoint that does not fit the run that wants to load it."""


class StorageError(ReshardError):
    """The file system refused: no space, no permission, or not shared between the ranks."""

    exit_code = 2
    usual_hint = "see to its permissions and free space, and that all ranks see the same file system"


class Fenced(ReshardError):
    """Another attempt has taken over this run; this one may no longer commit."""
