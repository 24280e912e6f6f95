"""Bytes and names that survive a crash: the one place that calls fsync and rename.

After a function here has returned, its effect survives a power cut. Where it raises or the process dies, the target
is as it was or as it should become, never in between, except for a tree being removed, which may be half gone.

fsync covers what *this* node has written. On a file system shared by several nodes, whoever writes a file has to make
it durable on its own node before another one renames the folder around it.

An operating system error leaves as a `StorageError` that says which file, why in words, and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from reshard.errors import StorageError

_Place = str | os.PathLike[str]

# AT_FDCWD and RENAME_EXCHANGE of <linux/fs.h>.
_HERE, _EXCHANGE = -100, 2

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")

# Reason in words, and what to do next.
_REFUSALS = {
    errno.ENOSPC: ("no space left on the file system", "free space there or use another file system, then try again"),
    errno.EDQUOT: ("the disk quota is used up", "delete files or have the quota raised, then try again"),
    errno.EROFS: ("the file system is mounted read-only", "use a folder on a writable file system"),
    errno.EACCES: ("permission denied", "check the owner and mode of the file and the folders above it"),
    errno.EPERM: ("operation not permitted", "check the owner, mode and attributes of the file and its folder"),
    errno.ENOENT: ("no such file or folder", "check the path, and that no other process removes it meanwhile"),
    errno.ENOTDIR: ("a part of the path is not a folder", "check the path"),
    errno.EEXIST: ("a file of that name is in the way", "move it away or use another path"),
    errno.ENOTEMPTY: ("a folder that is not empty is in the way", "check that no other process writes there"),
    errno.EXDEV: ("source and target lie on different file systems", "use two paths on one file system"),
    errno.EMFILE: ("too many open files", "raise the limit (`ulimit -n`), then try again"),
    errno.EIO: ("the device reported an I/O error", "check the health of the file system before writing there again"),
}


@contextmanager
def storage_errors(action: str, path: _Place) -> Iterator[None]:
    """Turn an OSError of the block into a `StorageError` "cannot `action`: why", placed at `path` or below it."""
    try:
        yield
    except OSError as error:
        raise _refusal(error, action, path) from error


def _refusal(error: OSError, action: str, path: _Place, progress: str = "") -> StorageError:
    if error.errno == errno.EFBIG:
        reason, hint = _over_file_limit()
    elif error.errno in _REFUSALS:
        reason, hint = _REFUSALS[error.errno]
    else:
        reason, hint = error.strerror or str(error), "check the file system, then try again"
    place = os.fspath(path)
    # Inside a tree, the error knows the file; a name relative to an open folder would say less than the tree does.
    if isinstance(error.filename, str) and error.filename.startswith(place + os.sep):
        place = error.filename
    return StorageError(f"cannot {action}: {reason}{progress}", path=place, hint=hint)


def _over_file_limit() -> tuple[str, str]:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes == resource.RLIM_INFINITY:
        return "larger than a file may be on this file system", "use another file system"
    return (
        f"over the limit of {limit_bytes} bytes a file (RLIMIT_FSIZE)",
        "raise it (`ulimit -f unlimited`), then retry",
    )


def write_atomic(path: _Place, data: bytes) -> None:
    """Write a whole file, replacing what was there; readers see the old bytes or the new ones.

    A crash leaves at most a temporary sibling, which `temporary_target` recognises.

    Raises:
        StorageError: the file system refused; the old file is untouched unless only the last fsync failed.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    view = memoryview(data)
    written_bytes = 0
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # By hand, because a write that stops short (full disk, RLIMIT_FSIZE) should say how far it came.
            while written_bytes < len(view):
                written_bytes += os.write(descriptor, view[written_bytes:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _refusal(error, "write", target, f" ({written_bytes} of {len(view)} bytes written)") from error
    _fsync_folder(target.parent)


def read_existing(path: _Place) -> bytes | None:
    """The content of a file; None where there is none.

    Raises:
        StorageError: it cannot be read.
    """
    with storage_errors("read", path):
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None


def temporary_target(name: str) -> str | None:
    """The name of the file that the temporary file `name` of `write_atomic` was to become; None for other names."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def make_folder(path: _Place) -> None:
    """Create a folder, and those above it that are missing; one that exists is left alone.

    Raises:
        StorageError: the file system refused, or a file is in the way; some of the folders above may exist by then.
    """
    folder = Path(path)
    with storage_errors("create the folder", folder):
        if folder.is_dir():
            return
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    _fsync_folder(folder.parent)


def fsync_tree(folder: _Place) -> None:
    """Flush every regular file below `folder`, then every folder, the deepest first and `folder` itself last.

    Symbolic links are not followed: what they point to belongs to someone else.

    Raises:
        StorageError: a file or folder could not be read or flushed, or `folder` is missing.
    """
    folders = []
    with storage_errors("list the folder", folder):
        for parent, _, names in os.walk(folder, onerror=_raise):
            folders.append(Path(parent))
            for path in (Path(parent, name) for name in names):
                if stat.S_ISREG(path.lstat().st_mode):
                    fsync_file(path)
    for path in reversed(folders):
        _fsync_folder(path)


def _raise(error: OSError) -> NoReturn:
    raise error


def rename_durably(src: _Place, dst: _Place) -> None:
    """Rename a file or folder within one file system; a crash leaves it under one of the two names.

    As with `os.rename`, a file or an empty folder at `dst` is replaced.

    Raises:
        StorageError: the file system refused. `src` still has its name unless only the last fsync failed.
    """
    source, target = Path(src), Path(dst)
    with storage_errors(f"rename to {target}", source):
        source.rename(target)
    _fsync_folder(target.parent)
    if source.parent != target.parent:
        _fsync_folder(source.parent)


def exchange_durably(first: _Place, second: _Place) -> bool:
    """Let two existing names of one file system swap what they name, in one step; a crash leaves it as before or after.

    Returns:
        Whether that was done: not every system and file system can (`renameat2` of Linux).

    Raises:
        StorageError: the file system refused.
    """
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is None:
        return False
    if exchange(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE):
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            return False
        with storage_errors(f"swap with {second}", first):
            raise OSError(number, os.strerror(number))
    for folder in {Path(first).parent, Path(second).parent}:
        _fsync_folder(folder)
    return True


def remove_tree(folder: _Place) -> None:
    """Delete a folder and all below it. A file or symbolic link is deleted itself; absence is fine.

    Not atomic: a crash leaves a part. Whatever could be mistaken for something whole is to be renamed first.

    Raises:
        StorageError: the file system refused; a part may be gone.
    """
    path = Path(folder)
    with storage_errors("delete", path):
        while os.path.lexists(path):
            # Another process may be sweeping the same tree: what it takes away under us is progress, not a fault.
            with suppress(FileNotFoundError):
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                else:
                    shutil.rmtree(path)


def fsync_file(path: Path) -> None:
    """Makes the content of a file durable.

    Raises:
        StorageError: the file system refused.
    """
    with storage_errors("flush", path):
        _fsync(path)


def _fsync_folder(path: Path) -> None:
    with storage_errors("flush the folder", path):
        try:
            _fsync(path)
        except OSError as error:
            # Some network file systems make names durable at once and answer so to an fsync of a folder.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(destination: Path, needed_bytes: int) -> None:
    """Passes where the file system of a path, which need not exist, has room for so many bytes.

    Raises:
        StorageError: it has not.
    """
    parent = destination.parent
    while not parent.exists():
        parent = parent.parent
    with storage_errors("read the free space of", parent):
        free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise StorageError(
            "not enough space for the new checkpoint",
            path=destination,
            expected=f"{needed_bytes} bytes free",
            found=f"{free_bytes}",
            hint="free space there, or write to another file system",
        )
