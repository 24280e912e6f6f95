"""What the shape of the loss alone says of the piece that was lost.

The loss of the first step after a resume is computed before any update. If it is off, what was loaded is wrong, weights
or samples; if it is in place and the loss leaves later, the updates are wrong: moments, learning rate, batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from reshard.verify.triage.finding import (
    DATA,
    INSTABILITY,
    LIKELY,
    MOMENTS,
    POSITION,
    POSSIBLE,
    RANDOM,
    WEIGHTS,
    Finding,
)
from reshard.verify.triage.shape import ALARM, BACK, LOW, MID_RUN, PERSISTENT, SPIKE, Shape

_FORGOTTEN = 0.1
"""Share of what the run had learnt above which a first loss is called that of other weights."""

_AT_ONCE = 0.5
"""Share of a spike that its first step has, above which the step's own samples are suspected."""


def examine_curve(
    shape: Shape, *, learnt: float, updates_are_explained: bool, samples_go_on: bool, has_first_step: bool
) -> Iterator[Finding]:
    """What fits the shape.

    Args:
        shape: of the loss.
        learnt: by how much the loss had fallen since the first step that is known.
        updates_are_explained: whether a column shows another reason for other updates than lost moments.
        samples_go_on: whether a column shows the samples to go on.
        has_first_step: whether the first loss known is that of the very first step, before which there was no update.
    """
    if shape.name in (SPIKE, PERSISTENT):
        if has_first_step:
            yield from _above(shape, learnt, updates_are_explained)
        elif not updates_are_explained:
            yield from _above_after_some(shape)
    elif shape.name == LOW and samples_go_on:
        told = f"{_low(shape)}; but the samples go on, and an epoch that ends or a rate that falls lowers the loss, too"
        yield Finding(POSITION, POSSIBLE, (told,))
    elif shape.name == LOW:
        yield Finding(POSITION, LIKELY, (_low(shape),))
    elif shape.name == MID_RUN:
        yield from _mid_run(shape, updates_are_explained)


def _above(shape: Shape, learnt: float, updates_are_explained: bool) -> Iterator[Finding]:
    first = f"the first loss after the resume is {_deviation(shape.first, shape.first_sigmas)}"
    if shape.first_sigmas > ALARM and not shape.first < _FORGOTTEN * learnt:
        share = shape.first / learnt if learnt > 0 else math.inf
        told = f", {share:.0%} of all that the run had learnt" if math.isfinite(share) else ""
        yield Finding(WEIGHTS, LIKELY, (f"{first}{told}, before any update",))
    elif shape.first_sigmas > ALARM:
        for piece in (WEIGHTS, POSITION, RANDOM):
            yield Finding(piece, POSSIBLE, (f"{first}, before any update: other weights, samples or dropout",))
    elif not updates_are_explained:
        later = f"it leaves at step {shape.onset}: what was loaded to compute it is right, the updates are not"
        is_in_place = abs(shape.first_sigmas) < BACK
        yield Finding(MOMENTS, LIKELY if is_in_place else POSSIBLE, (f"{first}; {later}",))
        if not is_in_place:
            yield Finding(WEIGHTS, POSSIBLE, (first,))


def _above_after_some(shape: Shape) -> Iterator[Finding]:
    """Where the first steps are not in the trace, updates may have come before the first loss."""
    text = f"the first loss in the trace is {_deviation(shape.first, shape.first_sigmas)}, some steps after the resume"
    for piece in (WEIGHTS, MOMENTS):
        yield Finding(piece, POSSIBLE, (text,))


def _low(shape: Shape) -> str:
    text = (
        f"from step {shape.onset} on the loss is {_deviation(shape.peak, shape.peak_sigmas)}, as on samples seen before"
    )
    return text if shape.back is None else f"{text}, until step {shape.back}"


def _mid_run(shape: Shape, updates_are_explained: bool) -> Iterator[Finding]:
    assert shape.onset_deviation is not None
    if updates_are_explained:
        return
    share = shape.onset_deviation / shape.peak if math.isfinite(shape.peak) else 0.0
    if share >= _AT_ONCE:
        told = (
            f"step {shape.onset} is off at once by {shape.onset_deviation:+.3g}: its loss is computed before its update"
        )
        yield Finding(DATA, LIKELY, (told,))
        yield Finding(INSTABILITY, POSSIBLE, ("an update of the steps before it may have been too large",))
        return
    told = f"the loss is no number at step {shape.peak_step}"
    if math.isfinite(shape.peak):
        climb = (
            f"from {shape.onset_deviation:+.3g} at step {shape.onset} to {shape.peak:+.3g} at step {shape.peak_step}"
        )
        told = f"the loss climbs over several steps, {climb}"
    yield Finding(INSTABILITY, LIKELY, (told,))
    yield Finding(DATA, POSSIBLE, ("the samples of the steps before it may have begun it",))


def _deviation(deviation: float, sigmas: float) -> str:
    if not math.isfinite(deviation):
        return "no number"
    return f"{deviation:+.3g} from the expected one ({abs(sigmas):.3g} standard deviations)"
