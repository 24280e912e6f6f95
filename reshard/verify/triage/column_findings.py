"""What the columns of a trace beside the loss show of a lost piece, and what they show to be in order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.finding import (
    AVERAGING,
    BATCH,
    CERTAIN,
    LIKELY,
    POSITION,
    POSSIBLE,
    RATE,
    SCALE,
    SCHEDULE,
    Evidence,
    Finding,
)
from reshard.verify.triage.rates import AHEAD, ELSEWHERE, REPEATED, RETURNED, Break, find_break
from reshard.verify.triage.shape import EARLY_STEPS

Rows = Sequence[TraceRow]

_FEWEST_RATES = 3
_MOST_DOUBLINGS = 64
_VARYING = (2 / 3, 3 / 2)
_FEW = 32
"""Rows on either side from which a usual value is taken."""


def examine_columns(before: Rows, after: Rows, reference: Rows = (), *, rate_is_saved: bool = False) -> Evidence:
    """Looks at learning rate, loss scale, samples and batch on both sides of a resume.

    Args:
        before: rows up to the resume, ascending; where there are none, the reference's stand in for them.
        after: those past it, one at least.
        reference: rows of a run that lost nothing.
        rate_is_saved: whether the first learning rate is known to be the one that was saved.
    """
    said = Evidence()
    if not before:
        before = [row for row in reference if row.step < after[0].step]
    _rates(said, before, after, reference, rate_is_saved)
    _scale(said, before, after)
    _position(said, before, after)
    _batch(said, before, after)
    return said


def rate_break(rows: Rows, reference: Rows, first_step: int, last_step: int) -> Break | None:
    """The first break of any group's learning rate between two steps, both included."""
    groups = max((len(row.lr) for row in rows), default=0)
    breaks = []
    for group in range(groups):
        points, known = (
            [(row.step, row.lr[group]) for row in series if len(row.lr) > group] for series in (rows, reference)
        )
        if (found := find_break(points, first_step, last_step, known)) is not None:
            breaks.append(found)
    return min(breaks, key=lambda each: each.step, default=None)


def rate_finding(found: Break, *, at_resume: bool, is_known: bool) -> Finding:
    """A break in words.

    Args:
        found: the break.
        at_resume: whether it comes with a resume, where the schedule itself may have been lost.
        is_known: whether the expected rate is a reference's. Else the schedule may have a jump of its own there, and
            one that goes down is no alarm: many do, at the ends of epochs, where many runs save.
    """
    change = (
        f"learning rate {found.before:.4g} -> {found.found:.4g} at step {found.step}, expected {found.expected:.4g}"
    )
    if found.kind == RETURNED:
        return Finding(RATE, CERTAIN, (f"{change}; back on the schedule at step {found.other_step}",), is_over=True)
    if not (math.isfinite(found.found) and (found.found > 0 or found.expected <= found.before / 2)):
        return Finding(RATE, CERTAIN, (change,))
    if found.kind == REPEATED:
        return Finding(
            SCHEDULE, CERTAIN, (f"{change}; it has the rates again that step {found.other_step} began with",)
        )
    if found.kind == AHEAD:
        told = f"{change}; from there on it has the rates that the reference has from step {found.other_step} on"
        return Finding(SCHEDULE, CERTAIN, (told,))
    confidence = CERTAIN if is_known else LIKELY if found.found > found.expected else POSSIBLE
    who = "--checkpoint or --reference tells" if at_resume else "--reference tells"
    asked = "" if is_known else f"; a schedule may have such a step: {who}"
    if found.kind == ELSEWHERE and at_resume:
        return Finding(SCHEDULE, confidence, (f"{change}; it goes on from there at another slope{asked}",))
    factor = f"{found.found / found.expected:.4g} times as much" if found.expected else "where it had been 0"
    return Finding(RATE, confidence, (f"{change}, {factor}{asked}",))


def _rates(said: Evidence, before: Rows, after: Rows, reference: Rows, is_saved: bool) -> None:
    rated = [row for row in after if row.lr]
    if not rated:
        said.silent.append("learning rate")
        return
    resume_step = before[-1].step if before else after[0].step - 1
    first = after[0].step + 1 if is_saved else resume_step + 1
    found = rate_break([*before, *after], reference, first, max(resume_step + EARLY_STEPS, rated[0].step))
    if found is not None:
        is_known = any(row.step == found.step and row.lr for row in reference)
        said.findings.append(rate_finding(found, at_resume=True, is_known=is_known))
        return
    row = rated[0]
    if any(other.step == row.step and other.lr for other in reference):
        said.in_order[SCHEDULE] = f"learning rate {row.lr[0]:.4g} at step {row.step}, as the reference has it"
    elif len(known := [other for other in before if other.lr]) >= _FEWEST_RATES:
        last = known[-1]
        said.in_order[SCHEDULE] = (
            f"learning rate {last.lr[0]:.4g} at step {last.step}, {row.lr[0]:.4g} at step {row.step}: no jump"
        )


def _scale(said: Evidence, before: Rows, after: Rows) -> None:
    known = [(row.step, row.scale) for row in before if row.scale is not None]
    if after[0].scale is None or not known:
        return
    (step, old), new = known[-1], after[0].scale
    change = f"loss scale {old:.9g} at step {step}, {new:.9g} at step {after[0].step}"
    # A scaler moves by a factor of two a step, at most and mostly.
    most = 2.0 ** min(after[0].step - step, _MOST_DOUBLINGS)
    if old > 0 and 1 / most <= new / old <= most:
        said.in_order[SCALE] = change
        return
    told = f", where it had begun at step {known[0][0]}" if new == known[0][1] else ""
    said.found(SCALE, CERTAIN, f"{change}{told}; it moves by a factor of 2 a step otherwise")


def _position(said: Evidence, before: Rows, after: Rows) -> None:
    first = after[0]
    if first.samples is None:
        said.silent.append("samples")
        return
    known = [(row.step, row.samples) for row in before if row.samples is not None]
    if not known:
        return
    last_step, last_samples = known[-1]
    gains = _gains(before)
    usual = statistics.median(gains) if gains else None
    change = f"samples {last_samples} at step {last_step}, {first.samples} at step {first.step}"
    gained, steps = first.samples - last_samples, first.step - last_step
    if gained < 0 or (gained == 0 and all(gain > 0 for gain in gains)):
        begun = "they are counted anew, and so are seen again" if first.samples < steps * 2 * (usual or 1) else ""
        again = begun or f"{-gained} of them are seen again"
        told = f"; {first.step} steps of {usual:g} are {first.step * usual:.0f}" if usual and begun else ""
        said.found(POSITION, CERTAIN, f"{change}: {again}{told}")
    elif gains and gained > 2 * max(gains) * steps:
        said.found(POSITION, CERTAIN, f"{change}: {gained - (usual or 0) * steps:.0f} samples were passed over")
    else:
        said.in_order[POSITION] = change


def _gains(rows: Rows) -> list[float]:
    """Samples a step, between neighbours among the last rows; some trainers count now and then only."""
    known = [(row.step, row.samples) for row in rows[-_FEW:] if row.samples is not None]
    return [(new - old) / (step - past) for (past, old), (step, new) in pairwise(known)]


def _batch(said: Evidence, before: Rows, after: Rows) -> None:
    old, new = _gains(before), _gains(after[:_FEW])
    changes = {name: _change(before, after, name) for name in ("ranks", "accumulation")}
    told = ", ".join(
        f"{name} {change[0]} -> {change[1]}" for name, change in changes.items() if change and change[0] != change[1]
    )
    ranks, accumulation = changes["ranks"], changes["accumulation"]
    if old and new:
        usual, now = (sum(gains) / len(gains) for gains in (old, new))
        text = f"{usual:g} samples a step before, {now:g} after" + (f" ({told})" if told else "")
        is_constant = len({*old}) == len({*new}) == 1
        # Batches of tokens vary, and some grow.
        least, most = (1.0, 1.0) if is_constant else _VARYING
        if least <= now / usual <= most if usual else now == 0:
            said.in_order[BATCH] = text
        else:
            said.found(BATCH, CERTAIN, text)
    elif ranks and accumulation and ranks[0] * accumulation[0] != ranks[1] * accumulation[1]:
        factor = ranks[1] * accumulation[1] / (ranks[0] * accumulation[0])
        text = f"{told}: {factor:.3g} times the batch, unless the micro-batch has changed, too"
        said.found(BATCH, LIKELY, text)
    elif told:
        said.in_order[BATCH] = told


def _change(before: Rows, after: Rows, name: str) -> tuple[int, int] | None:
    """A column's last value before and first after."""
    old = next((value for row in reversed(before) if (value := getattr(row, name)) is not None), None)
    new = getattr(after[0], name)
    return None if old is None or new is None else (old, new)


def averaging(before: Rows, after: Rows) -> Finding | None:
    """What a changed accumulation may do to a loss that is off; None where it has not changed."""
    change = _change(before, after, "accumulation")
    if change is None or change[0] == change[1]:
        return None
    text = f"accumulation {change[0]} -> {change[1]}: where sequences differ in length, a mean of means is another loss"
    return Finding(AVERAGING, POSSIBLE, (text,))


def first_norm(before: Rows, after: Rows) -> tuple[float, float] | None:
    """The usual gradient norm before the resume, and the first after; None where they are not known."""
    known = [row.grad_norm for row in before[-_FEW:] if row.grad_norm is not None]
    return (statistics.median(known), after[0].grad_norm) if known and after[0].grad_norm is not None else None
