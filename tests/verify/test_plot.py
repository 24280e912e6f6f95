"""The picture of a comparison: drawn for every kind of trace, without a display and without pyplot."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from reshard.errors import UsageError
from reshard.verify.traces.compare import Comparison, compare_traces
from reshard.verify.traces.plot import plot_traces
from reshard.verify.traces.trace import TraceRow

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def run(noise: float = 0.0, nan_at: int = 0) -> list[TraceRow]:
    """Ten steps on 4 ranks, then on 2, leaving the curve from step 6 on."""
    rows = []
    for step in range(1, 11):
        loss = math.nan if step == nan_at else 3 / step + (noise**step if step > 5 else 0)
        rows.append(TraceRow(step, loss, (1e-3,), ranks=4 if step < 6 else 2))
    return rows


def words(comparison: Comparison, tmp_path: Path) -> str:
    """An svg keeps its words in comments and is otherwise paths."""
    path = tmp_path / "plot.svg"
    plot_traces(comparison, path)
    return path.read_text()


def test_identical_traces_say_so_and_mark_the_change_of_ranks(tmp_path: Path) -> None:
    text = words(compare_traces(run(), run()), tmp_path)
    assert "identical: difference 0 at every step" in text
    assert text.count("<!-- 4 -&gt; 2 ranks -->") == 1


def test_identical_where_common_is_not_claimed_of_every_step(tmp_path: Path) -> None:
    assert "identical: difference 0 at every common step" in words(compare_traces(run(), run()[2:]), tmp_path)


@pytest.mark.parametrize(
    "comparison",
    [
        compare_traces(run(), run(0.9), epsilon=0.1),
        compare_traces(run(), run(0.01)),
        compare_traces(run(), run(nan_at=7)),
        compare_traces(run(nan_at=7), run(nan_at=7), epsilon=0.5),
    ],
    ids=["linear", "over decades", "nan on one side", "nan on both sides"],
)
def test_every_difference_can_be_drawn(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_traces(comparison, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_infinite_differences_and_epsilon_are_named(tmp_path: Path) -> None:
    text = words(compare_traces(run(), run(nan_at=7), epsilon=0.25), tmp_path)
    assert "NaN or infinite" in text
    assert "epsilon 0.25" in text
    assert "identical" not in text


def test_no_common_step_is_said(tmp_path: Path) -> None:
    assert "no step in common" in words(compare_traces(run()[:3], run()[3:]), tmp_path)
    assert "no step in common" in words(compare_traces([], []), tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'reshard\[plot\]'"):
        plot_traces(compare_traces(run(), run()), tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("name", "message"), [("plot.words", "cannot draw this kind of file"), ("no/folder.png", "cannot write the plot")]
)
def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plot_traces(compare_traces(run(), run()), tmp_path / name)


def test_pyplot_is_left_alone(tmp_path: Path) -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    plot_traces(compare_traces(run(), run()), tmp_path / "plot.png")
    assert "matplotlib.pyplot" not in sys.modules
