"""What to do about a diagnosis, and what else its reader should know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.errors import ReshardError
from reshard.storage.steps import committed_steps, step_number
from reshard.verify.describe.checklist import MISSING, holds_alone
from reshard.verify.describe.describe import Description, describe
from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.finding import POSSIBLE, Finding
from reshard.verify.triage.shape import CONTINUOUS, LOW, MID_RUN, SPIKE, Shape

_FEW_STEPS = 50
"""Steps after the resume below which a continuous loss says little."""


def complete_step(checkpoint: Path, at_most: int) -> int | None:
    """The newest committed step of a run, up to a number, that is sound and lacks nothing; None where there is none.

    Args:
        checkpoint: a step of the run.
        at_most: the largest number.

    Raises:
        StorageError: the run's folder cannot be listed.
    """
    place = checkpoint.resolve()
    if step_number(place.name) is None:
        return None
    earlier = [entry for entry in committed_steps(place.parent) if entry.step <= at_most]
    return next((entry.step for entry in reversed(earlier) if _is_complete(entry.path)), None)


def _is_complete(folder: Path) -> bool:
    try:
        found = describe(folder)
    except ReshardError:
        return False
    with found.checkpoint:
        return not found.faults and all(part.status != MISSING for part in found.parts)


def where_to_return(shape: Shape, findings: Sequence[Finding], checkpoint: Path | None, resume_step: int) -> int | None:
    """The committed step to go on from; None where none is known, or going on is as well."""
    is_over = shape.name in (SPIKE, MID_RUN) and shape.back is not None
    is_sound = shape.name == CONTINUOUS and all(each.confidence == POSSIBLE for each in findings)
    if checkpoint is None or is_over or is_sound:
        return None
    at_most = resume_step if shape.name != MID_RUN or shape.onset is None else shape.onset - 1
    return complete_step(checkpoint, at_most)


def advice(shape: Shape, findings: Sequence[Finding], return_to: int | None) -> list[str]:
    """What to do, in order."""
    sure = [each for each in findings if each.confidence != POSSIBLE]
    if shape.name == CONTINUOUS and not sure:
        return ["go on"]
    lines = [f"{each.piece}: {each.remedy}" for each in sure or findings]
    if return_to is not None:
        lines.append(f"then go on from step {return_to}: Checkpointer.roll_back({return_to}) sets the later ones aside")
    elif shape.name in (SPIKE, MID_RUN) and shape.back is not None:
        lines.append(f"the loss is back since step {shape.back}: this run can go on")
    elif shape.name == MID_RUN:
        lines.append(f"then go on from the newest checkpoint before step {shape.onset}")
    else:
        lines.append("then resume again; --checkpoint names the step of a run to go on from")
    return lines


def notes_on_trace(
    shape: Shape, before: Sequence[TraceRow], after: Sequence[TraceRow], reference: Sequence[TraceRow]
) -> Iterator[str]:
    """What else there is to know of the curve."""
    if shape.seen_steps < _FEW_STEPS:
        yield f"only {shape.seen_steps} steps after the resume: what grows slowly shows after {_FEW_STEPS} or more"
    if shape.name == LOW and shape.back is not None:
        yield f"the loss comes up again at step {shape.back}, as where samples begin that the run had not seen"
    if reference:
        yield _equality(after, {row.step: row.loss for row in reference})


def _equality(after: Sequence[TraceRow], losses: dict[int, float]) -> str:
    differences = [(row.step, abs(row.loss - losses[row.step])) for row in after if row.step in losses]
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
        yield f"{path} is of step {found.step}, not {resume_step}: the first steps are not held against it"
