"""Programs that are started and watched from here: the one place where processes are made. Linux only, by ``/proc``.

A launcher's descendants are found by a mark in their environment, and not by their parents: torchrun starts its workers
in sessions of their own, and a process whose parent has died is a child of another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from reshard.environment import inherited
from reshard.errors import UsageError
from reshard.storage.durable import storage_errors

_MARK = "RESHARD_LAUNCH"
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})


class Launch:
    """A program that runs beside this one, with whatever it starts. All of that is gone when the context ends.

    Args:
        command: the program and its arguments.
        log: file that its output is appended to.
        variables: of its environment, beside those of this process.

    Raises:
        UsageError: there is no such program.
        StorageError: the log cannot be written.
    """

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}".encode()
        name, _, value = self._mark.decode().partition("=")
        with storage_errors("write the log", log), log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Without this process's own rank, or the whole launch would seem to be workers.
                    env=inherited({**variables, name: value}, without=["LOCAL_RANK"]),
                    start_new_session=True,
                )
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
                raise UsageError(
                    f"cannot be started: {error.strerror}", path=command[0], hint="check the command after --"
                ) from error

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def status(self) -> int | None:
        """The program's exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the program to end; whether it did."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def workers(self) -> list[int]:
        """The processes that train: those that torchrun and its like gave a LOCAL_RANK, and not what these start in
        turn (the workers of a loader). Where none has one, the topmost processes that are no shells.
        """
        found = dict(_marked(self._mark))
        parents = {pid: _parent(pid) for pid in found}
        ranked = {pid for pid, environment in found.items() if any(v.startswith(b"LOCAL_RANK=") for v in environment)}
        candidates = ranked or {pid for pid in found if _name(pid) not in _SHELLS}
        return sorted(pid for pid in candidates if not _has_ancestor(pid, candidates, parents))

    def signal_workers(self, number: signal.Signals) -> int:
        """Sends a signal to all of them; to how many."""
        sent = 0
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                sent += 1
        return sent

    def kill(self) -> None:
        """Ends the program and whatever it started, at once."""
        for _ in range(100):
            remaining = [pid for pid, _ in _marked(self._mark)]
            if not remaining:
                break
            # Those that were being started while the list was made are found the next time.
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait()


def _marked(mark: bytes) -> list[tuple[int, list[bytes]]]:
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        # Gone meanwhile, or another user's.
        with contextlib.suppress(OSError):
            environment = Path(entry.path, "environ").read_bytes().split(b"\0")
            if mark in environment:
                found.append((int(entry.name), environment))
    return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        # The name, which is in parentheses, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _has_ancestor(pid: int, among: set[int], parents: Mapping[int, int]) -> bool:
    above = parents.get(pid, 0)
    while above in parents:
        if above in among:
            return True
        above = parents[above]
    return False
