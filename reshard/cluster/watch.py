"""Watching an attempt: whether it should stop, and why, told to its ranks; how far it is, told to the run's events.

Whoever could know that the end is near is listened to: signals to the batch script, signals to the tasks, the
controller, and the clock. Two of them are never enough: a preemption with grace signals the tasks only, `--signal=B:`
the batch script only, and a requeue by hand nobody before it is too late.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.cluster.job import Job
from reshard.cluster.policy import CANCELLED, PREEMPTED, REQUEUED, TIME_LIMIT
from reshard.cluster.scheduler import find_job
from reshard.cluster.signals import StopSignal
from reshard.errors import CheckpointUnsound, StorageError
from reshard.processes import Launch
from reshard.storage.commit import check_fence
from reshard.storage.run_files import (
    ASKED,
    Control,
    Progress,
    attempt_folder,
    clear_attempt,
    lead_time_s,
    read_progress,
    write_control,
)

_TICK_S = 0.5
_FENCE_INTERVAL_S = 5.0
_TASK_TERM = "SIGTERM to task"
# Less than the shortest KillWait that a site may have: what is left to do then must be done before SIGKILL.
_LAST_MOMENTS_S = 4.0


@dataclass(frozen=True)
class Watched:
    """How it ended.

    Attributes:
        status: the command's exit status; negative for a signal.
        asked: why it was asked to stop.
        is_hearsay: whether nothing but SIGTERM to a task spoke for it.
        progress: the last that the run said; None if it said nothing.
    """

    status: int
    asked: str | None
    is_hearsay: bool
    progress: Progress | None


class Watch:
    """Of one attempt, by its batch script. Make it before the command is started.

    Args:
        run: the run's folder.
        attempt: which.
        address: of its job.
        job: what SLURM said at the start.
        signals: to the batch script, caught one by one since before anything else.
        save_s: the slowest save of earlier attempts.
        poll_s: how often to ask SLURM.
        tell: for the words that go into the job's log.
        record: for events.
        on_cancel: called at once when the job turns out to be cancelled by its user, as little time is left then.
    """

    def __init__(
        self,
        run: Path,
        attempt: str,
        address: str,
        job: Job | None,
        signals: Mapping[signal.Signals, StopSignal],
        *,
        save_s: float | None,
        poll_s: float,
        tell: Callable[[str], None],
        record: Callable[..., None],
        on_cancel: Callable[[], None],
    ) -> None:
        self._run, self._attempt, self._address = run, attempt, address
        self._folder = attempt_folder(run, attempt)
        self._restarts = int(attempt.rpartition(".")[2])
        self._signals = signals
        self._poll_s = poll_s
        self._tell, self._record, self._on_cancel = tell, record, on_cancel
        self._asked: str | None = None
        self._is_announced = False
        self._too_late_s: float | None = None
        self._progress: Progress | None = None
        self._heard: set[str] = set()
        self._polled_at_s = self._fenced_at_s = time.monotonic()
        self._control = Control(end_time_s=None if job is None else job.end_time_s, save_s=save_s)
        clear_attempt(self._folder)
        write_control(self._folder, self._control)
        self._written = self._control

    def until_end(self, launch: Launch) -> Watched:
        """Returns when the command has ended, or when its time is up and the job will be killed in a moment.

        Raises:
            Fenced: another attempt has claimed the run; the command may be running.
        """
        while (status := launch.status) is None:
            if self._too_late_s is not None and time.monotonic() > self._too_late_s:
                self._tell("out of time, and the command has not ended: not waiting for it")
                status = -signal.SIGKILL
                break
            time.sleep(_TICK_S)
            self._listen()
        self._hear_progress()
        is_hearsay = self._asked is not None and self._asked.startswith(_TASK_TERM)
        return Watched(status, self._asked, is_hearsay, self._progress)

    def until_terminated(self, patience_s: float) -> None:
        """Returns when SLURM has begun to end the batch script, as it does after a requeue.

        One that exits by itself meanwhile may be taken for the end of the next attempt, if that has begun.
        """
        until_s = time.monotonic() + patience_s
        while not self._signals[signal.SIGTERM]() and time.monotonic() < until_s:
            time.sleep(0.1)

    def _listen(self) -> None:
        now_s = time.monotonic()
        self._hear_progress()
        alarm = self._hear_signals() or self._hear_tasks()
        if alarm is not None and self._asked is None:
            # At once: SLURM may take long to say why.
            self._stop(alarm)
        if alarm is not None or now_s - self._polled_at_s >= self._poll_s:
            self._ask_slurm(alarm)
        self._write_control()
        if self._asked is not None and self._written.stop is not None and not self._is_announced:
            self._announce(alarm)
        if now_s - self._fenced_at_s >= _FENCE_INTERVAL_S:
            self._fenced_at_s = now_s
            self._check_fence()

    def _hear_signals(self) -> str | None:
        """The name of a signal to the batch script that was not heard before."""
        for caught in self._signals.values():
            if caught.received and self._is_news(caught.received):
                return f"{caught.received} to the batch script"
        return None

    def _hear_tasks(self) -> str | None:
        """A signal that a task tells of, the first time."""
        with suppress(OSError):
            for path in self._folder.glob(f"{ASKED}*"):
                name, where = path.read_text().strip(), path.name.removeprefix(ASKED)
                if self._is_news(f"{name} in a task"):
                    return f"{name} to task {where}"
        return None

    def _is_news(self, what: str) -> bool:
        is_new = what not in self._heard
        self._heard.add(what)
        return is_new

    def _ask_slurm(self, alarm: str | None) -> None:
        self._polled_at_s = time.monotonic()
        job = find_job(self._address, tries=1 if alarm is None else 2, pause_s=1.0)
        if job is None:
            return
        if job.is_running:
            self._control = replace(self._control, end_time_s=job.end_time_s)
        reason = self._reason(alarm, job)
        if reason == CANCELLED and self._is_news(CANCELLED):
            self._on_cancel()
        if job.hit_time_limit and self._too_late_s is None:
            self._too_late_s = time.monotonic() + _LAST_MOMENTS_S
        # What SLURM knows takes the place of what a signal let suppose.
        if reason is not None and (self._asked is None or self._asked == alarm):
            self._stop(reason)

    def _reason(self, alarm: str | None, job: Job) -> str | None:
        """Why to stop; None where there is no reason to."""
        if job.restarts > self._restarts:
            return REQUEUED
        if job.preempt_time_s is not None or job.state == "PREEMPTED":
            return PREEMPTED
        if job.hit_time_limit:
            return TIME_LIMIT
        if job.is_ending:
            return CANCELLED if job.state in ("COMPLETING", "CANCELLED") else f"ended by SLURM: {job.state}"
        return TIME_LIMIT if alarm is not None and self._is_near(job.end_time_s) else alarm

    def _is_near(self, end_time_s: float | None) -> bool:
        progress = self._progress
        lead_s = lead_time_s(progress.save_s, progress.step_s) if progress else lead_time_s(None, None)
        # SLURM sends its warning up to a minute early.
        return end_time_s is not None and end_time_s - time.time() < 2 * lead_s + 60

    def _stop(self, reason: str) -> None:
        self._asked = reason
        self._control = replace(self._control, stop=reason)
        self._write_control()

    def _write_control(self) -> None:
        """Again at each tick if it does not succeed: a run that is not told to stop is lost."""
        if self._control == self._written:
            return
        try:
            write_control(self._folder, self._control)
            self._written = self._control
        except StorageError as error:
            if self._is_news("unwritable"):
                self._tell(f"cannot reach the run, trying again: {error}")

    def _announce(self, alarm: str | None) -> None:
        self._is_announced = True
        self._record("asked", reason=self._asked, signal=alarm)
        because = f" ({alarm})" if alarm and alarm != self._asked else ""
        self._tell(f"{self._asked}{because}: asked the run to save and stop")

    def _check_fence(self) -> None:
        try:
            check_fence(self._run, self._attempt)
        except (CheckpointUnsound, StorageError) as error:
            # A file system that does not answer says nothing about another attempt.
            if self._is_news("unreadable"):
                self._tell(f"cannot see who owns the run, going on: {error}")

    def _hear_progress(self) -> None:
        before = self._progress
        with suppress(CheckpointUnsound, StorageError):
            self._progress = read_progress(self._folder)
        now = self._progress
        if now is None or now == before:
            return
        if now.resumed_at is not None and (before is None or before.resumed_at != now.resumed_at):
            self._record("resumed", step=now.resumed_at, ranks=now.ranks)
            ranks = "1 rank" if now.ranks == 1 else f"{now.ranks} ranks"
            self._tell(f"training from step {now.resumed_at} on {ranks}")
        if now.saved_step is not None and (before is None or before.saved_step != now.saved_step):
            self._record("saved", step=now.saved_step, slowest_save_s=_rounded(now.save_s))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
