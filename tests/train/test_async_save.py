"""``Checkpointer(async_save=True)``: the loop goes on while a step is written, and what is written is that step."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import reshard
from reshard import Checkpointer, ReshardError, TrainState, load_state
from reshard.storage.steps import committed_steps
from reshard.verify.check.run import check

WIDTH = 256


def build() -> TrainState:
    """A sharded model whose every element is the number of the step, and an optimizer with state."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return TrainState(model, optimizer)


@torch.no_grad()
def fill(state: TrainState, value: float) -> None:
    optimizer = (
        state.optimizers["optimizer"] if "optimizer" in state.optimizers else next(iter(state.optimizers.values()))
    )
    for parameter in state.model.parameters():
        parameter.fill_(value)
        optimizer.state[parameter]["exp_avg"].fill_(value + 0.5)


def values(state: TrainState) -> set[float]:
    found = set()
    for parameter in state.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found |= set(local.detach().unique().tolist())
    return found


def steps_of(folder: str | Path) -> list[int]:
    return [entry.step for entry in committed_steps(folder)]


def change_at_once(folder: str) -> Any:
    state = build()
    checkpointer = Checkpointer(folder, state, interval=1, keep_latest_k=9, async_save=True)
    for number in (1, 2, 3):
        fill(state, number)
        checkpointer.step()
        fill(state, -1.0)
    checkpointer.wait()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "reshard-save"]
    found = []
    for number in (1, 2, 3):
        other = build()
        load_state(Path(folder) / f"step-{number}", other)
        found.append((other.step, values(other)))
    return found, threads


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_files_hold_the_moment_of_the_call(tmp_path: Path, ranks: int) -> None:
    for found, threads in run_ranks(ranks, change_at_once, str(tmp_path)):
        assert found == [(1, {1.0}), (2, {2.0}), (3, {3.0})]
        assert threads == []
    for number in (1, 2, 3):
        assert check(tmp_path / f"step-{number}", deep=True).is_sound


def fail_second(folder: str) -> Any:
    state = build()
    checkpointer = Checkpointer(folder, state, interval=1, keep_latest_k=9, async_save=True)
    fill(state, 1)
    checkpointer.step()
    checkpointer.wait()
    dist.barrier()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    dist.barrier()
    fill(state, 2)
    errors = []
    checkpointer.step()
    for call in (checkpointer.step, checkpointer.wait):
        try:
            call()
            errors.append(None)
        except ReshardError as error:
            errors.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    fill(state, 4)
    checkpointer.step()
    checkpointer.wait()
    return errors


def test_a_failure_is_raised_by_the_next_call_on_every_rank_and_once(tmp_path: Path) -> None:
    for first, second in run_ranks(2, fail_second, str(tmp_path)):
        assert first is not None and "in the background" in first and "rank 1" in first.splitlines()[0]
        assert second is None
    assert steps_of(tmp_path) == [1, 4]


TRAIN = """
import sys, torch
from test_async_save import build, fill
from reshard import Checkpointer
state = build()
checkpointer = Checkpointer(sys.argv[1], state, interval=1, keep_latest_k=2, async_save=sys.argv[2] == "async")
checkpointer.resume()
print("begins", state.step, flush=True)
while True:
    fill(state, state.step + 1)
    checkpointer.step()
"""


def killed_after(folder: Path, mode: str, seconds: float) -> None:
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parent.parent), str(Path(reshard.__file__).parent.parent)]
    )
    command = [sys.executable, "-c", TRAIN, str(folder), mode]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None and process.stdout.readline().startswith(b"begins")
    while not committed_steps(folder) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        ("async", 4),
        pytest.param("sync", 2, marks=pytest.mark.slow),
        pytest.param("async", 25, marks=pytest.mark.slow),
        pytest.param("sync", 25, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_leaves_a_sound_newest_step(tmp_path: Path, mode: str, rounds: int) -> None:
    before = 0
    for turn in range(rounds):
        killed_after(tmp_path, mode, 0.05 + 0.37 * ((turn * 0.618) % 1))
        newest = committed_steps(tmp_path)[-1]
        assert newest.step >= before
        before = newest.step
        assert check(newest.path, deep=True).is_sound
        state = build()
        load_state(newest.path, state)
        assert state.step == newest.step and values(state) == {float(newest.step)}
    assert before > rounds


def stop_in_the_middle(folder: str) -> Any:
    state = build()
    asked: list[bool] = []
    checkpointer = Checkpointer(folder, state, interval=5, async_save=True, stop=lambda: bool(asked))
    fill(state, 1)
    checkpointer.step()
    asked.append(True)
    ended = checkpointer.step()
    return ended, steps_of(folder), (Path(folder) / "STOPPED").exists()


def test_a_run_that_is_asked_to_stop_ends_with_its_step_committed(tmp_path: Path) -> None:
    assert run_ranks(2, stop_in_the_middle, str(tmp_path)) == [(True, [2], True)] * 2
