"""The recovery monitor, in runs that resume, recover, or go back."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn

import reshard
from reshard import Checkpointer, RecoveryMonitor
from reshard.errors import UsageError
from reshard.storage.retention import FALLBACK
from reshard.storage.steps import committed_steps
from reshard.train.recovery import Recovery
from reshard.verify.traces.trace import TraceRow, read_trace

RESUME, WINDOW = 60, 40


class Run:
    """A linear model of noisy data, every part of its state saved."""

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self.plan = reshard.BatchPlan(16, 16, 1)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(4000, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 0.3 * torch.randn(4000, 1, generator=generator)
        self.sampler = reshard.ElasticSampler(4000, self.plan, seed=2)
        self.state = reshard.TrainState(self.model, self.optimizer, self.scheduler, None, self.sampler, self.plan)
        self.checkpointer = Checkpointer(folder / "checkpoints", self.state, interval=20, keep_latest_k=keep)
        self.trace = folder / "trace.jsonl"
        self.said: list[Recovery] = []

    @torch.no_grad()
    def spoil(self) -> None:
        """Weights far off, and no way back: only another load helps."""
        self.model.weight.add_(10.0)
        self.optimizer.param_groups[0]["lr"] = 0.0

    def train(self, steps: int, monitor: RecoveryMonitor | None = None, *, goes_back: bool = False) -> None:
        with reshard.TraceWriter(self.trace) as trace:
            while self.state.step < steps:
                for batches in self.sampler.steps(list(self.sampler)):
                    loss = self._step(batches)
                    trace.write(TraceRow(self.state.step + 1, loss, samples=self.sampler.samples))
                    found = None if monitor is None else monitor.step(loss)
                    if found is not None:
                        self.said.append(found)
                    if found is not None and goes_back and found.return_to is not None:
                        self.checkpointer.roll_back(found.return_to)
                        break
                    if self.checkpointer.step() or self.state.step >= steps:
                        break

    def _step(self, batches: list[list[int]]) -> float:
        self.optimizer.zero_grad()
        result = reshard.accumulate(
            self.model,
            batches,
            lambda indices: nn.functional.mse_loss(self.model(self.x[indices]), self.y[indices]),
            self.plan,
            sampler=self.sampler,
        )
        self.optimizer.step()
        self.scheduler.step()
        return result.loss


def resumed(folder: Path, step: int | None = None) -> tuple[Run, RecoveryMonitor]:
    run = Run(folder)
    run.checkpointer.resume(step)
    return run, RecoveryMonitor(run.checkpointer, run.trace, window=WINDOW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 60 steps, saved at 20, 40 and 60."""
    Run(tmp_path, keep=3).train(RESUME)
    return tmp_path


def test_a_loss_that_goes_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, monitor = resumed(folder)
    with caplog.at_level("INFO"):
        run.train(RESUME + WINDOW + 10, monitor)
    assert run.said == [Recovery(True, "continuous", RESUME, None)]
    assert "step 100: the loss went on as it had after the resume at step 60" in caplog.text
    assert not monitor.is_watching
    assert not list((folder / "checkpoints").glob(f"{FALLBACK}*"))


def test_a_loss_that_does_not_come_back_names_an_earlier_step(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, monitor = resumed(folder)
    assert [path.name for path in (folder / "checkpoints").glob(f"{FALLBACK}*")] == [f"{FALLBACK}step-40"]
    run.spoil()
    # At keep_latest_k=1 retention would remove all but the newest.
    run.train(RESUME + WINDOW - 5, monitor)
    assert [entry.step for entry in committed_steps(folder / "checkpoints")] == [40, 80]
    run.train(RESUME + WINDOW, monitor)
    assert [(found.came_back, found.return_to) for found in run.said] == [(False, 40)]
    assert "the loss did not come back after the resume at step 60: off from step 6" in caplog.text
    assert "go back with Checkpointer.roll_back(40)" in caplog.text


def test_a_run_that_goes_back_goes_on_as_one_that_was_never_off(folder: Path, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole")
    whole.train(150)
    run, monitor = resumed(folder)
    run.spoil()
    run.train(150, monitor, goes_back=True)
    assert [found.return_to for found in run.said] == [40]
    rows, reference = read_trace(run.trace), read_trace(whole.trace)
    assert [(row.step, row.loss, row.samples) for row in rows] == [
        (row.step, row.loss, row.samples) for row in reference
    ]
    assert any("abandoned" in path.name for path in (folder / "checkpoints").iterdir())


def test_a_step_that_lacks_the_moments_is_not_gone_back_to(folder: Path) -> None:
    place = folder / "checkpoints" / "step-40"
    shutil.rmtree(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": Run(folder / "other").model.state_dict()}, checkpoint_id=place, no_dist=True)
    run, monitor = resumed(folder, RESUME)
    run.spoil()
    run.train(RESUME + WINDOW, monitor)
    assert [found.return_to for found in run.said] == [20]


def test_the_step_to_go_back_to_is_kept_until_it_is_gone_back_to(folder: Path) -> None:
    run, monitor = resumed(folder)
    run.spoil()
    run.train(RESUME + 2 * WINDOW, monitor)
    assert [entry.step for entry in committed_steps(folder / "checkpoints")] == [40, 140]
    run.checkpointer.roll_back(40)
    assert not list((folder / "checkpoints").glob(f"{FALLBACK}*"))
    assert run.state.step == 40


def test_a_run_that_is_resumed_twice_is_held_against_its_past_before_both(folder: Path) -> None:
    run, monitor = resumed(folder)
    run.spoil()
    run.train(RESUME + 30, monitor)
    again, monitor = resumed(folder)
    assert again.state.step == 80
    again.train(80 + WINDOW, monitor)
    assert again.said == [Recovery(False, "persistent or diverging", RESUME, 40)]
    again.checkpointer.unpin(40)
    assert not list((folder / "checkpoints").glob(f"{FALLBACK}*"))


def test_a_loss_that_is_too_low_is_told_and_not_gone_back_from(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, monitor = resumed(folder)
    assert [monitor.step(-20.0) for _ in range(WINDOW)][-1] == Recovery(False, "abnormally low", RESUME, None)
    assert "is too low after the resume at step 60" in caplog.text


@pytest.mark.parametrize("history", ["scratch", "no trace", "short", "no numbers"])
def test_without_a_history_nothing_is_said(history: str, folder: Path, tmp_path: Path) -> None:
    if history == "scratch":
        run, monitor = resumed(tmp_path / "new")
    elif history == "no trace":
        (folder / "trace.jsonl").unlink()
        run, monitor = resumed(folder)
    elif history == "no numbers":
        rows = [TraceRow(step, float("nan")) for step in range(1, RESUME + 1)]
        (folder / "trace.jsonl").write_text("".join(row.to_json_line() for row in rows))
        run, monitor = resumed(folder)
    else:
        lines = (folder / "trace.jsonl").read_text().splitlines(keepends=True)
        (folder / "trace.jsonl").write_text("".join(lines[-5:]))
        run, monitor = resumed(folder)
    assert not monitor.is_watching
    assert not list(run.checkpointer.directory.glob(f"{FALLBACK}*"))
    run.train(RESUME + WINDOW + 5, monitor)
    assert run.said == []


def test_a_crash_in_the_window_leaves_a_fallback_that_the_next_start_takes_over(folder: Path) -> None:
    run, monitor = resumed(folder)
    run.train(RESUME + 30, monitor)
    assert (folder / "checkpoints" / f"{FALLBACK}step-40").exists()
    again, monitor = resumed(folder)
    assert again.state.step == 80
    again.train(80 + WINDOW, monitor)
    assert [found.came_back for found in again.said] == [True]
    assert not list((folder / "checkpoints").glob(f"{FALLBACK}*"))


def test_a_step_to_go_back_to_that_was_deleted_by_hand_is_forgotten(folder: Path) -> None:
    run, monitor = resumed(folder)
    run.train(RESUME + 20, monitor)
    shutil.rmtree(folder / "checkpoints" / "step-40")
    again, monitor = resumed(folder)
    again.spoil()
    again.train(80 + WINDOW, monitor)
    # Steps 20 and 60 went by keep_latest_k=1.
    assert [(found.resume_step, found.return_to) for found in again.said] == [(80, None)]


@pytest.mark.parametrize("window", [0, -1, 2.5, True, "200"])
def test_what_is_no_window_is_refused(window: object, folder: Path) -> None:
    run = Run(folder)
    run.checkpointer.resume()
    with pytest.raises(UsageError, match="window: not a count"):
        RecoveryMonitor(run.checkpointer, run.trace, window=window)  # type: ignore[arg-type]


def _on_two_ranks(folder: Path) -> None:
    import torch.distributed as dist

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = reshard.TrainState(model, optimizer)
    checkpointer = Checkpointer(folder / "checkpoints", state, interval=20, keep_latest_k=3)
    monitor = RecoveryMonitor(checkpointer, folder / "trace.jsonl", window=1)
    assert not monitor.is_watching
    with reshard.TraceWriter(folder / "trace.jsonl") as trace:
        for step in range(1, 61):
            trace.write(TraceRow(step, 3 / step + 0.01 * (step % 3)))
            checkpointer.step()
    dist.barrier()
    monitor = RecoveryMonitor(checkpointer, folder / "trace.jsonl", window=20)
    # Of rank 1's losses, which are no means over the global batch, nothing comes.
    found = [monitor.step(9.0 if dist.get_rank() == 0 else 0.05) for _ in range(20)]
    assert found == [None] * 19 + [Recovery(False, "persistent or diverging", 60, 40)]


def test_all_ranks_are_told_the_same(tmp_path: Path) -> None:
    run_ranks(2, _on_two_ranks, tmp_path)
