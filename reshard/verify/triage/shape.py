"""Which shape the loss has after a resume, told from its deviations from where it should have gone on.

A deviation counts where the mean over 1, 4 or 16 neighbours lies further out than `ALARM` standard deviations of such a
mean. Means over more points find what is smaller, those over fewer what is shorter.
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

WIDTHS = (1, 4, 16)
EARLY_STEPS = 20
"""What begins later after a resume was not caused by what the resume lost, unless it grew slowly."""

FAST_STEPS = 200
_FEWEST_BACK = 8
MOST_STEPS = 500

_MOST_NOISE = 3.0
"""A run that is out of control is noisy, too, which must not hide it."""

Floats = npt.NDArray[np.float64]


class Expectation(Protocol):
    """Where the loss should have gone on, and how far that can be trusted."""

    @property
    def noise(self) -> float:
        """Standard deviation of a single point around the curve."""

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
    sigmas = curve.sigmas
    onset = _onset(sigmas)
    name, back = CONTINUOUS, None
    if onset is not None:
        back = _back(curve, onset)
        name = _name(curve, onset, back, resume_step)
    peak_at = int(np.argmax(np.abs(sigmas[4])))
    return Shape(
        name=name,
        onset=None if onset is None else steps[onset],
        back=None if back is None else steps[back],
        peak=float(np.mean(curve.deviations[peak_at : peak_at + 4])),
        peak_sigmas=float(sigmas[4][peak_at]),
        peak_step=steps[peak_at],
        first=float(curve.deviations[0]),
        first_sigmas=float(sigmas[1][0]),
        onset_deviation=None if onset is None else float(curve.deviations[onset]),
        seen_steps=steps[-1] - resume_step,
    )


@dataclass(frozen=True)
class _Curve:
    """Deviations by step, and by width the means from each point over so many, in their standard deviations."""

    steps: Sequence[int]
    deviations: Floats
    noise: float
    expectation: Expectation
    sigmas: dict[int, Floats]

    @classmethod
    def of(cls, steps: Sequence[int], losses: Sequence[float], expectation: Expectation) -> _Curve:
        deviations: Floats = np.asarray(losses, float) - expectation.expected(steps)
        noise = min(max(expectation.noise, noise_of(losses)), _MOST_NOISE * expectation.noise)
        curve = cls(steps, deviations, noise, expectation, {})
        for width in WIDTHS:
            curve.sigmas[width] = np.array([curve.mean(at, at + width) for at in range(len(steps))])
        return curve

    def mean(self, begin: int, end: int | None = None) -> float:
        """Of the deviations, in its standard deviations; infinite where one is no number."""
        mean = float(np.mean(self.deviations[begin:end]))
        return (
            mean / self.expectation.uncertainty(self.steps[begin:end], self.noise) if math.isfinite(mean) else math.inf
        )


def _onset(sigmas: dict[int, Floats]) -> int | None:
    """The first point that is out by itself, of the first window that is out."""
    firing = [(int(out[0]), width) for width in WIDTHS if len(out := np.flatnonzero(np.abs(sigmas[width]) > ALARM))]
    if not firing:
        return None
    at, width = min(firing)
    sign = math.copysign(1.0, sigmas[width][at])
    alone = np.flatnonzero(sign * sigmas[1][at : at + width] > BACK)
    return at + int(alone[0]) if len(alone) else at


def _back(curve: _Curve, onset: int) -> int | None:
    """The first point from which on both the next sixteen and all that follow are within bounds."""
    for at in range(onset + 1, len(curve.steps) - _FEWEST_BACK + 1):
        if abs(curve.sigmas[16][at]) < BACK and abs(curve.mean(at)) < BACK:
            return at
    return None


def _name(curve: _Curve, onset: int, back: int | None, resume_step: int) -> str:
    is_early = curve.steps[onset] - resume_step <= EARLY_STEPS
    if curve.sigmas[16][onset] <= 0 and curve.sigmas[1][onset] <= ALARM:
        return LOW if is_early else CONTINUOUS
    if not is_early and _is_sudden(curve, onset):
        return MID_RUN
    return SPIKE if is_early and back is not None and curve.steps[back] - resume_step <= FAST_STEPS else PERSISTENT


def _is_sudden(curve: _Curve, onset: int) -> bool:
    """Whether the loss rises there by more than it varies, and not because it had been drifting up to there."""
    before, after = curve.deviations[max(0, onset - 16) : onset], curve.deviations[onset : onset + 4]
    rise = float(after.mean() - before.mean()) if len(before) else math.inf
    return not rise <= ALARM * curve.noise * math.sqrt(1 / max(1, len(before)) + 1 / len(after))
