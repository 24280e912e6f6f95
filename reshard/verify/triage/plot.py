"""A diagnosis as a picture: the loss, where it should have gone on, and where it left and came back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.verify.figure import ALARM, GREY, PALE, STRONG, marker, new_figure, or_gap, save_figure, tidy
from reshard.verify.traces.trace import TraceRow
from reshard.verify.triage.diagnosis import Diagnosis
from reshard.verify.triage.shape import ALARM as ALARM_SIGMAS
from reshard.verify.triage.shape import MOST_STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_diagnosis(rows: Sequence[TraceRow], diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Draws it into a .png, .pdf or .svg file: as many steps before the resume as after it.

    Raises:
        UsageError: matplotlib is not installed, it does not know the file's ending, or the file cannot be written.
    """
    resume_step = diagnosis.resume_step
    last_step = resume_step + diagnosis.shape.seen_steps
    shown = [row for row in rows if 2 * resume_step - last_step <= row.step <= min(last_step, resume_step + MOST_STEPS)]
    figure = new_figure()
    axes = figure.subplots()
    _draw_expected(axes, [row.step for row in shown if row.step > resume_step], diagnosis)
    steps = [row.step for row in shown]
    losses = [or_gap(row.loss) for row in shown]
    axes.plot(steps, losses, color=STRONG, linewidth=1.3, marker=marker(steps), markersize=3, label="loss")
    _mark(axes, resume_step + 0.5, "resume", GREY, on_left=True)
    if diagnosis.shape.onset is not None:
        _mark(axes, diagnosis.shape.onset, f"off: step {diagnosis.shape.onset}", ALARM)
    if diagnosis.shape.back is not None:
        _mark(axes, diagnosis.shape.back, f"back: step {diagnosis.shape.back}", GREY)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(_title(diagnosis), loc="left", fontsize=10)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    tidy(axes)
    save_figure(figure, path)


def _draw_expected(axes: Axes, steps: Sequence[int], diagnosis: Diagnosis) -> None:
    known = [step for step in steps if diagnosis.expectation.covers(step)]
    if not known:
        return
    expected = diagnosis.expectation.expected(known)
    # Of a mean over four neighbours, which is what an alarm goes by.
    band = [ALARM_SIGMAS * diagnosis.expectation.uncertainty([step] * 4) for step in known]
    label = f"expected, within {ALARM_SIGMAS:g} standard deviations of a mean over 4 steps"
    axes.fill_between(known, expected - band, expected + band, color=PALE, alpha=0.5, linewidth=0, label=label)
    axes.plot(known, expected, color=GREY, linewidth=1, linestyle="--")


def _mark(axes: Axes, step: float, text: str, color: str, *, on_left: bool = False) -> None:
    axes.axvline(step, color=color, linewidth=1, linestyle=":")
    axes.annotate(
        text,
        (step, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if on_left else 3, 0),
        textcoords="offset points",
        horizontalalignment="right" if on_left else "left",
        verticalalignment="bottom",
        rotation=90,
        color=color,
        fontsize=9,
    )


def _title(diagnosis: Diagnosis) -> str:
    pieces = ", ".join(f"{each.piece} ({each.confidence})" for each in diagnosis.findings[:3])
    return f"{diagnosis.shape.name}: {pieces}" if pieces else diagnosis.shape.name
