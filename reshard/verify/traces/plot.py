"""A comparison of two loss traces as a picture; the only module that needs matplotlib.

matplotlib is imported when a picture is drawn, and never through pyplot: no display is needed, no global state touched.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.verify.traces.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PALE = "#9ec5e8"
_STRONG = "#0b3c6f"
_ALARM = "#b3261e"
_GREY = "#6b6b6b"

# An axis that has to reach further cannot be laid out; infinities and NaN are gaps, too.
_LARGEST_DRAWN = 1e100

# Beyond this ratio between the differences, a linear axis shows the largest one only.
_LINEAR_RANGE = 100.0


def plot_traces(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draw both losses, and below them their absolute difference, into a .png, .pdf or .svg file.

    Raises:
        UsageError: matplotlib is not installed, it does not know the file's ending, or the file cannot be written.
    """
    figure = _new_figure()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_losses(above, comparison)
    _draw_differences(below, comparison)
    _mark_rank_changes(above, below, comparison)
    _save(figure, path)


def _new_figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plotting needs matplotlib", hint="pip install 'reshard[plot]'") from error
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    steps = [row.step for row in comparison.rows]
    reference = [_or_gap(row.reference_loss) for row in comparison.rows]
    resumed = [_or_gap(row.resumed_loss) for row in comparison.rows]
    marker = _marker(steps)
    axes.plot(steps, reference, color=_PALE, linewidth=6, marker=marker, markersize=6, label="reference")
    axes.plot(steps, resumed, color=_STRONG, linewidth=1.3, marker=marker, markersize=3, label="resumed")
    axes.set_ylabel("loss")
    # Above the panel, where neither a curve nor the label of a rank change can lie under it.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    _tidy(axes)


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    compared = [(row.step, row.loss_difference) for row in comparison.rows if row.loss_difference is not None]
    steps = [step for step, _ in compared]
    drawn = [_or_gap(difference) for _, difference in compared]
    # Not clipped: half of a line along the lower edge would be cut off, and zero is what one looks for.
    axes.plot(steps, drawn, color=_ALARM, linewidth=1.3, marker=_marker(steps), markersize=3, clip_on=False, zorder=3)
    axes.set_ylabel("|difference|")
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    _tidy(axes)
    _scale_differences(axes, [difference for difference in drawn if difference > 0], comparison.epsilon)
    _mark_infinite(axes, [step for step, difference in compared if difference >= _LARGEST_DRAWN])
    if comparison.epsilon > 0:
        axes.axhline(comparison.epsilon, color=_GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"epsilon {comparison.epsilon:g}",
            (1, comparison.epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            horizontalalignment="right",
            color=_GREY,
            fontsize=9,
        )
    if not compared:
        _say(axes, "no step in common")
    elif all(difference == 0 for _, difference in compared):
        _say(axes, f"identical: difference 0 at every {'common ' if comparison.missing_steps else ''}step")


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
        color=_ALARM,
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
            axes.axvline(step - 0.5, color=_GREY, linewidth=1, linestyle=":")
        above.annotate(
            f"{before} -> {after} ranks",
            (step - 0.5, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            rotation=90,
            verticalalignment="top",
            color=_GREY,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(os.fspath(path))
    except ValueError as error:
        raise UsageError(
            "cannot draw this kind of file", path=path, hint="end the name in .png, .pdf or .svg"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write the plot: {error.strerror}", path=path, hint="check the folder") from error


def _say(axes: Axes, text: str) -> None:
    axes.text(
        0.5,
        0.5,
        text,
        transform=axes.transAxes,
        horizontalalignment="center",
        verticalalignment="center",
        color=_GREY,
        fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none"},
        zorder=4,
    )


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _or_gap(value: float | None) -> float:
    return value if value is not None and abs(value) < _LARGEST_DRAWN else math.nan


def _marker(steps: list[int]) -> str:
    """Dots while single steps can be told apart: a lone step between two gaps would be invisible as a line."""
    return "o" if len(steps) <= 60 else ""
