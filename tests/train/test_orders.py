"""What the environment asks of a run: to save and trace elsewhere, to save more often, to end early."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lab import Setup, build
from ranks import RankFailed, run_ranks

import reshard
from reshard import TraceRow


def ordered(folder: str, variables: dict[str, str], steps: int) -> Any:
    """(steps trained, step folders there, those that were asked for by the program itself)."""
    os.environ.update({f"RESHARD_{name}": value for name, value in variables.items()})
    os.chdir(folder)
    run = build(Setup())
    checkpointer = reshard.Checkpointer("own", run.state, interval=100, keep_latest_k=9)
    checkpointer.resume()
    with reshard.TraceWriter("own.jsonl") as trace:
        rows = run.train(steps, done=checkpointer.step)
        trace.write(TraceRow(run.state.step, rows[-1][1]))
    return run.state.step, str(checkpointer.directory), str(trace.path)


def test_nothing_said_nothing_changed(tmp_path: Path) -> None:
    variables = {"STEPS": "", "TRACE": "", "CHECKPOINTS": "", "INTERVAL": ""}
    (found,) = run_ranks(1, ordered, str(tmp_path), variables, 4)
    assert found == (4, str(tmp_path / "own"), str(tmp_path / "own.jsonl"))
    assert not list((tmp_path / "own").glob("step-*"))


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_does_as_it_is_told(tmp_path: Path, world: int) -> None:
    variables = {
        "STEPS": "7",
        "TRACE": str(tmp_path / "there.jsonl"),
        "CHECKPOINTS": str(tmp_path / "there"),
        "INTERVAL": "3",
    }
    found = run_ranks(world, ordered, str(tmp_path), variables, 100)
    assert found == [(7, str(tmp_path / "there"), str(tmp_path / "there.jsonl"))] * world
    assert sorted(path.name for path in (tmp_path / "there").glob("step-*")) == ["step-3", "step-6", "step-7"]
    # It was not asked to stop: it was done.
    assert not (tmp_path / "there" / "STOPPED").exists()
    assert not (tmp_path / "own").exists() and not (tmp_path / "own.jsonl").exists()
    assert json.loads((tmp_path / "there.jsonl").read_text())["step"] == 7


@pytest.mark.parametrize("text", ["0", "-1", "ten", "1.5"])
def test_what_is_no_count_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        RankFailed, match=rf"RESHARD_STEPS: not a count: expected a whole number above 0, found '{text}'"
    ):
        run_ranks(1, ordered, str(tmp_path), {"STEPS": text}, 3)
