"""Where a learning rate leaves its schedule, and where it goes from there.

Nothing is known of the schedule but the rates that the trace has. They are smooth, so that each follows from the two
before it up to the schedule's curvature, which is measured; but for a kink now and then, such as the end of a warm-up,
where the rate moves no further than it does before or behind it. What is left are jumps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

RETURNED, REPEATED, AHEAD, SCALED, ELSEWHERE = "returned", "repeated", "ahead", "scaled", "elsewhere"

_CURVATURE_POINTS = 8
_CURVATURE_FACTOR = 4.0
_LEAST_CHANGE = 1e-3
"""Relative changes below it are no break."""

_KINK_POINTS = 6
_KINK_FACTOR = 3.0
_NEAR = 0.02
_EQUAL = 1e-6
_COMPARED = 8
_RETURN_POINTS = 10
_SLOPE_TOLERANCE = 0.1

Points = Sequence[tuple[int, float]]
"""(step, rate), ascending by step."""


@dataclass(frozen=True)
class Break:
    """A rate that does not follow from those before it.

    Args:
        step: the first with another rate than expected.
        before: the rate at the step before, `found`: the rate there, `expected`: what it should have been.
        kind: ``RETURNED`` to the schedule at `other_step`; ``REPEATED`` the rates from `other_step` on, which it had
            before; ``AHEAD``, those that the reference has from `other_step` on; ``SCALED`` by a factor since; or
            ``ELSEWHERE``.
        other_step: see `kind`; None for the others.
    """

    step: int
    before: float
    found: float
    expected: float
    kind: str
    other_step: int | None = None


def find_break(points: Points, first_step: int, last_step: int, reference: Points = ()) -> Break | None:
    """The first break between two steps, both included; None where the rate goes on as it had.

    Args:
        points: the whole series, of one parameter group.
        first_step, last_step: where to look.
        reference: the rates of a run that lost nothing; they are what is expected where it has them.
    """
    known = dict(reference)
    for at, (step, found) in enumerate(points):
        if not first_step <= step <= last_step or at == 0:
            continue
        if step in known:
            expected, tolerance = known[step], _LEAST_CHANGE * abs(known[step])
        elif at < 3:
            continue
        else:
            expected, tolerance = _extrapolated(points, at, step), _tolerance(points, at)
        if abs(found - expected) <= tolerance:
            continue
        kind, other = _kind(points, at, reference)
        if kind != RETURNED and step not in known and _is_usual(points, at):
            continue
        return Break(step, points[at - 1][1], found, expected, kind, other)
    return None


def _extrapolated(points: Points, at: int, step: int) -> float:
    (one_step, one), (two_step, two) = points[at - 2], points[at - 1]
    return two + (two - one) / (two_step - one_step) * (step - two_step)


def _tolerance(points: Points, at: int) -> float:
    """How far off an extrapolation may be, by how far off the last ones were."""
    errors = [
        abs(points[each][1] - _extrapolated(points, each, points[each][0]))
        for each in range(max(2, at - _CURVATURE_POINTS), at)
    ]
    return _CURVATURE_FACTOR * max(errors, default=0.0) + _LEAST_CHANGE * abs(points[at - 1][1])


def _is_usual(points: Points, at: int) -> bool:
    """Whether the schedule has such a change of its own: a kink, or a jump that it had before."""
    return math.isfinite(points[at][1]) and (_is_kink(points, at) or _had_jump(points, at))


def _is_kink(points: Points, at: int) -> bool:
    """Whether the rate moves no further to this point than it usually does before it or behind it."""
    sides = (points[max(0, at - _KINK_POINTS) : at], points[at : at + _KINK_POINTS])
    changes = [[abs(new - old) for (_, old), (_, new) in pairwise(side)] for side in sides]
    usual = max(statistics.median(each) if each else 0.0 for each in changes)
    return abs(points[at][1] - points[at - 1][1]) <= _KINK_FACTOR * usual


def _had_jump(points: Points, at: int) -> bool:
    """Whether the rate has gone from the one value to the other before, as at every restart of a cosine."""
    before, found = points[at - 1][1], points[at][1]
    return any(_are_near(old, before) and _are_near(new, found) for (_, old), (_, new) in pairwise(points[:at]))


def _are_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_NEAR)


def _kind(points: Points, at: int, reference: Points) -> tuple[str, int | None]:
    after = [rate for _, rate in points[at : at + _COMPARED]]
    if (place := _place(after, points[:at])) is not None:
        return REPEATED, place
    if (place := _place(after, reference)) is not None:
        return AHEAD if place > points[at][0] else REPEATED, place
    known = dict(reference)
    for later in range(at + 1, min(at + _RETURN_POINTS, len(points))):
        step, rate = points[later]
        if step in known:
            expected, tolerance = known[step], _EQUAL * abs(known[step])
        else:
            expected, tolerance = _extrapolated(points, at, step), _tolerance(points, at) * (later - at + 1)
        if abs(rate - expected) <= tolerance:
            return RETURNED, step
    return (SCALED if _is_scaled(points, at) else ELSEWHERE), None


def _place(rates: Sequence[float], series: Points) -> int | None:
    """The step from which on a series has these rates; None where it has not, or where they say nothing: all equal."""
    if len(rates) < 3 or _are_equal(min(rates), max(rates)):
        return None
    for begin in range(len(series) - len(rates) + 1):
        if all(_are_equal(rate, series[begin + offset][1]) for offset, rate in enumerate(rates)):
            return series[begin][0]
    return None


def _is_scaled(points: Points, at: int) -> bool:
    """Whether rate and slope have changed by the same factor."""
    if at + 1 >= len(points) or points[at - 1][1] == 0:
        return False
    factor = points[at][1] / points[at - 1][1]
    before, after = _slope(points, at - 2), _slope(points, at)
    if abs(before) * 10 <= _EQUAL * abs(points[at - 1][1]):
        return abs(after) <= _EQUAL * abs(points[at][1])
    return math.isclose(after / before, factor, rel_tol=_SLOPE_TOLERANCE)


def _slope(points: Points, at: int) -> float:
    (one_step, one), (two_step, two) = points[at], points[at + 1]
    return (two - one) / (two_step - one_step)


def _are_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_EQUAL, abs_tol=0.0)
