"""Which shape the loss has after a resume, told from its deviations from where it should have gone on.

A deviation counts where a point, the mean of four neighbours or the median of sixteen lies further out than `ALARM`
standard deviations. What lasts is found by the median, which single hard batches do not move; what is short, by the
other two. What lies that far out as often as once in two hundred steps before the resume is not counted after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from reshard.verify.triage.trend import noise_of

CONTINUOUS = "continuous"
SPIKE = "fast-decaying spike"
PERSISTENT = "persistent or diverging"
LOW = "abnormally low"
MID_RUN = "mid-run spike"

ALARM = 5.0
BACK = 3.0
"""Standard deviations beyond which a mean is out, and within which it is back."""

SHORT, LONG = 4, 16
"""Points in a mean, and in a median."""

_MEDIAN = math.sqrt(math.pi / 2)
"""Standard deviation of a median, in that of the mean of as many points."""

EARLY_STEPS = 20
"""What begins later after a resume was not caused by what the resume lost, unless it grew slowly."""

FAST_STEPS = 200
_FEWEST_BACK = 8
_LONE = 2
MOST_STEPS = 500

_MOST_NOISE = 3.0
"""A run that is out of control is noisy, too, which must not hide it."""

Floats = npt.NDArray[np.float64]


class Expectation(Protocol):
    """Where the loss should have gone on, and how far that can be trusted."""

    @property
    def noise(self) -> float:
        """Standard deviation of a single point around the curve."""

    @property
    def tail(self) -> float:
        """How much further out its points lie at times than those of a normal distribution, at least 1."""

    def covers(self, step: int) -> bool:
        """Whether it says anything of a step."""

    def expected(self, steps: Sequence[int]) -> Floats:
        """The loss at each step; it covers all of them."""

    def uncertainty(self, steps: Sequence[int], noise: float | None = None) -> float:
        """Standard deviation of the mean deviation over some steps, whose points have this noise."""


@dataclass(frozen=True)
class Shape:
    """What the loss does after the resume.

    Args:
        name: one of the five.
        onset: first step that is out, and `back`: first from which on it is not; None where there is none.
        peak: largest deviation of a mean over up to four points, and `peak_sigmas`: in its standard deviations;
            infinite where the loss is no number.
        peak_step: where.
        first: deviation of the first step after the resume, and `first_sigmas`.
        onset_deviation: that of the step `onset`.
        seen_steps: how many steps after the resume the trace has, 500 at most.
    """

    name: str
    onset: int | None
    back: int | None
    peak: float
    peak_sigmas: float
    peak_step: int | None
    first: float
    first_sigmas: float
    onset_deviation: float | None
    seen_steps: int


def classify(steps: Sequence[int], losses: Sequence[float], expectation: Expectation, resume_step: int) -> Shape:
    """Names the shape.

    Args:
        steps: those after the resume, ascending, one at least.
        losses: as many.
        expectation: of the loss at all of them.
        resume_step: the last step before them.
    """
    curve = _Curve.of(steps, losses, expectation)
    onset = _onset(curve)
    back = None if onset is None else _back(curve, onset)
    name = CONTINUOUS if onset is None else _name(curve, onset, back, resume_step)
    if name == CONTINUOUS:
        onset = back = None
    peak_at = _peak(curve, onset, back)
    return Shape(
        name=name,
        onset=None if onset is None else steps[onset],
        back=None if back is None else steps[back],
        peak=float(np.mean(curve.deviations[peak_at : peak_at + SHORT])),
        peak_sigmas=float(curve.shorts[peak_at]),
        peak_step=steps[peak_at],
        first=float(curve.deviations[0]),
        first_sigmas=float(curve.ones[0]),
        onset_deviation=None if onset is None else float(curve.deviations[onset]),
        seen_steps=steps[-1] - resume_step,
    )


@dataclass(frozen=True)
class _Curve:
    """Deviations by step, and from each point on those of one, of the next four and of the next sixteen, in sigmas."""

    steps: Sequence[int]
    deviations: Floats
    noise: float
    expectation: Expectation
    ones: Floats
    shorts: Floats
    longs: Floats

    @classmethod
    def of(cls, steps: Sequence[int], losses: Sequence[float], expectation: Expectation) -> _Curve:
        deviations = np.asarray(losses, float) - expectation.expected(steps)
        deviations[~np.isfinite(deviations)] = math.inf
        noise = min(max(expectation.noise, noise_of(losses)), _MOST_NOISE * expectation.noise)
        curve = cls(steps, deviations, noise, expectation, *(np.empty(len(steps)) for _ in range(3)))
        for at in range(len(steps)):
            curve.ones[at] = curve.mean(at, at + 1)
            curve.shorts[at] = curve.mean(at, at + SHORT)
            curve.longs[at] = curve.median(at, at + LONG)
        return curve

    def mean(self, begin: int, end: int) -> float:
        """Of the deviations, in its standard deviations."""
        return float(np.mean(self.deviations[begin:end])) / self.expectation.uncertainty(
            self.steps[begin:end], self.noise
        )

    def median(self, begin: int, end: int | None = None) -> float:
        """Likewise."""
        sigma = self.expectation.uncertainty(self.steps[begin:end], _MEDIAN * self.noise)
        return float(np.median(self.deviations[begin:end])) / sigma

    def is_below(self, at: int) -> bool:
        """Whether the loss that is out from a point on is too low."""
        return bool(self.longs[at] <= 0 and self.ones[at] <= ALARM)


def _onset(curve: _Curve) -> int | None:
    """The first point that is out by itself, of the first few that are out together."""
    short = ALARM * curve.expectation.tail
    kinds = ((curve.ones, 1, short), (curve.shorts, SHORT, short), (curve.longs, LONG, ALARM))
    firing = [
        (int(out[0]), width, sigmas)
        for sigmas, width, alarm in kinds
        if len(out := np.flatnonzero(np.abs(sigmas) > alarm))
    ]
    if not firing:
        return None
    at, width, sigmas = min(firing, key=lambda each: each[:2])
    alone = np.flatnonzero(math.copysign(1.0, sigmas[at]) * curve.ones[at : at + width] > BACK)
    return at + int(alone[0]) if len(alone) else at


def _back(curve: _Curve, onset: int) -> int | None:
    """The first point from which on the next four, the next sixteen and all that follow are within bounds."""
    for at in range(onset + 1, len(curve.steps) - _FEWEST_BACK + 1):
        if max(abs(curve.shorts[at]), abs(curve.longs[at])) < BACK and abs(curve.median(at)) < BACK:
            return at
    return None


def _name(curve: _Curve, onset: int, back: int | None, resume_step: int) -> str:
    # Of a trace that has not every step, the first point may be late, and is all the same the first.
    is_early = onset == 0 or curve.steps[onset] - resume_step <= EARLY_STEPS
    if curve.is_below(onset):
        return LOW if is_early else CONTINUOUS
    if is_early and not _is_lone(curve, onset, back):
        return SPIKE if back is not None and curve.steps[back] - resume_step <= FAST_STEPS else PERSISTENT
    if _is_sudden(curve, onset):
        return MID_RUN
    # What grew slowly and went away again was no fault.
    return PERSISTENT if back is None else CONTINUOUS


def _is_sudden(curve: _Curve, onset: int) -> bool:
    """Whether the loss rises there by more than it varies, and not because it had been drifting up to there."""
    before, after = curve.deviations[max(0, onset - LONG) : onset], curve.deviations[onset : onset + SHORT]
    rise = float(after.mean() - before.mean()) if len(before) else math.inf
    return not rise <= ALARM * curve.noise * math.sqrt(1 / max(1, len(before)) + 1 / len(after))


def _is_lone(curve: _Curve, onset: int, back: int | None) -> bool:
    """Whether it is a point or two, and not the first: a hard batch, for what is lost is not found again at once."""
    return onset > 0 and back is not None and back - onset <= _LONE


def _peak(curve: _Curve, onset: int | None, back: int | None) -> int:
    """Where the mean of four is furthest out, between onset and return, on the side of the onset."""
    if onset is None:
        return int(np.argmax(np.abs(curve.shorts)))
    sign = -1.0 if curve.is_below(onset) else 1.0
    return onset + int(np.argmax(sign * curve.shorts[onset:back]))
