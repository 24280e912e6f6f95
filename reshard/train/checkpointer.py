"""When to save, which step to resume from, and how a run stops."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from reshard.dcp.background import Background
from reshard.dcp.ranks import Ranks, all_ranks
from reshard.environment import Orders, attempt_token
from reshard.errors import ReshardError, StorageError, UsageError
from reshard.formats import manifest
from reshard.storage.commit import abandon_later, claim
from reshard.storage.durable import write_atomic
from reshard.storage.retention import (
    Best,
    Retention,
    pin,
    plan_retention,
    record_fallback,
    record_resumed,
    remove,
    unpin,
)
from reshard.storage.steps import committed_steps, step_path
from reshard.storage.visibility import VISIBILITY_TIMEOUT_S
from reshard.train.boundary import any_asks
from reshard.train.capture import Captured, capture, small_state
from reshard.train.heartbeat import heartbeat
from reshard.train.resume.load import load_state
from reshard.train.resume.report import LoadReport
from reshard.train.resume.step_choice import faults_of, named_step, newest_sound
from reshard.train.rewarmup import Rewarmup, lost_moments, with_lost_optimizer
from reshard.train.sampler import ElasticSampler
from reshard.train.save import commit_step
from reshard.train.state import OPTIMIZER, TrainState
from reshard.train.supervisor import Supervisor

STOPPED_FILE = "STOPPED"


class Checkpointer:
    """Saves a run's state at intervals and when it is asked to stop, and brings it back.

    ::

        checkpointer = Checkpointer("run/checkpoints", state, interval=500, stop=StopSignal())
        checkpointer.resume()
        for ...:
            ...                          # one optimizer step
            if checkpointer.step():      # counts it; saves if it is time; True when the loop should end
                break
        checkpointer.save()              # the last steps, if the interval did not end there
        checkpointer.wait()              # with async_save=True: until they are on the disk

    Call ``step`` last: what a loop does after it (a schedule that moves once an epoch) is not in the step that it
    saved, and a run resumed there would not do it again.

    Every rank must make one and call its methods together. Making one claims the folder: an earlier attempt that is
    still alive can save there no more, and is told so (``Fenced``).

    A run that is set back, by resuming from an earlier step than its newest, leaves the later ones behind: at its next
    save they are renamed ``abandoned-step-<n>-...``, or the next start would take them for the newest of this run.

    What the environment asks for wins over the arguments (see :class:`reshard.environment.Orders`), so that ``reshard
    prove`` can have a run save elsewhere, and end early: ``step`` is True then, too, as soon as ``RESHARD_STEPS`` are
    done and saved.

    After each save the steps go that nothing keeps: not among the newest ``keep_latest_k``, no multiple of
    ``keep_every``, none of the best by ``keep_best``, not pinned. The newest sound step never goes, nor the one that
    the run was resumed from until it has saved another.

    With ``async_save`` the loop waits only while the state is copied to host memory; a thread writes, prunes and says
    so. The next save waits for it, and raises if it failed; so does ``wait``, to be called before the process group is
    destroyed. A step that is being written when the process dies was never there.

    Args:
        directory: the run's folder, shared by all ranks.
        state: what is saved and restored. ``step`` counts ``state.step``.
        interval: steps between saves.
        keep_latest_k: how many of the newest steps to keep.
        keep_every: keep the steps that are multiples of it.
        keep_best: a metric and how many steps to keep by it: ``("loss", 2)``, where the smallest is best, or
            ``("accuracy", 2, "max")``. Of its values at the saves (``step(metrics=...)``), NaN is never best.
        async_save: write in the background.
        stop: asked on every rank at each step; if any says yes, all save once and end. Such as ``StopSignal()``.
            Without it, too, the run ends when ``reshard slurm wrap`` asks it to, and before the job's time is up.
        attempt: a name for this start of the run; by default from the environment.
        visibility_timeout_s: as for :func:`reshard.save_state`.
    """

    def __init__(
        self,
        directory: str | Path,
        state: TrainState,
        *,
        interval: int,
        keep_latest_k: int = 3,
        keep_every: int | None = None,
        keep_best: tuple[str, int] | tuple[str, int, str] | None = None,
        async_save: bool = False,
        stop: Callable[[], bool] | None = None,
        attempt: str | None = None,
        visibility_timeout_s: float = VISIBILITY_TIMEOUT_S,
    ) -> None:
        orders = Orders.given()
        interval = orders.interval or interval
        if type(interval) is not int or interval < 1:
            raise UsageError("not a count", key="interval", expected="an int of at least 1", found=repr(interval))
        retention = Retention(keep_latest_k, keep_every, None if keep_best is None else Best.of(keep_best))
        if not str(directory):
            raise UsageError("no folder to save in", key="directory", found=repr(directory))
        state.validate()
        self.ranks = all_ranks()
        # Absolute, so that a later change of the working directory does not split the run over two folders; rank 0's,
        # so that all mean the same one.
        self.directory = self.ranks.broadcast(Path(orders.checkpoints or directory).expanduser().absolute())
        self.last_step = orders.steps
        self.state = state
        self.interval = interval
        self.retention = retention
        self.async_save = async_save
        self.stop = stop
        self.visibility_timeout_s = visibility_timeout_s
        self._background = Background.of(self.ranks)
        intervals = set(self.ranks.gather(interval))
        if len(intervals) > 1:
            raise UsageError("the ranks would save at different steps", key="interval", found=sorted(intervals))
        self.attempt = self.ranks.broadcast(attempt or attempt_token())
        self._saved_step: int | None = None
        self._saved_small: str | None = None
        self._measured: tuple[int, dict[str, float | None]] | None = None
        self._missed_metric = False
        self._samples: int | None = None
        with self.ranks.together():
            if self.ranks.rank == 0:
                claim(self.directory, self.attempt)
                with contextlib.suppress(FileNotFoundError):
                    (self.directory / STOPPED_FILE).unlink()
        # Rank 0 speaks for all; the others' hears and says nothing.
        heard = orders if self.ranks.rank == 0 else Orders()
        self._supervisor = Supervisor(heard, self.directory, self.ranks.size)

    def resume(
        self,
        step: int | str | Path | None = None,
        *,
        lost_optimizer: Literal["refuse", "rewarm"] = "refuse",
        **options: Any,
    ) -> LoadReport | None:
        """Restores the state from the newest sound step, or from the one named; None where there is none to resume.

        Args:
            step: a step's number, or a path; then it must be there and sound. Of another run's folder the newest
                sound step is taken. None takes the newest sound step of the run's own folder, and says why newer ones
                were passed over.
            lost_optimizer: ``rewarm`` goes on where the checkpoint has no optimizer state, and has every
                :class:`reshard.Rewarmup` among the schedulers climb back onto its schedule: full steps without moments
                spoil a run.
            options: of :func:`reshard.load_state`.

        Raises:
            UsageError: ``rewarm`` without a ``Rewarmup``, or the optimizer given up without ``rewarm``.
            CheckpointNotFound: a named step is not there.
            CheckpointUnsound: a named step is damaged, or all there are.
            ReshardError: as ``load_state``.
        """
        climbs = [each for each in self.state.schedulers.values() if isinstance(each, Rewarmup)]
        options = with_lost_optimizer(options, lost_optimizer, can_climb=bool(climbs))
        self.wait()
        folder: Path | None = None
        metrics: dict[str, float | None] = {}
        with self.ranks.together():
            if self.ranks.rank == 0:
                folder = self._chosen(step)
                if folder is not None:
                    self._keep_resumed(folder)
                    metrics = (manifest.read(folder).metrics or {}) if manifest.exists(folder) else {}
        folder, metrics = self.ranks.broadcast((folder, metrics))
        if folder is None:
            self.ranks.say(f"no checkpoint in {self.directory}: starting from scratch")
            self._supervisor.resumed(self.state.step)
            return None
        with heartbeat(self.ranks, f"loading {folder}"):
            report = load_state(folder, self.state, **options)
        if OPTIMIZER in report.missing:
            if lost_optimizer != "rewarm":
                # By a pattern such as "*", of which nobody could say before what it would leave out.
                raise lost_moments()
            for each in climbs:
                each.begin()
                self.ranks.warn(f"no optimizer state: the learning rate climbs back in {each.steps} steps")
        own = step_path(self.directory, report.step)
        is_own, is_as_saved = self.ranks.broadcast((own.resolve() == folder.resolve(), not options))
        self._saved_step = report.step if is_own and is_as_saved else None
        self._measured = (report.step, metrics) if is_own else None
        self._saved_small = small_state(self.state)
        self._samples = self._trained_on()
        self._supervisor.resumed(report.step)
        return report

    def roll_back(self, step: int, **options: Any) -> LoadReport:
        """Goes back to an earlier step of this run: restores it, and sets the later ones aside, deleting nothing.

        They are renamed ``abandoned-step-<n>-...`` at once, so that no later start takes one of them for the newest.

        Args:
            step: a committed step of the run's folder.
            options: of :func:`reshard.load_state`.

        Raises:
            CheckpointNotFound: it is not there.
            CheckpointUnsound: it is damaged; nothing was set aside.
            ReshardError: as ``load_state``; nothing was set aside.
        """
        report = self.resume(step, **options)
        assert report is not None
        self._abandon_later(step)
        with self.ranks.together():
            if self.ranks.rank == 0:
                # Until now, so that no save that is under way takes the step that is gone back to.
                record_fallback(self.directory, None)
        return report

    def _abandon_later(self, step: int) -> None:
        with self.ranks.together():
            if self.ranks.rank == 0:
                for path in abandon_later(self.directory, step, self.attempt):
                    self.ranks.warn(f"later than step {step}, to which the run was set back: kept as {path}")

    def step(self, metrics: Mapping[str, float | None] | None = None) -> bool:
        """Counts an optimizer step that is done. Saves if it is time. True when the loop should end.

        A collective: the ranks agree on a stop here, so all save the same step.

        Args:
            metrics: as ``save`` takes them; recorded if this step is saved.
        """
        self.state.step += 1
        samples_before, self._samples = self._samples, self._trained_on()
        self._supervisor.stepped(self.state.step)
        asked = self._asked()
        is_over = self.last_step is not None and self.state.step >= self.last_step
        if stop := any_asks(self.ranks, asked, self.state.step, self._samples, samples_before):
            self.ranks.say(f"asked to stop: saving step {self.state.step}")
        if stop or is_over or self.state.step % self.interval == 0:
            self.save(metrics)
        if stop or is_over:
            self.wait()
        if stop:
            self._mark_stopped()
        return stop or is_over

    def must_stop(self) -> bool:
        """Whether any rank was asked to stop. A collective.

        For whatever takes longer than there may be time to save, such as an evaluation: where it is true, cut that
        short and go on to the next ``step``, which saves and ends the run.
        """
        return bool(self.ranks.maxima([self._asked()])[0])

    def _asked(self) -> bool:
        return self._supervisor.asks() is not None or (self.stop is not None and self.stop())

    def save(self, metrics: Mapping[str, float | None] | None = None) -> Path:
        """Saves now, unless this step is saved as it is; returns its folder. Then removes the steps that nothing keeps.

        With ``async_save`` it returns when the state is copied; the folder is there after ``wait``.

        A step that is saved already is saved again, all of it, if anything but a tensor has changed since, such as a
        schedule that moved at the end of an epoch, or a metric.

        Args:
            metrics: what was measured at this step, numbers by name, for ``keep_best`` and whoever reads the manifest.
                Rank 0's are recorded, beside those that are with this step already.

        Raises:
            UsageError: a metric is not a number. Nothing was saved.
            ReshardError: as ``save_state``; or what was being saved in the background failed, and nothing is saved now.
        """
        step = self.state.step
        with self.ranks.together():
            given = manifest.as_metrics(metrics)
        before = self._measured[1] if self._measured is not None and self._measured[0] == step else {}
        measured = {**before, **given}
        if self._saved_step == step:
            has_changed = measured != before or self._saved_small != small_state(self.state)
            if not self.ranks.maxima([has_changed])[0]:
                return step_path(self.directory, step)
        self.wait()
        began = time.monotonic()
        self._supervisor.saving()
        self._abandon_later(step)
        captured = capture(self.state, self.ranks, self.attempt, measured)
        if self.async_save:
            copied = replace(captured, local=self._background.copy(captured.local))
            self._background.start(lambda ranks: self._write(copied, ranks, began))
        else:
            self._write(captured, self.ranks, began)
        self._saved_step = step
        self._measured = step, measured
        self._saved_small = small_state(self.state)
        return step_path(self.directory, step)

    def wait(self) -> None:
        """Waits until what is being saved in the background is committed. Every rank must call it.

        Raises:
            ReshardError: it failed, and the steps are as they were before.
        """
        try:
            self._background.finish()
        except ReshardError:
            self._saved_step = None
            raise

    def _write(self, captured: Captured, ranks: Ranks, began: float) -> None:
        with heartbeat(ranks, f"saving step {captured.manifest.step}"):
            path = commit_step(
                self.directory, captured, ranks, replace=True, visibility_timeout_s=self.visibility_timeout_s
            )
        save_s = time.monotonic() - began
        ranks.say(f"saved step {captured.manifest.step} to {path} in {save_s:.1f} s")
        self._supervisor.saved(captured.manifest.step, save_s)
        # Deleting takes long, and the ranks that do not delete are to wait here, not in a collective of the next step.
        with ranks.together():
            if ranks.rank == 0:
                self._prune()

    def pin(self, step: int) -> None:
        """Keeps a saved step until ``unpin``: no retention removes it, of this run, a later start or ``reshard prune``.

        Raises:
            CheckpointNotFound: the step is not there.
            ReshardError: on every rank, if the file system refused.
        """
        self.wait()
        with self.ranks.together():
            if self.ranks.rank == 0:
                pin(self.directory, step)

    def unpin(self, step: int) -> None:
        """Leaves a step to retention again; one that is not pinned is fine.

        Raises:
            ReshardError: on every rank, if the file system refused.
        """
        with self.ranks.together():
            if self.ranks.rank == 0:
                unpin(self.directory, step)

    def _prune(self) -> None:
        try:
            # What was just saved was held against its index, so the run needs the step that it came from no more.
            record_resumed(self.directory, None)
            plan = plan_retention(
                self.directory, self.retention, lambda folder: not faults_of(folder), value_of=manifest.metric
            )
            remove(plan)
        except StorageError as fault:
            # The step is safe. What could not be deleted is tried again at the next save or start.
            self.ranks.warn(f"older steps are kept for now: {fault}")
            return
        best = self.retention.keep_best
        if best is not None and not plan.values and not self._missed_metric:
            self._missed_metric = True
            told = f"{{{best.metric!r}: ...}}"
            self.ranks.warn(f"no step has a value of {best.metric!r} to keep the best by: call step(metrics={told})")

    def _chosen(self, step: int | str | Path | None) -> Path | None:
        if step is None:
            return newest_sound(self.directory, self.ranks.warn)
        return named_step(self.directory, step, self.ranks.warn)

    def _keep_resumed(self, folder: Path) -> None:
        """Has every process keep the step to resume from, where it is not the newest, until another is saved."""
        earlier = committed_steps(self.directory)[:-1]
        set_back_to = [entry.step for entry in earlier if entry.path.resolve() == folder.resolve()]
        record_resumed(self.directory, set_back_to[0] if set_back_to else None)

    def _trained_on(self) -> int | None:
        return self.state.data.samples if isinstance(self.state.data, ElasticSampler) else None

    def _mark_stopped(self) -> None:
        mine = self._supervisor.asks() or getattr(self.stop, "received", None)
        reason = next((name for name in self.ranks.gather(mine) if name), None)
        with self.ranks.together():
            if self.ranks.rank == 0:
                mark = {"step": self.state.step, "reason": reason, "attempt": self.attempt}
                write_atomic(self.directory / STOPPED_FILE, json.dumps(mark).encode() + b"\n")
        self._supervisor.stopped(self.state.step, reason)
        self.ranks.say(f"stopped at step {self.state.step}" + (f" on {reason}" if reason else ""))
