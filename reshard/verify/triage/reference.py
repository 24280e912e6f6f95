"""Another run's loss as what the loss should have been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRIFT = 0.5
"""How far runs drift apart that differ in rounding alone, in units of the noise of a step, within `DRIFT_STEPS`. Nearby
runs of a small model at a large learning rate part by so much, and are as good as each other."""

DRIFT_STEPS = 100


@dataclass(frozen=True)
class Reference:
    """The losses of a run that lost nothing.

    Args:
        losses: by step.
        noise: standard deviation of a single step around the curve.
        resume_step: from where on the runs may drift apart.
        tail: as of any expectation; hard batches are hard for both runs.
    """

    losses: Mapping[int, float]
    noise: float
    resume_step: int
    tail: float = 1.0

    def covers(self, step: int) -> bool:
        """Whether the reference has a step."""
        return step in self.losses

    def expected(self, steps: Sequence[int]) -> npt.NDArray[np.float64]:
        """The loss at each step; it covers all of them."""
        return np.array([self.losses[step] for step in steps], float)

    def uncertainty(self, steps: Sequence[int], noise: float | None = None) -> float:
        """Standard deviation of the mean of the differences over some steps."""
        middle = sum(steps) / len(steps) - self.resume_step
        drift = DRIFT * min(1.0, middle / DRIFT_STEPS)
        return (noise or self.noise) * math.sqrt(1 / len(steps) + drift**2)
