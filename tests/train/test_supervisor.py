"""What a run under `reshard slurm wrap` hears and tells, and when it knows by itself that its time is up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lab
import pytest
from ranks import run_ranks

import reshard
from reshard.environment import Orders
from reshard.storage.run_files import Control, lead_time_s, read_progress, write_control
from reshard.storage.steps import committed_steps
from reshard.train.supervisor import Supervisor


def supervised(folder: Path | None, end_time_s: int | None = None) -> Supervisor:
    orders = Orders(attempt_folder=None if folder is None else str(folder), end_time_s=end_time_s)
    return Supervisor(orders, Path("checkpoints"), 2)


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "progress.json").read_text())


def test_without_a_supervisor_there_is_nothing_to_do(tmp_path: Path) -> None:
    supervisor = supervised(None)
    supervisor.stepped(1)
    supervisor.saved(1, 2.0)
    assert supervisor.asks() is None
    assert list(tmp_path.iterdir()) == []


def test_it_is_told_to_stop(tmp_path: Path) -> None:
    write_control(tmp_path, Control())
    assert supervised(tmp_path).asks() is None
    write_control(tmp_path, Control(stop="preempted"))
    assert supervised(tmp_path).asks() == "preempted"


def test_it_looks_into_the_file_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system that is a request to a server, and there may be thousands of steps a minute."""
    reads = []
    monkeypatch.setattr("reshard.train.supervisor.read_control", lambda folder: reads.append(folder))
    now_s = [100.0]
    monkeypatch.setattr("reshard.train.supervisor.time.monotonic", lambda: now_s[0])
    supervisor = supervised(tmp_path)
    for _ in range(500):
        supervisor.asks()
        now_s[0] += 0.01
    assert len(reads) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stop": "preempted", "of_a_later_version": 1}'])
def test_a_file_that_makes_no_sense_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "control.json").write_text(text)
    assert supervised(tmp_path).asks() == ("preempted" if "stop" in text else None)


def test_a_folder_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path / "gone")
    supervisor.resumed(3)
    supervisor.saved(4, 1.0)
    assert supervisor.asks() is None


def test_the_time_to_stop_is_a_step_and_two_saves_before_the_end(tmp_path: Path) -> None:
    assert lead_time_s(None, None) == 10
    assert lead_time_s(30.0, 5.0) == 75
    end_time_s = int(time.time()) + 60
    assert supervised(None, end_time_s).asks() is None
    slow = supervised(None, end_time_s)
    slow.saved(1, 30.0)
    assert slow.asks() == "time limit"
    # The first save of this attempt is to come; an earlier one took so long.
    write_control(tmp_path, Control(end_time_s=end_time_s, save_s=30.0))
    assert supervised(tmp_path).asks() == "time limit"
    # What `wrap` knows of the end wins over what SLURM said at the start.
    write_control(tmp_path, Control(end_time_s=end_time_s + 3600, save_s=30.0))
    assert supervised(tmp_path, end_time_s).asks() is None


def test_it_says_how_far_it_is(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path)
    assert told(tmp_path)["resumed_at"] is None
    supervisor.resumed(40)
    supervisor.stepped(41)
    assert told(tmp_path)["step"] == 40, "written at every step"
    supervisor.saved(41, 3.0)
    supervisor.saved(42, 2.0)
    supervisor.stopped(42, "preempted")
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.step, progress.resumed_at, progress.saved_step, progress.save_s) == (42, 40, 42, 3.0)
    assert (progress.stopped_at, progress.stop_reason, progress.ranks) == (42, "preempted", 2)


def trained(folder: str, control: dict[str, Any], variables: dict[str, str]) -> Any:
    attempt = Path(folder, "attempt")
    os.environ["RESHARD_ATTEMPT_FOLDER"] = str(attempt)
    os.environ.update(variables)
    run = lab.build(lab.Setup(global_batch=4))
    checkpointer = reshard.Checkpointer(Path(folder, "checkpoints"), run.state, interval=100)
    checkpointer.resume()

    def on_step(run: lab.Run, loss: float) -> None:
        if run.state.step == 4:
            # Rank 0's to read, and its alone; every rank writes the same.
            write_control(attempt, Control(**control))
            time.sleep(1.1)

    rows = run.train(20, on_step, done=checkpointer.step)
    return len(rows), [entry.step for entry in committed_steps(checkpointer.directory)]


@pytest.mark.parametrize("reason", ["preempted", "time limit"])
def test_all_ranks_stop_at_the_same_step_without_a_signal(tmp_path: Path, reason: str) -> None:
    """B92, by way of a file that only rank 0 reads."""
    (tmp_path / "attempt").mkdir()
    control = {"stop": reason} if reason == "preempted" else {"end_time_s": time.time() + 5}
    for steps, saved in run_ranks(2, trained, str(tmp_path), control, {}, timeout_s=60):
        assert (steps, saved) == (5, [5])
    progress = read_progress(tmp_path / "attempt")
    assert progress is not None
    assert (progress.stopped_at, progress.stop_reason, progress.saved_step) == (5, reason, 5)
    assert json.loads((tmp_path / "checkpoints" / "STOPPED").read_text())["reason"] == reason


def test_a_job_whose_end_slurm_tells_needs_no_wrap(tmp_path: Path) -> None:
    """By SLURM_JOB_END_TIME, which recent releases set."""
    variables = {"RESHARD_ATTEMPT_FOLDER": "", "SLURM_JOB_END_TIME": str(int(time.time()) + 5)}
    (tmp_path / "attempt").mkdir()
    ((steps, saved),) = run_ranks(1, trained, str(tmp_path), {}, variables)
    assert (steps, saved) == (1, [1])
