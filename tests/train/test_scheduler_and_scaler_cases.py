"""Schedules and gradient scalers across a resume: the cases B04, B60 and B65 of CASES.md, and every torch scheduler.

Against an uninterrupted run or a closed form.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small import edit_manifest
from torch import nn
from torch.optim import lr_scheduler

from reshard import BatchPlan, ReshardError, TrainState, load_state, save_state

Build = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Build] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 6, 9], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=12, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=14, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=1e-3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, [0.01, 0.02], [0.1, 0.2], step_size_up=3, mode="exp_range", gamma=0.9
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=[1e-4, 1e-5]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=12)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Schedule:
    """A model, two groups, a scheduler; ``run`` gives the learning rates of each step."""

    def __init__(self, build: Build, lr: float = 0.05) -> None:
        self.model = nn.Linear(2, 2)
        groups = [{"params": [self.model.weight], "lr": lr}, {"params": [self.model.bias], "lr": 2 * lr}]
        self.optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        self.scheduler = build(self.optimizer)
        self.state = TrainState(self.model, self.optimizer, self.scheduler)

    def run(self, steps: int) -> list[list[float]]:
        rates = []
        while self.state.step < steps:
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.step()
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step(*([1.0] if plateau else []))
            self.state.step += 1
        return rates


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in copy.deepcopy(state).items() if key != "optimizer"}


@pytest.mark.parametrize("name", SCHEDULERS)
class TestEveryScheduler:
    def test_its_state_comes_back_equal_and_the_rates_go_on(self, tmp_path: Path, name: str) -> None:
        reference = Schedule(SCHEDULERS[name])
        expected = reference.run(16)
        saver = Schedule(SCHEDULERS[name])
        saver.run(7)
        path = save_state(tmp_path, saver.state)
        loader = Schedule(SCHEDULERS[name])
        load_state(path, loader.state)
        mine, theirs = plain(loader.scheduler.state_dict()), plain(saver.scheduler.state_dict())
        assert mine == theirs
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}
        assert loader.run(16) == expected[7:]

    def test_another_base_rate_rescales_the_whole_rest(self, tmp_path: Path, name: str) -> None:
        """A law: from here on each rate is the same multiple of what it would have been."""
        reference = Schedule(SCHEDULERS[name])
        expected = reference.run(16)[7:]
        saver = Schedule(SCHEDULERS[name])
        saver.run(7)
        path = save_state(tmp_path, saver.state)
        loader = Schedule(SCHEDULERS[name])
        base = [group.get("initial_lr", group["lr"]) for group in saver.optimizer.param_groups]
        load_state(path, loader.state, lr=[3 * rate for rate in base])
        for rates, reference_rates in zip(loader.run(16), expected, strict=True):
            assert rates == pytest.approx([3 * rate for rate in reference_rates], rel=1e-9, abs=1e-15)


class TestConstructionOrder:
    """B04: SGD lr 0.1, cosine over 20 steps, saved at 8."""

    at_8 = 0.05 * (1 + math.cos(math.pi * 8 / 20))

    def saved(self, folder: Path) -> Path:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        for _ in range(8):
            optimizer.step(), scheduler.step()
        return save_state(folder, TrainState(model, optimizer, scheduler, step=8))

    def assert_goes_on(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        assert abs(self.at_8 - 0.0654508497) < 1e-10
        (group,) = optimizer.param_groups
        assert group["initial_lr"] == 0.1 and scheduler.base_lrs == [0.1] and scheduler.last_epoch == 8
        for epoch in range(8, 21):
            assert abs(group["lr"] - 0.05 * (1 + math.cos(math.pi * epoch / 20))) <= 1e-12
            optimizer.step(), scheduler.step()

    @pytest.mark.parametrize("config_lr", [0.1, 0.7])
    def test_the_scheduler_is_built_before_the_load(self, tmp_path: Path, config_lr: float) -> None:
        path = self.saved(tmp_path)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config_lr)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        load_state(path, TrainState(model, optimizer, scheduler))
        self.assert_goes_on(optimizer, scheduler)

    def test_the_scheduler_is_built_after_a_load_and_restored_by_a_second_one(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.7)
        state = TrainState(model, optimizer)
        with pytest.raises(ReshardError, match="scheduler: in the checkpoint, and the run has none"):
            load_state(path, state)
        load_state(path, state, allow_unexpected=["scheduler"])
        assert abs(optimizer.param_groups[0]["lr"] - self.at_8) <= 1e-12
        state.scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        load_state(path, state)
        self.assert_goes_on(optimizer, state.scheduler)

    def test_another_length_in_the_config_is_said_to_be_ignored(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = self.saved(tmp_path)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        load_state(path, TrainState(model, optimizer, scheduler))
        assert scheduler.T_max == 20
        assert any("config T_max=40 ignored, the checkpoint's 20 restored" in r.getMessage() for r in caplog.records)


class TestScaling:
    @pytest.mark.parametrize(("scaling", "factor"), [(None, 1.0), ("linear", 2.0), ("sqrt", math.sqrt(2))])
    def test_with_another_global_batch(self, tmp_path: Path, scaling: Any, factor: float) -> None:
        reference = Schedule(SCHEDULERS["OneCycleLR"])
        expected = reference.run(16)[7:]
        saver = Schedule(SCHEDULERS["OneCycleLR"])
        saver.state.plan = BatchPlan(8, 2, 1)
        saver.run(7)
        path = save_state(tmp_path, saver.state)
        loader = Schedule(SCHEDULERS["OneCycleLR"])
        loader.state.plan = BatchPlan(16, 2, 1)
        report = load_state(path, loader.state, allow_global_batch_change=True, lr_scaling=scaling)
        for rates, reference_rates in zip(loader.run(16), expected, strict=True):
            assert rates == pytest.approx([factor * rate for rate in reference_rates], rel=1e-12)
        told = "\n".join(report.warnings)
        assert ("learning rate as saved" in told) == (scaling is None)
        assert ("as asked" in told) == (scaling is not None)

    def test_one_floor_cannot_follow_two_factors(self, tmp_path: Path) -> None:
        saver = Schedule(SCHEDULERS["CosineAnnealingLR"])
        path = save_state(tmp_path, saver.state)
        loader = Schedule(SCHEDULERS["CosineAnnealingLR"], lr=0.2)
        with pytest.raises(ReshardError, match="eta_min"):
            load_state(path, loader.state, lr=[0.05, 0.3])
        assert loader.optimizer.param_groups[0]["lr"] == 0.2


class TestCountedRanks:
    """B65: a wrapper steps the scheduler once a rank; 8 ranks, 100 steps, 8000 in all; then 4 ranks, 4000 in all."""

    def cosine(self, total: int) -> Build:
        return lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=total)

    def warmed(self, ranks: int) -> Build:
        def build(o: torch.optim.Optimizer) -> Any:
            parts = [
                lr_scheduler.LinearLR(o, 0.1, total_iters=50 * ranks),
                lr_scheduler.CosineAnnealingLR(o, T_max=950 * ranks),
            ]
            return lr_scheduler.SequentialLR(o, parts, milestones=[50 * ranks])

        return build

    def stepped(self, build: Build, ranks: int, steps: int) -> Schedule:
        run = Schedule(build)
        run.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(ranks * steps):
                run.scheduler.step()
        run.state.step = steps
        return run

    def saved(self, folder: Path, run: Schedule, ranks: int) -> Path:
        path = save_state(folder, run.state)
        # 8 real ranks would add nothing: the manifest is where the number of ranks is read.
        edit_manifest(path, world=lambda world: world | {"ranks": ranks}, parts=lambda parts: parts | {"rng": "none"})
        return path

    @pytest.mark.parametrize("kind", ["cosine", "warmed"])
    @pytest.mark.parametrize("ranks", [1])
    def test_the_counter_follows_the_ranks_and_the_rate_stays(self, tmp_path: Path, kind: str, ranks: int) -> None:
        def build(count: int) -> Build:
            return self.cosine(1000 * count) if kind == "cosine" else self.warmed(count)

        saver = self.stepped(build(8), 8, 100)
        path = self.saved(tmp_path, saver, 8)
        loader = Schedule(build(ranks))
        load_state(path, loader.state, scheduler_counts_ranks=True, allow_missing=["rng"])
        assert loader.scheduler.last_epoch == 100 * ranks
        assert loader.scheduler.state_dict()["_last_lr"] == saver.scheduler.state_dict()["_last_lr"]
        uninterrupted = self.stepped(build(ranks), ranks, 100)
        for step in range(5):
            for mine, theirs in zip(loader.optimizer.param_groups, uninterrupted.optimizer.param_groups, strict=True):
                assert abs(mine["lr"] - theirs["lr"]) <= 1e-9, step
            loader.scheduler.step(), uninterrupted.scheduler.step()

    def test_without_being_told_it_warns(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = self.saved(tmp_path, self.stepped(self.cosine(8000), 8, 100), 8)
        loader = Schedule(self.cosine(8000))
        load_state(path, loader.state, allow_missing=["rng"])
        assert loader.scheduler.last_epoch == 800
        assert any("800 = 8 ranks x 100 steps" in record.getMessage() for record in caplog.records)

    def test_a_schedule_that_does_not_count_ranks_is_refused(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path, self.stepped(self.cosine(1000), 1, 101), 8)
        with pytest.raises(ReshardError, match="last_epoch 101 is no multiple of the 8 ranks"):
            load_state(path, Schedule(self.cosine(125)).state, scheduler_counts_ranks=True, allow_missing=["rng"])

    def test_counters_that_cannot_be_converted_are_refused(self, tmp_path: Path) -> None:
        saver = self.stepped(SCHEDULERS["CosineAnnealingWarmRestarts"], 8, 2)
        path = self.saved(tmp_path, saver, 8)
        loader = Schedule(SCHEDULERS["CosineAnnealingWarmRestarts"])
        with pytest.raises(ReshardError, match="T_cur cannot be converted"):
            load_state(path, loader.state, scheduler_counts_ranks=True, allow_missing=["rng"])


class Counting(torch.optim.SGD):
    """B60: counts its steps, and its ``step`` advances the scaler too, as some wrappers do."""

    def __init__(self, parameters: Any, scaler: torch.amp.GradScaler) -> None:
        super().__init__(parameters, lr=0.5, momentum=0.9, weight_decay=0.5)
        self.scaler = scaler
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": 1.0})
        return super().step(closure)


class TestScaler:
    state: ClassVar = {"scale": 1024.0, "_growth_tracker": 7}

    def saved(self, folder: Path) -> Path:
        model = nn.Linear(2, 2)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = Counting(model.parameters(), scaler)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scaler.load_state_dict(scaler.state_dict() | self.state)
        return save_state(folder, TrainState(model, optimizer, scaler=scaler))

    @pytest.mark.parametrize("with_gradients", [False, True])
    def test_it_is_restored_and_nothing_of_the_users_is_stepped(self, tmp_path: Path, with_gradients: bool) -> None:
        path = self.saved(tmp_path)
        model = nn.Linear(2, 2)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = Counting(model.parameters(), scaler)
        if with_gradients:
            model(torch.ones(1, 2)).sum().backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.extra = nn.Parameter(torch.ones(1))
        with pytest.raises(ReshardError):
            load_state(path, TrainState(model, optimizer, scaler=scaler))
        assert optimizer.calls == 0 and scaler.get_scale() == 65536.0
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
        del model.extra
        load_state(path, TrainState(model, optimizer, scaler=scaler))
        assert optimizer.calls == 0
        assert scaler.get_scale() == 1024.0 and scaler.state_dict()["_growth_tracker"] == 7
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is None if gradient is None else torch.equal(parameter.grad, gradient)

    def test_a_disabled_one_is_none_at_all(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 2)
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        without = save_state(tmp_path / "a", TrainState(model, scaler=disabled))
        load_state(without, TrainState(model))
        load_state(without, TrainState(model, scaler=disabled))
        with pytest.raises(ReshardError, match="lacks what the run has: scaler"):
            load_state(without, TrainState(model, scaler=torch.amp.GradScaler("cpu")))
        with pytest.raises(ReshardError, match="scaler: in the checkpoint, and the run has none"):
            load_state(self.saved(tmp_path / "b"), TrainState(model, scaler=disabled), allow_unexpected=["optimizer"])
