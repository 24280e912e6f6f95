"""`reshard compare-traces`: exit codes, table, JSON and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.verify.traces.trace import TraceRow


def trace(path: Path, *, steps: int = 5, jump: float = 0.0) -> str:
    rows = [TraceRow(s, 3 / s + (jump if s > 3 else 0), (1e-3,), ranks=4, accumulation=2) for s in range(1, steps + 1)]
    path.write_text("".join(row.to_json_line() for row in rows))
    return str(path)


def test_traces_that_agree_are_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-traces", trace(tmp_path / "a"), trace(tmp_path / "b")]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("the traces agree (epsilon 0)\n")
    assert err == ""


def test_traces_that_differ_are_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [trace(tmp_path / "a"), trace(tmp_path / "b", jump=0.125)]
    assert main(["compare-traces", *traces]) == 1
    assert "the traces differ from step 4 (epsilon 0): loss differs by 0.125" in capsys.readouterr().out
    assert main(["compare-traces", *traces, "--epsilon", "0.2"]) == 0


def test_an_empty_trace_is_exit_1(tmp_path: Path) -> None:
    assert main(["compare-traces", trace(tmp_path / "a"), trace(tmp_path / "b", steps=0)]) == 1


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-traces", trace(tmp_path / "a"), trace(tmp_path / "b", steps=4), "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert (fields["agrees"], fields["first_differing_step"], fields["missing_steps"]) == (False, 5, [5])


def test_faults_of_usage_are_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = trace(tmp_path / "a")
    missing = str(tmp_path / "missing")
    assert main(["compare-traces", reference, missing]) == 2
    assert f"{missing}: cannot read the trace" in capsys.readouterr().err
    assert main(["compare-traces", reference, reference, "--epsilon", "-1"]) == 2
    assert main(["compare-traces", reference, reference, "--epsilon", "some"]) == 2


def test_a_plot_is_drawn_and_not_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "plot.png"
    argv = ["compare-traces", trace(tmp_path / "a"), trace(tmp_path / "b", jump=1.0), "--plot", str(plot)]
    assert main(argv) == 1
    assert plot.stat().st_size > 0
    assert main(argv) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*argv, "--force"]) == 1


def test_a_trace_of_ours_is_compared_with_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = trace(tmp_path / "a")
    table = tmp_path / "wandb.csv"
    table.write_text("Step,run - score\n" + "".join(f"{step},{3 / step!r}\n" for step in range(1, 6)))
    for argv in ([ours, str(table)], [str(table), ours]):
        assert main(["compare-traces", *argv]) == 2
        assert "no column is known to be the loss; name it with --column loss=NAME" in capsys.readouterr().err
        assert main(["compare-traces", *argv, "--column", "loss=run - score"]) == 0
        assert capsys.readouterr().out.endswith("the traces agree (epsilon 0)\n")
    table.write_text(table.read_text().replace("run - score", "run - train/loss"))
    assert main(["compare-traces", ours, str(table)]) == 0


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        (["loss"], "--column: not a column: expected FIELD=NAME, found loss"),
        (["=loss"], "--column: not a column"),
        (["loss="], "--column: not a column"),
        (["loss=a=b"], "loss=a=b: no such column"),
        (["loss=ranks", "loss=lr"], "--column: loss is given twice"),
        (["lost=ranks"], "lost: not a field of a trace: expected one of step, loss,"),
    ],
)
def test_a_column_that_cannot_be_taken_is_exit_2(
    tmp_path: Path, columns: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = trace(tmp_path / "a")
    options = [word for column in columns for word in ("--column", column)]
    assert main(["compare-traces", reference, reference, *options]) == 2
    out, err = capsys.readouterr()
    assert what in err and out == "" and "Traceback" not in err
