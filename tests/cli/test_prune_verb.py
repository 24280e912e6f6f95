"""`reshard prune`: what it says and removes, exit codes, JSON; on steps that `save_state` wrote, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sharded import training_state, write_sharded
from small import Small

import reshard
from reshard.cli.main import main
from reshard.storage.retention import PINNED, pin, record_resumed

Capture = pytest.CaptureFixture[str]

LOSSES = {100: 3.5, 200: 1.25, 300: float("nan"), 400: 2.0, 500: 1.5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five steps, made once."""
    run = tmp_path_factory.mktemp("saved") / "run"
    state = Small().state
    for step, loss in LOSSES.items():
        state.step = step
        reshard.save_state(run, state, metrics={"loss": loss, "eval:accuracy": -loss})
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))


def length_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def text(count: int) -> str:
    return f"{count / 1000:.3g} kB"


def test_it_says_what_goes_and_why_the_others_stay(run: Path, capsys: Capture) -> None:
    pin(run, 100)
    lengths = {step: length_bytes(run / f"step-{step}") for step in (300, 400)}
    command = ["prune", str(run), "--keep", "1", "--keep-every", "100000", "--keep-best", "loss:1"]
    width = max(len(text(length)) for length in lengths.values())

    def expected(verb: str) -> list[str]:
        stays = f"{'stays'.ljust(len(verb))}  {' ' * width}"
        return [
            f"{run}: 5 steps, 2 {verb} ({text(sum(lengths.values()))})",
            f"  step-100  {stays}  pinned",
            f"  step-200  {stays}  best loss 1.25",
            f"  step-300  {verb}  {text(lengths[300]).rjust(width)}",
            f"  step-400  {verb}  {text(lengths[400]).rjust(width)}",
            f"  step-500  {stays}  latest, newest sound",
        ]

    before = sorted(path.name for path in run.iterdir())
    assert main([*command, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [*expected("to remove"), "nothing was removed (--dry-run)"]
    assert err == ""
    assert sorted(path.name for path in run.iterdir()) == before

    assert main(command) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines(), err) == (expected("removed"), "")
    assert sorted(path.name for path in run.iterdir()) == [f"{PINNED}step-100", "step-100", "step-200", "step-500"]
    for step in (100, 200, 500):
        assert main(["check", str(run / f"step-{step}"), "--deep"]) == 0


def fields(capsys: Capture, *command: object) -> dict[str, Any]:
    assert main(["prune", *map(str, command), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_one_object(run: Path, capsys: Capture) -> None:
    lengths = {step: length_bytes(run / f"step-{step}") for step in LOSSES}
    (run / f"{PINNED}step-7").write_text("")
    found = fields(capsys, run, "--keep", 2, "--keep-best", "eval:accuracy:1:max", "--dry-run")
    assert found == {
        "path": str(run),
        "dry_run": True,
        "removed": [{"step": 100, "bytes": lengths[100]}, {"step": 300, "bytes": lengths[300]}],
        "removed_bytes": lengths[100] + lengths[300],
        "kept": [
            {"step": 200, "reasons": ["best eval:accuracy -1.25"]},
            {"step": 400, "reasons": ["latest"]},
            {"step": 500, "reasons": ["latest", "newest sound"]},
        ],
        "not_removed": [],
        "pinned_and_absent": [7],
        "others": [],
    }
    assert steps(run) == sorted(LOSSES)
    done = fields(capsys, run, "--keep", 2, "--keep-best", "eval:accuracy:1:max")
    assert done == {**found, "dry_run": False}
    assert steps(run) == [200, 400, 500]


def test_the_newest_sound_step_stays_whatever_is_asked(run: Path, capsys: Capture) -> None:
    os.truncate(run / "step-500/__0_0.distcp", 10)
    (run / "step-400/reshard.json").unlink()
    found = fields(capsys, run, "--keep", 1)
    assert found["kept"] == [{"step": 300, "reasons": ["newest sound"]}, {"step": 500, "reasons": ["latest"]}]
    assert steps(run) == [300, 500]
    (run / "step-300/.metadata").unlink()
    found = fields(capsys, run, "--keep", 1)
    assert found["kept"][0] == {"step": 300, "reasons": ["no step is sound"]}
    assert steps(run) == [300, 500]


def test_the_step_that_a_run_was_set_back_to_stays(run: Path, capsys: Capture) -> None:
    record_resumed(run, 200)
    found = fields(capsys, run, "--keep", 1)
    assert found["kept"][0] == {"step": 200, "reasons": ["resumed from"]}
    assert steps(run) == [200, 500]


def test_steps_of_stock_torch_need_no_manifest(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2, 3):
        write_sharded(tmp_path / f"step-{step}", training_state(step), 2)
    assert [entry["step"] for entry in fields(capsys, tmp_path, "--keep", 1)["removed"]] == [1, 2]
    assert steps(tmp_path) == [3]


def test_what_else_takes_space_is_listed_and_left_alone(run: Path, capsys: Capture) -> None:
    others = {"abandoned-step-600-ff": 3000, ".staging-step-600-job": 20, ".trash-step-1-ff": 0, "step-40.tmp": 7}
    for name, length in others.items():
        (run / name / "below").mkdir(parents=True)
        (run / name / "below" / "shard").write_bytes(bytes(length))
    (run / ".STOPPED.0123abcd.tmp").write_bytes(bytes(5))
    (run / "abandoned-step-700-ff").symlink_to(run / "step-500")
    (run / "notes").mkdir()
    found = fields(capsys, run, "--keep", 5)
    lengths = {entry["name"]: entry["bytes"] for entry in found["others"]}
    assert lengths == {**others, ".STOPPED.0123abcd.tmp": 5, "abandoned-step-700-ff": 0}
    assert found["removed"] == []
    assert main(["prune", str(run), "--keep", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}: 5 steps, 0 removed"
    assert lines[6:] == [
        "no steps, and left alone",
        "  .STOPPED.0123abcd.tmp   5 B  never committed; yours to delete",
        "  .staging-step-600-job  20 B  in use by a run, or left by a crash; the next start of the run sees to it",
        "  .trash-step-1-ff        0 B  in use by a run, or left by a crash; the next start of the run sees to it",
        "  abandoned-step-600-ff  3 kB  left behind when the run was set back; yours to delete",
        "  abandoned-step-700-ff   0 B  left behind when the run was set back; yours to delete",
        "  step-40.tmp             7 B  never committed; yours to delete",
    ]
    assert all((run / name).is_dir() for name in others)


def test_a_metric_that_was_never_recorded_is_told(run: Path, capsys: Capture) -> None:
    assert main(["prune", str(run), "--keep", "5", "--keep-best", "los:2"]) == 0
    assert "no step has a value of 'los' recorded: --keep-best keeps none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--keep"),
        (["--keep", "0"], "must be a whole number above zero, not '0'"),
        (["--keep", "-1"], "--keep"),
        (["--keep", "2", "--keep-every", "0"], "must be a whole number above zero, not '0'"),
        (["--keep", "2", "--keep-best", "loss"], "must be METRIC:K or METRIC:K:max, not 'loss'"),
        (["--keep", "2", "--keep-best", "loss:0"], "not 'loss:0'"),
        (["--keep", "2", "--keep-best", "loss:2:most"], "not 'loss:2:most'"),
    ],
)
def test_wrong_options_are_exit_2_and_remove_nothing(run: Path, capsys: Capture, options: list[str], told: str) -> None:
    assert main(["prune", str(run), *options]) == 2
    assert told in capsys.readouterr().err
    assert steps(run) == sorted(LOSSES)


def test_what_is_not_a_run_is_exit_2(run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    errors = []
    for place in (tmp_path / "none", tmp_path / "empty", tmp_path / "file", run / "step-500"):
        assert main(["prune", str(place), "--keep", "1"]) == 2
        errors.append(capsys.readouterr().err)
        assert errors[-1].startswith(f"reshard: error: {place}: not a run folder: expected step-<n> folders, found ")
    assert errors[0].endswith("found no such folder; name the folder that holds the step-<n> folders\n")
    assert "found a folder without any;" in errors[1]
    assert "found not a folder;" in errors[2]
    assert errors[3].endswith(f"; name the run that this step is of: {run}\n")
    assert steps(run) == sorted(LOSSES)
    # A run that has committed nothing yet is one.
    (tmp_path / "empty/ATTEMPT").write_text('{"attempt": "a"}\n')
    assert fields(capsys, tmp_path / "empty", "--keep", 1)["kept"] == []


def test_inspect_takes_no_mark_for_a_step(run: Path, capsys: Capture) -> None:
    pin(run, 100)
    record_resumed(run, 200)
    assert main(["inspect", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["run"]
    assert (found["steps"], found["passed_over"]) == (sorted(LOSSES), [])


def test_torch_is_not_needed(run: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; "
        f"sys.exit(main(['prune', {str(run)!r}, '--keep', '2', '--keep-best', 'loss:1']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert steps(run) == [200, 400, 500]
