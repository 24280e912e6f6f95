"""What becomes of a run when an attempt has ended: a pure function of how it ended and of what SLURM says.

| how it ended                                                     | the run     | in the queue again     |
|------------------------------------------------------------------|-------------|------------------------|
| exit 0, and not because it was asked to stop                     | `done`      | no                     |
| its user cancelled the job                                       | `cancelled` | no                     |
| SLURM has requeued the job (no grace, a dead node)               | `waiting`   | it is there already    |
| preempted, or a node lost                                        | `waiting`   | yes                    |
| asked to stop, or its time up, and it saved a newer step         | `waiting`   | yes                    |
| it stopped and saved, and nobody had asked (its own `stop=`)     | `waiting`   | no                     |
| the same without a newer step, or a crash: a *failure*           | `waiting`   | yes, up to a limit     |
| as many failures in a row without a newer step                   | `failed`    | no, or, if that is     |
|                                                                  |             | allowed, a step back   |
| a crash before any step was saved                                | `failed`    | no                     |

Only failures are counted, and a newer step begins the count anew. Of a command that does not say how far it is, nothing
is known: it is taken to get on, and a crash ends it. What SLURM ends or has ended is not requeued, but where it is sure
that this was not its user's wish.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.cluster.job import Job

# Reasons to stop that SLURM knows.
PREEMPTED = "preempted"
TIME_LIMIT = "time limit"
CANCELLED = "cancelled"
REQUEUED = "requeued"

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONTINUES = 75
EXIT_REPLACED = 76
EXIT_CANCELLED = 77


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended.

    Attributes:
        restarts: which restart of the job it was.
        status: the command's exit status; negative for the signal that ended it.
        asked: why it was asked to stop, or why it did; None if neither.
        is_hearsay: whether all that asked was SIGTERM to a task, of which SLURM knows no reason: so, too, srun ends
            the tasks that are left when one has crashed.
        reports: whether the run told how far it is.
        stopped_at: the step at which the run says that it ended early.
        best_step: the newest step there ever was when the attempt began; None if there was none.
        steps: those there are now, ascending.
        lost_nodes: nodes that SLURM does not hear from.
    """

    restarts: int
    status: int
    asked: str | None = None
    is_hearsay: bool = False
    reports: bool = True
    stopped_at: int | None = None
    best_step: int | None = None
    steps: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """A command that says nothing of itself may have been done when it was asked to stop: the next attempt sees."""
        ended_early = self.stopped_at is not None if self.reports else self.asked is not None
        return self.status == 0 and not ended_early

    @property
    def newest(self) -> int | None:
        return self.steps[-1] if self.steps else None

    @property
    def progressed(self) -> bool:
        """Whether it saved a step that no attempt did before: one that is saved again after a fall-back is no news."""
        return self.newest is not None and (self.best_step is None or self.newest > self.best_step)


@dataclass(frozen=True)
class History:
    """What went before, as far as it counts.

    Attributes:
        failures: in a row without a newer step.
        fell_back_to: the step that the run fell back to since its newest; None if it did not.
    """

    failures: int = 0
    fell_back_to: int | None = None


@dataclass(frozen=True)
class Limits:
    """What is allowed.

    Attributes:
        max_failures: failures in a row without a newer step that end the run.
        fall_back: whether the run then goes back one step, and begins to count anew. It goes back further each time,
            and fails when there is nothing left, or it would do the same steps for ever.
    """

    max_failures: int = 3
    fall_back: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        state: of the run, as `reshard.storage.run_files.State` has it.
        reason: in words.
        requeue: whether to put the job into the queue.
        history: for the next attempt.
        fall_back_to: the step to go on from, after those past it are set aside; None for the newest.
        exit_code: of the job.
    """

    state: str
    reason: str
    requeue: bool
    history: History
    fall_back_to: int | None = None

    @property
    def exit_code(self) -> int:
        codes = {"done": EXIT_DONE, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}
        return codes.get(self.state, EXIT_CONTINUES)


def decide(attempt: Attempt, job: Job | None, history: History, limits: Limits) -> Decision:
    """What becomes of the run.

    Args:
        attempt: how it ended.
        job: what SLURM says now; None where it does not answer.
        history: what went before.
        limits: what is allowed.
    """
    kept = History() if attempt.progressed else history
    if attempt.is_finished:
        return Decision("done", "the command has finished", False, History())
    if job is not None and job.restarts > attempt.restarts:
        return Decision("waiting", "requeued by SLURM", False, kept)
    if _is_cancelled(attempt, job):
        return Decision("cancelled", "cancelled by its user", False, kept)
    if reason := _interruption(attempt, job):
        return Decision("waiting", reason, _may_go_on(job), kept)
    if attempt.stopped_at is not None:
        return Decision("waiting", "it stopped by itself; submit it again to go on", False, kept)
    return _after_failure(attempt, job, history, limits)


def _is_cancelled(attempt: Attempt, job: Job | None) -> bool:
    if job is None:
        return attempt.asked == CANCELLED
    if job.state == "CANCELLED":
        return True
    # While its processes are being ended, SLURM does not say why, but for these three reasons.
    others = job.preempt_time_s is not None or job.hit_time_limit or bool(attempt.lost_nodes)
    return job.state == "COMPLETING" and not others


def may_requeue_now(job: Job) -> bool:
    """Whether a job that is to be requeued still may be: its user may have cancelled it meanwhile."""
    if not job.is_ending or job.hit_time_limit:
        return True
    return job.state in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL") or (
        job.preempt_time_s is not None and job.state == "COMPLETING" and _may_go_on(job)
    )


def _may_go_on(job: Job | None) -> bool:
    """Not a job that was cancelled while it had been given grace. One that SLURM has cancelled at once to preempt it is
    told from that by the time.
    """
    if job is None or job.state != "COMPLETING" or job.preempt_time_s is None:
        return True
    return job.end_time_s is not None and abs(job.end_time_s - job.preempt_time_s) <= 1


def _interruption(attempt: Attempt, job: Job | None) -> str | None:
    """What ended the attempt that is no fault of the run."""
    if attempt.asked == PREEMPTED or (job is not None and (job.preempt_time_s is not None or job.state == "PREEMPTED")):
        return PREEMPTED
    if job is not None and job.state in ("NODE_FAIL", "BOOT_FAIL"):
        return f"ended by SLURM: {job.state}"
    if attempt.lost_nodes:
        return f"lost {', '.join(attempt.lost_nodes)}"
    # A run that never gets as far as a save when it is told to, or before its time is up, would be started for ever.
    got_on = attempt.stopped_at is not None or attempt.progressed or not attempt.reports
    if attempt.asked is not None and got_on and (attempt.stopped_at is not None or not attempt.is_hearsay):
        return attempt.asked
    if job is not None and job.hit_time_limit and got_on:
        return TIME_LIMIT
    return None


def _after_failure(attempt: Attempt, job: Job | None, history: History, limits: Limits) -> Decision:
    what = _failure(attempt, job)
    if attempt.newest is None:
        why = "before a step was saved" if attempt.reports else "without a word of how far it was"
        return Decision("failed", f"{what} {why}: another attempt would do the same", False, history)
    after = History(1) if attempt.progressed else History(history.failures + 1, history.fell_back_to)
    reason = f"{what} at step {attempt.newest}"
    if after.failures > 1:
        reason = f"{what}, {after.failures} times in a row without a newer step than {attempt.newest}"
    if after.failures < limits.max_failures:
        return Decision("waiting", reason, True, after)
    if limits.fall_back and (target := _earlier(attempt.steps, after.fell_back_to)) is not None:
        return Decision("waiting", f"{reason}: falling back to step {target}", True, History(0, target), target)
    return Decision("failed", reason, False, after)


def _earlier(steps: tuple[int, ...], fell_back_to: int | None) -> int | None:
    below = steps[-1] if fell_back_to is None else fell_back_to
    return max((step for step in steps if step < below), default=None)


def _failure(attempt: Attempt, job: Job | None) -> str:
    if attempt.asked == TIME_LIMIT or (job is not None and job.hit_time_limit):
        return "out of time"
    if job is not None and job.is_ending and job.state != "COMPLETING":
        return f"ended by SLURM: {job.state}"
    if attempt.status < 0:
        return f"ended by signal {-attempt.status}"
    return f"exit status {attempt.status}"
