"""What the processes of one launch tell each other, through files of a folder that all of them see.

    <name>.<event>.<rank>     JSON: what a rank has to tell with an event

Launchers give the same name to launches one after the other, and what a launch before has left must mislead nobody. So
each launch begins with a handshake: every rank says hello with a number of its own, rank 0 answers all of them with a
session, and from then on the session is a part of the name.

A rank that fails tells the others what happened, and rank 0 that it has heard: so that all end, and one of them speaks.
A rank whose heart has stopped beating is given up after a while.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError, StorageError
from reshard.storage.durable import storage_errors, write_atomic

_POLL_S = 0.05
_BEAT_S = 2.0
_HEARING_S = 10.0
_FAREWELL_S = 60.0


class Launch:
    """One process's line to the others.

    Args:
        folder: where the files are; rank 0 makes it before it opens the launch.
        rank, ranks: of the launch.
        name: the same for all its ranks.
        timeout_s: without a sign of life from another rank for that long, it is given up.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, name: str, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self._folder = folder
        self._name = name
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="reshard-heartbeat")

    def open(self, value: Any) -> None:
        """Waits for all ranks and lets them in, with a value. Rank 0 does, after it has deleted what others left.

        Raises:
            ReshardError: a rank gives no sign of life; or the file system refused.
        """
        nonces = [self.hear("hello", rank) for rank in range(1, self.ranks)]
        session = secrets.token_hex(4)
        self.tell("open", {"session": session, "nonces": nonces, "value": value})
        self._begin(session)

    def refuse(self, error: Exception) -> None:
        """Tells the ranks that wait to be let in why they are not; rank 0 does."""
        deadline = time.monotonic() + _HEARING_S
        nonces: dict[int, Any] = {}
        while len(nonces) < self.ranks - 1 and time.monotonic() < deadline:
            for rank in range(1, self.ranks):
                with contextlib.suppress(OSError, ValueError):
                    nonces[rank] = json.loads(self.event(rank, "hello").read_bytes())
            time.sleep(_POLL_S)
        with contextlib.suppress(ReshardError):
            self.tell("refused", {**_described(error), "nonces": list(nonces.values())})

    def join(self) -> Any:
        """Waits for rank 0 to let this process in, and not one of a launch before; returns what it was let in with.

        Raises:
            FailedElsewhere: rank 0 refused.
            StorageError: rank 0 gives no sign of life; or the file system refused.
        """
        nonce = secrets.token_hex(8)
        started = time.monotonic()
        failures = 0
        while time.monotonic() - started < self._timeout_s:
            # Rank 0 deletes whatever was there before it came.
            if self._folder.is_dir() and _told(self.event(self.rank, "hello")) != nonce:
                try:
                    self.tell("hello", nonce)
                except StorageError:
                    # Rank 0 may be about to make the folder anew; but it may also be that this rank cannot write there.
                    failures += 1
                    if failures * _POLL_S > _HEARING_S:
                        raise
            refused = _told(self.event(0, "refused"))
            if isinstance(refused, dict) and nonce in refused.get("nonces", ()):
                raise FailedElsewhere(refused, 0)
            told = _told(self.event(0, "open"))
            if isinstance(told, dict) and nonce in told.get("nonces", ()):
                self._begin(str(told["session"]))
                return told["value"]
            time.sleep(_POLL_S)
        raise self._silence(0)

    def tell(self, event: str, value: Any = None) -> None:
        """Tells the other ranks that this one has come to an event.

        Raises:
            StorageError: the file system refused.
        """
        write_atomic(self.event(self.rank, event), json.dumps(value).encode())

    def hear(self, event: str, rank: int) -> Any:
        """Waits until a rank has come to an event, and returns what it told with it.

        Raises:
            ReshardError: a rank failed, or gives no sign of life; or the file system refused.
        """
        path = self.event(rank, event)
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

    def gather(self, event: str) -> list[Any]:
        """What each rank told with an event, waiting for it.

        Raises:
            ReshardError: a rank failed, or gives no sign of life; or the file system refused.
        """
        return [self.hear(event, rank) for rank in range(self.ranks)]

    def fail(self, error: Exception) -> None:
        """Tells the others, and gives rank 0 the time to say it before a launcher ends all of them."""
        if self.ranks == 1 or getattr(error, "is_shared", False):
            return
        with contextlib.suppress(ReshardError):
            self.tell("failed", _described(error))
            if self.rank != 0 and isinstance(error, ReshardError):
                deadline = time.monotonic() + _HEARING_S
                while not error.is_shared and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    error.is_shared = self.event(0, "heard").exists()

    def leave(self) -> None:
        """Tells that all is done here; rank 0 waits a while for the others, one of which may be gone."""
        if self.rank != 0:
            self.stop()
            self.tell("left")
            return
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline:
            if all(self.event(rank, "left").exists() for rank in range(1, self.ranks)):
                break
            time.sleep(_POLL_S)
        self.stop()

    def stop(self) -> None:
        """Ends the beating: from then on, nothing is written any more but what is told."""
        self._stop.set()
        if self._heart.is_alive():
            self._heart.join()

    def event(self, rank: int, event: str) -> Path:
        """The file in which a rank tells of an event."""
        return self._folder / f"{self._name}.{event}.{rank}"

    def _begin(self, session: str) -> None:
        self._name = f"{self._name}.{session}"
        if self.ranks > 1:
            self._heart.start()

    def _raise_failure(self) -> None:
        for path in self._folder.glob(f"{self._name}.failed.*"):
            with contextlib.suppress(OSError, ValueError):
                fields = json.loads(path.read_bytes())
                rank = int(path.name.rpartition(".")[2])
                if self.rank == 0:
                    self.tell("heard")
                raise FailedElsewhere(fields, rank)

    def _silence(self, rank: int) -> StorageError:
        return StorageError(
            "no sign of life from a rank",
            path=self._folder,
            rank=rank,
            hint="look for its error, and see that all nodes share this file system; "
            "start again to go on from what is done (RESHARD_TIMEOUT_S is how long to wait)",
        )

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(_BEAT_S):
            number += 1
            with contextlib.suppress(OSError):
                self.event(self.rank, "beat").write_text(str(number))

    def _last_beat(self, rank: int) -> object:
        try:
            return self.event(rank, "beat").read_text()
        except OSError:
            return None


class FailedElsewhere(ReshardError):
    """Another rank of the launch failed; says what it said."""

    is_shared = True

    def __init__(self, fields: dict[str, Any], rank: int) -> None:
        first, *details = str(fields.get("text")).splitlines() or ["failed"]
        super().__init__(first, rank=rank, details=[detail.strip() for detail in details])
        self.exit_code = int(fields.get("code", 1))


def _told(path: Path) -> Any:
    """What a file says that may not be there, or may be about to go."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        with storage_errors("read", path):
            raise error


def _described(error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
    return {"text": text, "code": getattr(error, "exit_code", 3)}
