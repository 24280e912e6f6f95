"""Storage calls of this process that fail on purpose: the Nth one below a folder, whichever function of Python made it.

An audit hook sees every open, rename, removal and listing; what leaves no audit event (writes, flushes) is wrapped.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError

# How a child ends: with one of our errors, or another.
REFUSED, UNEXPECTED = 3, 4

WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.scandir", "os.listdir", "os.truncate"}
WRAPPED = ("write", "pwrite", "fsync", "fdatasync", "ftruncate")


class Faults:
    """For processes that end soon: an audit hook cannot be taken out again.

    Attributes:
        count: storage calls met while armed.
        struck: what was struck.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = os.fspath(folder)
        self.count = 0
        self.struck: list[str] = []
        self._at = 0
        self._strike: Callable[[], None] = no_space
        self._is_armed = self._is_lasting = False
        sys.addaudithook(self._hook)
        for call in WRAPPED:
            setattr(os, call, self._watching(call, getattr(os, call)))

    @contextmanager
    def armed(self, at: int, strike: Callable[[], None], lasting: bool = False) -> Iterator[None]:
        """Strikes at the call with this number, from 1 on; ``lasting``: and at all after it."""
        self.count, self.struck = 0, []
        self._at, self._strike, self._is_lasting = at, strike, lasting
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed = False

    def _watching(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(descriptor: int, *args: Any) -> Any:
            if self._is_armed and str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self.folder):
                self._step(name)
            return real(descriptor, *args)

        return watched

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_armed and event in WATCHED and str(args[0]).startswith(self.folder):
            self._step(f"{event} {Path(str(args[0])).name}")

    def _step(self, what: str) -> None:
        self.count += 1
        if self.count == self._at or (self._is_lasting and self.count > self._at):
            self.struck.append(what)
            self._strike()


def in_child(action: Callable[[], object]) -> int:
    """The wait status of a forked child that runs ``action``."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = UNEXPECTED
    try:
        action()
        status = 0
    except ReshardError:
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
