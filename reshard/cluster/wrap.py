"""One attempt at a run, from the batch script: claim the run, start its command, watch it, and decide what comes next.

What is decided is in `reshard.cluster.policy`, and what is written in `reshard.storage.run_files`. The order matters
where the attempt may be killed between two lines: the run is claimed before anything is read of it, and what it is at
is written before the job is requeued, as the next attempt may begin at once.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.cluster import scheduler
from reshard.cluster.job import Job
from reshard.cluster.ledger import Ledger
from reshard.cluster.policy import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REPLACED,
    Attempt,
    Decision,
    Limits,
    decide,
    may_requeue_now,
)
from reshard.cluster.signals import StopSignal
from reshard.cluster.task import ASKING
from reshard.cluster.watch import Watch, Watched
from reshard.environment import SlurmPlace, chain_name, unless_set
from reshard.errors import Fenced, ReshardError, StorageError, UsageError
from reshard.processes import Launch
from reshard.storage.commit import claim
from reshard.storage.run_files import DONE_FILE, attempt_folder, lead_time_s, read_state

_FIRST_TRIES, _LAST_TRIES = 2, 5
_PAUSE_S = 2.0
_REQUEUE_POLLS = 20
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
    # One for each, as of several all are to be heard; and before anything that takes time.
    signals = {number: StopSignal([number]) for number in ASKING}
    try:
        if (code := _is_over(terms.run, tell)) is not None:
            return code
        return _Attempt(terms, place, tell, signals).make()
    except Fenced as error:
        tell(f"another attempt has taken over: {error}")
        return EXIT_REPLACED


def _is_over(run: Path, tell: Callable[[str], None]) -> int | None:
    """The exit code of a job that has nothing to do; None where it has."""
    if (run / DONE_FILE).exists():
        tell(f"{run / DONE_FILE}: nothing is left to do; delete it to go on")
        return EXIT_DONE
    state, chain = read_state(run), chain_name()
    if chain is not None and state is not None and state.chain == chain and state.state in ("failed", "cancelled"):
        tell(f"the chain ends here: {state.state} ({state.reason}); submit anew to go on")
        return EXIT_FAILED
    return None


class _Attempt:
    def __init__(
        self,
        terms: Terms,
        place: SlurmPlace,
        tell: Callable[[str], None],
        signals: Mapping[signal.Signals, StopSignal],
    ) -> None:
        self._terms = terms
        self._tell = tell
        self._job = scheduler.find_job(place.address, tries=_FIRST_TRIES)
        if self._job is not None:
            # The environment may have another job's count, from which this one was submitted.
            place = replace(place, restarts=self._job.restarts)
        self._place = place
        self._name = place.attempt
        claim(terms.run, self._name)
        self._ledger = Ledger(terms.run, self._name, chain_name(), tell)
        self._watch = Watch(
            terms.run,
            self._name,
            place.address,
            self._job,
            signals,
            save_s=self._ledger.state.save_s,
            poll_s=terms.poll_s,
            tell=tell,
            record=self._ledger.add,
            on_cancel=self._note_cancelled,
        )

    def make(self) -> int:
        """The batch script's exit code."""
        self._say_started()
        self._ledger.started(self._place.address, self._job)
        try:
            launched = Launch(self._terms.command, None, self._variables())
        except UsageError as error:
            self._ledger.say("failed", str(error))
            raise
        with launched as launch:
            try:
                watched = self._watch.until_end(launch)
            except Fenced:
                # srun ends its tasks on all nodes when it is told so; killed, it would leave them.
                launch.send(signal.SIGTERM)
                launch.wait(_TERMINATION_S)
                raise
            code = self._conclude(watched)
            # One that did not end in time may yet save something before it is killed.
            launch.wait(_TERMINATION_S)
            return code

    def _variables(self) -> dict[str, str]:
        """For the command: where the attempt's messages are, and what launchers can use."""
        folder = attempt_folder(self._terms.run, self._name)
        known = {
            "RESHARD_ATTEMPT": self._name,
            "RESHARD_ATTEMPT_FOLDER": str(folder),
            "RESHARD_ATTEMPT_JOB": self._place.job_id,
        }
        state = self._ledger.state
        lead_s = lead_time_s(state.save_s, state.step_s) if state.save_s else _LAST_RESORT_S
        # torchrun takes its options from PET_ variables; releases that do not have one of them do not read it.
        wishes = {
            "PET_RDZV_ID": self._name,
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
            "PET_SHUTDOWN_TIMEOUT": str(math.ceil(lead_s) + 30),
            # Another one for each attempt, so that it does not meet the remains of the last.
            "MASTER_PORT": str(20000 + (int(self._place.job_id) + 997 * self._place.restarts) % 20000),
        }
        if self._job is not None and (hosts := _hosts(self._job)):
            wishes["MASTER_ADDR"] = hosts[0]
        return {**known, **unless_set(wishes)}

    def _note_cancelled(self) -> None:
        try:
            self._ledger.say("cancelled", "cancelled by its user")
        except StorageError as error:
            self._tell(f"cannot write what the run is at: {error}")

    def _conclude(self, watched: Watched) -> int:
        ledger, progress = self._ledger, watched.progress
        if progress is not None:
            ledger.learn(progress)
        job = scheduler.find_job(self._place.address, tries=_LAST_TRIES)
        lost_nodes: tuple[str, ...] = ()
        if watched.status and watched.asked is None:
            lost_nodes = _lost_nodes(job)
            # Time has passed, in which its user may have cancelled it.
            job = scheduler.find_job(self._place.address, tries=_LAST_TRIES)
        attempt = Attempt(
            self._place.restarts,
            watched.status,
            watched.asked or (progress.stop_reason if progress else None),
            is_hearsay=watched.is_hearsay,
            reports=progress is not None,
            stopped_at=progress.stopped_at if progress else None,
            best_step=ledger.state.best_step,
            steps=ledger.steps(),
            lost_nodes=lost_nodes,
        )
        decision = decide(attempt, job, ledger.history, self._terms.limits)
        is_counted = decision.history != ledger.history
        may_requeue = job is None or job.may_requeue
        try:
            losses = ledger.ended(decision, watched.status, progress, requeue=decision.requeue and may_requeue)
        except StorageError as error:
            self._tell(f"cannot write what the run is at: {error}")
            # An interruption leaves nothing to remember; a failure that is not counted might be tried for ever.
            if not decision.requeue or is_counted:
                return error.exit_code
            losses = ledger.losses(progress, time.time())
        self._say_ended(decision, losses, requeue=decision.requeue and may_requeue)
        if decision.requeue and may_requeue:
            self._requeue()
        elif decision.requeue:
            how = "the next job of the chain goes on" if ledger.state.chain else "submit it again to go on"
            self._tell(f"SLURM may not requeue this job (Requeue=0): {how}")
        return decision.exit_code

    def _requeue(self) -> None:
        """While SLURM does not answer, again: the job has its nodes, and somebody may wait for the run for days."""
        until_s = time.monotonic() + _REQUEUE_POLLS * self._terms.poll_s
        said = None
        while True:
            try:
                job = scheduler.show_job(self._place.address)
                if job.restarts > self._place.restarts:
                    return
                if not may_requeue_now(job):
                    self._note_cancelled()
                    self._tell("cancelled by its user meanwhile: not requeued")
                    return
                scheduler.requeue(self._place.address)
                self._watch.until_terminated(_TERMINATION_S)
                return
            except ReshardError as error:
                if str(error) != said:
                    said = str(error)
                    self._tell(f"cannot requeue, trying again: {error}")
                if time.monotonic() > until_s:
                    break
                time.sleep(_PAUSE_S)
        self._tell("not requeued; what is saved is safe: submit the job again to go on")

    def _say_started(self) -> None:
        if self._ledger.lost_attempt is not None:
            lost = self._ledger.lost_attempt
            self._tell(f"attempt {lost} ended without a word: killed, replaced, or its node is dead")
        where, job = "", self._job
        if job is not None:
            where = f" on {job.nodes}" + (f" with {job.gpus} GPUs" if job.gpus else "")
        newest = self._ledger.state.committed_step
        self._tell(f"attempt {self._name}{where}, " + ("from scratch" if newest is None else f"after step {newest}"))

    def _say_ended(self, decision: Decision, losses: Mapping[str, float | None], *, requeue: bool) -> None:
        what = {"done": "done", "failed": "FAILED", "cancelled": "stopped", "waiting": "to be continued"}
        newest = self._ledger.state.committed_step
        parts = [f"{what[decision.state]}: {decision.reason}"]
        parts.append("no step saved" if newest is None else f"newest step {newest}")
        if losses["lost_steps"]:
            parts.append(f"{losses['lost_steps']} steps ({losses['lost_s']:.0f} s) lost")
        if requeue:
            parts.append("requeueing")
        self._tell(", ".join(parts))


def _lost_nodes(job: Job | None) -> tuple[str, ...]:
    """The command's end may be the first sign of a node's, so SLURM is given time to notice."""
    if job is None or job.node_count < 2:
        return ()
    # Of a job that SLURM is ending it knows already, and little time is left.
    until_s = time.monotonic() + (_NEWS_OF_NODES_S if job.is_running else 0.0)
    while True:
        try:
            if lost := scheduler.lost_nodes(job.nodes):
                return tuple(lost)
        except ReshardError:
            return ()
        if time.monotonic() > until_s:
            return ()
        time.sleep(_PAUSE_S)


def _hosts(job: Job) -> list[str]:
    try:
        return scheduler.host_names(job.nodes)
    except ReshardError:
        return []
