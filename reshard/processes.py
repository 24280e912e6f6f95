"""Programs that are started and watched from here: the one place where processes are made. Linux only, by ``/proc``.

A launcher's descendants are found by a mark in their environment, not only by their parents: torchrun starts its
workers in sessions of their own, and a process whose parent has died is a child of another.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from reshard.environment import SlurmPlace, inherited
from reshard.errors import UsageError
from reshard.storage.durable import storage_errors

_MARK = "RESHARD_LAUNCH"
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
_LAUNCHERS = (b"torchrun", b"torch.distributed.run", b"torch/distributed/run")


@dataclass(frozen=True)
class Output:
    """What a short program left: its exit status and its text."""

    status: int
    text: str
    errors: str


def run(command: Sequence[str], *, timeout_s: float, variables: Mapping[str, str] | None = None) -> Output:
    """Runs a short program to its end.

    Raises:
        UsageError: there is no such program, or it did not end in time.
    """
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=inherited(variables or {}),
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot be started: {reason}", path=command[0], hint="is it installed here?") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"no answer in {timeout_s:g} s", path=" ".join(command), hint="try again later") from error
    return Output(done.returncode, done.stdout, done.stderr)


class Launch:
    """A program that runs beside this one, with whatever it starts. All of that is gone when the context ends.

    Args:
        command: the program and its arguments.
        log: file that its output is appended to; None for where this process's own goes.
        variables: of its environment, beside those of this process.

    Raises:
        UsageError: there is no such program.
        StorageError: the log cannot be written.
    """

    def __init__(self, command: Sequence[str], log: Path | None, variables: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = f"{_MARK}={uuid.uuid4().hex}".encode()
        place = SlurmPlace.given()
        self._job = None if place is None else place.job_id
        name, _, value = self._mark.decode().partition("=")
        output = None
        if log is not None:
            with storage_errors("write the log", log):
                output = log.open("ab")
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
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"cannot be started: {reason}", path=command[0], hint="check the command after --"
            ) from error
        except BaseException:
            # Interrupted while it was being started.
            self.kill()
            raise
        finally:
            if output is not None:
                output.close()

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def status(self) -> int | None:
        """The program's exit status, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.poll()

    def workers(self) -> list[int]:
        """The processes that train: those that torchrun and its like gave a LOCAL_RANK, and not what these start in
        turn (the workers of a loader). Where none is seen to have one, the topmost that are no shells and no torchrun.
        """
        running = self._running()
        ranked = {pid for pid in running if any(v.startswith(b"LOCAL_RANK=") for v in _environment(pid))}
        candidates = ranked or {pid for pid in running if not _is_launcher(pid)}
        return sorted(pid for pid in candidates if not _has_ancestor(pid, candidates, running))

    def signal_workers(self, number: signal.Signals) -> list[int]:
        """Sends a signal to all of them; to which."""
        reached = []
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
        return reached

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program itself, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Waits for the program to end, but not longer than that."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def kill(self) -> None:
        """Ends the program and whatever it started, at once."""
        for _ in range(100):
            remaining = self._running()
            if not remaining:
                break
            # Those that were being started while the list was made are found the next time.
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self._process is not None:
            self._process.wait()

    def _running(self) -> dict[int, int]:
        """All that it started and that still runs, with their parents.

        By the mark, and by descent: a process that gives itself another title writes over its environment.
        """
        parents = {int(entry.name): _parent(int(entry.name)) for entry in os.scandir("/proc") if entry.name.isdigit()}
        own = set() if self._process is None else {self._process.pid}
        found = {
            pid: parent
            for pid, parent in parents.items()
            if pid in own or _has_ancestor(pid, own, parents) or self._bears_mark(pid)
        }
        return {pid: parent for pid, parent in found.items() if is_running(pid)}

    def _bears_mark(self, pid: int) -> bool:
        variables = _environment(pid)
        if self._mark not in variables:
            return False
        # A job that the program has submitted has inherited the mark, and is none of ours.
        jobs = [text for text in variables if text.startswith(b"SLURM_JOB_ID=")]
        return self._job is None or not jobs or jobs == [f"SLURM_JOB_ID={self._job}".encode()]


def slurm_step() -> str | None:
    """``batch``, or the number of the SLURM step that this process is part of, by the name of the slurmstepd above it;
    None where that is not to be seen, as from within a container.
    """
    pid = os.getpid()
    while pid > 1:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            if match := re.fullmatch(r"slurmstepd: \[\d+\.(\w+)\]\s*", command):
                return match[1]
        pid = _parent(pid)
    return None


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; one that has, and that its parent has not asked for, is not."""
    return _status(pid)[0] not in ("", "Z", "X")


def _status(pid: int) -> list[str]:
    """State, parent and so on; the state is empty where there is no such process."""
    with contextlib.suppress(OSError):
        # The name, which is in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return ["", "0"]


def _parent(pid: int) -> int:
    return int(_status(pid)[1])


def _environment(pid: int) -> list[bytes]:
    # Gone meanwhile, or another user's.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _is_launcher(pid: int) -> bool:
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return name in _SHELLS or any(launcher in command for launcher in _LAUNCHERS)
    return False


def _has_ancestor(pid: int, among: Collection[int], parents: Mapping[int, int]) -> bool:
    above = parents.get(pid, 0)
    while above:
        if above in among:
            return True
        above = parents.get(above, 0)
    return False
