"""What an attempt knows of its run, and keeps for the next one: state.json and events.jsonl, by one hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from reshard.cluster.job import Job
from reshard.cluster.policy import Decision, History
from reshard.errors import StorageError
from reshard.storage.commit import abandon_later, claim
from reshard.storage.run_files import (
    Progress,
    State,
    add_event,
    attempt_folder,
    mark_done,
    read_progress,
    read_state,
    write_state,
)
from reshard.storage.steps import committed_steps


class Ledger:
    """Of a run that the attempt has claimed. Every method raises Fenced where another attempt has done so since.

    Args:
        run: the run's folder.
        attempt: its name.
        chain: the dependency chain that its job belongs to.
        tell: for the words that go into the job's log.
    """

    def __init__(self, run: Path, attempt: str, chain: str | None, tell: Callable[[str], None]) -> None:
        self._run = run
        self._attempt = attempt
        self._tell = tell
        self.state = State("running", "training", attempt, chain)
        self.former = read_state(run)
        self.lost_attempt: str | None = None
        if self.former is not None:
            self._take_over(self.former)

    def _take_over(self, former: State) -> None:
        self.state = replace(former, state="running", reason="training", attempt=self._attempt, chain=self.state.chain)
        if former.state in ("failed", "cancelled", "done"):
            # Whoever starts it again has seen to what was wrong.
            self.state = replace(self.state, failures=0, fell_back_to=None)
        if former.state == "running" and former.attempt != self._attempt:
            self.lost_attempt = former.attempt
            last = read_progress(attempt_folder(self._run, former.attempt))
            if last is not None:
                self.learn(last)
            self.add("lost", lost_attempt=former.attempt, **self.losses(last))
        if self.state.checkpoints is not None:
            # Before its ranks do so: from here on a former attempt that still trains cannot commit.
            claim(self.state.checkpoints, self._attempt)
            self._count_steps()
            if self.state.best_step != former.best_step:
                self.state = replace(self.state, failures=0, fell_back_to=None)

    @property
    def history(self) -> History:
        return History(self.state.failures, self.state.fell_back_to)

    def steps(self) -> tuple[int, ...]:
        """Those that the run can go on from, ascending."""
        folder = self.state.checkpoints
        return () if folder is None else tuple(entry.step for entry in committed_steps(folder))

    def started(self, job_id: str, job: Job | None) -> None:
        self.say(self.state.state, self.state.reason)
        self.add(
            "started",
            job=job_id,
            nodes=None if job is None else job.nodes,
            gpus=None if job is None else job.gpus,
            committed_step=self.state.committed_step,
            idle_s=None if self.former is None else round(time.time() - self.former.time_s, 1),
        )

    def learn(self, progress: Progress) -> None:
        """Takes over what an attempt has said of itself."""
        self.state = replace(
            self.state,
            checkpoints=progress.checkpoints,
            # Of a folder that was there before the run was wrapped, the attempt that resumes is the first to tell.
            best_step=_larger(self.state.best_step, progress.resumed_at or None),
            save_s=progress.save_s or self.state.save_s,
            step_s=progress.step_s or self.state.step_s,
        )

    def ended(
        self, decision: Decision, status: int, progress: Progress | None, *, requeue: bool
    ) -> dict[str, float | None]:
        """What was decided, done and written; returns what was lost."""
        if decision.fall_back_to is not None:
            self._set_aside(decision.fall_back_to)
        after = decision.history
        self.state = replace(self.state, failures=after.failures, fell_back_to=after.fell_back_to)
        self._count_steps()
        losses = self.losses(progress, time.time())
        self.add(
            "ended",
            state=decision.state,
            reason=decision.reason,
            status=status,
            ranks=None if progress is None else progress.ranks,
            committed_step=self.state.committed_step,
            failures=after.failures or None,
            requeue=requeue,
            **losses,
        )
        self.say(decision.state, decision.reason)
        if decision.state == "done":
            mark_done(self._run, self._attempt, self.state.committed_step)
        return losses

    def say(self, state: str, reason: str) -> None:
        """Writes what the run is at."""
        self.state = replace(self.state, state=state, reason=reason)
        write_state(self._run, self.state)

    def add(self, event: str, **fields: object) -> None:
        """Appends an event. That there is no room for one must not end a run."""
        try:
            add_event(self._run, self._attempt, event, **fields)
        except StorageError as error:
            self._tell(f"not recorded: {event}: {error}")

    def losses(self, progress: Progress | None, until_s: float | None = None) -> dict[str, float | None]:
        """Steps that were trained and not saved, and the time since the last that was: until then, or its last word."""
        if progress is None:
            return {"step": None, "lost_steps": None, "lost_s": None}
        newest = max(self.steps(), default=0)
        lost = max(0, progress.step - max(newest, progress.resumed_at or 0))
        lost_s = (until_s or progress.time_s) - (progress.saved_time_s or progress.began_s)
        return {"step": progress.step, "lost_steps": lost, "lost_s": round(lost_s, 1) if lost else 0.0}

    def _set_aside(self, step: int) -> None:
        for path in abandon_later(self.state.checkpoints or "", step, self._attempt):
            self.add("set_aside", path=str(path))

    def _count_steps(self) -> None:
        newest = max(self.steps(), default=None)
        self.state = replace(self.state, committed_step=newest, best_step=_larger(self.state.best_step, newest))


def _larger(first: int | None, second: int | None) -> int | None:
    return max((value for value in (first, second) if value is not None), default=None)
