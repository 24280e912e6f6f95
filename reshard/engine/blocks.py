"""Files written in large aligned blocks, past the page cache where the file system takes that.

A checkpoint is read by other processes at another time: keeping what was written in this machine's page cache only
pushes out what is still to be read, and costs a copy. ``O_DIRECT`` needs addresses, lengths and offsets that are
multiples of the page; the last block of a file is written with zeros behind it, and the file cut to its length.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from reshard.errors import StorageError
from reshard.storage.durable import storage_errors

PAGE_BYTES = mmap.PAGESIZE


def aligned_buffer(length_bytes: int) -> memoryview:
    """Memory that starts at a page."""
    return memoryview(mmap.mmap(-1, length_bytes))


class BlockFile:
    """A file of known length that is written by position, from any thread.

    Args:
        path: an existing file, unless ``create``: one that has gone meanwhile must not come back as a hole.

    Attributes:
        is_direct: whether blocks bypass the page cache; then they start at multiples of the page, and so do buffers.
    """

    def __init__(self, path: Path, length_bytes: int, *, create: bool = False) -> None:
        self.path = path
        self.length_bytes = length_bytes
        with storage_errors("write", path):
            self._descriptor, self.is_direct = _open(path, os.O_CREAT if create else 0)

    def write(self, block: memoryview, position: int) -> None:
        """Writes a block; only the last one of the file may have a length that is not a multiple of the page.

        Raises:
            StorageError: the file system refused.
        """
        length = len(block)
        with storage_errors(f"write beyond {position} of {self.length_bytes} bytes", self.path):
            done = 0
            while done < length:
                count = os.pwrite(self._descriptor, block[done:], position + done)
                done += count
                if done < length and self.is_direct and count % PAGE_BYTES:
                    # A write that stops short leaves the rest unaligned; the disk is full, or the rest can be buffered.
                    self._write_buffered(block[done:], position + done)
                    done = length

    def sync(self) -> None:
        """Makes what was written durable.

        Raises:
            StorageError: the file system refused.
        """
        with storage_errors("flush", self.path):
            os.fdatasync(self._descriptor)

    def patch(self, data: bytes, position: int) -> None:
        """Writes a few bytes at any place.

        Raises:
            StorageError: the file system refused.
        """
        with storage_errors("write", self.path):
            self._write_buffered(memoryview(data), position)

    def cut_to_length(self) -> None:
        """Takes off what pads the last block.

        Raises:
            StorageError: the file system refused, or the file is shorter than what was written to it.
        """
        with storage_errors("finish", self.path):
            found_bytes = os.fstat(self._descriptor).st_size
            if found_bytes < self.length_bytes:
                raise StorageError(
                    "lost what was written to it", path=self.path, expected=self.length_bytes, found=found_bytes
                )
            os.ftruncate(self._descriptor, self.length_bytes)

    def close(self) -> None:
        """Closes the file; does not flush it.

        Raises:
            StorageError: the file system refused; some tell only now that they have no room.
        """
        with storage_errors("finish", self.path):
            os.close(self._descriptor)

    def _write_buffered(self, data: memoryview, position: int) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                count = os.pwrite(descriptor, data, position)
                data, position = data[count:], position + count
        finally:
            os.close(descriptor)


def _open(path: Path, create: int) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CLOEXEC | create
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            descriptor = os.open(path, flags | direct, 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        else:
            return descriptor, True
    return os.open(path, flags, 0o666), False
