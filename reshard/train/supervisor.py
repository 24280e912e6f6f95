"""What a run hears from, and tells, `reshard slurm wrap`; and when its time is up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.environment import Orders
from reshard.errors import ReshardError
from reshard.storage.run_files import Control, Progress, lead_time_s, read_control, write_progress

_ASK_INTERVAL_S = 1.0
_TELL_INTERVAL_S = 10.0
_RECENT_STEPS = 20


class Supervisor:
    """Rank 0's side of it. Where nobody supervises, it knows the end of the job, if SLURM tells, and says nothing.

    What cannot be read or written is passed over: a run must not end because its supervisor's folder is gone.

    Args:
        orders: where the messages are, and when the job ends.
        checkpoints: the folder that the run saves in.
        ranks: its world size.
    """

    def __init__(self, orders: Orders, checkpoints: Path, ranks: int) -> None:
        self._folder = None if orders.attempt_folder is None else Path(orders.attempt_folder)
        self._control = Control(end_time_s=orders.end_time_s)
        self._asked_at_s = self._told_at_s = float("-inf")
        self._progress = Progress(str(checkpoints), ranks, time.time(), 0, time.time())
        self._step_times_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_began_s: float | None = None
        # A save in the background ends in another thread.
        self._lock = threading.Lock()
        self._tell()

    def asks(self) -> str | None:
        """Why the run should save and end now; None where it should not."""
        now_s = time.monotonic()
        if self._folder is not None and now_s - self._asked_at_s >= _ASK_INTERVAL_S:
            self._asked_at_s = now_s
            with contextlib.suppress(ReshardError):
                if heard := read_control(self._folder):
                    self._control = replace(heard, end_time_s=heard.end_time_s or self._control.end_time_s)
        if self._control.stop is not None:
            return self._control.stop
        end_time_s = self._control.end_time_s
        if end_time_s is not None and time.time() + self._lead_s() >= end_time_s:
            return "time limit"
        return None

    def _lead_s(self) -> float:
        progress = self._progress
        return lead_time_s(max(progress.save_s or 0.0, self._control.save_s or 0.0), progress.step_s)

    def resumed(self, step: int) -> None:
        """It went on from a step; 0 where it began anew."""
        self._tell(resumed_at=step, step=step)

    def stepped(self, step: int) -> None:
        """An optimizer step is done, and nothing was saved since the last."""
        now_s = time.monotonic()
        if self._step_began_s is not None:
            self._step_times_s.append(now_s - self._step_began_s)
        self._step_began_s = now_s
        longest_s = max(self._step_times_s, default=None)
        if now_s - self._told_at_s >= _TELL_INTERVAL_S:
            self._tell(step=step, step_s=longest_s)
        else:
            with self._lock:
                self._progress = replace(self._progress, step=step, step_s=longest_s)

    def saving(self) -> None:
        """The time until the next step is not a step's."""
        self._step_began_s = None

    def saved(self, step: int, save_s: float) -> None:
        """A step is committed. From any thread."""
        slowest_s = max(save_s, self._progress.save_s or 0.0)
        self._tell(saved_step=step, saved_time_s=time.time(), save_s=slowest_s)

    def stopped(self, step: int, reason: str | None) -> None:
        """It ends early, as it was asked to."""
        self._tell(stopped_at=step, step=step, stop_reason=reason)

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._progress = replace(self._progress, time_s=time.time(), **changes)
            self._told_at_s = time.monotonic()
            if self._folder is not None:
                with contextlib.suppress(ReshardError):
                    write_progress(self._folder, self._progress)
