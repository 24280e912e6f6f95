"""A comparison of two loss traces as a picture."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import TYPE_CHECKING

from reshard.verify.figure import (
    ALARM,
    GREY,
    LARGEST_DRAWN,
    PALE,
    STRONG,
    marker,
    new_figure,
    or_gap,
    save_figure,
    say,
    tidy,
)
from reshard.verify.traces.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Beyond this ratio between the differences, a linear axis shows the largest one only.
_LINEAR_RANGE = 100.0


def plot_traces(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draw both losses, and below them their absolute difference, into a .png, .pdf or .svg file.

    Raises:
        UsageError: matplotlib is not installed, it does not know the file's ending, or the file cannot be written.
    """
    figure = new_figure()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_losses(above, comparison)
    _draw_differences(below, comparison)
    _mark_rank_changes(above, below, comparison)
    save_figure(figure, path)


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    steps = [row.step for row in comparison.rows]
    reference = [or_gap(row.reference_loss) for row in comparison.rows]
    resumed = [or_gap(row.resumed_loss) for row in comparison.rows]
    dots = marker(steps)
    axes.plot(steps, reference, color=PALE, linewidth=6, marker=dots, markersize=6, label="reference")
    axes.plot(steps, resumed, color=STRONG, linewidth=1.3, marker=dots, markersize=3, label="resumed")
    axes.set_ylabel("loss")
    # Above the panel, where neither a curve nor the label of a rank change can lie under it.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    tidy(axes)


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    compared = [(row.step, row.loss_difference) for row in comparison.rows if row.loss_difference is not None]
    steps = [step for step, _ in compared]
    drawn = [or_gap(difference) for _, difference in compared]
    # Not clipped: half of a line along the lower edge would be cut off, and zero is what one looks for.
    axes.plot(steps, drawn, color=ALARM, linewidth=1.3, marker=marker(steps), markersize=3, clip_on=False, zorder=3)
    axes.set_ylabel("|difference|")
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    tidy(axes)
    _scale_differences(axes, [difference for difference in drawn if difference > 0], comparison.epsilon)
    _mark_infinite(axes, [step for step, difference in compared if difference >= LARGEST_DRAWN])
    if comparison.epsilon > 0:
        axes.axhline(comparison.epsilon, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"epsilon {comparison.epsilon:g}",
            (1, comparison.epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            horizontalalignment="right",
            color=GREY,
            fontsize=9,
        )
    if not compared:
        say(axes, "no step in common")
    elif all(difference == 0 for _, difference in compared):
        say(axes, f"identical: difference 0 at every {'common ' if comparison.missing_steps else ''}step")


def _scale_differences(axes: Axes, positive: list[float], epsilon: float) -> None:
    marks = [*positive, *([epsilon] if epsilon > 0 else [])]
    if not marks:
        axes.set_ylim(-0.1, 1)
        axes.set_yticks([0])
    elif max(marks) > _LINEAR_RANGE * min(marks):
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(marks))))
        axes.set_ylim(bottom=0)
    else:
        axes.set_ylim(bottom=0, top=1.15 * max(marks))


def _mark_infinite(axes: Axes, steps: list[int]) -> None:
    if not steps:
        return
    along_the_top = axes.get_xaxis_transform()
    axes.plot(
        steps,
        [0.95] * len(steps),
        "v",
        color=ALARM,
        markersize=7,
        transform=along_the_top,
        label="NaN or infinite",
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _mark_rank_changes(above: Axes, below: Axes, comparison: Comparison) -> None:
    known = [(row.step, row.ranks) for row in comparison.rows if row.ranks is not None]
    for (_, before), (step, after) in pairwise(known):
        if before == after:
            continue
        for axes in (above, below):
            axes.axvline(step - 0.5, color=GREY, linewidth=1, linestyle=":")
        above.annotate(
            f"{before} -> {after} ranks",
            (step - 0.5, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            rotation=90,
            verticalalignment="top",
            color=GREY,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
