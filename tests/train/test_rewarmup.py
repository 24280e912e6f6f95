"""The way back onto a learning rate schedule: exact on the way, resumable, and worth it where moments were lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import lab
import pytest
import torch
from ranks import RankFailed, run_ranks
from torch.optim import lr_scheduler

import reshard
from reshard import Checkpointer, Rewarmup, TrainState
from reshard.errors import StateMismatch, UsageError
from reshard.train.rewarmup import with_climb

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "closed form": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "recursive": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=40, eta_min=1e-3),
    "steps": lambda opt: lr_scheduler.StepLR(opt, step_size=7, gamma=0.5),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[0.2, 0.4], total_steps=60, cycle_momentum=False),
    "sequence": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=10), lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[10],
    ),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2),
}
STEPS, START = 8, 0.1


def optimizer(tensor_lr: bool = False) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    rates = [torch.tensor(0.1), torch.tensor(0.2)] if tensor_lr else [0.1, 0.2]
    return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)])


def advance(each: torch.optim.Optimizer, schedule: Any, loss: float = 1.0) -> list[float]:
    """One training step; the learning rates that it had."""
    rates = [float(group["lr"]) for group in each.param_groups]
    each.step()
    is_plateau = isinstance(getattr(schedule, "scheduler", schedule), lr_scheduler.ReduceLROnPlateau)
    schedule.step(*([loss] if is_plateau else []))
    return rates


def factors(begun_at: int, count: int) -> list[float]:
    """By the formula in words: linear from the fraction, 1 from the last step on."""
    return [
        START + (1 - START) * (step - begun_at) / STEPS if begun_at <= step < begun_at + STEPS else 1.0
        for step in range(count)
    ]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("interrupted_at", [None, 3, 9, 14, 30])
def test_the_rates_are_the_schedules_times_the_climb(kind: str, interrupted_at: int | None) -> None:
    begun_at, count = 6, 40
    plain = optimizer()
    plain_schedule = SCHEDULES[kind](plain)
    expected = [advance(plain, plain_schedule) for _ in range(count)]

    climbing = optimizer()
    schedule = Rewarmup(SCHEDULES[kind](climbing), STEPS, START)
    found = []
    for step in range(count):
        if step == begun_at:
            schedule.begin()
        if step == interrupted_at:
            # As a resume does it: hyperparameters of the groups from the checkpoint, then the schedule.
            saved = json.loads(json.dumps(schedule.state_dict(), default=lambda value: None))
            rates = [float(group["lr"]) for group in climbing.param_groups]
            state = schedule.state_dict()
            climbing = optimizer()
            # A climb goes on as it was begun, whatever the run says now.
            settings = (77, 0.7) if schedule.is_climbing else (STEPS, START)
            schedule = Rewarmup(SCHEDULES[kind](climbing), *settings)
            schedule.load_state_dict(state)
            for group, rate in zip(climbing.param_groups, rates, strict=True):
                group["lr"] = rate
            assert saved.keys() == state.keys()
        found.append(advance(climbing, schedule))
    for step, (rates, of_plain, factor) in enumerate(zip(found, expected, factors(begun_at, count), strict=True)):
        if factor == 1.0:
            assert rates == of_plain, f"step {step}: not the schedule's, to the bit"
        else:
            assert rates == pytest.approx([rate * factor for rate in of_plain], rel=1e-12), f"step {step}"


def test_without_a_climb_it_is_not_there() -> None:
    each = optimizer()
    schedule = Rewarmup(lr_scheduler.CosineAnnealingLR(each, 10))
    assert not schedule.is_climbing
    assert schedule.get_last_lr() == schedule.scheduler.get_last_lr()
    assert schedule.optimizer is each


def test_a_learning_rate_that_is_a_tensor_stays_the_same_one() -> None:
    each = optimizer(tensor_lr=True)
    tensors = [group["lr"] for group in each.param_groups]
    schedule = Rewarmup(lr_scheduler.ConstantLR(each, factor=1.0), 4, 0.5)
    schedule.begin()
    assert [float(tensor) for tensor in tensors] == pytest.approx([0.05, 0.1])
    assert all(group["lr"] is tensor for group, tensor in zip(each.param_groups, tensors, strict=True))


def test_the_state_of_the_inner_schedule_alone_is_taken() -> None:
    each = optimizer()
    inner = lr_scheduler.CosineAnnealingLR(each, 10)
    for _ in range(3):
        advance(each, inner)
    schedule = Rewarmup(lr_scheduler.CosineAnnealingLR(optimizer(), 10))
    schedule.load_state_dict(inner.state_dict())
    assert schedule.scheduler.state_dict() == inner.state_dict()


@pytest.mark.parametrize(
    ("steps", "start"),
    [(0, 0.1), (1.5, 0.1), (True, 0.1), (10, -0.1), (10, 1.1), ("10", 0.1), (10, "0.1"), (10, None), (10, True)],
)
def test_what_it_refuses(steps: Any, start: Any) -> None:
    with pytest.raises(UsageError, match=r"not a (count|fraction): expected"):
        Rewarmup(lr_scheduler.ConstantLR(optimizer()), steps, start)


def test_it_is_put_around_a_schedule_once() -> None:
    each = optimizer()
    schedule = Rewarmup(lr_scheduler.ConstantLR(each))
    for wrong, said in ((each, "found SGD without optimizer"), (None, "found NoneType"), (schedule, "found Rewarmup")):
        with pytest.raises(UsageError, match=said):
            Rewarmup(wrong)


def test_a_climb_of_other_groups_is_refused() -> None:
    first = Rewarmup(lr_scheduler.ConstantLR(optimizer()), STEPS, START)
    first.begin()
    one = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    second = Rewarmup(lr_scheduler.ConstantLR(one), 5, 0.5)
    before = second.state_dict()
    with pytest.raises(StateMismatch, match="another number of parameter groups: expected 2, found 1"):
        second.load_state_dict(first.state_dict())
    assert second.state_dict() == before


RATES = {"a": 0.1, "b": 0.2}


def grouped(order: str, has_optimizer: bool = True) -> tuple[TrainState, torch.optim.Optimizer, Any]:
    """A model of layers a and b, and an optimizer with a group for each in ``order``."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "ab"})
    each = torch.optim.AdamW([{"params": list(model[name].parameters()), "lr": RATES[name]} for name in order])
    # Every rate follows from the one before, so that a wrong one stays wrong.
    schedule = Rewarmup(lr_scheduler.CosineAnnealingLR(each, 40), STEPS, START)
    return TrainState(model, each if has_optimizer else None, schedule), each, schedule


def rates_by_name(order: str, each: torch.optim.Optimizer, schedule: Any, count: int) -> dict[str, list[float]]:
    for group in each.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    rows = [advance(each, schedule) for _ in range(count)]
    return {name: [row[number] for row in rows] for number, name in enumerate(order)}


def cosine_of(name: str, count: int) -> list[float]:
    each = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATES[name])
    schedule = lr_scheduler.CosineAnnealingLR(each, 40)
    return [advance(each, schedule)[0] for _ in range(count)]


@pytest.mark.parametrize(("saved", "resumed", "options"), [
    ("ab", "ab", {}), ("ab", "ba", {}), ("a", "ab", {"allow_missing": ["*"]}), ("a", "ba", {"allow_missing": ["*"]}),
    ("ab", "b", {"allow_unexpected": ["*"]}),
])  # fmt: skip
def test_groups_in_another_order_climb_at_their_own_rates(
    saved: str, resumed: str, options: dict[str, Any], tmp_path: Path
) -> None:
    state, each, schedule = grouped(saved)
    rates_by_name(saved, each, schedule, 3)
    schedule.begin()
    rates_by_name(saved, each, schedule, 2)
    reshard.save_state(tmp_path, state)
    state, each, schedule = grouped(resumed)
    reshard.load_state(tmp_path, state, **options)
    found = rates_by_name(resumed, each, schedule, 12)
    climb = factors(3, 17)[5:]
    for name in set(saved) & set(resumed):
        expected = [rate * factor for rate, factor in zip(cosine_of(name, 17)[5:], climb, strict=True)]
        assert found[name] == pytest.approx(expected, rel=1e-9), name
    for name in set(resumed) - set(saved):
        # The first step has the run's own rate, as for any group that is new; then it climbs with the others.
        assert found[name][0] == RATES[name]
        assert all(0 < rate < RATES[name] * factor for rate, factor in zip(found[name][1:], climb[1:], strict=True))


def test_a_schedule_of_other_groups_is_refused_where_no_optimizer_tells_them_apart(tmp_path: Path) -> None:
    state, each, schedule = grouped("a", has_optimizer=False)
    rates_by_name("a", each, schedule, 3)
    reshard.save_state(tmp_path, state)
    state, each, schedule = grouped("ab")
    before = schedule.state_dict()
    with pytest.raises(StateMismatch, match="another number of parameter groups: expected 1, as saved, found 2"):
        Checkpointer(tmp_path, state, interval=100).resume(lost_optimizer="rewarm")
    assert schedule.state_dict() == before
    assert [group["lr"] for group in each.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize(("saved_ranks", "ranks"), [(2, 4), (4, 2), (2, 3), (4, 4)])
def test_a_climb_that_counts_ranks_is_as_long_in_steps(saved_ranks: int, ranks: int) -> None:
    """A schedule that every rank steps: 12 optimizer steps of climb, 5 of them done."""
    first = Rewarmup(lr_scheduler.ConstantLR(optimizer(), factor=1.0), 12 * saved_ranks, START)
    first.begin()
    first.optimizer.step()
    for _ in range(5 * saved_ranks):
        first.step()
    second = Rewarmup(lr_scheduler.ConstantLR(optimizer(), factor=1.0), 77, 0.5)
    second.load_state_dict(with_climb(first.state_dict(), per_step=Fraction(ranks, saved_ranks)))
    second.optimizer.step()
    second.step()
    factor = START + (1 - START) * (5 * ranks + 1) / (12 * ranks)
    assert second.get_last_lr() == pytest.approx([rate * factor for rate in (0.1, 0.2)])
    for _ in range(7 * ranks - 2):
        second.step()
    assert second.is_climbing
    second.step()
    assert not second.is_climbing


def begin(folder: str, rewarmup: bool, **options: Any) -> tuple[lab.Run, Checkpointer]:
    run = lab.build(lab.Setup(global_batch=4, **options))
    if rewarmup:
        run.state.scheduler = Rewarmup(run.state.scheduler, 6, 0.1)
    return run, Checkpointer(folder, run.state, interval=100, keep_latest_k=9)


def save_without_moments(folder: str) -> None:
    run, checkpointer = begin(folder, False)
    run.train(5, done=checkpointer.step)
    run.state.optimizer = None
    checkpointer.save()


def go_on(folder: str, steps: int, options: dict[str, Any]) -> Any:
    run, checkpointer = begin(folder, options.pop("rewarmup", True))
    report = checkpointer.resume(**options)
    rows = run.train(run.state.step + steps, done=checkpointer.step)
    if steps:
        checkpointer.save()
    return report.step, [lr for _, _, lr in rows], run.optimizer.param_groups[0]["lr"]


def scheduled() -> list[float]:
    """By torch alone: what the lab's schedule gives for each step."""
    each = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lab.Setup().lr)
    schedule = lr_scheduler.CosineAnnealingLR(each, T_max=lab.Setup().total_steps)
    rates = []
    for _ in range(16):
        rates.append(each.param_groups[0]["lr"])
        each.step()
        schedule.step()
    return rates


def test_a_run_without_moments_climbs_and_goes_on_climbing_on_other_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(2, save_without_moments, folder)
    expected = scheduled()
    for step, rates, _ in run_ranks(2, go_on, folder, 2, {"lost_optimizer": "rewarm"}):
        assert step == 5
        assert rates == pytest.approx([expected[5] * 0.1, expected[6] * (0.1 + 0.9 / 6)], rel=1e-9)
    ((step, rates, _),) = run_ranks(1, go_on, folder, 7, {})
    assert step == 7
    climb = [0.1 + 0.9 * k / 6 for k in range(2, 6)] + [1, 1, 1]
    assert rates == pytest.approx([rate * factor for rate, factor in zip(expected[7:14], climb, strict=True)], rel=1e-9)
    assert rates[4:] == expected[11:14]


def test_nothing_else_lets_a_run_go_on_without_moments(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(1, save_without_moments, folder)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "the checkpoint lacks what the run has: optimizer"),
        ({"allow_missing": ["optimizer"]}, "a run without the moments of its optimizer takes full steps"),
        ({"allow_missing": ["*"]}, "a run without the moments of its optimizer takes full steps"),
        ({"lost_optimizer": "rewarm", "rewarmup": False}, "no schedule that can climb"),
        ({"lost_optimizer": "ignore"}, "no such choice"),
    ]
    for options, said in cases:
        with pytest.raises(RankFailed, match=said):
            run_ranks(1, go_on, folder, 0, options)


def test_a_checkpoint_with_moments_does_not_climb(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(1, go_from_scratch, folder)
    ((step, rates, _),) = run_ranks(1, go_on, folder, 3, {"lost_optimizer": "rewarm"})
    assert (step, rates) == (5, scheduled()[5:8])


def go_from_scratch(folder: str) -> None:
    run, checkpointer = begin(folder, False)
    run.train(5, done=checkpointer.step)
    checkpointer.save()


def save_in_the_middle(folder: str) -> None:
    run, checkpointer = begin(folder, True)
    run.train(3, done=checkpointer.step)
    run.state.scheduler.begin()
    run.train(5, done=checkpointer.step)
    checkpointer.save()


def test_a_climb_is_not_lost_for_want_of_a_wrapper(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(1, save_in_the_middle, folder)
    with pytest.raises(RankFailed, match="saved on the way back to its schedule: expected a Rewarmup, found Cosine"):
        run_ranks(1, go_on, folder, 0, {"rewarmup": False})
    # A new base rate reaches the schedule below the climb.
    ((_, rates, _),) = run_ranks(1, go_on, folder, 6, {"lr": 0.3})
    climb = [0.1 + 0.9 * k / 6 for k in range(2, 6)] + [1, 1]
    expected = [10 * rate * factor for rate, factor in zip(scheduled()[5:11], climb, strict=True)]
    assert rates == pytest.approx(expected, rel=1e-9)


def spoils(climbs: bool, seed: int) -> tuple[float, float]:
    """The worst loss of the 20 steps before a restart without moments, and of the 60 after it, by torch's own AdamW."""
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 16)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(1024, 1)
    layers = [
        torch.nn.Linear(16, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    ]
    model = torch.nn.Sequential(*layers)

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            chosen = torch.randint(1024, (64,), generator=chance)
            each.zero_grad()
            torch.nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
            each.step()
            schedule.step()
            with torch.no_grad():
                losses.append(torch.nn.functional.mse_loss(model(x), y).item())
        return losses

    each = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule: Any = lr_scheduler.ConstantLR(each, factor=1.0)
    before = max(train(300)[-20:])
    each = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = Rewarmup(lr_scheduler.ConstantLR(each, factor=1.0), 40)
    if climbs:
        schedule.begin()
    return before, max(train(60))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_climb_spares_a_run_what_full_steps_without_moments_do_to_it(seed: int) -> None:
    before, spoilt = spoils(False, seed)
    same, spared = spoils(True, seed)
    assert before == same
    assert spoilt > 1.3 * before
    assert spared < before


def rolled_back(folder: str) -> Any:
    run, checkpointer = start_rolled(folder)
    straight = run.train(8, done=checkpointer.step)
    end = lab.digest(run)
    report = checkpointer.roll_back(4)
    names = [path.name for path in Path(folder).iterdir()]
    kept = sorted(name for name in names if name.startswith("step-"))
    aside = sorted(name.rpartition("-")[0] for name in names if name.startswith("abandoned-"))
    again = run.train(8, done=checkpointer.step)
    return report.step, straight[4:] == again, end == lab.digest(run), kept, aside


def start_rolled(folder: str) -> tuple[lab.Run, Checkpointer]:
    run = lab.build(lab.Setup(global_batch=4, exact=True))
    return run, Checkpointer(folder, run.state, interval=2, keep_latest_k=9)


def test_a_run_that_is_rolled_back_goes_the_same_way_again(tmp_path: Path) -> None:
    for step, same_rows, same_end, kept, aside in run_ranks(2, rolled_back, str(tmp_path)):
        assert (step, same_rows, same_end) == (4, True, True)
        assert kept == ["step-2", "step-4"]
        assert aside == ["abandoned-step-6", "abandoned-step-8"]
    assert reshard.Rewarmup is Rewarmup
