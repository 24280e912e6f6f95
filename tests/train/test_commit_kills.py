"""A save that is killed, or refused by the file system, at every storage call it makes.

The faults strike below Python's file functions, so our code and torch's writer meet them alike: an audit hook sees
every open, rename, mkdir and removal, and the calls that leave no audit event (fsync, write) are wrapped.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab
import pytest
import ranks
import torch
from faults import REFUSED, in_child
from ranks import run_ranks
from torch import nn

from reshard import Checkpointer, ReshardError, TrainState
from reshard.storage.commit import ATTEMPT_FILE
from reshard.storage.steps import committed_steps

WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


class Faults:
    """Calls ``strike`` before the Nth storage call of this process below ``run`` (``lasting``: before later ones too).

    For processes that end soon: an audit hook cannot be taken out again.
    """

    def __init__(self, run: Path, at: int, strike: Callable[[], None], lasting: bool = False) -> None:
        self.run, self.at, self.strike, self.lasting = str(run), at, strike, lasting
        self.count = 0
        sys.addaudithook(self.hook)
        for call in ("fsync", "write"):
            setattr(os, call, self.watching(getattr(os, call)))

    def watching(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(descriptor: int, *args: Any) -> Any:
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self.run):
                self.step()
            return real(descriptor, *args)

        return watched

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED and (not Path(str(args[0])).is_absolute() or str(args[0]).startswith(self.run)):
            self.step()

    def step(self) -> None:
        self.count += 1
        if self.count == self.at or (self.lasting and self.count > self.at):
            self.strike()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class History:
    """A run whose every value tells the step and the version of the history that it belongs to."""

    def __init__(self, width: int = 3) -> None:
        model = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.state = TrainState(model, optimizer)
        model(torch.ones(width)).sum().backward()
        optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        optimizer = self.state.optimizer
        moments = [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*self.state.model.parameters(), *moments]

    @torch.no_grad()
    def fill(self, step: int, version: int) -> None:
        self.state.step = step
        for number, tensor in enumerate(self.tensors()):
            tensor.copy_(expected(tensor, number, step, version))

    def version(self) -> int:
        """Which version all values belong to; fails where they are not all of one step and version."""
        matching = [
            version
            for version in range(4)
            if all(
                torch.equal(tensor, expected(tensor, number, self.state.step, version))
                for number, tensor in enumerate(self.tensors())
            )
        ]
        assert len(matching) == 1, f"step {self.state.step} is not whole"
        return matching[0]


def expected(tensor: torch.Tensor, number: int, step: int, version: int) -> torch.Tensor:
    return (torch.arange(tensor.numel()) + 1000 * number + 0.25 * step + 0.0625 * version).reshape(tensor.shape)


def save(run: Path, step: int, version: int, **options: Any) -> None:
    history = History()
    history.fill(step, version)
    Checkpointer(run, history.state, interval=1, **options).save()


def prepare(run: Path, steps: tuple[int, ...]) -> None:
    for step in steps:
        save(run, step, 0, keep_latest_k=9)
    # A dead attempt's stage, of a larger save of the step that comes next.
    stage = run / ".staging-step-30-dead"
    shutil.copytree(run / f"step-{steps[0]}", stage)
    (stage / "__1_0.distcp").write_bytes(b"of a second rank")
    (run / "STOPPED").write_text("{}")


def attempt(run: Path, at: int, strike: Callable[[], None], lasting: bool) -> None:
    """Resumes at step 20 and saves another step 30, with a fault on the way."""
    history = History()
    Faults(run, at, strike, lasting)
    checkpointer = Checkpointer(run, history.state, interval=1, keep_latest_k=2)
    checkpointer.resume(20)
    history.fill(30, 1)
    history.state.step = 29
    checkpointer.step()


def load(run: Path, step: int | None = None) -> tuple[int, int]:
    """Step and version of what a resume finds, by a new attempt."""
    history = History()
    Checkpointer(run, history.state, interval=1).resume(step)
    return history.state.step, history.version()


def stock_version(folder: Path) -> int:
    """The version of a listed step, as stock torch reads it, in whatever name the folder has."""
    history = History()
    names = dict(history.state.model.named_parameters())
    moments = {
        f"optim.state.{name}.{kind}": history.state.optimizer.state[parameter][kind]
        for name, parameter in names.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    target = {f"model.{name}": parameter.detach() for name, parameter in names.items()} | moments
    torch.distributed.checkpoint.load(target, checkpoint_id=folder, no_dist=True)
    history.state.step = int(folder.name.removeprefix("step-"))
    return history.version()


def check_after(run: Path, before: tuple[int, ...], goes_on: bool) -> None:
    listed = {folder.step: stock_version(folder.path) for folder in committed_steps(run)}
    assert 20 in listed
    assert listed.keys() <= {*before, 30}
    assert all(version == 0 for step, version in listed.items() if step != 30)
    newest = max(listed)
    if 30 in before and newest == 20:
        # The old step 30 was set aside at that moment; the next attempt puts it back, unless the new one is there.
        found = load(run)
        assert found in ((30, 0), (30, 1), (20, 0))
        assert found != (20, 0) or any(run.glob("abandoned-step-30-*"))
    else:
        assert load(run) == (newest, listed[newest])
    assert not list(run.glob(".*"))
    if not goes_on:
        return
    # It saves the same step, and the next one.
    for step in (30, 31):
        save(run, step, 2, keep_latest_k=2)
        assert load(run) == (step, 2)
        assert stock_version(run / f"step-{step}") == 2
    assert [folder.step for folder in committed_steps(run)] == [30, 31]
    left = {path.name for path in run.iterdir() if not path.name.startswith("abandoned-step-40-")}
    assert left == {ATTEMPT_FILE, "step-30", "step-31"}


def sweep(folder: Path, fault: str, steps: tuple[int, ...], stride: int, results: Any) -> None:
    """Strikes at every ``stride``-th storage call, until the save ends without being struck."""
    try:
        torch.set_num_threads(1)
        base = folder / "base"
        prepare(base, steps)
        struck = absorbed = 0
        at = 1
        while True:
            run = folder / "run"
            shutil.copytree(base, run)
            last = folder / "last"

            def strike(last: Path = last) -> None:
                last.touch()
                die() if fault == "kill" else no_space()

            def action(run: Path = run, at: int = at, strike: Callable[[], None] = strike) -> None:
                attempt(run, at, strike, lasting=fault == "full from then on")

            last.unlink(missing_ok=True)
            status = in_child(action)
            if last.exists():
                struck += 1
                absorbed += status == 0
                allowed = (signal.SIGKILL,) if fault == "kill" else (REFUSED << 8, 0)
                assert status in allowed, f"call {at}: status {status}"
            else:
                assert status == 0
                assert load(run) == (30, 1)
                results.put((struck, absorbed, at))
                return
            check_after(run, steps, goes_on=at % 4 == 1)
            shutil.rmtree(run)
            at += stride
    except BaseException:
        results.put(traceback.format_exc())


def in_server(function: Callable[..., None], *args: Any) -> Any:
    """Runs a function in a process with torch imported and no process group; what it puts into the queue."""
    assert ranks.TIMEOUT_S  # Importing that module made the server.
    context = multiprocessing.get_context("forkserver")
    results = context.SimpleQueue()
    process = context.Process(target=function, args=(*args, results))
    process.start()
    result = results.get()
    process.join()
    if isinstance(result, str):
        raise AssertionError(result)
    return result


# 20 is the step to resume from; with 30 and 40 there, 30 is replaced and 40 belongs to a history left behind.
HISTORIES = {"new": (10, 20), "set back": (10, 20, 30, 40)}


@pytest.mark.parametrize(
    ("fault", "history", "stride"),
    [
        ("kill", "new", 1),
        ("full once", "new", 3),
        ("full from then on", "set back", 3),
        *[
            pytest.param(fault, history, 1, marks=pytest.mark.slow)
            for fault in ("kill", "full once", "full from then on")
            for history in HISTORIES
            if (fault, history) != ("kill", "new")
        ],
    ],
)
def test_a_fault_at_every_storage_call_of_a_save(tmp_path: Path, fault: str, history: str, stride: int) -> None:
    struck, absorbed, last = in_server(sweep, tmp_path, fault, HISTORIES[history], stride)
    # Claim, resume, stage, write, flush, rename and prune come to more: else faults were not injected.
    assert last > 60
    assert struck >= (last - 1) // stride
    # Only what is deleted after the commit may fail without a word to the caller.
    assert absorbed == 0 if fault == "kill" else absorbed <= 25 / stride


def two_ranks(folder: str, victim: int, at: int, fault: str) -> Any:
    """Two ranks save step 30 and one of them meets a fault; what this rank sees, or None where it was not met."""
    run = Path(folder)
    rank = torch.distributed.get_rank()
    live = lab.build(lab.Setup(global_batch=4))
    checkpointer = Checkpointer(run, live.state, interval=10)
    checkpointer.resume()
    live.train(19)
    met = []

    def strike() -> None:
        met.append(1)
        die() if fault == "kill" else no_space()

    if rank == victim:
        Faults(run, at, strike)
    try:
        live.train(20, done=checkpointer.step)
    except ReshardError as error:
        if fault == "kill":
            # The helper's own barrier would miss the dead rank.
            torch.distributed.barrier = torch.distributed.destroy_process_group = lambda: None
        return f"{type(error).__name__} {error}"
    return "saved" if met or rank != victim else "not struck"


def first_step(folder: str) -> Any:
    live = lab.build(lab.Setup(global_batch=4))
    live.train(10, done=Checkpointer(folder, live.state, interval=10).step)
    return lab.digest(live)


def newest(folder: str) -> Any:
    live = lab.build(lab.Setup(global_batch=4))
    checkpointer = Checkpointer(folder, live.state, interval=10)
    checkpointer.resume()
    found = live.state.step, lab.digest(live)
    live.train(20, done=checkpointer.step)
    return found, lab.digest(live)


@pytest.mark.parametrize(
    ("victim", "at", "fault"),
    [
        (1, 2, "kill"),  # opening its file
        (0, 24, "kill"),  # flushing the tree
        (1, 3, "full"),  # flushing its file
        *[pytest.param(0, at, "kill", marks=pytest.mark.slow) for at in range(1, 36, 2)],
        *[pytest.param(0, at, "full", marks=pytest.mark.slow) for at in range(1, 36, 2)],
        *[pytest.param(1, at, fault, marks=pytest.mark.slow) for at in (1, 2, 3) for fault in ("kill", "full")],
    ],
)
def test_one_of_two_ranks_fails_in_a_save(tmp_path: Path, victim: int, at: int, fault: str) -> None:
    folder = str(tmp_path / "run")
    before = run_ranks(2, first_step, folder)[0]
    seen = run_ranks(2, two_ranks, folder, victim, at, fault, timeout_s=60)
    if fault == "kill":
        assert seen[victim] is None
        assert "lost contact" in seen[1 - victim] or "saved" in seen[1 - victim]
    else:
        # All ranks learn of it in the same words, unless it hindered nothing: pruning, making a folder that is there.
        assert seen[0] == seen[1]
        if not seen[0].startswith("saved"):
            assert seen[0].startswith("StorageError ") and "o space left on" in seen[0].splitlines()[0]
    listed = [step.step for step in committed_steps(folder)]
    assert listed == [10, 20] if seen[0] and seen[0].startswith("saved") else listed in ([10], [10, 20])
    (found, digest), end = run_ranks(2, newest, folder)[0]
    assert found == listed[-1]
    assert (digest == before) == (found == 10)
    (again, digest), _ = run_ranks(2, newest, folder)[0]
    assert (again, digest) == (20, end)


def over_the_limit(run: Path, results: Any) -> None:
    try:
        save(run, 10, 0)
        history = History(width=4000)
        history.fill(20, 0)
        before = sorted(path.name for path in run.iterdir())

        def action() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
            try:
                Checkpointer(run, history.state, interval=1).save()
            except ReshardError as error:
                (run.parent / "error").write_text(str(error))
                raise

        status = in_child(action)
        after = sorted(path.name for path in run.iterdir())
        results.put((status, (run.parent / "error").read_text(), before == after, load(run)))
    except BaseException:
        results.put(traceback.format_exc())


def test_a_file_that_may_not_grow_any_further(tmp_path: Path) -> None:
    status, error, is_clean, found = in_server(over_the_limit, tmp_path / "run")
    assert status == REFUSED << 8
    assert "__0_0.distcp" in error.splitlines()[0] or "RLIMIT_FSIZE" in error.splitlines()[0], error
    assert is_clean
    assert found == (10, 0)


def fill_up(run: Path, results: Any) -> None:
    """Saves until the file system is full."""
    try:
        history = History(width=2000)
        checkpointer = Checkpointer(run, history.state, interval=1, keep_latest_k=100)
        error = None
        for step in range(1, 100):
            history.fill(step, 0)
            try:
                checkpointer.save()
            except ReshardError as fault:
                error = f"{type(fault).__name__} {fault}"
                break
        names = sorted(path.name for path in run.iterdir())
        fresh = History(width=2000)
        # Claiming the run takes a little space, and there is some, as what was half written is gone.
        checkpointer = Checkpointer(run, fresh.state, interval=1, keep_latest_k=1)
        checkpointer.resume()
        found = fresh.state.step, fresh.version()
        shutil.rmtree(run / "step-1")
        fresh.fill(step, 1)
        checkpointer.save()
        results.put((step, error, names, found, [entry.step for entry in committed_steps(run)]))
    except BaseException:
        results.put(traceback.format_exc())


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.strip()}")
    try:
        run = tmp_path / "run"
        step, error, names, found, after = in_server(fill_up, run)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    assert step > 2
    assert error.startswith("StorageError ") and "not enough space" in error.splitlines()[0], error
    assert str(run) in error.splitlines()[0]
    assert names == sorted([ATTEMPT_FILE, *(f"step-{number}" for number in range(1, step))])
    assert found == (step - 1, 0)
    assert after == [step]
