"""Two loss traces, step by step: does the resumed run continue the reference, and where does it first leave it?

By default every loss and every gradient norm must be equal exactly, for that is what an exact resume promises.
`epsilon` allows for runs that add gradients in another order: then losses may differ by that much, and norms are not
compared. The learning rate, the loss scale and the samples have no such excuse.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from reshard.errors import UsageError
from reshard.verify.traces.trace import TraceRow

# Schedules that compute the same rate by another route differ in the last bits; a lost or shifted schedule by far more.
LR_TOLERANCE = 1e-12


@dataclass(frozen=True)
class ComparedStep:
    """One step of the two traces. None means that a side does not have the step or does not say.

    Args:
        step: the optimizer step.
        reference_loss: loss of the reference.
        resumed_loss: loss of the resumed run.
        loss_difference: absolute; 0 for NaN on both sides, infinite for NaN on one.
        lr_difference: absolute, the largest over the parameter groups; infinite where their numbers differ.
        ranks: data-parallel ranks of the resumed run.
        accumulation: micro-steps per rank of the resumed run.
        samples_equal: whether both had trained on as many samples.
        scale_equal: whether both scaled the loss by the same factor.
        norm_difference: absolute, of the gradient norms; as for the loss.
    """

    step: int
    reference_loss: float | None
    resumed_loss: float | None
    loss_difference: float | None
    lr_difference: float | None
    ranks: int | None
    accumulation: int | None
    samples_equal: bool | None
    scale_equal: bool | None
    norm_difference: float | None

    @property
    def is_missing(self) -> bool:
        """Whether only one side has the step."""
        return self.reference_loss is None or self.resumed_loss is None

    def faults(self, epsilon: float) -> list[str]:
        """What differs, in words; empty where the step agrees."""
        if self.is_missing:
            return [f"missing in the {'reference' if self.reference_loss is None else 'resumed'} trace"]
        faults = []
        if self.loss_difference is not None and self.loss_difference > epsilon:
            faults.append(f"loss differs by {self.loss_difference:.3g}")
        if self.lr_difference is not None and self.lr_difference > LR_TOLERANCE:
            faults.append(f"learning rate differs by {self.lr_difference:.3g}")
        if self.samples_equal is False:
            faults.append("trained on another number of samples")
        if self.scale_equal is False:
            faults.append("another loss scale")
        if epsilon == 0 and self.norm_difference:
            faults.append(f"gradient norm differs by {self.norm_difference:.3g}")
        return faults


@dataclass(frozen=True)
class Comparison:
    """Every step of either trace, ascending, and the largest loss difference that still agrees."""

    rows: tuple[ComparedStep, ...]
    epsilon: float

    @property
    def common_steps(self) -> int:
        """How many steps both traces have."""
        return sum(not row.is_missing for row in self.rows)

    @property
    def missing_steps(self) -> list[int]:
        """The steps that only one trace has, ascending."""
        return [row.step for row in self.rows if row.is_missing]

    @property
    def largest_loss_difference(self) -> float | None:
        """Over the common steps; None where there is none."""
        return _largest(row.loss_difference for row in self.rows)

    @property
    def largest_lr_difference(self) -> float | None:
        """Over the common steps; None where no such step has the rates of both."""
        return _largest(row.lr_difference for row in self.rows)

    @property
    def first_differing_step(self) -> int | None:
        """The first step whose loss, learning rate or samples differ, or that only one trace has."""
        row = self.first_differing_row
        return None if row is None else row.step

    @property
    def first_differing_row(self) -> ComparedStep | None:
        """The row of `first_differing_step`."""
        return next((row for row in self.rows if row.faults(self.epsilon)), None)

    @property
    def agrees(self) -> bool:
        """Whether no step differs. Traces without a common step show nothing and do not agree."""
        return self.common_steps > 0 and self.first_differing_step is None

    def to_json(self) -> dict[str, object]:
        """Everything above as plain values; differences may be infinite and losses NaN, as Python's `json` allows."""
        return {
            "agrees": self.agrees,
            "epsilon": self.epsilon,
            "common_steps": self.common_steps,
            "missing_steps": self.missing_steps,
            "first_differing_step": self.first_differing_step,
            "largest_loss_difference": self.largest_loss_difference,
            "largest_lr_difference": self.largest_lr_difference,
            "rows": [asdict(row) for row in self.rows],
        }


def compare_traces(reference: Sequence[TraceRow], resumed: Sequence[TraceRow], *, epsilon: float = 0.0) -> Comparison:
    """Compare two traces over all steps of either.

    Args:
        reference: the run that was never interrupted, one row a step.
        resumed: the run in question.
        epsilon: largest absolute loss difference that counts as equal.

    Raises:
        UsageError: epsilon is negative or not finite.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise UsageError("must be a finite number of at least 0", key="epsilon", found=epsilon)
    expected = {row.step: row for row in reference}
    found = {row.step: row for row in resumed}
    rows = tuple(_compare(step, expected.get(step), found.get(step)) for step in sorted({*expected, *found}))
    return Comparison(rows, epsilon)


def format_table(comparison: Comparison, only: Collection[int] | None = None) -> str:
    """A text table with a line a step (`*` where it differs), then the largest differences and the verdict.

    Args:
        comparison: of two traces.
        only: steps to show, with dots where others are left out; all by default.
    """
    head = ("step", "reference loss", "resumed loss", "|difference|", "lr difference", "ranks", "accumulation", "")
    body: list[tuple[str, ...]] = []
    is_gap = False
    for row in comparison.rows:
        if only is None or row.step in only:
            body.append(_cells(row, comparison.epsilon))
        elif not is_gap:
            body.append(("...", *[""] * (len(head) - 1)))
        is_gap = only is not None and row.step not in only
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = ["  ".join(map(str.rjust, cells, widths)).rstrip() for cells in (head, *body)]
    largest_loss = _number(comparison.largest_loss_difference, 3)
    largest_lr = _number(comparison.largest_lr_difference, 3)
    lines.append(
        f"largest difference over {comparison.common_steps} common steps: loss {largest_loss}, lr {largest_lr}; "
        f"steps in one trace only: {len(comparison.missing_steps)}"
    )
    lines.append(verdict(comparison))
    return "\n".join(lines)


def verdict(comparison: Comparison) -> str:
    """One line: whether the traces agree, and if not, from which step and in what."""
    if comparison.common_steps == 0:
        return "the traces differ: they have no step in common"
    row = comparison.first_differing_row
    if row is None:
        return f"the traces agree (epsilon {comparison.epsilon:g})"
    faults = "; ".join(row.faults(comparison.epsilon))
    return f"the traces differ from step {row.step} (epsilon {comparison.epsilon:g}): {faults}"


def _compare(step: int, reference: TraceRow | None, resumed: TraceRow | None) -> ComparedStep:
    loss_difference = lr_difference = norm_difference = samples_equal = scale_equal = None
    if reference is not None and resumed is not None:
        loss_difference = _distance(reference.loss, resumed.loss)
        lr_difference = _lr_distance(reference.lr, resumed.lr)
        if reference.samples is not None and resumed.samples is not None:
            samples_equal = reference.samples == resumed.samples
        if reference.scale is not None and resumed.scale is not None:
            scale_equal = reference.scale == resumed.scale
        if reference.grad_norm is not None and resumed.grad_norm is not None:
            norm_difference = _distance(reference.grad_norm, resumed.grad_norm)
    return ComparedStep(
        step=step,
        reference_loss=None if reference is None else reference.loss,
        resumed_loss=None if resumed is None else resumed.loss,
        loss_difference=loss_difference,
        lr_difference=lr_difference,
        ranks=None if resumed is None else resumed.ranks,
        accumulation=None if resumed is None else resumed.accumulation,
        samples_equal=samples_equal,
        scale_equal=scale_equal,
        norm_difference=norm_difference,
    )


def _distance(one: float, other: float) -> float:
    # Equal infinities would give NaN by subtraction, which no threshold catches.
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance


def _lr_distance(reference: Sequence[float], resumed: Sequence[float]) -> float | None:
    if not reference or not resumed:
        return None
    if len(reference) != len(resumed):
        return math.inf
    return max(map(_distance, reference, resumed))


def _largest(differences: Iterable[float | None]) -> float | None:
    return max((difference for difference in differences if difference is not None), default=None)


def _cells(row: ComparedStep, epsilon: float) -> tuple[str, ...]:
    return (
        str(row.step),
        _number(row.reference_loss, 9),
        _number(row.resumed_loss, 9),
        _number(row.loss_difference, 3),
        _number(row.lr_difference, 3),
        _number(row.ranks, 9),
        _number(row.accumulation, 9),
        "*" if row.faults(epsilon) else "",
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
