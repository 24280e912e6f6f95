"""What to do about a diagnosis, and from which step to go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reshard.errors import ReshardError
from reshard.storage.steps import committed_steps, step_number
from reshard.verify.describe.checklist import MISSING
from reshard.verify.describe.describe import describe
from reshard.verify.triage.finding import POSSIBLE, WEIGHTS, Finding
from reshard.verify.triage.shape import CONTINUOUS, MID_RUN, SPIKE, Shape


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


def can_go_on(shape: Shape, findings: Sequence[Finding]) -> bool:
    """Whether the run may go on as it is: the loss is back, or was never off, and what was lost is found again."""
    sure = [each for each in findings if each.confidence != POSSIBLE]
    if shape.name == CONTINUOUS:
        return all(each.is_over for each in sure)
    return shape.name in (SPIKE, MID_RUN) and shape.back is not None and all(each.piece != WEIGHTS for each in sure)


def where_to_return(shape: Shape, findings: Sequence[Finding], checkpoint: Path | None, resume_step: int) -> int | None:
    """The committed step to go on from; None where none is known, or going on is as well."""
    if checkpoint is None or can_go_on(shape, findings):
        return None
    at_most = resume_step if shape.name != MID_RUN or shape.onset is None else shape.onset - 1
    return complete_step(checkpoint, at_most)


def advice(shape: Shape, findings: Sequence[Finding], return_to: int | None, has_checkpoint: bool) -> list[str]:
    """What to do, in order."""
    sure = [each for each in findings if each.confidence != POSSIBLE]
    if shape.name == CONTINUOUS and all(each.is_over for each in sure):
        return ["go on" + (f"; {sure[0].piece} has set itself right" if sure else "")]
    lines = [f"{each.piece}: {each.remedy}" for each in sure or findings]
    if return_to is not None:
        lines.append(f"then go on from step {return_to}: Checkpointer.roll_back({return_to}) sets the later ones aside")
    elif can_go_on(shape, findings):
        lines.append(f"the loss is back since step {shape.back}: this run can go on")
    elif shape.name == MID_RUN:
        lines.append(f"then go on from the newest checkpoint before step {shape.onset}")
    elif not has_checkpoint:
        lines.append("then resume again; with --checkpoint RUN this says from which of its steps")
    else:
        lines.append("then resume again, from a checkpoint that is sound and lacks nothing")
    return lines
