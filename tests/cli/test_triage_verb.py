"""`reshard triage`: what it reads, says and draws, and its exit codes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from reshard.cli.main import main
from reshard.verify.traces.trace import TraceRow

RESUME, LAST = 100, 250


def losses(jump: float = 0.0) -> list[float]:
    noise = np.random.default_rng(0).standard_normal(LAST + 1) * 0.02
    return [
        2 + 3 * step**-0.4 + float(noise[step]) + (jump if step > RESUME + 3 else 0.0) for step in range(1, LAST + 1)
    ]


def trace(path: Path, jump: float = 0.0, **fields: object) -> str:
    rows = [TraceRow(at, loss, (1e-3,), samples=8 * at) for at, loss in enumerate(losses(jump), start=1)]
    path.write_text("".join(row.to_json_line() for row in rows))
    return str(path)


def triage(*argv: object) -> int:
    return main(["triage", *map(str, argv)])


def test_a_run_that_lost_nothing_is_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triage(trace(tmp_path / "t"), "--resume-step", RESUME) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "continuous: up to step 250 the loss goes on as expected; largest mean deviation of 4 neighbours"
    )
    assert "in order\n  learning rate 0.001 at step 100, 0.001 at step 101: no jump\n" in out
    assert "  samples 800 at step 100, 808 at step 101\n" in out
    assert out.endswith("to do\n  go on\n")
    assert err == ""


def test_a_loss_that_is_off_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triage(trace(tmp_path / "t", 0.5), "--resume-step", RESUME) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "persistent or diverging: the loss is off from step 104 on; largest mean deviation of 4 neighbours +0.5"
    )
    assert "not back by step 250" in out.splitlines()[0]
    assert "\nlikely: optimizer moments\n" in out
    assert "then resume again; with --checkpoint RUN this says from which of its steps" in out


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triage(trace(tmp_path / "t", math.nan), "--resume-step", RESUME, "--json") == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (found["class"], found["alarm"], found["resume_step"]) == ("persistent or diverging", True, RESUME)
    assert found["shape"]["peak_sigmas"] == "inf"
    assert [(each["piece"], each["confidence"]) for each in found["findings"]] == [("optimizer moments", "likely")]
    assert found.keys() >= {"findings", "in_order", "columns_missing", "notes", "return_to", "advice"}


def test_an_export_of_weights_and_biases_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "export.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["trainer/global_step", "run - train/loss", "run - train/loss__MIN", "run - train/loss__MAX"])
        table.writerows([at, loss, loss, loss] for at, loss in enumerate(losses(0.5), start=1))
    assert triage(path, "--resume-step", RESUME) == 1
    out = capsys.readouterr().out
    assert out.startswith("persistent or diverging")
    assert "the trace has no learning rate and no samples: with them it would say more" in out


def test_event_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for at, loss in enumerate(losses(0.5), start=1):
            writer.add_scalar("train/loss", loss, at)
            writer.add_scalar("my/rate", 1e-3 if at <= RESUME else 1e-2, at)
    assert triage(tmp_path, "--resume-step", RESUME, "--column", "lr=my/rate") == 1
    assert "\nlikely: learning rate\n" in capsys.readouterr().out


def test_a_reference_is_compared_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [trace(tmp_path / "t", 0.5), "--resume-step", RESUME, "--reference", trace(tmp_path / "r")]
    assert triage(*argv) == 1
    assert "not bit-equal to the reference: from step 104 on, by 0.5 at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("jump_at", "told"),
    [
        (None, "this one went the same way, to 0"),
        (RESUME + 1, "this one differs from the first of them on: other weights, samples or random numbers"),
        (RESUME + 4, "this one went the same way up to step 103, so its updates differ, and not what was loaded"),
    ],
)
def test_the_attempt_before_is_a_reference_for_as_far_as_it_got(
    jump_at: int | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed at step 108."""
    rows = [TraceRow(at, loss) for at, loss in enumerate(losses(), start=1)]
    again = [TraceRow(row.step, row.loss + (0.5 if jump_at and row.step >= jump_at else 0.0)) for row in rows[RESUME:]]
    (tmp_path / "t").write_text("".join(row.to_json_line() for row in [*rows[: RESUME + 8], *again]))
    assert triage(tmp_path / "t", "--resume-step", RESUME) == (1 if jump_at else 0)
    assert f"the attempt before had gone through steps 101 to 108: {told}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--resume-step", "250"], "no step after the resume: expected a step below 250, the last one, found 250"),
        (["--resume-step", "-1"], "--resume-step: not a step"),
        (["--resume-step", "5"], "too few steps before the resume"),
        (["--resume-step", "100", "--checkpoint", "nowhere"], "nowhere: no such file or folder"),
        (["--resume-step", "100", "--reference", "nowhere"], "nowhere: cannot read the trace"),
        (["--resume-step", "100", "--column", "loss=x"], "loss=x: no such column"),
        (["--resume-step", "100", "--reference", "empty"], "empty: a trace without a step"),
        (["--resume-step", "100", "--plot", "t"], "t: exists already"),
        (["--resume-step", "100", "--plot", "t.xyz"], "t.xyz: cannot draw this kind of file"),
        (["--resume-step", "100", "--plot", "no/t.png"], "no: no such folder"),
        (["--resume-step", "100", "--checkpoint", "run"], "run: the run has not this step any more"),
    ],
)
def test_faults_of_usage_are_exit_2(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace(Path("t"))
    Path("empty").touch()
    Path("run/step-80").mkdir(parents=True)
    assert triage("t", *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err.splitlines()[0]


@pytest.mark.parametrize("jump", [0.0, 0.5, math.nan, 1e300])
def test_every_diagnosis_can_be_drawn(jump: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    argv = [trace(tmp_path / "t", jump), "--resume-step", RESUME, "--plot", tmp_path / "loss.svg"]
    assert triage(*argv) == (1 if jump else 0)
    words = (tmp_path / "loss.svg").read_text()
    assert "<!-- resume -->" in words
    assert ("<!-- off: step 104 -->" in words) == bool(jump)
    assert triage(*argv) == 2
    assert triage(*argv, "--force") == (1 if jump else 0)
