"""The files of a run under `reshard slurm wrap`: what it is at, and what its attempts and their ranks tell each other.

    run/
      state.json              what the run is at, and what the next attempt must know
      DONE                    there when nothing is left to do
      ATTEMPT                 which attempt owns the run (see `reshard.storage.commit`)
      events.jsonl            one line an event, of all attempts; only ever appended to
      attempts/<attempt>/
        control.json          from `wrap` to the ranks: stop, and by when
        progress.json         from rank 0 to `wrap`: how far it is
        asked-<node>-<task>   from a task of the job step to `wrap`: a signal came in here

Each file has one writer, and is replaced as a whole; whoever reads sees the old text or the new one. control.json is
there from the beginning: a network file system may hide a file that appears for a minute, but not a new content.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reshard.errors import CheckpointUnsound
from reshard.storage.commit import check_fence, commit_file
from reshard.storage.durable import make_folder, read_existing, storage_errors, write_atomic

STATE_FILE = "state.json"
DONE_FILE = "DONE"
EVENTS_FILE = "events.jsonl"
ATTEMPTS = "attempts"
CONTROL_FILE = "control.json"
PROGRESS_FILE = "progress.json"
ASKED = "asked-"

_SLACK_S = 10.0


def lead_time_s(save_s: float | None, step_s: float | None) -> float:
    """How long before the end a run must be told to stop: the step it is in, a save that takes twice as long as the
    slowest so far, and a little to end.
    """
    return (step_s or 0.0) + 2 * (save_s or 0.0) + _SLACK_S


@dataclass(frozen=True)
class Control:
    """What `wrap` tells the ranks.

    Attributes:
        stop: why to save and end at the next step; None to go on.
        end_time_s: when the job will be ended (Unix time).
        save_s: the slowest save of earlier attempts.
    """

    stop: str | None = None
    end_time_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """How far an attempt is, as rank 0 says.

    Attributes:
        checkpoints: the folder it saves in.
        ranks: its world size.
        began_s: when it started (Unix time).
        step: optimizer steps done.
        time_s: when that was written (Unix time).
        resumed_at: the step it went on from; None before it has loaded one, 0 if there was none.
        saved_step: the newest step it committed.
        saved_time_s: when.
        save_s: its slowest save.
        step_s: its slowest step of late, saves not counted.
        stopped_at: the step at which it ended early, because it was asked to.
        stop_reason: why, as far as it knows.
    """

    checkpoints: str
    ranks: int
    began_s: float
    step: int
    time_s: float
    resumed_at: int | None = None
    saved_step: int | None = None
    saved_time_s: float | None = None
    save_s: float | None = None
    step_s: float | None = None
    stopped_at: int | None = None
    stop_reason: str | None = None


@dataclass(frozen=True)
class State:
    """What the run is at.

    Attributes:
        state: `running`, `waiting` (for the next attempt), `done`, `failed` or `cancelled`.
        reason: why, in words.
        attempt: the last attempt.
        chain: the dependency chain that the attempt's job belongs to.
        time_s: when that was written (Unix time).
        checkpoints: the folder that the run saves in, once it has said so.
        committed_step: the newest step in it.
        best_step: the newest that there ever was.
        failures: attempts in a row that crashed without a newer step.
        fell_back_to: the step that it fell back to since its best.
        save_s, step_s: the slowest save and step, as the last attempt that had any measured them.
    """

    state: str
    reason: str
    attempt: str
    chain: str | None = None
    time_s: float = 0.0
    checkpoints: str | None = None
    committed_step: int | None = None
    best_step: int | None = None
    failures: int = 0
    fell_back_to: int | None = None
    save_s: float | None = None
    step_s: float | None = None


_Record = TypeVar("_Record", Control, Progress, State)


def attempt_folder(run: Path, attempt: str) -> Path:
    return run / ATTEMPTS / attempt


def read_state(run: Path) -> State | None:
    """What a run is at; None where no attempt has said so yet.

    Raises:
        CheckpointUnsound: the file is not one of ours.
        StorageError: it cannot be read.
    """
    return _read(State, run / STATE_FILE)


def write_state(run: Path, state: State) -> None:
    """Says what the run is at, if the state's attempt still owns it.

    Raises:
        Fenced: another attempt has claimed the run.
        StorageError: the file system refused.
    """
    commit_file(run, STATE_FILE, _text(dataclasses.replace(state, time_s=time.time())), state.attempt)


def mark_done(run: Path, attempt: str, step: int | None) -> None:
    """Says that nothing is left to do, if the attempt still owns the run.

    Raises:
        Fenced: another attempt has claimed the run.
        StorageError: the file system refused.
    """
    fields = {"attempt": attempt, "step": step, "time_s": time.time()}
    commit_file(run, DONE_FILE, json.dumps(fields).encode() + b"\n", attempt)


def add_event(run: Path, attempt: str, event: str, **fields: Any) -> None:
    """Appends a line to the run's events, if the attempt still owns it.

    Raises:
        Fenced: another attempt has claimed the run.
        StorageError: the file system refused.
    """
    check_fence(run, attempt)
    path = run / EVENTS_FILE
    given = {name: value for name, value in fields.items() if value is not None}
    line = json.dumps({"time_s": round(time.time(), 3), "attempt": attempt, "event": event, **given})
    with storage_errors("write the events", path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # What a crash cut off must not spoil the line after it.
            end = os.lseek(descriptor, 0, os.SEEK_END)
            is_cut = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
            os.write(descriptor, b"\n" * is_cut + line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clear_attempt(folder: Path) -> None:
    """Takes away what another `wrap` left under the same attempt, in a batch script that has two.

    Raises:
        StorageError: the file system refused.
    """
    make_folder(folder)
    with storage_errors("clear", folder):
        for path in (folder / PROGRESS_FILE, *folder.glob(f"{ASKED}*")):
            path.unlink(missing_ok=True)


def write_control(folder: Path, control: Control) -> None:
    """Raises StorageError where the file system refuses."""
    make_folder(folder)
    write_atomic(folder / CONTROL_FILE, _text(control))


def read_control(folder: Path) -> Control | None:
    """Raises as `read_state`."""
    return _read(Control, folder / CONTROL_FILE)


def write_progress(folder: Path, progress: Progress) -> None:
    """Raises StorageError where the file system refuses."""
    write_atomic(folder / PROGRESS_FILE, _text(progress))


def read_progress(folder: Path) -> Progress | None:
    """Raises as `read_state`."""
    return _read(Progress, folder / PROGRESS_FILE)


def _text(record: Control | Progress | State) -> bytes:
    return json.dumps(dataclasses.asdict(record), indent=2).encode() + b"\n"


def _read(kind: type[_Record], path: Path) -> _Record | None:
    text = read_existing(path)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        known = {field.name for field in dataclasses.fields(kind)}
        record = kind(**{name: value for name, value in fields.items() if name in known})
        if isinstance(record, State) and not isinstance(record.attempt, str):
            raise TypeError("attempt")
        return record
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointUnsound(
            "not a file of reshard's", path=path, found=repr(text[:80]), hint="delete it to begin anew"
        ) from error
