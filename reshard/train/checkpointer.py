"""When to save, which step to resume from, and how a run stops."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reshard.environment import attempt_token
from reshard.errors import CheckpointNotFound, CheckpointUnsound, UsageError
from reshard.storage.commit import claim
from reshard.storage.durable import write_atomic
from reshard.storage.steps import StepFolder, committed_steps, prune, step_path, uncommitted
from reshard.train.load import load_state
from reshard.train.ranks import all_ranks
from reshard.train.report import LoadReport
from reshard.train.sampler import ElasticSampler
from reshard.train.save import save_state
from reshard.train.state import TrainState
from reshard.verify.structure import structure_faults

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

    Every rank must make one and call its methods together.

    Args:
        directory: the run's folder, shared by all ranks.
        state: what is saved and restored. ``step`` counts ``state.step``.
        interval: steps between saves.
        keep_latest_k: how many steps to keep. The newest sound one is never removed.
        stop: asked on every rank at each step; if any says yes, all save once and end. Such as ``StopSignal()``.
        attempt: a name for this start of the run; by default from the environment.
    """

    def __init__(
        self,
        directory: str | Path,
        state: TrainState,
        *,
        interval: int,
        keep_latest_k: int = 3,
        stop: Callable[[], bool] | None = None,
        attempt: str | None = None,
    ) -> None:
        if interval < 1 or keep_latest_k < 1:
            raise UsageError("interval and keep_latest_k are at least 1", found=f"{interval} and {keep_latest_k}")
        self.directory = Path(directory)
        self.state = state
        self.interval = interval
        self.keep_latest_k = keep_latest_k
        self.stop = stop
        self._ranks = all_ranks()
        self.attempt = self._ranks.broadcast(attempt or attempt_token())
        self._saved_step: int | None = None
        self._samples: int | None = None
        with self._ranks.together():
            if self._ranks.rank == 0:
                claim(self.directory, self.attempt)
                with contextlib.suppress(FileNotFoundError):
                    (self.directory / STOPPED_FILE).unlink()

    def resume(self, step: int | str | Path | None = None, **options: Any) -> LoadReport | None:
        """Restores the state from the newest sound step, or from the one named; None where there is none to resume.

        Args:
            step: a step's number, or a path (a step folder, or another run's folder); then it must be there and sound.
                None takes the newest sound step of the run's own folder, and says why newer ones were passed over.
            options: of :func:`reshard.load_state`.

        Raises:
            CheckpointNotFound: a named step is not there.
            CheckpointUnsound: a named step is damaged, or all there are.
            ReshardError: as ``load_state``.
        """
        if step is None:
            folder = self._newest_sound()
            if folder is None:
                self._ranks.say(f"no checkpoint in {self.directory}: starting from scratch")
                return None
        else:
            folder = step_path(self.directory, step) if isinstance(step, int) else Path(step).expanduser()
            self._check_named(folder)
        report = load_state(folder, self.state, **options)
        self._saved_step = report.step
        self._samples = self._trained_on()
        return report

    def step(self) -> bool:
        """Counts an optimizer step that is done. Saves if it is time. True when the loop should end.

        A collective: the ranks agree on a stop here, so all save the same step.
        """
        self.state.step += 1
        self._check_position()
        stop = self._ranks.any(self.stop is not None and self.stop())
        if stop or self.state.step % self.interval == 0:
            self.save()
        if stop:
            self._mark_stopped()
        return stop

    def save(self) -> Path:
        """Saves now, unless this step is saved already; returns its folder. Then removes steps beyond the newest k."""
        path = step_path(self.directory, self.state.step)
        if self._saved_step == self.state.step:
            return path
        path = save_state(self.directory, self.state, attempt=self.attempt, replace=True)
        self._saved_step = self.state.step
        self._ranks.say(f"saved step {self.state.step} to {path}")
        with self._ranks.together():
            if self._ranks.rank == 0:
                prune(self.directory, self.keep_latest_k, lambda folder: not structure_faults(folder))
        return path

    def _newest_sound(self) -> Path | None:
        chosen: Path | None = None
        with self._ranks.together():
            if self._ranks.rank == 0:
                chosen = self._choose(committed_steps(self.directory))
        return self._ranks.broadcast(chosen)

    def _choose(self, steps: list[StepFolder]) -> Path | None:
        for leftover in uncommitted(self.directory):
            self._ranks.warn(f"passed over {leftover.name}: it was never committed")
        reasons = []
        for folder in reversed(steps):
            faults = structure_faults(folder.path)
            if not faults:
                return folder.path
            reasons.append(f"{folder.path.name}: {faults[0]}")
            self._ranks.warn(f"passed over {reasons[-1]}")
        if reasons:
            raise CheckpointUnsound(
                "every step there is damaged",
                path=self.directory,
                hint="restore one from a copy, or start from scratch in an empty folder",
                details=reasons,
            )
        return None

    def _check_named(self, folder: Path) -> None:
        with self._ranks.together():
            if self._ranks.rank != 0:
                return
            if not folder.is_dir():
                there = [entry.step for entry in committed_steps(folder.parent)]
                raise CheckpointNotFound(
                    "the step to resume from is not there",
                    path=folder,
                    hint=f"there are steps {there}" if there else "nothing is committed beside it either",
                )
            if not committed_steps(folder) and (faults := structure_faults(folder)):
                raise CheckpointUnsound(faults[0], path=folder, details=faults[1:], hint="resume from another step")
            own = committed_steps(self.directory)
            if own and own[-1].path.resolve() != folder.resolve():
                self._ranks.warn(
                    f"resuming from {folder}, as asked; {self.directory} already holds {own[-1].path.name}, "
                    "which an automatic resume would take"
                )

    def _trained_on(self) -> int | None:
        return self.state.data.samples if isinstance(self.state.data, ElasticSampler) else None

    def _check_position(self) -> None:
        """A sampler that stands still would make a resume repeat everything, silently."""
        samples = self._trained_on()
        if samples is not None and samples == (self._samples or 0):
            raise UsageError(
                "the data position did not move in this step",
                key="data",
                expected=f"more than {samples} samples",
                found=samples,
                hint="pass sampler= to accumulate, or call sampler.advance() once a step, before checkpointer.step()",
            )
        self._samples = samples

    def _mark_stopped(self) -> None:
        reason = getattr(self.stop, "received", None)
        reasons = [name for name in self._ranks.gather(reason) if name]
        with self._ranks.together():
            if self._ranks.rank == 0:
                mark = {"step": self.state.step, "reason": reasons[0] if reasons else None, "attempt": self.attempt}
                write_atomic(self.directory / STOPPED_FILE, json.dumps(mark).encode() + b"\n")
        self._ranks.say(f"stopped at step {self.state.step}" + (f" on {reasons[0]}" if reasons else ""))
