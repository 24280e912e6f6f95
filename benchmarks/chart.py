"""Bars: how many times as fast as stock torch each contender is, in every section, case and place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from record import Line, by_contender, median_of


def draw(lines: Sequence[Line], path: Path, title: str) -> str | None:
    """Draws the chart; where it cannot, says why."""
    try:
        import matplotlib
    except ImportError:
        return "no chart: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, tuple[float, str]]] = {}
    for (section, case, where, contender), group in by_contender(lines).items():
        speed, seconds = median_of(group, "to_stock"), median_of(group, "seconds")
        if speed is not None and seconds is not None:
            panels.setdefault(f"{section}, {case}, {where}", {})[contender] = speed, f"{speed:.2g} x, {seconds:.2g} s"
    if not panels:
        return "no chart: nothing was measured beside stock torch"
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.28 * max(map(len, panels.values())) + 0.9
    figure, axes = pyplot.subplots(rows, columns, figsize=(7 * columns, height * rows), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (name, bars) in zip(axes.flat, panels.items(), strict=False):
        colors = ["tab:orange" if contender == "ours" else "tab:gray" for contender in bars]
        drawn = ax.barh(list(bars), [speed for speed, _ in bars.values()], color=colors)
        ax.bar_label(drawn, [label for _, label in bars.values()], padding=3, fontsize=8)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.margins(x=0.25)
        ax.invert_yaxis()
        ax.set_title(name, fontsize=10, loc="left")
        ax.tick_params(labelsize=8)
    figure.suptitle(f"times as fast as stock torch\n{title}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None
