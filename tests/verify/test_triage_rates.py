"""Breaks of a learning rate, by the schedulers of torch: none where one goes on, and each where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from reshard.verify.triage.rates import AHEAD, ELSEWHERE, REPEATED, RETURNED, SCALED, find_break

STEPS, RESUME = 400, 160
Points = list[tuple[int, float]]


def rates(build: Callable[[Any], Any], steps: int = STEPS, lr: float = 1e-3) -> Points:
    """What a run logs: the rate of each step, which is that of before the scheduler moves."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = build(optimizer)
    found = []
    for step in range(1, steps + 1):
        found.append((step, float(optimizer.param_groups[0]["lr"])))
        optimizer.step()
        scheduler.step()
    return found


def warm_up(then: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.01, 1.0, steps), then(optimizer)], [steps]
    )


def cosine(optimizer: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


SCHEDULES = {
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 1.0),
    "cosine": cosine,
    "cosine to zero soon after": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, RESUME + 3),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.98),
    "inverse square root": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) ** -0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-3, STEPS),
    "in warm-up": warm_up(cosine, 300),
    "warm-up ends at the resume": warm_up(cosine, RESUME),
    "warm-up ends next to it": warm_up(cosine, RESUME + 1),
    "decay begins at the resume": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 if step < RESUME else max(0.0, 1 - (step - RESUME) / 50)
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_goes_on_has_no_break(name: str) -> None:
    points = rates(SCHEDULES[name])
    assert find_break(points, RESUME + 1, RESUME + 20) is None
    assert find_break(points, RESUME + 1, RESUME + 20, reference=points) is None


@pytest.mark.parametrize("name", ["cosine", "linear", "one cycle", "in warm-up", "inverse square root"])
@pytest.mark.parametrize("every", [1, 10])
def test_a_schedule_that_begins_anew_is_one_that_it_had_before(name: str, every: int) -> None:
    points = rates(SCHEDULES[name])
    spoiled = [*points[:RESUME], *((step, points[step - RESUME - 1][1]) for step, _ in points[RESUME:])]
    logged = [point for point in spoiled if (point[0] - 1) % every == 0]
    found = find_break(logged, RESUME + 1, RESUME + 20)
    assert found is not None
    assert (found.step, found.kind, found.other_step) == (RESUME + 1, REPEATED, 1)


def test_a_schedule_that_is_ahead_is_told_by_the_reference() -> None:
    points = rates(cosine)
    spoiled = [*points[:RESUME], *((step, points[step + 80 - 1][1]) for step, _ in points[RESUME : RESUME + 60])]
    found = find_break(spoiled, RESUME + 1, RESUME + 20, reference=points)
    assert found is not None
    assert (found.kind, found.other_step, found.expected) == (AHEAD, RESUME + 81, points[RESUME][1])
    alone = find_break(spoiled, RESUME + 1, RESUME + 20)
    assert alone is not None
    assert (alone.step, alone.kind) == (RESUME + 1, ELSEWHERE)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rate_that_is_off_for_a_step_returns(late: int) -> None:
    points = rates(cosine)
    points[RESUME + late] = (RESUME + late + 1, 1e-3)
    found = find_break(points, RESUME + 1, RESUME + 20)
    assert found is not None
    assert (found.step, found.kind, found.other_step) == (RESUME + late + 1, RETURNED, RESUME + late + 2)
    assert (found.before, found.found) == (points[RESUME + late - 1][1], 1e-3)


@pytest.mark.parametrize("name", ["constant", "cosine", "exponential"])
def test_a_schedule_of_another_peak_is_scaled(name: str) -> None:
    points = rates(SCHEDULES[name])
    spoiled = [*points[:RESUME], *((step, 10 * rate) for step, rate in points[RESUME:])]
    found = find_break(spoiled, RESUME + 1, RESUME + 20)
    assert found is not None
    assert found.kind == SCALED
    assert found.found / found.expected == pytest.approx(10, rel=1e-3)


def test_rates_of_three_digits_have_no_break_of_their_own() -> None:
    points = [(step, float(f"{rate:.2e}")) for step, rate in rates(cosine)]
    assert find_break(points, RESUME + 1, RESUME + 20) is None


def test_too_few_points_before_say_nothing() -> None:
    assert find_break(rates(cosine, steps=3), 1, 3) is None
