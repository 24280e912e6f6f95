"""Byte ranges of files, read by position: no file pointer is shared, so any number of threads may read at once."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from reshard.errors import CheckpointUnsound
from reshard.storage.durable import storage_errors

MOST_OPEN_FILES = 256
# The kernel takes no more pieces in one call (IOV_MAX).
MOST_PIECES = 1024
# Reading on through a gap (what surrounds the records of the source) costs less than another call.
_GAP_BYTES = 4096


class Read(NamedTuple):
    """A byte range to be read into memory of its length."""

    file: int
    place: int
    view: memoryview


class SourceFiles:
    """Numbered files that are read from, opened when first needed and closed when too many are open.

    Args:
        paths: where they are.
        in_memory: the content of those that are no files, by number.

    Attributes:
        bytes_read: from files, by all calls so far.
    """

    def __init__(self, paths: Sequence[Path], in_memory: Mapping[int, bytes | bytearray] | None = None) -> None:
        self.paths = list(paths)
        self.in_memory = dict(in_memory or {})
        self.bytes_read = 0
        # Half of what the process may have, for threads and the files that are written have theirs.
        self._most_open = min(MOST_OPEN_FILES, max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 16))
        self._lock = threading.Lock()
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._users: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[SourceFiles], tuple[list[Path], dict[int, bytes | bytearray]]]:
        return SourceFiles, (self.paths, self.in_memory)

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every file; reading opens them again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def add_in_memory(self, path: Path, content: bytes | bytearray) -> int:
        """Adds one that is no file, by the path that errors are to name; its number."""
        self.paths.append(path)
        self.in_memory[len(self.paths) - 1] = content
        return len(self.paths) - 1

    def read(self, file: int, start: int, length: int) -> bytearray:
        """The bytes [start, start + length).

        Raises:
            CheckpointUnsound: the file is missing or ends before.
            StorageError: the file system failed to read it.
        """
        data = bytearray(length)
        self.read_into(file, start, [memoryview(data)])
        return data

    def read_into(self, file: int, start: int, pieces: Sequence[memoryview]) -> None:
        """Fills ``pieces`` one after the other with the bytes from ``start`` on.

        Raises:
            CheckpointUnsound: the file is missing or ends before.
            StorageError: the file system failed to read it.
        """
        if file in self.in_memory:
            self._copy(file, start, pieces)
            return
        with self._descriptor(file) as descriptor:
            for group in range(0, len(pieces), MOST_PIECES):
                start = self._fill(file, descriptor, start, list(pieces[group : group + MOST_PIECES]))

    def read_all(self, reads: Iterable[Read]) -> None:
        """Fills all views, in the order of the files; neighbours in one call, with what lies between them.

        Raises:
            CheckpointUnsound, StorageError: as `read`.
        """
        run: list[memoryview] = []
        file, start, end = -1, 0, 0
        for read in sorted(reads, key=lambda read: read[:2]):
            gap = read.place - end
            if read.file != file or not 0 <= gap <= _GAP_BYTES:
                if run:
                    self.read_into(file, start, run)
                file, start, run = read.file, read.place, []
            elif gap:
                run.append(memoryview(bytearray(gap)))
            run.append(read.view)
            end = read.place + len(read.view)
        if run:
            self.read_into(file, start, run)

    def size_bytes(self, file: int) -> int:
        """How long the file is.

        Raises:
            CheckpointUnsound, StorageError: as `read`.
        """
        if file in self.in_memory:
            return len(self.in_memory[file])
        with self._descriptor(file) as descriptor:
            return os.fstat(descriptor).st_size

    def _copy(self, file: int, start: int, pieces: Sequence[memoryview]) -> None:
        content = memoryview(self.in_memory[file])
        end = start + sum(map(len, pieces))
        if end > len(content):
            raise CheckpointUnsound(
                "cut short", path=self.paths[file], expected=f"at least {end} bytes", found=f"{len(content)} bytes"
            )
        for piece in pieces:
            piece[:] = content[start : start + len(piece)]
            start += len(piece)

    def _fill(self, file: int, descriptor: int, start: int, pieces: list[memoryview]) -> int:
        while pieces:
            with storage_errors("read", self.paths[file]):
                count = os.preadv(descriptor, pieces, start)
            if count == 0 and any(len(piece) for piece in pieces):
                raise self._cut_short(file, descriptor, start + sum(map(len, pieces)))
            start += count
            with self._lock:
                self.bytes_read += count
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][count:]
        return start

    def _cut_short(self, file: int, descriptor: int, needed: int) -> CheckpointUnsound:
        found = os.fstat(descriptor).st_size
        return CheckpointUnsound(
            "cut short", path=self.paths[file], expected=f"at least {needed} bytes", found=f"{found} bytes"
        )

    @contextmanager
    def _descriptor(self, file: int) -> Iterator[int]:
        with self._lock:
            descriptor = self._descriptors.get(file)
            if descriptor is None:
                descriptor = self._descriptors[file] = self._open(file)
            self._descriptors.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
            self._close_idle()
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users[file] -= 1

    def _open(self, file: int) -> int:
        path = self.paths[file]
        try:
            with storage_errors("read", path):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except Exception as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOENT, errno.ENOTDIR):
                hint = (
                    "copy it here, or name the folder that has it with --in (files of other nodes stay on their disks)"
                )
                raise CheckpointUnsound("missing", path=path, hint=hint) from None
            raise

    def _close_idle(self) -> None:
        for file in list(self._descriptors):
            if len(self._descriptors) <= self._most_open:
                return
            if not self._users.get(file):
                os.close(self._descriptors.pop(file))
