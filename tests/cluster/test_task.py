"""A command inside a task: no signal reaches it, every signal is told, and it knows its rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import wait_until

from reshard.environment import SlurmPlace
from reshard.storage.run_files import Control, write_control

# Says which signals reached it.
COMMAND = """
import json, os, signal, sys, time
got = []
for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
open("started", "w").close()
while not os.path.exists("stop"):
    time.sleep(0.05)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(json.dumps({"signals": got, "ranks": [os.environ.get(name) for name in names]}))
sys.exit(int(sys.argv[1]))
"""
TASK = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


class Task:
    def __init__(self, folder: Path, *options: str, status: int = 0) -> None:
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RESHARD"))}
        self.process = subprocess.Popen(
            ["reshard", "slurm", "wrap", *options, "--", sys.executable, "-c", COMMAND, str(status)],
            cwd=folder,
            env={
                **environment,
                **TASK,
                "RESHARD_ATTEMPT_FOLDER": str(folder),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until("it runs", (folder / "started").exists)

    def asked(self) -> list[str]:
        return [path.read_text() for path in self.folder.glob("asked-*")]

    def stop(self) -> tuple[int, dict[str, list[str]]]:
        (self.folder / "stop").touch()
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, json.loads(output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_to_the_whole_task_are_told_and_kept_away(tmp_path: Path, number: signal.Signals) -> None:
    """As SLURM sends them: to the process group of the task. The last of them, too (B93)."""
    task = Task(tmp_path)
    os.killpg(task.process.pid, number)
    wait_until("told", task.asked)
    os.killpg(task.process.pid, number)
    assert task.asked() == [number.name]
    status, said = task.stop()
    assert (status, said["signals"]) == (0, [])


def test_a_signal_is_forwarded_where_that_is_asked_for(tmp_path: Path) -> None:
    task = Task(tmp_path, "--forward=INT")
    os.killpg(task.process.pid, signal.SIGTERM)
    wait_until("told", task.asked)
    assert task.stop()[1]["signals"] == ["SIGINT"]


def test_what_only_the_batch_script_knows_is_forwarded_too(tmp_path: Path) -> None:
    write_control(tmp_path, Control())
    task = Task(tmp_path, "--forward=INT")
    write_control(tmp_path, Control(stop="preempted"))
    time.sleep(1)
    assert task.stop()[1]["signals"] == ["SIGINT"]
    assert task.asked() == []


def test_the_exit_status_is_the_command_s(tmp_path: Path) -> None:
    assert Task(tmp_path, status=7).stop()[0] == 7


def test_a_task_that_is_a_rank_is_told_which(tmp_path: Path) -> None:
    assert Task(tmp_path, "--ranks").stop()[1]["ranks"] == ["5", "7", "1", "2"]


def test_a_task_that_starts_torchrun_is_not(tmp_path: Path) -> None:
    assert Task(tmp_path).stop()[1]["ranks"] == [None, None, None, None]


def place(monkeypatch: pytest.MonkeyPatch, **variables: str) -> SlurmPlace | None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return SlurmPlace.given()


def test_where_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch) is None
    # The batch script has a SLURM_PROCID, too.
    batch = place(monkeypatch, SLURM_JOB_ID="8", SLURM_PROCID="0", SLURM_JOB_NAME="big", SLURM_RESTART_COUNT="2")
    assert batch == SlurmPlace("8", "8", 2, "big", in_task=False)
    assert batch.attempt == "8.2"
    array = place(monkeypatch, SLURM_JOB_ID="9", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert array is not None and array.attempt == "7_2.0"
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    last = {**TASK, "SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURM_PROCID": "6"}
    task = place(monkeypatch, **last)
    assert task == SlurmPlace("71", "71", 0, "71", True, rank=6, ranks=7, local_rank=0, local_ranks=1, node=3)
