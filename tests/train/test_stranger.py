"""Faults that a stranger found: what is easily lost without a word."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import reshard
from reshard import Checkpointer, ReshardError, TrainState, load_state, save_state


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def lora(folder: str) -> Any:
    """A frozen base whose parameters are in the optimizer all the same, under FSDP1: saved and loaded."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            nn.Sequential(Lora(), Lora()),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({Lora}),
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    step(model, optimizer)
    save_state(folder, TrainState(model, optimizer, step=1))
    step(model, optimizer)
    again, fresh = build()
    load_state(folder, TrainState(again, fresh))
    step(again, fresh)
    with FullyShardedDataParallel.summon_full_params(model), FullyShardedDataParallel.summon_full_params(again):
        return all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


def test_frozen_parameters_in_the_optimizer_under_fsdp1(tmp_path: Path) -> None:
    assert run_ranks(2, lora, str(tmp_path)) == [True, True]


def test_an_optimizer_with_a_state_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "k": 3}

    model = linear()
    with pytest.raises(ReshardError, match=r"^k: Counting.state_dict\(\) holds more than the state of parameters"):
        save_state(tmp_path, TrainState(model, Counting(model.parameters(), lr=0.1)))


def test_an_explicit_save_keeps_what_changed_after_the_step_was_saved(tmp_path: Path) -> None:
    def build() -> TrainState:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))

    state = build()
    checkpointer = Checkpointer(tmp_path, state, interval=1)
    step(state.model, state.optimizer)
    checkpointer.step()
    written = (tmp_path / "step-1" / "reshard.json").stat().st_mtime_ns
    checkpointer.save()
    assert (tmp_path / "step-1" / "reshard.json").stat().st_mtime_ns == written, "nothing had changed"
    state.scheduler.step()
    checkpointer.save()
    again = build()
    Checkpointer(tmp_path, again, interval=1).resume()
    assert again.optimizer.param_groups[0]["lr"] == 0.05
    assert again.scheduler.last_epoch == 1


class Cosine:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.steps)


@pytest.mark.parametrize(
    ("build", "told", "expected"),
    [
        (
            lambda optimizer, long: torch.optim.lr_scheduler.LambdaLR(optimizer, Cosine(40 if long else 4)),
            "config lr_lambdas.0.steps=40 ignored, the checkpoint's 4 restored; schedule='target'",
            1 - 4 / 40,
        ),
        (
            lambda optimizer, long: torch.optim.lr_scheduler.MultiStepLR(optimizer, [50 if long else 2]),
            "config milestones=",
            0.1,
        ),
    ],
    ids=["lambda", "multistep"],
)
def test_another_schedule_in_the_config_is_told_and_can_be_taken(
    tmp_path: Path, build: Any, told: str, expected: float
) -> None:
    def fresh(long: bool) -> TrainState:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return TrainState(model, optimizer, build(optimizer, long))

    state = fresh(long=False)
    for _ in range(3):
        step(state.model, state.optimizer)
        state.scheduler.step()
        state.step += 1
    save_state(tmp_path, state)

    kept = fresh(long=True)
    report = load_state(tmp_path, kept)
    assert any(told in warning for warning in report.warnings), report.warnings
    assert kept.scheduler.state_dict() == state.scheduler.state_dict()

    longer = fresh(long=True)
    report = load_state(tmp_path, longer, schedule="target")
    assert not any("config" in warning for warning in report.warnings)
    assert longer.scheduler.last_epoch == 3
    longer.optimizer.step()
    longer.scheduler.step()
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_plateau_that_lowered_the_rate_is_no_change_of_the_config(tmp_path: Path) -> None:
    def fresh() -> TrainState:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))

    state = fresh()
    for metric in (1.0, 2.0, 3.0):
        state.scheduler.step(metric)
    save_state(tmp_path, state)
    again = fresh()
    assert load_state(tmp_path, again).warnings == []
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_an_empty_dictionary_in_the_optimizer_state_comes_back(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"n": torch.tensor(1.0), "memo": {}, "deep": {"queue": [], "more": {}}}
    save_state(tmp_path, TrainState(model, optimizer))
    other = linear()
    restored = torch.optim.SGD(other.parameters(), lr=0.1)
    load_state(tmp_path, TrainState(other, restored))
    assert restored.state[other.weight] == {"n": torch.tensor(1.0), "memo": {}, "deep": {"queue": [], "more": {}}}


class Metric:
    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def differing(folder: str) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reshard").addHandler(handler)
    extra = {"mine": Metric(float(dist.get_rank())), "ours": Metric(7.0)}
    save_state(folder, TrainState(linear(), extra=extra))
    return heard


def test_an_extra_that_differs_between_ranks_is_told(tmp_path: Path) -> None:
    first, second = run_ranks(2, differing, str(tmp_path))
    assert [line for line in first if "differs" in line] == [
        "extra.mine differs between ranks; rank 0's is saved, and every rank will get it"
    ]
    assert second == []


def draw_without_streams(world_free: bool) -> str:
    from lab import Setup, build

    run = build(Setup(exact=True, streams=False, dropout=0.0 if world_free else 0.1))
    try:
        run.train(1)
    except ReshardError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("world", [1, 2])
def test_exact_mode_refuses_random_numbers_that_follow_the_ranks(world: int) -> None:
    refused = run_ranks(world, draw_without_streams, False)
    assert all(text.startswith("streams: random numbers were drawn from a rank's own stream") for text in refused)
    assert run_ranks(world, draw_without_streams, True) == ["trained"] * world


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_clipping_norm_that_would_stop_or_reverse_the_training(max_norm: float) -> None:
    model = linear()
    with pytest.raises(ReshardError, match="max_norm: would stop or reverse the training"):
        reshard.clip_grad_norm_(model, max_norm)


@pytest.mark.parametrize("step_value", [1.0, -1, True, torch.tensor(3)])
def test_a_step_that_is_no_number_of_steps(tmp_path: Path, step_value: Any) -> None:
    with pytest.raises(ReshardError, match="step: not a number of steps"):
        save_state(tmp_path, TrainState(linear(), step=step_value))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("interval", ["5", None, 1.5, 0])
def test_an_interval_that_is_none(tmp_path: Path, interval: Any) -> None:
    with pytest.raises(ReshardError, match="interval: not a count"):
        Checkpointer(tmp_path, TrainState(linear()), interval=interval)


def test_a_tensor_that_has_no_bytes_is_named(tmp_path: Path) -> None:
    metric = Metric(1.0)
    metric.value = torch.eye(2).to_sparse()
    with pytest.raises(ReshardError, match=r"extra.m.value: a tensor that cannot be saved"):
        save_state(tmp_path, TrainState(linear(), extra={"m": metric}))


@pytest.mark.parametrize("pattern", ["1.*", "model.1.*"])
def test_a_tensor_that_may_be_missing_is_named_bare_or_as_messages_spell_it(tmp_path: Path, pattern: str) -> None:
    save_state(tmp_path, TrainState(nn.Sequential(linear())))
    larger = nn.Sequential(linear(), nn.Linear(2, 2))
    with pytest.raises(ReshardError, match=r"model\.1\.weight: not in the checkpoint"):
        load_state(tmp_path, TrainState(larger))
    report = load_state(tmp_path, TrainState(larger), allow_missing=[pattern])
    assert report.missing == ["model.1.weight", "model.1.bias"]
