"""Runs the legs of a proof: real processes, real kills, each leg resumed from what the one before left on the disk.

What a run is told, and must honour, is in its environment: where to save, where to trace, how many steps
(:class:`reshard.environment.Orders`). The library's ``Checkpointer`` and ``TraceWriter`` do so by themselves.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.environment import Orders
from reshard.processes import Launch, is_running
from reshard.storage.durable import storage_errors
from reshard.storage.steps import committed_steps
from reshard.verify.prove.follow import TraceFollower
from reshard.verify.prove.legs import Leg

POLL_S = 0.02
# A launcher whose workers were killed has nothing to wait for; torchrun takes a few seconds over it.
AFTERMATH_S = 60.0

OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Place:
    """Where a run keeps its things: the one without a break has its own, and so has the one that is killed."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def trace(self) -> Path:
        return self.folder / "trace.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Demand:
    """What is asked of every leg.

    Attributes:
        command: with ``{ranks}`` in it.
        steps: of the whole run.
        interval: between saves; None leaves it to the run.
        number: the signal that kills.
        patience_s: how long a leg may go without a step.
    """

    command: Sequence[str]
    steps: int
    interval: int | None = None
    number: signal.Signals = signal.SIGKILL
    patience_s: float = 1800.0


@dataclass
class LegResult:
    """What became of a leg.

    Attributes:
        ranks: the world size.
        committed: the newest step that was there to resume from; None where none of ours was.
        resumed_at: the step after which it went on, by its trace; 0 from scratch, None if it never did a step.
        killed_at: the last step that it did before it was killed, or on being asked to stop; None if it was not killed.
        last: the last step that it did.
        restored: what the run itself said about its resume, if it did.
        faults: what is wrong with it.
    """

    ranks: int
    committed: int | None = None
    resumed_at: int | None = None
    killed_at: int | None = None
    last: int | None = None
    restored: str | None = None
    faults: list[str] = field(default_factory=list)


def run_leg(
    demand: Demand, leg: Leg, place: Place, *, is_first: bool, on_step: OnStep = lambda step: None
) -> LegResult:
    """Starts a leg, kills it where it is to be killed, and waits for its end. Nothing that it started is left over.

    Raises:
        UsageError: the command cannot be started.
        StorageError: its trace or its log cannot be read or written.
    """
    with storage_errors("make the folder", place.folder):
        place.folder.mkdir(parents=True, exist_ok=True)
    steps = committed_steps(place.checkpoints)
    result = LegResult(leg.ranks, committed=steps[-1].step if steps else None)
    orders = Orders(str(place.checkpoints), str(place.trace), demand.steps, demand.interval)
    logged_bytes = place.log.stat().st_size if place.log.exists() else 0
    trace = TraceFollower(place.trace)
    with Launch(leg.command(demand.command), place.log, orders.variables()) as launch:
        killed_at, fault = _watch(launch, trace, demand, leg.kill_at, on_step)
        status = launch.status
    trace.look()
    with storage_errors("read the log", place.log):
        said = place.log.read_bytes()[logged_bytes:].decode(errors="replace").splitlines()
    result.restored = next((line.strip() for line in said if "resumed at step" in line), None)
    result.last = trace.last
    result.resumed_at = None if trace.first is None else trace.first - 1
    result.killed_at = killed_at
    if fault:
        result.faults.append(fault)
    elif killed_at is None:
        result.faults += _end_faults(demand, leg, result, status, f"{_last_words(said)} ({place.log})")
    result.faults += _start_faults(result, demand.steps, is_first)
    return result


def _watch(
    launch: Launch, trace: TraceFollower, demand: Demand, kill_at: int | None, on_step: OnStep
) -> tuple[int | None, str | None]:
    """Until its end, or its kill; the step of the kill, and a fault."""
    heard_s = time.monotonic()
    while launch.status is None:
        if trace.look() and trace.last is not None:
            heard_s = time.monotonic()
            on_step(trace.last)
            if kill_at is not None and trace.last >= kill_at and (struck := launch.signal_workers(demand.number)):
                return _aftermath(launch, trace, demand, struck), None
        if time.monotonic() - heard_s > demand.patience_s:
            return None, f"no step in {demand.patience_s:g} s, the last one was {trace.last}: it was ended"
        time.sleep(POLL_S)
    return None, None


def _aftermath(launch: Launch, trace: TraceFollower, demand: Demand, struck: Sequence[int]) -> int | None:
    """Waits for the workers that were struck, and then for the launcher; the last step that they did."""
    # Those that are asked to stop may take their time to save.
    patience_s = AFTERMATH_S if demand.number == signal.SIGKILL else demand.patience_s
    ends_s = time.monotonic() + patience_s
    while any(map(is_running, struck)) and time.monotonic() < ends_s:
        time.sleep(POLL_S)
    trace.look()
    last = trace.last
    # A launcher that starts its workers again by itself is ended with them: the next leg is to resume.
    while launch.status is None and time.monotonic() < ends_s and not {*launch.workers()} - {*struck}:
        time.sleep(0.1)
    return last


def _end_faults(demand: Demand, leg: Leg, result: LegResult, status: int | None, last_words: str) -> list[str]:
    """Of a leg that ended by itself."""
    at = f"at step {result.last}" if result.last is not None else "before its first step"
    if status:
        return [f"failed with exit status {status} {at}: {last_words}"]
    if result.last is None and (result.committed or 0) >= demand.steps:
        return [f"had nothing left to do: {_TOO_LATE}"]
    if leg.kill_at is not None:
        return [f"ended {at}, before it could be killed after step {leg.kill_at}"]
    if (result.last or 0) < demand.steps:
        return [
            f"ended {at} of {demand.steps}: does the command train as many steps as RESHARD_STEPS says, "
            "and write a line a step to RESHARD_TRACE?"
        ]
    return []


_TOO_LATE = "the kill came when the run was over already, or it was ignored; kill earlier (--kill-at)"


def _start_faults(result: LegResult, steps: int, is_first: bool) -> list[str]:
    if result.resumed_at is None:
        return []
    if result.resumed_at >= steps:
        return [f"resumed at step {result.resumed_at} of {steps}: {_TOO_LATE}"]
    if is_first:
        return [] if result.resumed_at == 0 else [f"began at step {result.resumed_at} in an empty folder"]
    if result.resumed_at == 0:
        reason = (
            "nothing was committed before the kill; save more often (--interval N)"
            if result.committed is None
            else f"step {result.committed} was there to resume from"
        )
        return [f"started from scratch: {reason}"]
    if result.committed is not None and result.resumed_at != result.committed:
        return [f"resumed at step {result.resumed_at}, and the newest committed step was {result.committed}"]
    return []


def _last_words(said: Sequence[str]) -> str:
    lines = [line.strip() for line in said if line.strip()]
    # What the run says of its own error is worth more than what the launcher says about its workers.
    errors = [
        line for line in lines[-200:] if line.startswith(("error", "Error", "reshard: error")) or "Error: " in line
    ]
    return (errors or lines or ["it said nothing"])[-1][:300]
