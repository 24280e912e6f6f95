"""The diagnosis: the shape of the loss after a resume, the pieces of the state that it points to, and what to do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from reshard.errors import UsageError
from reshard.verify.describe.describe import Description
from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.advice import advice, where_to_return
from reshard.verify.triage.checkpoint_findings import examine_checkpoint, holdings
from reshard.verify.triage.column_findings import averaging, examine_columns, first_norm, rate_break, rate_finding
from reshard.verify.triage.curve_findings import examine_curve
from reshard.verify.triage.finding import (
    BATCH,
    CERTAIN,
    LIKELY,
    MOMENTS,
    POSITION,
    POSSIBLE,
    RANDOM,
    RATE,
    SCHEDULE,
    WEIGHTS,
    Evidence,
    Finding,
    merge,
)
from reshard.verify.triage.notes import attempts, notes_on_attempts, notes_on_checkpoint, notes_on_trace
from reshard.verify.triage.reference import Reference
from reshard.verify.triage.shape import (
    CONTINUOUS,
    EARLY_STEPS,
    MID_RUN,
    MOST_STEPS,
    PERSISTENT,
    SPIKE,
    Expectation,
    Shape,
    classify,
)
from reshard.verify.triage.trend import FEWEST, fit_trend, least_noise, noise_of

Rows = Sequence[TraceRow]

_USUAL = 16
"""Rows before the resume by which its loss is known."""

_OF_UPDATES = (RATE, SCHEDULE, BATCH)


@dataclass(frozen=True)
class Diagnosis:
    """What `reshard triage` tells.

    Attributes:
        resume_step: the last step before the resume.
        shape: of the loss after it.
        findings: pieces that may be lost, the surest first.
        in_order: what is shown not to be.
        silent: columns that are not there.
        notes: what else a reader should know.
        return_to: committed step to go on from; None where none is known, or needed.
        advice: what to do, in order.
        expectation: where the loss should have gone on.
    """

    resume_step: int
    shape: Shape
    findings: list[Finding]
    in_order: list[str]
    silent: list[str]
    notes: list[str]
    return_to: int | None
    advice: list[str]
    expectation: Expectation

    @property
    def is_alarming(self) -> bool:
        """Whether anything was lost, or the loss is off."""
        return self.shape.name != CONTINUOUS or any(each.confidence != POSSIBLE for each in self.findings)

    def to_json(self) -> dict[str, object]:
        """All of it but the expectation, as plain values."""
        return {
            "alarm": self.is_alarming,
            "class": self.shape.name,
            "resume_step": self.resume_step,
            "shape": asdict(self.shape),
            "findings": [{**asdict(each), "remedy": each.remedy} for each in self.findings],
            "in_order": self.in_order,
            "columns_missing": self.silent,
            "notes": self.notes,
            "return_to": self.return_to,
            "advice": self.advice,
        }


def diagnose(
    rows: Sequence[TraceRow],
    resume_step: int,
    *,
    reference: Sequence[TraceRow] = (),
    checkpoint: Description | None = None,
    attempt_before: Sequence[TraceRow] = (),
) -> Diagnosis:
    """Tells what a resume lost.

    Args:
        rows: the run's trace, ascending, each step once.
        resume_step: the last step before the resume: that of the checkpoint.
        reference: the trace of a run that lost nothing, over some of the same steps.
        checkpoint: what the run resumed from.
        attempt_before: the steps past the resume that the attempt before had gone through.

    Raises:
        UsageError: no step after the resume; none of them in the reference; or no reference, and too few before.
    """
    before = [row for row in rows if row.step <= resume_step]
    after = [row for row in rows if resume_step < row.step <= resume_step + MOST_STEPS]
    if not after:
        raise UsageError(
            "no step after the resume",
            key="--resume-step",
            expected=f"a step below {rows[-1].step}, the last one" if rows else "a trace with steps",
            found=resume_step,
            hint="name the last step before the resume",
            details=attempts(rows),
        )
    compared, expectation = _expectation(before, after, reference, resume_step)
    shape = classify([row.step for row in compared], [row.loss for row in compared], expectation, resume_step)
    own = checkpoint if checkpoint is not None and checkpoint.step in (None, resume_step) else None
    held = Evidence() if own is None else examine_checkpoint(own, after)
    columns = examine_columns(before, after, reference, rate_is_saved=SCHEDULE in held.in_order)
    if shape.name == MID_RUN and (found := _rate_break_at(shape, rows, reference)) is not None:
        columns.findings.append(found)
    findings = merge(
        [
            *columns.findings,
            *_of_curve(shape, before, after, columns, held, resume_step),
            *_of_checkpoint(shape, columns, held),
            *_restorable(columns, own),
        ]
    )
    run = None if checkpoint is None else checkpoint.checkpoint.path
    return_to = where_to_return(shape, findings, run, resume_step)
    return Diagnosis(
        resume_step=resume_step,
        shape=shape,
        findings=findings,
        in_order=list({**held.in_order, **columns.in_order}.values()),
        silent=columns.silent,
        notes=[
            *notes_on_trace(shape, rows, compared, reference),
            *notes_on_attempts(after, attempt_before, expectation.noise),
            *notes_on_checkpoint(checkpoint, resume_step),
        ],
        return_to=return_to,
        advice=advice(shape, findings, return_to, checkpoint is not None),
        expectation=expectation,
    )


def _expectation(before: Rows, after: Rows, reference: Rows, resume_step: int) -> tuple[Rows, Expectation]:
    """The rows after the resume that can be judged, and by what."""
    if not reference:
        return after, fit_trend([row.step for row in before], [row.loss for row in before])
    losses = {row.step: row.loss for row in reference if math.isfinite(row.loss)}
    compared = [row for row in after if row.step in losses]
    if not compared:
        raise UsageError(
            "the reference has none of the steps after the resume",
            key="--reference",
            expected=f"steps from {after[0].step} to {after[-1].step}",
            found=f"{reference[0].step} to {reference[-1].step}",
            hint="name the trace of a run that went through them",
        )
    return compared, Reference(losses, _noise(before, after, reference, resume_step), resume_step)


def _noise(before: Rows, after: Rows, reference: Rows, resume_step: int) -> float:
    """Of a step of the reference, or where it has too few to tell, of the run."""
    near = [row.loss for row in reference if abs(row.step - resume_step) <= MOST_STEPS]
    known = next((each for each in (near, [row.loss for row in before]) if len(each) >= FEWEST), None)
    if known is None:
        raise UsageError(
            "too few steps, in the reference and before the resume, to know how much the loss varies",
            expected=f"at least {FEWEST}",
            found=max(len(near), len(before)),
            hint="give a longer trace",
        )
    return max(noise_of(known), least_noise(known))


def _rate_break_at(shape: Shape, rows: Rows, reference: Rows) -> Finding | None:
    """A learning rate that left its schedule shortly before a spike did."""
    assert shape.onset is not None
    found = rate_break(rows, reference, shape.onset - EARLY_STEPS, shape.onset)
    if found is None:
        return None
    is_known = any(row.step == found.step for row in reference)
    return rate_finding(found, at_resume=False, is_known=is_known)


def _of_curve(
    shape: Shape, before: Rows, after: Rows, columns: Evidence, held: Evidence, resume_step: int
) -> Iterator[Finding]:
    """What the shape points to; certain where the checkpoint lacks it, too."""
    of_shape = examine_curve(
        shape,
        learnt=before[0].loss - statistics.median([row.loss for row in before[-_USUAL:]]) if before else math.nan,
        updates_are_explained=any(each.piece in _OF_UPDATES for each in columns.findings),
        samples_go_on=POSITION in columns.in_order,
        has_first_step=after[0].step == resume_step + 1,
    )
    lacking = {each.piece for each in held.findings if each.confidence != POSSIBLE}
    for finding in of_shape:
        is_shown = finding.confidence == LIKELY and finding.piece in lacking
        told = (*finding.evidence, *_norms(finding, before, after))
        yield replace(finding, confidence=CERTAIN if is_shown else finding.confidence, evidence=told)
    if shape.name in (SPIKE, PERSISTENT) and (found := averaging(before, after)) is not None:
        yield found


def _of_checkpoint(shape: Shape, columns: Evidence, held: Evidence) -> Iterator[Finding]:
    """What the checkpoint shows, less what the columns show to be in order and what the shape does not need."""
    has_schedule = any(each.piece == SCHEDULE for each in columns.findings)
    for finding in held.findings:
        if finding.confidence == POSSIBLE and finding.piece in columns.in_order:
            continue
        if finding.piece == RANDOM and shape.name not in (SPIKE, PERSISTENT):
            continue
        # One change of the rate is one finding, whoever saw it.
        yield replace(finding, piece=SCHEDULE if finding.piece == RATE and has_schedule else finding.piece)


def _norms(finding: Finding, before: Rows, after: Rows) -> Iterator[str]:
    if finding.piece in (WEIGHTS, MOMENTS) and (norms := first_norm(before, after)) is not None:
        yield f"gradient norm {norms[1]:.3g} at step {after[0].step}, usually {norms[0]:.3g} before"


def _restorable(columns: Evidence, checkpoint: Description | None) -> Iterator[Finding]:
    """Of what the columns show to be lost, that the checkpoint has it."""
    if checkpoint is not None:
        held = holdings(checkpoint)
        for finding in columns.findings:
            if finding.piece in held:
                yield Finding(finding.piece, POSSIBLE, (held[finding.piece],))
