"""Work by several processes on a folder that does not exist yet, coordinated through files beside it.

    <parent>/.offline-<name>/
        files/                          what becomes <parent>/<name>
        work/job                        which job this is: what is staged for another one is thrown away
        work/lock                       held by the process that leads
        work/journal-<rank>.jsonl       what has been done and is durable, a line each; outlives a crash
        work/<launch>.<event>.<rank>    what the processes of a launch tell each other (see `reshard.storage.launch`)

A later launch with the same job goes on from the journals, whatever the number of its processes. The commit is one
rename, as for a step. Only shared files are needed, and no network between the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from reshard.errors import ReshardError, StorageError, UsageError
from reshard.storage.commit import put_in_place
from reshard.storage.durable import (
    fsync_tree,
    make_folder,
    remove_tree,
    rename_durably,
    storage_errors,
    temporary_target,
    write_atomic,
)
from reshard.storage.launch import Launch
from reshard.storage.steps import REPLACED, TRASH, move_to_trash


class SharedWork:
    """One process's part in it. Every process of the launch enters the context; rank 0 leads and commits.

    Args:
        destination: what is to be made; its parent is made if missing.
        job: names the job: equal for processes and launches that do the same.
        rank, ranks, name, timeout_s: of the launch, as `Launch` takes them.

    Attributes:
        folder: where the files are written.
        launch: the line to the other processes.
        continued: whether a launch before left something to go on from.
    """

    def __init__(self, destination: Path, job: str, rank: int, ranks: int, name: str, timeout_s: float) -> None:
        self.destination = destination
        self.root = destination.with_name(f".offline-{destination.name}")
        self.folder = self.root / "files"
        self.continued = False
        self._job = job
        self._work = self.root / "work"
        self.launch = Launch(self._work, rank, ranks, name, timeout_s)
        self._aside = destination.with_name(f"{REPLACED}{destination.name}-offline")
        self._lock: int | None = None
        self._journal: int | None = None

    def __enter__(self) -> SharedWork:
        if self.launch.rank == 0:
            self._open()
        else:
            self._join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, Exception):
            self.launch.fail(value)
        self.launch.stop()
        if self._journal is not None:
            os.close(self._journal)
        if self.launch.rank == 0 and isinstance(value, ReshardError):
            self._leave(value)
        self._unlock()

    def _leave(self, error: ReshardError) -> None:
        """After a failure, keeps what a next run can go on from: nothing, if it is the source that is at fault."""
        if isinstance(error, StorageError) or error.exit_code == StorageError.exit_code:
            error.details = (*error.details, f"what was written stays in {self.root}: start again to go on from it")
            return
        with contextlib.suppress(StorageError):
            # Others may be writing still: without its name, all is thrown away by the next launch.
            remove_tree(self.root if self.launch.ranks == 1 else self._work / "job")

    def _open(self) -> None:
        """Makes or takes over the staged folder, and lets the other ranks in."""
        try:
            self._lead()
            self.launch.open({"continued": self.continued, "job": self._job})
        except BaseException as error:
            if self.launch.ranks > 1 and isinstance(error, Exception):
                self.launch.refuse(error)
            self._unlock()
            raise

    def _join(self) -> None:
        told = self.launch.join()
        if told["job"] != self._job:
            error = UsageError(
                "this rank sees another source than rank 0",
                path=self.destination,
                rank=self.launch.rank,
                hint="look whether all nodes see the same files, and run the same release",
            )
            self.launch.fail(error)
            self.launch.stop()
            raise error
        self.continued = bool(told["continued"])

    def note(self, *entries: dict[str, Any]) -> None:
        """Adds lines to this rank's journal, durably.

        Raises:
            StorageError: the file system refused.
        """
        path = self._work / f"journal-{self.launch.rank}.jsonl"
        # On lines of their own even where a crash or a full disk has left a torn one.
        lines = memoryview(b"".join(b"\n" + json.dumps(entry).encode() + b"\n" for entry in entries))
        with storage_errors("write", path):
            if self._journal is None:
                self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            while lines:
                lines = lines[os.write(self._journal, lines) :]
            os.fdatasync(self._journal)

    def noted(self) -> list[dict[str, Any]]:
        """All lines of all journals. A line that a crash cut short is left out.

        Raises:
            StorageError: they cannot be read.
        """
        entries = []
        for path in sorted(self._work.glob("journal-*.jsonl")):
            with storage_errors("read", path):
                lines = path.read_bytes().splitlines()
            for line in lines:
                with contextlib.suppress(ValueError):
                    entries.append(json.loads(line))
        return entries

    def forget(self) -> None:
        """Throws away all journals; before any rank of this launch notes something.

        Raises:
            StorageError: the file system refused.
        """
        for path in self._work.glob("journal-*.jsonl"):
            remove_tree(path)

    def commit(self, only: str | None = None) -> None:
        """Gives the files their name; rank 0 does, and the others wait. Replaces what has the name.

        Args:
            only: the one file that is to have the name, rather than the folder.

        Raises:
            StorageError: the file system refused; the destination is as it was.
            ReshardError: the leading rank failed.
        """
        if self.launch.rank == 0:
            fsync_tree(self.folder)
            # After the swap the old folder lies where the new one was staged: no launch may go on from that.
            write_atomic(self._work / "job", b"committed")
            put_in_place(self.folder if only is None else self.folder / only, self.destination, self._aside)
            if os.path.lexists(self._aside):
                # A launch before had set it aside, and came no further.
                move_to_trash(self._aside)
            self.launch.tell("committed")
            self.launch.leave()
            # All is done: what cannot be cleared away hinders nothing.
            with contextlib.suppress(StorageError):
                remove_tree(self.root)
            return
        self.launch.hear("committed", 0)
        self.launch.leave()

    def _lead(self) -> None:
        make_folder(self._work)
        self._take_lock()
        self._tidy()
        job = self._work / "job"
        with storage_errors("read", job):
            known = job.read_text() if job.exists() else None
        if known == self._job and self.folder.is_dir():
            self.continued = True
            for path in _listed(self._work):
                if path.name not in ("job", "lock") and not path.name.startswith("journal-"):
                    remove_tree(path)
            for path in _listed(self.folder):
                if temporary_target(path.name) is not None:
                    remove_tree(path)
            return
        remove_tree(self.folder)
        for path in _listed(self._work):
            if path.name != "lock":
                remove_tree(path)
        make_folder(self.folder)
        write_atomic(job, self._job.encode())

    def _tidy(self) -> None:
        """Puts right what a crash between or after the renames of a commit has left."""
        parent, name = self.destination.parent, self.destination.name
        for trash in parent.glob(glob.escape(f"{TRASH}{name}-") + "*"):
            remove_tree(trash)
        if os.path.lexists(self._aside) and not os.path.lexists(self.destination):
            rename_durably(self._aside, self.destination)

    def _take_lock(self) -> None:
        path = self._work / "lock"
        with storage_errors("write", path):
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "another process is writing this destination", path=self.destination, hint="wait for it, or stop it"
            ) from None
        except OSError:
            # A file system without locks: then it is up to the user to start one job at a time.
            return

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _listed(folder: Path) -> list[Path]:
    with storage_errors("list the folder", folder):
        return list(folder.iterdir())
