"""Work by several processes on a folder that does not exist yet, coordinated through files beside it.

    <parent>/.offline-<name>/
        files/                          what becomes <parent>/<name>
        work/job                        which job this is: what is staged for another one is thrown away
        work/lock                       held by the process that leads
        work/journal-<rank>.jsonl       what has been done and is durable, a line each; outlives a crash
        work/<launch>.<event>.<rank>    something a rank has to tell the others of its launch

A later launch with the same job goes on from the journals, whatever the number of its processes. The commit is one
rename, as for a step. Only shared files are needed, and no network between the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import threading
import time
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
from reshard.storage.steps import REPLACED, TRASH, move_to_trash

_POLL_S = 0.05
_BEAT_S = 2.0
_HEARING_S = 10.0
_FAREWELL_S = 60.0


class SharedWork:
    """One process's part in it. Every process of the launch enters the context; rank 0 leads and commits.

    Args:
        destination: what is to be made; its parent is made if missing.
        job: names the job: equal for processes and launches that do the same.
        rank, ranks: of the launch.
        launch: names the launch, the same for all its ranks.
        timeout_s: without a sign of life from another rank for that long, it is given up.

    Attributes:
        folder: where the files are written.
        continued: whether a launch before left something to go on from.
    """

    def __init__(self, destination: Path, job: str, rank: int, ranks: int, launch: str, timeout_s: float) -> None:
        self.destination = destination
        self.root = destination.with_name(f".offline-{destination.name}")
        self.folder = self.root / "files"
        self.rank = rank
        self.ranks = ranks
        self.continued = False
        self._job = job
        self._launch = launch
        self._timeout_s = timeout_s
        self._work = self.root / "work"
        self._aside = destination.with_name(f"{REPLACED}{destination.name}-offline")
        self._lock: int | None = None
        self._journal: int | None = None
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="reshard-heartbeat")

    def __enter__(self) -> SharedWork:
        # A name for this launch's events: launchers give launches one after the other the same names.
        session = self._open() if self.rank == 0 else self._join()
        self._launch = f"{self._launch}.{session}"
        if self.ranks > 1:
            self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ranks > 1 and isinstance(value, Exception) and not getattr(value, "is_shared", False):
            self._share(value)
        self._stop_heart()
        if self._journal is not None:
            os.close(self._journal)
        if self.rank == 0 and isinstance(value, ReshardError):
            self._leave(value)
        self._unlock()

    def _leave(self, error: ReshardError) -> None:
        """After a failure, keeps what a next run can go on from: nothing, if it is the source that is at fault."""
        if isinstance(error, StorageError) or error.exit_code == StorageError.exit_code:
            error.details = (*error.details, f"what was written stays in {self.root}: start again to go on from it")
            return
        with contextlib.suppress(StorageError):
            # Others may be writing still: without its name, all is thrown away by the next launch.
            remove_tree(self.root if self.ranks == 1 else self._work / "job")

    def _open(self) -> str:
        """Makes or takes over the staged folder, waits for all ranks, and tells them the name of the session."""
        try:
            self._lead()
            nonces = [self.hear("hello", rank) for rank in range(1, self.ranks)]
            session = secrets.token_hex(4)
            told = {"session": session, "continued": self.continued, "nonces": nonces, "job": self._job}
            self.tell("open", told)
        except BaseException as error:
            if self.ranks > 1 and isinstance(error, Exception):
                self._refuse(error)
            self._unlock()
            raise
        return session

    def _refuse(self, error: Exception) -> None:
        """Tells the ranks that wait to join why there is nothing to join."""
        deadline = time.monotonic() + _HEARING_S
        nonces: dict[int, Any] = {}
        while len(nonces) < self.ranks - 1 and time.monotonic() < deadline:
            for rank in range(1, self.ranks):
                with contextlib.suppress(OSError, ValueError):
                    nonces[rank] = json.loads(self._event("hello", rank).read_bytes())
            time.sleep(_POLL_S)
        with contextlib.suppress(ReshardError):
            self.tell("refused", {**_described(error), "nonces": list(nonces.values())})

    def _join(self) -> str:
        """Waits for rank 0 to open the work for this process, not for one of a launch before."""
        nonce = secrets.token_hex(8)
        started = time.monotonic()
        hello = self._event("hello", self.rank)
        refusals = 0
        while time.monotonic() - started < self._timeout_s:
            # Rank 0 deletes whatever was there before it came.
            if self._work.is_dir() and self._told(hello) != nonce:
                try:
                    self.tell("hello", nonce)
                except StorageError:
                    # Rank 0 may be about to make the folder anew; but it may also be that this rank cannot write there.
                    refusals += 1
                    if refusals * _POLL_S > _HEARING_S:
                        raise
            refused = self._told(self._event("refused", 0))
            if isinstance(refused, dict) and nonce in refused.get("nonces", ()):
                raise FailedElsewhere(refused, 0)
            told = self._told(self._event("open", 0))
            if isinstance(told, dict) and nonce in told.get("nonces", ()):
                if told["job"] != self._job:
                    raise UsageError(
                        "this rank sees another source than rank 0", path=self.destination, rank=self.rank,
                        hint="look whether all nodes see the same files, and run the same release",
                    )  # fmt: skip
                self.continued = bool(told["continued"])
                return str(told["session"])
            time.sleep(_POLL_S)
        raise self._silence(0)

    def _told(self, path: Path) -> Any:
        """What a file says that may not be there, or may be about to go."""
        try:
            return json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            with storage_errors("read", path):
                raise error

    def note(self, *entries: dict[str, Any]) -> None:
        """Adds lines to this rank's journal, durably.

        Raises:
            StorageError: the file system refused.
        """
        path = self._work / f"journal-{self.rank}.jsonl"
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

    def tell(self, event: str, value: Any = None) -> None:
        """Tells the other ranks that this one has come to an event.

        Raises:
            StorageError: the file system refused.
        """
        write_atomic(self._event(event, self.rank), json.dumps(value).encode())

    def gather(self, event: str) -> list[Any]:
        """What each rank told with an event, waiting for it.

        Raises:
            ReshardError: a rank failed, or gives no sign of life; or the file system refused.
        """
        return [self.hear(event, rank) for rank in range(self.ranks)]

    def commit(self) -> None:
        """Gives the files their name; rank 0 does, and the others wait. Replaces what has the name.

        Raises:
            StorageError: the file system refused; the destination is as it was.
            ReshardError: the leading rank failed.
        """
        if self.rank == 0:
            fsync_tree(self.folder)
            # After the swap the old folder lies where the new one was staged: no launch may go on from that.
            write_atomic(self._work / "job", b"committed")
            put_in_place(self.folder, self.destination, self._aside)
            if os.path.lexists(self._aside):
                # A launch before had set it aside, and came no further.
                move_to_trash(self._aside)
            self.tell("committed")
            self._see_off()
            self._stop_heart()
            # All is done: what cannot be cleared away hinders nothing.
            with contextlib.suppress(StorageError):
                remove_tree(self.root)
            return
        self.hear("committed", 0)
        self._stop_heart()
        self.tell("left")

    def _lead(self) -> None:
        make_folder(self._work)
        self._take_lock()
        self._tidy()
        job = self._work / "job"
        with storage_errors("read", job):
            known = job.read_text() if job.exists() else None
        if known == self._job and self.folder.is_dir():
            self.continued = True
            for path in self._work.iterdir():
                if path.name not in ("job", "lock") and not path.name.startswith("journal-"):
                    remove_tree(path)
            for path in self.folder.iterdir():
                if temporary_target(path.name) is not None:
                    remove_tree(path)
            return
        remove_tree(self.folder)
        for path in self._work.iterdir():
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

    def _see_off(self) -> None:
        """Waits a while until the others have seen the commit; all is done, so one that is gone hinders nothing."""
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline:
            if all(self._event("left", rank).exists() for rank in range(1, self.ranks)):
                return
            time.sleep(_POLL_S)

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

    def hear(self, event: str, rank: int) -> Any:
        """Waits until a rank has come to an event, and returns what it told with it.

        Raises:
            ReshardError: a rank failed, or gives no sign of life; or the file system refused.
        """
        path = self._event(event, rank)
        seen: tuple[object, float] = (None, time.monotonic())
        while True:
            if path.exists():
                with storage_errors("read", path):
                    return json.loads(path.read_bytes())
            self._raise_failure()
            beat = self._last_beat(rank)
            if beat != seen[0]:
                seen = (beat, time.monotonic())
            elif time.monotonic() - seen[1] > self._timeout_s:
                raise self._silence(rank)
            time.sleep(_POLL_S)

    def _silence(self, rank: int) -> StorageError:
        return StorageError(
            "no sign of life from a rank",
            path=self.root,
            rank=rank,
            hint="look for its error, and see that all nodes share this file system; "
            "start again to go on from what is done (RESHARD_TIMEOUT_S is how long to wait)",
        )

    def _share(self, error: Exception) -> None:
        """Tells the others, and gives rank 0 the time to say it before a launcher ends all of them."""
        with contextlib.suppress(ReshardError):
            self.tell("failed", _described(error))
            if self.rank != 0 and isinstance(error, ReshardError):
                deadline = time.monotonic() + _HEARING_S
                while not error.is_shared and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    error.is_shared = self._event("heard", 0).exists()

    def _raise_failure(self) -> None:
        for path in self._work.glob(f"{self._launch}.failed.*"):
            with contextlib.suppress(OSError, ValueError):
                fields = json.loads(path.read_bytes())
                rank = int(path.name.rpartition(".")[2])
                if self.rank == 0:
                    self.tell("heard")
                raise FailedElsewhere(fields, rank)

    def _event(self, event: str, rank: int) -> Path:
        return self._work / f"{self._launch}.{event}.{rank}"

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _stop_heart(self) -> None:
        self._stop.set()
        if self._heart.is_alive():
            self._heart.join()

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(_BEAT_S):
            number += 1
            with contextlib.suppress(OSError):
                self._event("beat", self.rank).write_text(str(number))

    def _last_beat(self, rank: int) -> object:
        try:
            return self._event("beat", rank).read_text()
        except OSError:
            return None


class FailedElsewhere(ReshardError):
    """Another rank of the launch failed; says what it said."""

    is_shared = True

    def __init__(self, fields: dict[str, Any], rank: int) -> None:
        first, *details = str(fields.get("text")).splitlines() or ["failed"]
        super().__init__(first, rank=rank, details=[detail.strip() for detail in details])
        self.exit_code = int(fields.get("code", 1))


def _described(error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
    return {"text": text, "code": getattr(error, "exit_code", 3)}
