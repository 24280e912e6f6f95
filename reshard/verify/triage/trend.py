"""Where a loss curve would have gone on: a robust line over the logarithm of the step, and how far it can be trusted.

Over an octave or two of steps a loss curve is nearly straight in log(step), whatever its exponent. The line is fitted
with Huber's weights, so that spikes in the history do not bend it. What its formula says of the error of the line
assumes that the curve is one; how much larger the errors are in fact is measured, by predicting parts of the history
from what lies before them. Of windows of several lengths, the one is taken by which the next points are known best.

How the curve bends beyond the history, no history shows. A power law, loss = a + b step^-c, has a slope in log(step)
that changes by its c-fold in each unit of it, and nothing is known of c but that it is mostly below `BEND`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError

Floats = npt.NDArray[np.float64]

FEWEST = 12
"""Points below which no line is fitted."""

BEND = 0.5
"""Usual exponent of a loss curve, at most; larger ones are those of curves that are nearly flat already."""

_MOST = 1000
_SPANS = (4.0, 2.0, 1.5)
"""Last step of a window, in units of its first."""

_AHEAD = (16, 64)
"""Numbers of points whose mean should be known well."""

_HUBER = 1.345
_TO_SIGMA = 1.4826
_ROUNDS = 10
_LEAST_NOISE = 5e-4
"""Share of the loss below which a deviation is of no concern, however smooth the curve."""

_SMALLEST = 1e-30
"""Its square is a number, too."""

_CLIPPED = 3.0
_MOST_CORRELATION = 0.95
_TAIL = 0.995
_NORMAL_TAIL = 2.807
"""What so large a share of a normal distribution's absolute values lies below, in standard deviations."""

_MOST_INFLATION = 10.0
_BACKTEST_LENGTHS = (1, 4, 16, 64)


@dataclass(frozen=True)
class Trend:
    """A fitted line.

    Args:
        noise: standard deviation of a single point around it.
        inflation: how much larger the errors of the line are than its formula says, at least 1.
        tail: how much further out its points lie at times than those of a normal distribution, at least 1.
        memory: variance of a mean of many points, in that of independent ones, at least 1; smoothed losses have one.
        first_step, last_step: the history that it was fitted to.
    """

    noise: float
    inflation: float
    tail: float
    memory: float
    first_step: int
    last_step: int
    _coefficients: Floats
    _covariance: Floats

    def covers(self, step: int) -> bool:
        """A line goes on for ever."""
        return True

    def expected(self, steps: Sequence[int]) -> Floats:
        """The loss at each step."""
        result: Floats = _design(np.asarray(steps, float)) @ self._coefficients
        return result

    def uncertainty(self, steps: Sequence[int], noise: float | None = None) -> float:
        """Standard deviation of the mean of the residuals over some steps: of their noise, and of the line there.

        Args:
            steps: of the points in the mean.
            noise: of a single point, where it is not that of the history.
        """
        middle = _design(np.asarray(steps, float)).mean(axis=0)
        of_points = (noise or self.noise) ** 2 * min(1.0, self.memory / len(steps))
        of_line = float(middle @ self._covariance @ middle) * self.noise**2
        beyond = np.log(np.maximum(np.asarray(steps, float) / self.last_step, 1.0))
        of_bend = BEND / 2 * float(self._coefficients[1] * (beyond**2).mean())
        return math.sqrt(of_points + self.inflation**2 * of_line + of_bend**2)


def fit_trend(steps: Sequence[int], losses: Sequence[float]) -> Trend:
    """Fits the end of a history, the last thousand points at most.

    Args:
        steps: ascending, above 0.
        losses: as many; points that are not finite are left out.

    Raises:
        UsageError: fewer than `FEWEST` finite points.
    """
    finite = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
    at, loss = (np.array(column, float) for column in zip(*finite, strict=True)) if finite else (np.empty(0),) * 2
    if len(at) < FEWEST:
        raise UsageError(
            "too few steps before the resume to know how the loss would have gone on",
            expected=f"at least {FEWEST}",
            found=len(at),
            hint="give the trace of the whole run, all attempts; or one to compare with, by --reference",
        )
    return min((_trend(at, loss, span) for span in _SPANS), key=_error_ahead)


def _trend(steps: Floats, losses: Floats, span: float) -> Trend:
    begin = _begin(steps, len(steps), span)
    fitted = _Fit.of(steps[begin:], losses[begin:])
    residuals = losses[begin:] - _design(steps[begin:]) @ fitted.coefficients
    return Trend(
        noise=fitted.noise,
        inflation=_inflation(steps, losses, span),
        tail=_tail(residuals, fitted.noise),
        memory=_memory(residuals, fitted.noise),
        first_step=int(steps[begin]),
        last_step=int(steps[-1]),
        _coefficients=fitted.coefficients,
        _covariance=fitted.covariance,
    )


def _error_ahead(trend: Trend) -> float:
    return math.fsum(trend.uncertainty(range(trend.last_step + 1, trend.last_step + 1 + ahead)) for ahead in _AHEAD)


def spread(values: Floats) -> float:
    """Standard deviation, by the median of the absolute deviations from the median."""
    return _TO_SIGMA * float(np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def least_noise(losses: Sequence[float] | Floats) -> float:
    """What is no concern, whatever the noise seems to be: a small share of the loss."""
    values = np.asarray(losses, float)
    return max(_LEAST_NOISE * float(np.median(np.abs(values[np.isfinite(values)]))), _SMALLEST)


def noise_of(losses: Sequence[float] | Floats) -> float:
    """Standard deviation of a single point, by the differences between neighbours: no trend disturbs them."""
    values = np.asarray(losses, float)
    finite = values[np.isfinite(values)]
    return spread(np.diff(finite)) / math.sqrt(2) if len(finite) > 1 else 0.0


def _tail(residuals: Floats, noise: float) -> float:
    return max(1.0, float(np.quantile(np.abs(residuals), _TAIL)) / (noise * _NORMAL_TAIL))


def _memory(residuals: Floats, noise: float) -> float:
    """By the correlation of neighbours, where there are enough of them to show one."""
    bounded = np.clip(residuals / noise, -_CLIPPED, _CLIPPED)
    correlation = float(np.mean(bounded[1:] * bounded[:-1]) / np.mean(bounded**2)) if np.any(bounded) else 0.0
    if correlation < 2 / math.sqrt(len(residuals)):
        return 1.0
    correlation = min(correlation, _MOST_CORRELATION)
    return (1 + correlation) / (1 - correlation)


@dataclass(frozen=True)
class _Fit:
    coefficients: Floats
    covariance: Floats
    noise: float

    @classmethod
    def of(cls, steps: Floats, losses: Floats) -> _Fit:
        design = _design(steps)
        weights = np.ones(len(losses))
        least = max(noise_of(losses), least_noise(losses))
        for _ in range(_ROUNDS):
            weighted = design * weights[:, None]
            coefficients: Floats = np.linalg.lstsq(weighted.T @ design, weighted.T @ losses, rcond=None)[0]
            residuals = losses - design @ coefficients
            noise = max(spread(residuals), least)
            weights = np.minimum(1.0, _HUBER * noise / np.maximum(np.abs(residuals), 1e-300))
        covariance: Floats = np.linalg.pinv(design.T @ (design * weights[:, None]))
        return cls(coefficients, covariance, noise)


def _design(steps: Floats) -> Floats:
    return np.column_stack([np.ones(len(steps)), np.log(np.maximum(steps, 1.0))])


def _begin(steps: Floats, end: int, span: float) -> int:
    """The first point of the window that ends before `end`."""
    first = int(np.searchsorted(steps, steps[end - 1] / span))
    return min(max(first, end - _MOST), max(0, end - 2 * FEWEST))


def _inflation(steps: Floats, losses: Floats, span: float) -> float:
    """How large the errors of the line are within the history, in units of what the formula expects."""
    errors = list(_prediction_errors(steps, losses, span))
    if not errors:
        return 1.0
    error, of_points, of_line = np.array(errors).T
    for inflation in np.geomspace(1.0, _MOST_INFLATION, 40):
        if float(np.median(np.abs(error) / np.sqrt(of_points + inflation**2 * of_line))) * _TO_SIGMA <= 1:
            return float(inflation)
    return _MOST_INFLATION


def _prediction_errors(steps: Floats, losses: Floats, span: float) -> Iterator[tuple[float, float, float]]:
    """Errors of means that follow a part of the history, and the variances expected of their points and of the line."""
    first = _begin(steps, len(steps), span)
    for end in np.unique(np.linspace(min(2 * FEWEST, len(steps)), len(steps), 40).astype(int)):
        begin = _begin(steps, end, span)
        # The first steps of a run fall steeply, which says nothing of how well the end is predicted.
        if 2 * begin < first:
            continue
        fitted = _Fit.of(steps[begin:end], losses[begin:end])
        for length in _BACKTEST_LENGTHS:
            if end + length > len(steps):
                break
            design = _design(steps[end : end + length])
            middle = design.mean(axis=0)
            error = float((losses[end : end + length] - design @ fitted.coefficients).mean())
            of_line = float(middle @ fitted.covariance @ middle)
            yield error, fitted.noise**2 / length, fitted.noise**2 * of_line
