"""What the reader of a diagnosis should know beside it, of the curve, the attempts and the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from reshard.verify.describe.checklist import holds_alone
from reshard.verify.describe.describe import Description
from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.shape import LOW, Shape

_FEW_POINTS = 30
"""Points after the resume below which a continuous loss says little."""

_MOST_ATTEMPTS = 5

_SAME_WAY = 0.05
"""Share of the noise of a step by which two attempts at the same step may differ, of the same state and samples."""


def attempts(rows: Sequence[TraceRow]) -> list[str]:
    """Where the trace says that attempts began, a line each."""
    return [
        f"attempt {new.attempt} begins at step {new.step}: it resumed from step {old.step}"
        for old, new in pairwise(rows)
        if old.attempt != new.attempt
    ]


def notes_on_trace(
    shape: Shape,
    rows: Sequence[TraceRow],
    compared: Sequence[TraceRow],
    reference: Sequence[TraceRow],
) -> Iterator[str]:
    """What else there is to know of the curve.

    Args:
        shape: of the loss.
        rows: all of the trace.
        compared: those after the resume that were judged.
        reference: a run that lost nothing.
    """
    if len(compared) < _FEW_POINTS:
        told = f"{len(compared)} {'point' if len(compared) == 1 else 'points'} over {shape.seen_steps} steps"
        yield f"only {told} after the resume: what is small or grows slowly shows after {_FEW_POINTS} points or more"
    if compared[0].step not in {new.step for old, new in pairwise(rows) if old.attempt != new.attempt}:
        yield from attempts(rows)[-_MOST_ATTEMPTS:]
    if shape.name == LOW and shape.back is not None:
        yield f"the loss comes up again at step {shape.back}, as where samples begin that the run had not seen"
    if reference:
        yield _equality(_differences(compared, reference))


def notes_on_attempts(after: Sequence[TraceRow], before: Sequence[TraceRow], noise: float) -> Iterator[str]:
    """Where the attempt before the resume had gone on beyond it: whether this one went the same way, and how long."""
    shared = _differences(after, before)
    if not shared:
        return
    text = f"the attempt before had gone through steps {shared[0][0]} to {shared[-1][0]}: this one "
    # Of a sum in another order little is seen in the first steps; noise is what another batch or mask makes.
    apart = [step for step, difference in shared if not difference <= _SAME_WAY * noise]
    largest = max(difference for _, difference in shared)
    if not apart:
        yield f"{text}went the same way, to {largest:.2g}"
    elif apart[0] == shared[0][0]:
        yield f"{text}differs from the first of them on: other weights, samples or random numbers"
    else:
        yield f"{text}went the same way up to step {apart[0] - 1}, so its updates differ, and not what was loaded"


def _differences(rows: Sequence[TraceRow], others: Sequence[TraceRow]) -> list[tuple[int, float]]:
    """(step, absolute difference of the losses) of the steps that both have."""
    losses = {row.step: row.loss for row in others}
    return [(row.step, abs(row.loss - losses[row.step])) for row in rows if row.step in losses]


def _equality(differences: Sequence[tuple[int, float]]) -> str:
    unequal = [(step, difference) for step, difference in differences if difference != 0]
    if not unequal:
        return f"bit-equal to the reference over {len(differences)} steps"
    largest = max(difference for _, difference in unequal)
    return f"not bit-equal to the reference: from step {unequal[0][0]} on, by {largest:.3g} at most"


def notes_on_checkpoint(found: Description | None, resume_step: int) -> Iterator[str]:
    """What else there is to know of the checkpoint."""
    if found is None:
        return
    path = found.checkpoint.path
    if (alone := holds_alone(found.checkpoint, found.parts)) is not None:
        yield f"{path} holds {alone} alone: no run can resume from it"
    if found.step is not None and found.step != resume_step:
        yield f"{path} is of step {found.step}, not {resume_step}: nothing is held against it"
