"""Signals as a flag: to one process, to a process group with data workers, and to torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch.utils.data import DataLoader

from reshard.cluster.signals import SIGNALS, StopSignal
from reshard.errors import UsageError

REPOSITORY = Path(__file__).parents[2]
assert ranks.TIMEOUT_S  # Importing it sets up the server below.


@pytest.fixture
def handlers() -> Iterator[None]:
    """Whatever a test installs is gone after it."""
    former = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR2, signal.SIGINT)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def stop(handlers: None) -> StopSignal:
    return StopSignal()


def tell(number: int, pid: int | None = None) -> None:
    os.kill(pid or os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_sets_the_flag_and_nothing_else(stop: StopSignal, number: signal.Signals) -> None:
    assert not stop()
    tell(number)
    assert stop()
    assert stop.received == number.name


def test_a_second_signal_is_harmless_and_the_first_is_named(stop: StopSignal) -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        tell(number)
    assert stop.received == "SIGUSR1"


def test_a_handler_that_was_there_runs_too(handlers: None) -> None:
    seen: list[tuple[int, bool]] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append((number, frame is not None)))
    stop = StopSignal()
    tell(signal.SIGUSR1)
    assert stop()
    assert seen == [(signal.SIGUSR1, True)]


def test_two_of_them_both_hear(handlers: None) -> None:
    first, second = StopSignal(), StopSignal()
    tell(signal.SIGTERM)
    assert first.received == second.received == "SIGTERM"


def test_other_signals_can_be_chosen_and_defaults_are_replaced(handlers: None) -> None:
    stop = StopSignal([signal.SIGINT, signal.SIGUSR2])
    tell(signal.SIGINT)  # Python's own handler would raise KeyboardInterrupt in the middle of a step.
    assert stop.received == "SIGINT"


def test_an_ignored_signal_is_heard(handlers: None) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    stop = StopSignal()
    tell(signal.SIGUSR1)
    assert stop.received == "SIGUSR1"


def test_close_puts_the_former_handlers_back(handlers: None) -> None:
    def handler(number: int, frame: Any) -> None: ...

    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop = StopSignal()
    stop.close()
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    stop.close()
    tell(signal.SIGUSR1)
    assert not stop()


def test_outside_the_main_thread_it_is_an_error(handlers: None) -> None:
    errors: list[UsageError] = []

    def make() -> None:
        try:
            StopSignal()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=make, name="helper")
    thread.start()
    thread.join()
    assert "signals can be caught in the main thread only: found helper; make the StopSignal before" in str(errors[0])


def in_fork(action: Callable[[int], int]) -> tuple[int, Callable[[], int]]:
    """Forks a child that writes to a pipe when it is ready; its pid, and a function that waits for its status."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os._exit(action(write_end))
        finally:
            os._exit(99)
    os.read(read_end, 1)
    return child, lambda: os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_report_a_stop_and_runs_no_handler(handlers: None) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    stop = StopSignal()

    def wait(ready: int) -> int:
        tell(signal.SIGUSR1)
        os.write(ready, b"x")
        return 10 * stop() + len(calls)

    _, status = in_fork(wait)
    assert status() == 0
    assert not stop()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_terminate_ends_a_forked_process(stop: StopSignal) -> None:
    """Else a pool or a process that is joined after ``terminate`` would keep the run waiting for ever."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    time.sleep(0.2)
    process.terminate()
    process.join(10)
    assert process.exitcode == -signal.SIGTERM
    assert not stop()


class Slow(torch.utils.data.Dataset[int]):
    def __init__(self, length: int, delay_s: float = 0.005) -> None:
        self.length = length
        self.delay_s = delay_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.delay_s)
        return index


def loader(length: int, protected: bool = True, context: str = "fork", **options: Any) -> DataLoader[int]:
    return DataLoader(
        Slow(length, **options),
        batch_size=2,
        num_workers=2,
        multiprocessing_context=context,
        worker_init_fn=StopSignal.ignore_in_worker if protected else None,
    )


def train_and_evaluate(number: int, signal_in: str, protected: bool, context: str, results: Any) -> None:
    """A training loop with an evaluation after each step, in a process group of its own."""
    os.setpgid(0, 0)
    stop = StopSignal()
    trained: list[int] = []
    evaluated: list[int] = []

    def send() -> None:
        # From outside: a worker takes a signal of the training process for the end of the loader.
        subprocess.run(["setsid", "sh", "-c", f"kill -{number} -{os.getpid()}"], check=True)

    try:
        for batch in loader(24, protected, context):
            trained += batch.tolist()
            if signal_in == "training" and len(trained) == 8:
                send()
            if len(trained) == 12:
                for held_out in loader(12, protected, context):
                    evaluated += held_out.tolist()
                    if signal_in == "evaluation" and len(evaluated) == 4:
                        send()
            assert not stop() or signal_in == "training" or evaluated
    except RuntimeError as error:
        results.send(str(error))
        return
    results.send((trained, evaluated, stop.received))


def run_in_group(*args: Any) -> Any:
    # The server of the helpers has torch imported already.
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train_and_evaluate, args=(*args, sender))
    process.start()
    try:
        assert receiver.poll(60), "the loop hangs"
        return receiver.recv()
    finally:
        # Workers that were killed may hold locks for which an orderly end would wait.
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.parametrize(
    ("number", "signal_in", "context"),
    [
        (signal.SIGTERM, "training", "fork"),
        (signal.SIGTERM, "evaluation", "fork"),
        (signal.SIGUSR1, "evaluation", "fork"),
        pytest.param(signal.SIGTERM, "training", "spawn", marks=pytest.mark.slow),
    ],
)
def test_data_workers_survive_a_signal_to_the_whole_group(number: signal.Signals, signal_in: str, context: str) -> None:
    expected = (list(range(24)), list(range(12)), number.name)
    assert run_in_group(number, signal_in, True, context) == expected


def test_unprotected_data_workers_would_not(handlers: None) -> None:
    """Else the test above would prove nothing."""
    said = run_in_group(signal.SIGTERM, "training", False, "fork")
    # Torch has two ways to notice: its handler of SIGCHLD, or a wait for the next batch.
    assert "exited unexpectedly" in said or "is killed by signal: Terminated" in said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_protected_worker_that_is_stuck_ends_with_the_loader(stop: StopSignal) -> None:
    batches = iter(loader(4, delay_s=60.0))
    workers = batches._workers
    time.sleep(0.5)
    began = time.monotonic()
    del batches
    for worker in workers:
        worker.join(10)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert time.monotonic() - began < 30


SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from reshard import Checkpointer, StopSignal, TrainState

stop = StopSignal()
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
state = TrainState(model, torch.optim.AdamW(model.parameters()))
checkpointer = Checkpointer(folder / "run", state, interval=1000, stop=stop)
checkpointer.resume()
(folder / f"first-{dist.get_rank()}").write_text(str(state.step))
while state.step < steps:
    model(torch.ones(2)).sum().backward()
    state.optimizer.step()
    time.sleep(0.02)
    if checkpointer.step():
        break
    Path(folder, f"pid-{dist.get_rank()}").write_text(str(__import__("os").getpid()))
(folder / f"last-{dist.get_rank()}").write_text(str(state.step))
dist.destroy_process_group()
"""


def torchrun(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, folder]
    return subprocess.Popen([*command, str(steps)], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


def finish(launcher: subprocess.Popen[bytes]) -> int:
    try:
        return launcher.wait(60)
    finally:
        if launcher.poll() is None:
            launcher.kill()


def wait_for_steps(folder: Path, launcher: subprocess.Popen[bytes]) -> list[int]:
    """The workers' process ids, once all of them train."""
    deadline = time.monotonic() + 60
    paths = [folder / "pid-0", folder / "pid-1"]
    while not all(path.exists() and path.read_text() for path in paths):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def numbers(folder: Path, name: str) -> list[int]:
    return [int((folder / f"{name}-{rank}").read_text()) for rank in range(2)]


def test_under_torchrun_a_signal_to_one_worker_stops_and_saves_all_and_the_next_run_goes_on(tmp_path: Path) -> None:
    launcher = torchrun(tmp_path, 100_000)
    tell(signal.SIGTERM, wait_for_steps(tmp_path, launcher)[1])
    assert finish(launcher) == 0
    first, second = numbers(tmp_path, "last")
    assert first == second > 0
    marker = json.loads((tmp_path / "run/STOPPED").read_text())
    assert (marker["step"], marker["reason"]) == (first, "SIGTERM")
    assert (tmp_path / f"run/step-{first}/reshard.json").exists()

    assert finish(torchrun(tmp_path, first + 5)) == 0
    assert numbers(tmp_path, "first") == [first] * 2
    assert numbers(tmp_path, "last") == [first + 5] * 2
    assert not (tmp_path / "run/STOPPED").exists()


@pytest.mark.slow
def test_torchrun_hands_a_signal_on_and_the_workers_save(tmp_path: Path) -> None:
    launcher = torchrun(tmp_path, 100_000)
    wait_for_steps(tmp_path, launcher)
    launcher.send_signal(signal.SIGTERM)
    # torchrun itself ends with an error, whatever its workers return: the marker is what a job script can trust.
    assert finish(launcher) != 0
    first, second = numbers(tmp_path, "last")
    assert first == second > 0
    assert json.loads((tmp_path / "run/STOPPED").read_text())["step"] == first
    assert (tmp_path / f"run/step-{first}/reshard.json").exists()
