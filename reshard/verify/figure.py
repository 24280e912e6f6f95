"""Pictures of loss curves; the only module that needs matplotlib.

matplotlib is imported when a picture is drawn, and never through pyplot: no display is needed, no global state touched.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from reshard.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALE = "#9ec5e8"
STRONG = "#0b3c6f"
ALARM = "#b3261e"
GREY = "#6b6b6b"

LARGEST_DRAWN = 1e100
"""An axis that has to reach further cannot be laid out; infinities and NaN are gaps, too."""


def new_figure() -> Figure:
    """An empty page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plotting needs matplotlib", hint="pip install 'reshard[plot]'") from error
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes it, as its name ends.

    Raises:
        UsageError: matplotlib does not know the ending, or the file cannot be written.
    """
    try:
        figure.savefig(os.fspath(path))
    except ValueError as error:
        raise UsageError(
            "cannot draw this kind of file", path=path, hint="end the name in .png, .pdf or .svg"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write the plot: {error.strerror}", path=path, hint="check the folder") from error


def say(axes: Axes, text: str) -> None:
    """A line in the middle of a panel."""
    axes.text(
        0.5,
        0.5,
        text,
        transform=axes.transAxes,
        horizontalalignment="center",
        verticalalignment="center",
        color=GREY,
        fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none"},
        zorder=4,
    )


def tidy(axes: Axes) -> None:
    """Two lines around a panel, and a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def or_gap(value: float | None) -> float:
    """The value, or NaN, which is drawn as a gap."""
    return value if value is not None and abs(value) < LARGEST_DRAWN else math.nan


def marker(steps: list[int]) -> str:
    """Dots while single steps can be told apart: a lone step between two gaps would be invisible as a line."""
    return "o" if len(steps) <= 60 else ""
