"""Optimizers across a resume: the cases B01-B03, B06-B08, B10, B13 and B57 of CASES.md.

Against stock torch: the state of the optimizer that was saved, and what stock functions write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard import ReshardError, TrainState, load_state, save_state
from reshard.errors import StateMismatch

STOCK_LACKS = ["rng", "step"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, width: int = 4) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(3, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Whole tensors of state by parameter name, by means of torch alone."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: {k: whole(v) for k, v in entries.items()} for p, entries in optimizer.state.items()}


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def messages(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


class Partly(nn.Module):
    """B01: ``a`` is used, ``unused`` trainable and never called, ``froz`` frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.froz = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.froz.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.froz(self.a(x))


def partly(sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model: nn.Module = fully_shard(Partly()) if sharded else Partly()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save_partly(folder: str) -> Any:
    model, optimizer = partly()
    step(model, optimizer, width=2)
    save_state(folder, TrainState(model, optimizer, step=1))
    return by_name(model, optimizer)


def load_partly(folder: str) -> Any:
    model, optimizer = partly()
    report = load_state(folder, TrainState(model, optimizer))
    return by_name(model, optimizer), report.fresh, report.notes, report.warnings


class TestParametersWithoutState:
    @pytest.mark.parametrize("world", [1, 4])
    def test_one_that_never_got_a_gradient_has_none_after_the_load(self, tmp_path: Path, world: int) -> None:
        saved = run_ranks(2, save_partly, str(tmp_path))[0]
        assert set(saved) == {"a.weight", "a.bias"}
        loaded, fresh, notes, _ = run_ranks(world, load_partly, str(tmp_path))[0]
        assert loaded == saved
        assert fresh == ["unused.weight", "unused.bias", "froz.weight", "froz.bias"]
        assert "unused.weight, unused.bias" in notes[0]

    @pytest.mark.parametrize("lost", ["exp_avg_sq", "step"])
    def test_a_part_of_a_parameters_state_is_refused(self, tmp_path: Path, lost: str) -> None:
        model, optimizer = partly(sharded=False)
        step(model, optimizer, width=2)
        state = get_optimizer_state_dict(model, optimizer)
        del state["state"]["a.weight"][lost]
        stock.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "s", no_dist=True)
        fresh, target = partly(sharded=False)
        with pytest.raises(StateMismatch) as refusal:
            load_state(tmp_path / "s", TrainState(fresh, target), allow_missing=STOCK_LACKS)
        assert f"optim.state.a.weight.{lost}: not in the checkpoint" in str(refusal.value).splitlines()[0]
        assert not target.state


class TestMoments:
    def test_a_fresh_optimizer_gets_them_bit_for_bit(self, tmp_path: Path) -> None:
        """B02."""
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 3)
        path = save_state(tmp_path, TrainState(model, optimizer, step=3))
        other = nn.Linear(4, 4)
        target = torch.optim.AdamW(other.parameters())
        load_state(path, TrainState(other, target))
        assert by_name(other, target) == by_name(model, optimizer)
        assert by_name(other, target)["weight"]["step"] == (torch.float32, 3.0)
        step(model, optimizer), step(other, target)
        assert torch.equal(model.weight, other.weight)

    def test_saving_with_gradients_set_before_any_step_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """B03, first variant."""
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1)).sum().backward()
        path = save_state(tmp_path, TrainState(model, optimizer))
        assert "0 of 1 parameters have optimizer state" in messages(caplog)
        described = json.loads((path / "reshard.json").read_text())["optimizers"]["optimizer"]
        assert (described["parameters"], described["with_state"]) == (1, 0)
        caplog.clear()
        other = nn.Linear(1, 1, bias=False)
        load_state(path, TrainState(other, torch.optim.AdamW(other.parameters())))
        assert "holds no optimizer state for any of its 1 parameters" in messages(caplog)

    def test_saving_with_gradients_set_after_a_step_loses_nothing(self, tmp_path: Path) -> None:
        """B03, second variant."""
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        gradient = model.weight.grad.clone()
        path = save_state(tmp_path, TrainState(model, optimizer, step=1))
        assert torch.equal(model.weight.grad, gradient)
        other = nn.Linear(1, 1, bias=False)
        target = torch.optim.AdamW(other.parameters())
        load_state(path, TrainState(other, target))
        assert by_name(other, target) == by_name(model, optimizer)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_precision_survives(self, tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
        """B57: 1.0009765625 and 10000 are no bfloat16 numbers."""
        model = nn.Linear(2, 2, bias=False, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, width=2)
        with torch.no_grad():
            model.weight.fill_(1.0009765625)
            for name, value in {"exp_avg": 1.0009765625, "exp_avg_sq": 1.0009765625, "step": 10000.0}.items():
                optimizer.state[model.weight][name].fill_(value)
        path = save_state(tmp_path, TrainState(model, optimizer))
        other = nn.Linear(2, 2, bias=False, dtype=dtype)
        target = torch.optim.AdamW(other.parameters())
        load_state(path, TrainState(other, target), allow_cast=dtype != torch.float32)
        state = target.state[other.weight]
        assert state["step"].dtype == torch.float32 and state["step"].item() == 10000.0
        expected = 1.0009765625 if dtype == torch.float32 else 1.0
        assert other.weight.unique().tolist() == state["exp_avg"].unique().tolist() == [expected]
        announced = messages(caplog).count("optimizer state torch.float32 -> torch.bfloat16")
        assert announced == (dtype == torch.bfloat16)

    def test_fp32_moments_of_a_bf16_model_stay_fp32(self, tmp_path: Path) -> None:
        """B57: torch's own Optimizer.load_state_dict would round them."""
        model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        moments = {name: torch.full((2, 2), 1.0009765625) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[model.weight] = {"step": torch.tensor(10000.0), **moments}
        path = save_state(tmp_path, TrainState(model, optimizer))
        other = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        target = torch.optim.AdamW(other.parameters())
        load_state(path, TrainState(other, target))
        assert by_name(other, target) == by_name(model, optimizer)


class TestLearningRate:
    """B06."""

    def saved(self, folder: Path, lr: float = 1e-4) -> tuple[nn.Module, torch.optim.Optimizer, Path]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        for _ in range(4):
            step(model, optimizer)
            scheduler.step()
        return model, optimizer, save_state(folder, TrainState(model, optimizer, scheduler, step=4))

    def target(self, lr: float) -> tuple[nn.Module, torch.optim.Optimizer, Any, TrainState]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return model, optimizer, scheduler, TrainState(model, optimizer, scheduler)

    def test_the_saved_one_wins_and_it_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        _, saved, path = self.saved(tmp_path)
        _, optimizer, scheduler, state = self.target(5e-5)
        load_state(path, state)
        assert optimizer.param_groups[0]["lr"] == saved.param_groups[0]["lr"]
        assert scheduler.base_lrs == [1e-4]
        assert "config lr 5e-05 ignored; checkpoint lr 0.0001 restored; pass lr=5e-05 to override" in messages(caplog)

    def test_one_that_is_asked_for_rescales_the_schedule_and_keeps_the_moments(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        old_model, saved, path = self.saved(tmp_path)
        model, optimizer, scheduler, state = self.target(5e-5)
        load_state(path, state, lr=5e-5)
        assert scheduler.base_lrs == [5e-5] and optimizer.param_groups[0]["initial_lr"] == 5e-5
        assert by_name(model, optimizer) == by_name(old_model, saved)
        assert "ignored" not in messages(caplog) and "0.0001 -> 5e-05, as asked" in messages(caplog)
        _, _, reference, _ = self.target(5e-5)
        for _ in range(4):
            reference.optimizer.step(), reference.step()
        for _ in range(16):
            assert abs(optimizer.param_groups[0]["lr"] - reference.get_last_lr()[0]) <= 1e-15
            optimizer.step(), scheduler.step(), reference.optimizer.step(), reference.step()

    def test_without_a_schedule(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 4)
        path = save_state(tmp_path, TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        load_state(path, TrainState(model, optimizer), lr=5e-5)
        assert optimizer.param_groups[0]["lr"] == 5e-5

    def test_a_base_of_zero_cannot_be_rescaled(self, tmp_path: Path) -> None:
        _, _, path = self.saved(tmp_path, lr=0.0)
        _, optimizer, _, state = self.target(5e-5)
        with pytest.raises(ReshardError, match="base learning rate is 0"):
            load_state(path, state, lr=5e-5)
        assert optimizer.param_groups[0]["lr"] == 5e-5

    def test_a_rate_kept_in_a_tensor_comes_back_in_it(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 4)
        path = save_state(tmp_path, TrainState(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))))
        rate = torch.tensor(3.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        load_state(path, TrainState(model, optimizer))
        assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25
        load_state(path, TrainState(model, optimizer), lr=0.5)
        assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5
        plain = torch.optim.AdamW(model.parameters(), lr=3.0)
        load_state(path, TrainState(model, plain))
        assert type(plain.param_groups[0]["lr"]) is float and plain.param_groups[0]["lr"] == 0.25


def grouped(model: nn.Module, kind: str, lr: float = 0.01) -> torch.optim.Optimizer:
    w, b = model.weight, model.bias
    groups: dict[str, list[dict[str, Any]]] = {
        "one": [{"params": [w, b], "weight_decay": 0.01}],
        "two": [{"params": [w], "weight_decay": 0.1, "lr": 2 * lr}, {"params": [b], "weight_decay": 0.0, "lr": lr}],
        "hollow": [{"params": [w], "weight_decay": 0.1}, {"params": []}, {"params": [b], "weight_decay": 0.0}],
    }
    groups["reversed"] = groups["two"][::-1]
    return torch.optim.AdamW(groups[kind], lr=lr)


class TestGroups:
    """B07."""

    def saved(self, folder: Path, kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Path]:
        model = nn.Linear(4, 4)
        optimizer = grouped(model, kind)
        step(model, optimizer)
        return model, optimizer, save_state(folder, TrainState(model, optimizer))

    @pytest.mark.parametrize(("before", "after"), [("one", "two"), ("two", "one")])
    def test_another_grouping_is_refused_with_both_printed(self, tmp_path: Path, before: str, after: str) -> None:
        old_model, old, path = self.saved(tmp_path, before)
        model = nn.Linear(4, 4)
        optimizer = grouped(model, after)
        with pytest.raises(StateMismatch) as refusal:
            load_state(path, TrainState(model, optimizer))
        first, *others = str(refusal.value).splitlines()
        one, two = "1 group [weight, bias]", "2 groups [weight]; [bias]"
        expected, found = (one, two) if before == "one" else (two, one)
        assert f"expected the parameters in {expected}, as saved, found {found}" in first
        assert "param_groups='target'" in first
        decay = "weight_decay 0.01 -> 0.1" if before == "one" else "weight_decay 0.1 -> 0.01"
        assert any("weight:" in line and decay in line for line in others)
        load_state(path, TrainState(model, optimizer), param_groups="target")
        assert by_name(model, optimizer) == by_name(old_model, old)
        expected_groups = [{k: v for k, v in g.items() if k != "params"} for g in grouped(model, after).param_groups]
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == expected_groups

    def test_an_empty_group_in_the_middle(self, tmp_path: Path) -> None:
        _, old, path = self.saved(tmp_path, "hollow")
        model = nn.Linear(4, 4)
        optimizer = grouped(model, "hollow", lr=3.0)
        load_state(path, TrainState(model, optimizer))
        assert [g.keys() for g in optimizer.param_groups] == [g.keys() for g in old.param_groups]
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.01, 0.1), (0.01, 0.01), (0.01, 0)]

    @pytest.mark.parametrize("schedule", ["LambdaLR", "CosineAnnealingLR"])
    def test_groups_in_reversed_order_keep_decay_rate_and_schedule(self, tmp_path: Path, schedule: str) -> None:
        def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
            if schedule == "LambdaLR":
                return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)

        model = nn.Linear(4, 4)
        optimizer = grouped(model, "two")
        scheduler = scheduler_of(optimizer)
        for _ in range(3):
            step(model, optimizer), scheduler.step()
        path = save_state(tmp_path, TrainState(model, optimizer, scheduler, step=3))
        other = nn.Linear(4, 4)
        target = grouped(other, "reversed", lr=7.0)
        follower = scheduler_of(target)
        load_state(path, TrainState(other, target, follower))
        for _ in range(5):
            assert [g["lr"] for g in target.param_groups][::-1] == [g["lr"] for g in optimizer.param_groups]
            assert [g["weight_decay"] for g in target.param_groups] == [0.0, 0.1]
            step(model, optimizer), step(other, target), scheduler.step(), follower.step()
            assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)

    def test_the_targets_groups_go_on_where_the_schedule_stands(self, tmp_path: Path) -> None:
        """The run's own base rates, at the place in the schedule that the checkpoint has."""
        model = nn.Linear(4, 4)
        optimizer = grouped(model, "one")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        reference_model = nn.Linear(4, 4)
        reference = grouped(reference_model, "two", lr=0.5)
        uninterrupted = torch.optim.lr_scheduler.CosineAnnealingLR(reference, T_max=20)
        for _ in range(8):
            optimizer.step(), scheduler.step(), reference.step(), uninterrupted.step()
        path = save_state(tmp_path, TrainState(model, optimizer, scheduler, step=8))
        other = nn.Linear(4, 4)
        target = grouped(other, "two", lr=0.5)
        follower = torch.optim.lr_scheduler.CosineAnnealingLR(target, T_max=20)
        load_state(path, TrainState(other, target, follower), param_groups="target")
        for _ in range(12):
            for group, expected in zip(target.param_groups, reference.param_groups, strict=True):
                assert abs(group["lr"] - expected["lr"]) <= 1e-12
            target.step(), follower.step(), reference.step(), uninterrupted.step()


class TestIntegers:
    """B08: two layers of one shape, one frozen between them, the optimizer over the trainable ones only."""

    def model(self) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            [{"params": [p for p in trainable if p.ndim > 1]}, {"params": [p for p in trainable if p.ndim == 1]}]
        )

    @pytest.mark.parametrize("steps", [0, 1])
    def test_integer_names_are_refused(self, tmp_path: Path, steps: int) -> None:
        model = self.model()
        optimizer = self.optimizer(model)
        step(model, optimizer, steps)
        tree = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        stock.save(tree, checkpoint_id=tmp_path / "s", no_dist=True)
        other = self.model()
        target = self.optimizer(other)
        before = [p.clone() for p in other.parameters()]
        with pytest.raises(StateMismatch, match=r"integers.*which do not say.*get_optimizer_state_dict"):
            load_state(tmp_path / "s", TrainState(other, target), allow_missing=STOCK_LACKS)
        assert not target.state and all(map(torch.equal, before, other.parameters()))
        if steps:
            load_state(tmp_path / "s", TrainState(other, target), allow_missing=[*STOCK_LACKS, "optimizer"])
            assert not target.state and all(map(torch.equal, model.parameters(), other.parameters()))

    def test_by_name_each_moment_lands_on_its_own(self, tmp_path: Path) -> None:
        model = self.model()
        optimizer = self.optimizer(model)
        step(model, optimizer, 2)
        path = save_state(tmp_path, TrainState(model, optimizer))
        other = self.model()
        target = torch.optim.AdamW(
            [{"params": [other[2].weight, other[0].weight]}, {"params": [other[0].bias, other[2].bias]}]
        )
        load_state(path, TrainState(other, target))
        assert by_name(other, target) == by_name(model, optimizer)

    def test_parameters_whose_names_are_numbers_are_names(self, tmp_path: Path) -> None:
        parameters = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)])
        optimizer = torch.optim.AdamW(parameters)
        sum(p.square().sum() for p in parameters).backward()
        optimizer.step()
        path = save_state(tmp_path, TrainState(parameters, optimizer))
        other = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        target = torch.optim.AdamW(other)
        load_state(path, TrainState(other, target))
        assert by_name(other, target) == by_name(parameters, optimizer)


class Nested(torch.optim.Optimizer):
    """State with one more level, as Shampoo keeps it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state[p].setdefault("block_0", {})
                entry["factor"] = entry.get("factor", torch.zeros_like(p)) + p.grad
                entry["rank"] = 2


class TestNames:
    """B10."""

    @pytest.mark.parametrize("flat", [False, True])
    @pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd"])
    def test_nested_and_flattened_give_the_same(self, tmp_path: Path, kind: str, flat: bool) -> None:
        def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
            if kind == "adamw":
                groups = [{"params": [model[0].weight], "weight_decay": 0.5}, {"params": [model[0].bias]}]
                return torch.optim.AdamW(groups, lr=lr)
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if kind == "momentum" else 0.0)

        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = optimizer_of(model, 0.1)
        step(model, optimizer, 2)
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        tree = {"model": get_model_state_dict(model), "optim": state}
        stock.save(tree, checkpoint_id=tmp_path / "s", no_dist=True)
        other = nn.Sequential(nn.Linear(4, 4))
        target = optimizer_of(other, 3.0)
        load_state(tmp_path / "s", TrainState(other, target), allow_missing=STOCK_LACKS)
        expected = {k: {n: v for n, v in e.items() if v is not None} for k, e in by_name(model, optimizer).items()}
        assert by_name(other, target) == {k: e for k, e in expected.items() if e}
        assert [{k: v for k, v in g.items() if k != "params"} for g in target.param_groups] == [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]

    def test_sgd_without_momentum_stays_without_state_and_nobody_worries(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        path = save_state(tmp_path, TrainState(model, optimizer, step=1))
        target = torch.optim.SGD(model.parameters(), lr=0.1)
        load_state(path, TrainState(model, target))
        assert not target.state
        assert not [r for r in caplog.records if r.name == "reshard" and r.levelname == "WARNING"]

    def test_one_more_level(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 4)
        optimizer = Nested(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        path = save_state(tmp_path, TrainState(model, optimizer))
        other = nn.Linear(4, 4)
        target = Nested(other.parameters())
        load_state(path, TrainState(other, target))
        assert by_name(other, target) == by_name(model, optimizer)
        assert by_name(other, target)["bias"]["block_0"]["rank"] == 2


class TestFreezing:
    """B13: train a and b, freeze b, resume; unfreeze it, resume with c newly trainable."""

    def model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def test_moments_survive_and_the_newcomer_starts_fresh(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = self.model()
        a, b, c = model
        c.requires_grad_(False)
        optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
        step(model, optimizer, 2)
        b.requires_grad_(False)
        step(model, optimizer)
        kept = by_name(model, optimizer)
        assert kept["0.weight"]["step"][1] == 3 and kept["1.weight"]["step"][1] == 2
        path = save_state(tmp_path / "1", TrainState(model, optimizer))

        second = self.model()
        second[1].requires_grad_(False), second[2].requires_grad_(False)
        resumed = torch.optim.AdamW([*second[0].parameters(), *second[1].parameters()])
        load_state(path, TrainState(second, resumed))
        assert by_name(second, resumed) == kept
        path = save_state(tmp_path / "2", TrainState(second, resumed))

        third = self.model()
        final = torch.optim.AdamW(third.parameters())
        load_state(path, TrainState(third, final))
        assert by_name(third, final) == kept
        assert "2 parameters (2.weight, 2.bias)" in messages(caplog)
        step(third, final)
        assert by_name(third, final)["2.weight"]["step"][1] == 1

    def test_an_optimizer_without_the_frozen_ones_is_told_what_it_would_drop(self, tmp_path: Path) -> None:
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        path = save_state(tmp_path, TrainState(model, optimizer))
        target = torch.optim.AdamW(model[0].parameters())
        with pytest.raises(StateMismatch, match=r"optim.state.1.bias.*allow_unexpected"):
            load_state(path, TrainState(model, target))
        load_state(path, TrainState(model, target), allow_unexpected=["1.*", "2.*"])
        assert set(by_name(model, target)) == {"0.weight", "0.bias"}


class TestSeveral:
    def test_each_schedule_follows_its_own_optimizer_when_rates_are_changed(self, tmp_path: Path) -> None:
        def build() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            optimizers = {
                "first": torch.optim.SGD(model[0].parameters(), lr=0.1),
                "second": torch.optim.SGD(model[1].parameters(), lr=0.4),
            }
            schedule = torch.optim.lr_scheduler.LambdaLR
            return model, optimizers, {n: schedule(o, lambda k: 1 / (1 + k)) for n, o in reversed(optimizers.items())}

        model, optimizers, schedulers = build()
        path = save_state(tmp_path, TrainState(model, optimizers, schedulers))
        model, optimizers, schedulers = build()
        load_state(path, TrainState(model, optimizers, schedulers), lr=[1.0, 2.0])
        for name, base in {"first": 1.0, "second": 2.0}.items():
            assert schedulers[name].base_lrs == [base] and optimizers[name].param_groups[0]["lr"] == base
            optimizers[name].step(), schedulers[name].step()
            assert optimizers[name].param_groups[0]["lr"] == base / 2
