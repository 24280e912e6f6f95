"""One attempt at a run, from the batch script: claim the run, start its command, watch it, and decide what comes next.

What is decided is in `reshard.cluster.policy`, and what is written in `reshard.storage.run_files`. The order matters
where the attempt may be killed between two lines: the run is claimed before anything is read of it, and what it is at
is written before the job is requeued, as the next attempt may begin at once.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.cluster import scheduler
from reshard.cluster.job import Job
from reshard.cluster.policy import EXIT_CONTINUES, EXIT_FAILED, EXIT_REPLACED, Attempt, Decision, Limits, decide
from reshard.cluster.watch import Watch, Watched
from reshard.environment import SlurmPlace, chain_name, unless_set
from reshard.errors import Fenced, ReshardError
from reshard.processes import Launch
from reshard.storage.commit import abandon_later, claim, holder
from reshard.storage.run_files import (
    DONE_FILE,
    Progress,
    State,
    add_event,
    attempt_folder,
    lead_time_s,
    mark_done,
    read_progress,
    read_state,
    write_state,
)
from reshard.storage.steps import committed_steps

_CONTROLLER_TRIES = 5
_REQUEUE_TRIES = 3
_NEWS_OF_NODES_S = 20.0
_LAST_RESORT_S = 120.0
_TERMINATION_S = 60.0


@dataclass(frozen=True)
class Terms:
    """What `reshard slurm wrap` was told.

    Attributes:
        run: the run's folder, which all nodes share.
        command: the program and its arguments.
        limits: how many failures, and what then.
        poll_s: how often to ask SLURM about the job.
    """

    run: Path
    command: Sequence[str]
    limits: Limits
    poll_s: float


def wrap(terms: Terms, place: SlurmPlace, tell: Callable[[str], None]) -> int:
    """Runs an attempt to its end, and puts the job into the queue again if the run goes on.

    Args:
        terms: what to do.
        place: the job.
        tell: for the words that go into the job's log.

    Returns:
        The exit code of the batch script; see `reshard.cluster.policy`.

    Raises:
        ReshardError: the run's folder cannot be used, or the command not be started.
    """
    try:
        if (code := _is_over(terms.run, tell)) is not None:
            return code
        return _Attempt(terms, place, tell).make()
    except Fenced as error:
        tell(f"another attempt has taken over: {error}")
        return EXIT_REPLACED


def _is_over(run: Path, tell: Callable[[str], None]) -> int | None:
    """The exit code of a job that has nothing to do; None where it has."""
    if (run / DONE_FILE).exists():
        tell(f"{run / DONE_FILE}: nothing is left to do; delete it to go on")
        return 0
    state, chain = read_state(run), chain_name()
    if chain is not None and state is not None and state.chain == chain and state.state in ("failed", "cancelled"):
        tell(f"the chain ends here: {state.state} ({state.reason}); submit anew to go on")
        return EXIT_FAILED
    return None


class _Attempt:
    def __init__(self, terms: Terms, place: SlurmPlace, tell: Callable[[str], None]) -> None:
        self._terms = terms
        self._run = terms.run
        self._place = place
        self._name = place.attempt
        self._tell = tell
        self._state = State("running", "training", self._name, chain_name())

    def make(self) -> int:
        claim(self._run, self._name)
        before = read_state(self._run)
        if before is not None:
            self._take_over(before)
        job = scheduler.find_job(self._place.job_id, tries=_CONTROLLER_TRIES)
        watch = Watch(
            self._run,
            self._name,
            self._place.job_id,
            job,
            save_s=self._state.save_s,
            poll_s=self._terms.poll_s,
            tell=self._tell,
            on_cancel=lambda: self._write("cancelled", "cancelled by its user"),
        )
        self._say_started(job, before)
        with Launch(self._terms.command, None, self._variables(job)) as launch:
            try:
                watched = watch.until_end(launch)
            except Fenced:
                # srun ends its tasks on all nodes when it is told so; killed, it would leave them.
                launch.send(signal.SIGTERM)
                _wait_for_end(launch, 30.0)
                raise
        return self._conclude(watched, watch)

    def _take_over(self, before: State) -> None:
        """What the run's state says of the attempts before, and what the last could not say any more."""
        self._state = replace(
            self._state,
            checkpoints=before.checkpoints,
            committed_step=before.committed_step,
            failures=before.failures,
            save_s=before.save_s,
            step_s=before.step_s,
        )
        if before.state == "running" and before.attempt != self._name:
            last = read_progress(attempt_folder(self._run, before.attempt))
            if last is not None:
                self._learn(last)
            self._event("lost", lost_attempt=before.attempt, **_losses(last, self._state, None))
            self._tell(f"attempt {before.attempt} ended without a word: killed, or its node is dead")
        if self._state.checkpoints is not None:
            # Before its ranks do so: from here on a former attempt that still trains cannot commit.
            claim(self._state.checkpoints, self._name)
            self._state = replace(self._state, committed_step=self._newest())

    def _say_started(self, job: Job | None, before: State | None) -> None:
        self._write("running", "training")
        self._event(
            "started",
            job=self._place.job_id,
            restart=self._place.restarts,
            nodes=None if job is None else job.nodes,
            gpus=None if job is None else job.gpus,
            committed_step=self._state.committed_step,
            idle_s=None if before is None else round(time.time() - before.time_s, 1),
        )
        where = "" if job is None else f" on {job.nodes}" + (f" with {job.gpus} GPUs" if job.gpus else "")
        newest = self._state.committed_step
        self._tell(f"attempt {self._name}{where}, " + ("from scratch" if newest is None else f"after step {newest}"))

    def _variables(self, job: Job | None) -> dict[str, str]:
        """For the command: where the attempt's messages are, and what launchers can use."""
        folder = attempt_folder(self._run, self._name)
        known = {"RESHARD_ATTEMPT": self._name, "RESHARD_ATTEMPT_FOLDER": str(folder)}
        lead_s = lead_time_s(self._state.save_s, self._state.step_s) if self._state.save_s else _LAST_RESORT_S
        # torchrun takes its options from PET_ variables; releases that do not have one of them do not read it.
        wishes = {
            "PET_RDZV_ID": self._name,
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
            "PET_SHUTDOWN_TIMEOUT": str(math.ceil(lead_s) + 30),
            # Another one for each attempt, so that it does not meet the remains of the last.
            "MASTER_PORT": str(20000 + (int(self._place.job_id) + 997 * self._place.restarts) % 20000),
        }
        if job is not None and (hosts := _hosts(job)):
            wishes["MASTER_ADDR"] = hosts[0]
        return {**known, **unless_set(wishes)}

    def _conclude(self, watched: Watched, watch: Watch) -> int:
        step_before = self._state.committed_step
        progress = watched.progress
        if progress is not None:
            if self._state.checkpoints is None and progress.resumed_at:
                step_before = progress.resumed_at
            self._learn(progress)
        job = scheduler.find_job(self._place.job_id, tries=_CONTROLLER_TRIES)
        attempt = Attempt(
            self._place.restarts,
            watched.status,
            watched.asked,
            reports=progress is not None,
            stopped_at=None if progress is None else progress.stopped_at,
            step_before=step_before,
            step_after=self._state.committed_step,
            lost_nodes=self._lost_nodes(job) if watched.status and watched.asked is None else (),
        )
        decision = decide(attempt, job, self._state.failures, self._terms.limits, len(self._steps()))
        if decision.fall_back:
            self._fall_back()
        self._state = replace(self._state, failures=decision.failures)
        self._say_ended(watched, decision)
        if decision.state == "done":
            mark_done(self._run, self._name, self._state.committed_step)
        if decision.requeue:
            return self._requeue(job, decision, watch)
        return decision.exit_code

    def _lost_nodes(self, job: Job | None) -> tuple[str, ...]:
        """The command's end may be the first sign of a node's, so SLURM is given time to notice."""
        if job is None or not job.is_running or job.node_count < 2:
            return ()
        until_s = time.monotonic() + _NEWS_OF_NODES_S
        while True:
            try:
                if lost := scheduler.lost_nodes(job.nodes):
                    return tuple(lost)
            except ReshardError:
                return ()
            if time.monotonic() > until_s:
                return ()
            time.sleep(1.0)

    def _fall_back(self) -> None:
        steps = self._steps()
        folder = Path(self._state.checkpoints or "")
        for path in abandon_later(folder, steps[-2], self._holder(folder)):
            self._tell(f"set aside as {path}")
        self._state = replace(self._state, committed_step=steps[-2])

    def _holder(self, folder: Path) -> str:
        """The name under which this attempt holds a folder."""
        owner = holder(folder)
        return owner if owner is not None and owner.startswith(self._name) else self._name

    def _requeue(self, job: Job | None, decision: Decision, watch: Watch) -> int:
        if job is not None and not job.may_requeue:
            how = "the next job of the chain goes on" if self._state.chain else "submit it again to go on"
            self._tell(f"SLURM may not requeue this job (Requeue=0): {how}")
            return decision.exit_code
        for turn in range(_REQUEUE_TRIES):
            try:
                scheduler.requeue(self._place.job_id)
                watch.until_terminated(_TERMINATION_S)
                return EXIT_CONTINUES
            except ReshardError as error:
                self._tell(f"cannot requeue: {error}")
                job = scheduler.find_job(self._place.job_id)
                if job is not None and job.restarts > self._place.restarts:
                    return EXIT_CONTINUES
                if turn + 1 < _REQUEUE_TRIES:
                    time.sleep(2.0)
        self._tell("the run is saved; submit the job again to go on")
        return EXIT_CONTINUES

    def _say_ended(self, watched: Watched, decision: Decision) -> None:
        losses = _losses(watched.progress, self._state, time.time())
        self._event(
            "ended",
            state=decision.state,
            reason=decision.reason,
            status=watched.status,
            ranks=watched.progress and watched.progress.ranks,
            committed_step=self._state.committed_step,
            failures=decision.failures or None,
            requeued=decision.requeue,
            **losses,
        )
        self._write(decision.state, decision.reason)
        what = {"done": "done", "failed": "FAILED", "cancelled": "cancelled", "waiting": "to be continued"}
        newest = self._state.committed_step
        parts = [f"{what[decision.state]}: {decision.reason}"]
        parts.append("no step saved" if newest is None else f"newest step {newest}")
        if losses["lost_steps"]:
            parts.append(f"{losses['lost_steps']} steps ({losses['lost_s']:.0f} s) lost")
        if decision.requeue:
            parts.append("requeueing")
        self._tell(", ".join(parts))

    def _learn(self, progress: Progress) -> None:
        self._state = replace(
            self._state,
            checkpoints=progress.checkpoints,
            save_s=progress.save_s or self._state.save_s,
            step_s=progress.step_s or self._state.step_s,
        )
        self._state = replace(self._state, committed_step=self._newest())

    def _steps(self) -> list[int]:
        folder = self._state.checkpoints
        return [] if folder is None else [entry.step for entry in committed_steps(folder)]

    def _newest(self) -> int | None:
        return max(self._steps(), default=None)

    def _write(self, state: str, reason: str) -> None:
        self._state = replace(self._state, state=state, reason=reason)
        write_state(self._run, self._state)

    def _event(self, event: str, **fields: object) -> None:
        add_event(self._run, self._name, event, **fields)


def _losses(progress: Progress | None, state: State, until_s: float | None) -> dict[str, int | float | None]:
    """Steps that were trained and not saved, and the time since the last that was: until then, or its last word."""
    if progress is None:
        return {"step": None, "lost_steps": None, "lost_s": None}
    lost = max(0, progress.step - max(state.committed_step or 0, progress.resumed_at or 0))
    lost_s = (until_s or progress.time_s) - (progress.saved_time_s or progress.began_s)
    return {"step": progress.step, "lost_steps": lost, "lost_s": round(lost_s, 1) if lost else 0.0}


def _hosts(job: Job) -> list[str]:
    try:
        return scheduler.host_names(job.nodes)
    except ReshardError:
        return []


def _wait_for_end(launch: Launch, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while launch.status is None and time.monotonic() < until_s:
        time.sleep(0.2)
