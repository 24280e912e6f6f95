"""Watching whether the loss comes back after a resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from reshard.environment import Orders
from reshard.errors import CheckpointNotFound, UsageError
from reshard.storage.retention import record_fallback, recorded_fallback
from reshard.storage.steps import step_path
from reshard.train.checkpointer import Checkpointer
from reshard.verify.traces.trace import TraceRow, read_trace
from reshard.verify.triage.advice import complete_step
from reshard.verify.triage.shape import CONTINUOUS, LOW, MID_RUN, MOST_STEPS, SPIKE, Shape, classify
from reshard.verify.triage.trend import FEWEST, fit_trend


@dataclass(frozen=True)
class Recovery:
    """What became of the loss in the window after a resume.

    Args:
        came_back: whether it is where it was heading before.
        shape: what `reshard triage` would call it.
        resume_step: the step that the run resumed from.
        return_to: where it stayed too high, the committed step to go back to; None where there is none.
    """

    came_back: bool
    shape: str
    resume_step: int
    return_to: int | None


class RecoveryMonitor:
    """Says, a number of steps after a resume, whether the loss came back, and if not, which step to go back to.

    ::

        checkpointer.resume()
        monitor = reshard.RecoveryMonitor(checkpointer, "run/trace.jsonl", window=200)
        while ...:
            for micro_batches in sampler.steps(loader):
                ...                                                 # one optimizer step
                recovery = monitor.step(loss)                       # None but once, at the end of the window
                if recovery is not None and recovery.return_to is not None:
                    checkpointer.roll_back(recovery.return_to)      # or leave it at what was said
                    monitor = reshard.RecoveryMonitor(checkpointer, "run/trace.jsonl", window=200)
                    break                                           # the sampler goes on from its earlier position
                if checkpointer.step():
                    return

    Every rank must make one after ``resume`` and call ``step`` at each optimizer step. Where the run begins from
    scratch, or the trace has too little of it before the resume to know a trend, there is nothing to say: a trace of
    at least twelve steps is needed, and some hundreds are better.

    The step to go back to is the newest before the resume that is sound and lacks nothing: what the run resumed from
    has been tried. No retention removes it until the loss is back, or the run; ``Checkpointer.unpin`` gives it up. A
    run that is resumed again before that is held against its past before the first of the resumes. A loss that is too
    low is told, and nothing is gone back to for it: epochs that end and learning rates that fall do that, too.

    Args:
        checkpointer: the run's, after ``resume``.
        trace: the file that the run's ``TraceWriter`` writes.
        window: how many steps to wait.

    Raises:
        UsageError: ``window`` is no count, or the trace cannot be read.
        ReshardError: on every rank, if the file system refused.
    """

    def __init__(self, checkpointer: Checkpointer, trace: str | Path, window: int = 200) -> None:
        if type(window) is not int or window < 1:
            raise UsageError("not a count", key="window", expected="an int of at least 1", found=repr(window))
        self.window = window
        self._ranks = checkpointer.ranks
        self._directory = checkpointer.directory
        self._resume_step = self._step = checkpointer.state.step
        self._last_step = self._step + window
        self._fallback: int | None = None
        self._before: list[TraceRow] = []
        self._losses: dict[int, float] = {}
        with self._ranks.together():
            if self._ranks.rank == 0:
                self._begin(Path(Orders.given().trace or trace).expanduser())
        self.is_watching = self._ranks.broadcast(bool(self._before))

    def step(self, loss: float) -> Recovery | None:
        """Takes the loss of an optimizer step, the mean over the global batch; at the end of the window it tells.

        A collective in that one step; rank 0's losses count.

        Raises:
            ReshardError: on every rank, if the file system refused.
        """
        if not self.is_watching:
            return None
        self._step += 1
        self._losses[self._step] = float(loss)
        if self._step < self._last_step:
            return None
        self.is_watching = False
        found: Recovery | None = None
        with self._ranks.together():
            if self._ranks.rank == 0:
                found = self._judge()
                if found.came_back:
                    record_fallback(self._directory, None)
        return self._ranks.broadcast(found)

    def _begin(self, trace: Path) -> None:
        """Rank 0: finds what the loss is held against, and the step to go back to."""
        rows = [row for row in read_trace(trace) if row.step <= self._step] if trace.exists() else []
        earlier = recorded_fallback(self._directory)
        if earlier is not None and self._step - MOST_STEPS < earlier[1] < self._step:
            self._fallback, self._resume_step = earlier
        else:
            before = self._resume_step - 1
            here = step_path(self._directory, self._resume_step)
            self._fallback = complete_step(here, before) if before > 0 else None
        history = [row for row in rows if row.step <= self._resume_step and math.isfinite(row.loss)]
        if len(history) >= FEWEST:
            self._before = history
            self._losses = {row.step: row.loss for row in rows if row.step > self._resume_step}
        else:
            self._fallback = None
        try:
            record_fallback(self._directory, self._fallback, self._resume_step)
        except CheckpointNotFound:
            # Removed this very moment, by hand or by another process.
            self._fallback = None

    def _judge(self) -> Recovery:
        trend = fit_trend([row.step for row in self._before], [row.loss for row in self._before])
        steps = sorted(self._losses)
        shape = classify(steps, [self._losses[step] for step in steps], trend, self._resume_step)
        came_back = shape.name == CONTINUOUS or (shape.name in (SPIKE, MID_RUN) and shape.back is not None)
        return_to = None if came_back or shape.name == LOW else self._fallback
        recovery = Recovery(came_back, shape.name, self._resume_step, return_to)
        (self._ranks.say if came_back else self._ranks.warn)(_told(recovery, shape, steps[-1]))
        return recovery


def _told(recovery: Recovery, shape: Shape, last_step: int) -> str:
    at = f"step {last_step}: the loss"
    since = f"after the resume at step {recovery.resume_step}"
    if shape.name == CONTINUOUS:
        return f"{at} went on as it had {since}"
    if recovery.came_back:
        return f"{at} came back {since}: off at step {shape.onset}, back at step {shape.back} ({shape.name})"
    peak = f"by {shape.peak:+.3g} at step {shape.peak_step}" if math.isfinite(shape.peak) else "and no number"
    off = f"off from step {shape.onset} on, {peak} ({shape.name})"
    if shape.name == LOW:
        return f"{at} is too low {since}: {off}; reshard triage looks whether samples are seen again"
    if recovery.return_to is None:
        return f"{at} did not come back {since}: {off}; no earlier step is there to go back to"
    return f"{at} did not come back {since}: {off}; go back with Checkpointer.roll_back({recovery.return_to})"
