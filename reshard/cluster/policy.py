"""What becomes of a run when an attempt has ended: a pure function of how it ended and of what SLURM says.

| how it ended                                                     | the run     | in the queue again     |
|------------------------------------------------------------------|-------------|------------------------|
| exit 0, and not because it was asked to stop                     | `done`      | no                     |
| its user cancelled the job                                       | `cancelled` | no                     |
| SLURM has requeued the job (no grace, a dead node)               | `waiting`   | it is there already    |
| preempted with grace, a node lost, or asked to stop              | `waiting`   | yes                    |
| the time limit, with a newer step than before                    | `waiting`   | yes                    |
| the time limit without one, or a crash: a *failure*              | `waiting`   | yes, up to a limit     |
| as many failures in a row without a newer step, or a crash       | `failed`    | no, or, if that is     |
| before any step was saved                                        |             | allowed, a step back   |

Only failures are counted, and a newer step begins the count anew. A job is requeued while it runs and never later: one
that its user cancels is no longer running, nor is one that SLURM requeues by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.cluster.job import Job

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
        asked: why it was asked to stop; None if it was not.
        reports: whether the run told how far it is.
        stopped_at: the step at which the run says that it ended early.
        step_before: the newest step when the attempt began; None if there was none.
        step_after: the newest step now.
        lost_nodes: nodes that SLURM does not hear from.
    """

    restarts: int
    status: int
    asked: str | None = None
    reports: bool = True
    stopped_at: int | None = None
    step_before: int | None = None
    step_after: int | None = None
    lost_nodes: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """A command that says nothing of itself may have been done when it was asked to stop: the next attempt sees."""
        ended_early = self.stopped_at is not None if self.reports else self.asked is not None
        return self.status == 0 and not ended_early

    @property
    def progressed(self) -> bool:
        return self.step_after is not None and (self.step_before is None or self.step_after > self.step_before)


@dataclass(frozen=True)
class Limits:
    """What is allowed.

    Attributes:
        max_failures: failures in a row without a newer step that end the run.
        fall_back: whether the run then goes back one step, and begins to count anew.
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
        failures: in a row without a newer step, this one included.
        fall_back: whether to set the newest step aside first.
        exit_code: of the job.
    """

    state: str
    reason: str
    requeue: bool
    failures: int
    fall_back: bool = False

    @property
    def exit_code(self) -> int:
        codes = {"done": EXIT_DONE, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}
        return codes.get(self.state, EXIT_CONTINUES)


def decide(attempt: Attempt, job: Job | None, failures: int, limits: Limits, steps: int) -> Decision:
    """What becomes of the run.

    Args:
        attempt: how it ended.
        job: what SLURM says now; None where it does not answer.
        failures: those in a row before this attempt.
        limits: what is allowed.
        steps: how many steps there are to go on from.
    """
    kept = 0 if attempt.progressed else failures
    if attempt.is_finished:
        return Decision("done", "the command has finished", False, 0)
    if job is not None and job.restarts > attempt.restarts:
        return Decision("waiting", "requeued by SLURM", False, kept)
    if job is not None and job.is_ending and not job.hit_time_limit:
        return Decision("cancelled", "cancelled by its user", False, kept)
    if reason := _interruption(attempt, job):
        return Decision("waiting", reason, True, kept)
    return _after_failure(attempt, job, failures, limits, steps)


def _interruption(attempt: Attempt, job: Job | None) -> str | None:
    """What ended the attempt that is no fault of the run."""
    if job is not None and job.preempt_time_s is not None:
        return "preempted"
    if attempt.lost_nodes:
        return f"lost {', '.join(attempt.lost_nodes)}"
    if attempt.asked is not None or attempt.stopped_at is not None:
        reason = attempt.asked or "it stopped by itself"
        # A run that never gets as far as a save before its time is up would be started for ever.
        in_vain = reason == "time limit" and attempt.reports and attempt.stopped_at is None and not attempt.progressed
        return None if in_vain else reason
    if job is not None and job.hit_time_limit and attempt.progressed:
        return "time limit"
    return None


def _after_failure(attempt: Attempt, job: Job | None, failures: int, limits: Limits, steps: int) -> Decision:
    what = _failure(attempt, job)
    if not attempt.reports:
        return Decision("failed", f"{what}, and does not say how far it was", False, 1)
    if attempt.step_after is None:
        return Decision("failed", f"{what} before a step was saved: another attempt would do the same", False, 1)
    count = 1 if attempt.progressed else failures + 1
    reason = f"{what} at step {attempt.step_after}"
    if count > 1:
        reason = f"{what}, {count} times in a row without a newer step than {attempt.step_after}"
    if count < limits.max_failures:
        return Decision("waiting", reason, True, count)
    if limits.fall_back and steps > 1:
        return Decision("waiting", f"{reason}, which is set aside", True, 0, fall_back=True)
    return Decision("failed", reason, False, count)


def _failure(attempt: Attempt, job: Job | None) -> str:
    if attempt.asked == "time limit" or (job is not None and job.hit_time_limit):
        return "out of time"
    if attempt.status < 0:
        return f"ended by signal {-attempt.status}"
    return f"exit status {attempt.status}"
