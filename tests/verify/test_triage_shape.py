"""The shape of a loss after a resume, over curves whose truth is known because they are made here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from reshard.errors import UsageError
from reshard.verify.triage.reference import Reference
from reshard.verify.triage.shape import CONTINUOUS, LOW, MID_RUN, PERSISTENT, SPIKE, Shape, classify
from reshard.verify.triage.trend import FEWEST, fit_trend

RESUME, NOISE = 400, 0.05


def losses(
    seed: int, steps: np.ndarray[Any, Any], *, exponent: float = 0.3, noise: float = NOISE, kind: str = "normal"
) -> np.ndarray[Any, Any]:
    """A power law with noise around it."""
    generator = np.random.default_rng(seed)
    errors = generator.standard_normal(len(steps))
    if kind == "correlated":
        for at in range(1, len(errors)):
            errors[at] = 0.5 * errors[at - 1] + math.sqrt(0.75) * errors[at]
    elif kind == "hard batches":
        errors[generator.random(len(steps)) < 0.02] += 8
    curve = 2 + 4 * steps**-exponent
    if kind == "cosine":
        # What a decaying learning rate does to a loss.
        curve = curve - 0.2 * (1 - np.cos(np.pi * steps / steps[-1])) / 2
    return curve + noise * errors


def shape(steps: Sequence[int], loss: np.ndarray[Any, Any], resume: int = RESUME) -> Shape:
    before = sum(step <= resume for step in steps)
    trend = fit_trend(steps[:before], loss[:before])
    return classify(steps[before:], loss[before:], trend, resume)


def after(steps: int = 300, every: int = 1) -> tuple[list[int], np.ndarray[Any, Any]]:
    numbers = list(range(every, RESUME + steps + 1, every))
    return numbers, losses(1, np.array(numbers, float))


@pytest.mark.parametrize("kind", ["normal", "correlated", "hard batches", "cosine"])
@pytest.mark.parametrize(("resume", "every"), [(40, 1), (160, 1), (1000, 1), (10_000, 10)])
def test_a_run_that_lost_nothing_goes_on(kind: str, resume: int, every: int) -> None:
    steps = np.arange(every, resume + 501, every)
    names = []
    for seed in range(4):
        loss = losses(seed, steps.astype(float), exponent=0.1 + 0.1 * seed, kind=kind)
        names.append(shape(steps.tolist(), loss, resume).name)
    allowed = {CONTINUOUS, MID_RUN} if kind == "hard batches" else {CONTINUOUS}
    assert set(names) <= allowed
    assert names.count(CONTINUOUS) >= 3


@pytest.mark.parametrize("every", [1, 5])
def test_a_spike_that_decays(every: int) -> None:
    steps, loss = after(every=every)
    past = np.maximum(np.array(steps) - RESUME, 0)
    found = shape(steps, loss + np.where(past > 0, 1.0 * np.exp(-past / 20), 0))
    assert found.name == SPIKE
    assert found.onset == RESUME + every
    assert found.back is not None
    # After 20 ln(1 / NOISE) steps it is as small as the noise.
    assert RESUME + 30 <= found.back <= RESUME + 90
    assert found.first == pytest.approx(math.exp(-every / 20), abs=4 * NOISE)


@pytest.mark.parametrize("every", [1, 5])
def test_a_loss_that_stays_too_high(every: int) -> None:
    steps, loss = after(every=every)
    found = shape(steps, loss + np.where(np.array(steps) > RESUME + 2, 0.4, 0))
    assert (found.name, found.back) == (PERSISTENT, None)
    assert found.onset is not None
    assert RESUME + 2 < found.onset <= RESUME + 2 + every
    assert found.peak == pytest.approx(0.4, abs=4 * NOISE)


def test_a_loss_that_climbs_slowly_is_no_spike() -> None:
    steps, loss = after()
    found = shape(steps, loss + 0.003 * np.maximum(np.array(steps) - RESUME, 0))
    assert (found.name, found.back) == (PERSISTENT, None)
    assert found.onset is not None
    assert RESUME + 20 < found.onset < RESUME + 200


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_has_diverged(value: float) -> None:
    steps, loss = after()
    loss[RESUME + 5 :] = value
    found = shape(steps, loss)
    assert (found.name, found.onset, found.peak_sigmas) == (PERSISTENT, RESUME + 6, math.inf)
    steps, loss = after()
    loss[RESUME + 100 : RESUME + 103] = value
    found = shape(steps, loss)
    assert (found.name, found.onset, found.back) == (MID_RUN, RESUME + 101, RESUME + 104)


def test_repeated_data_look_like_progress_and_then_collapse() -> None:
    """B75."""
    steps, loss = after()
    past = np.array(steps) - RESUME
    found = shape(steps, loss - np.where((past > 0) & (past <= 120), 0.25, 0))
    assert (found.name, found.onset) == (LOW, RESUME + 1)
    assert found.back is not None
    assert abs(found.back - (RESUME + 121)) <= 8
    assert found.peak == pytest.approx(-0.25, abs=4 * NOISE)


@pytest.mark.parametrize("begins", [60, 200])
def test_a_spike_in_the_middle_of_the_run_is_not_the_resume(begins: int) -> None:
    steps, loss = after()
    past = np.array(steps) - RESUME - begins
    found = shape(steps, loss + np.where(past >= 0, 1.5 * np.exp(-np.maximum(past, 0) / 10), 0))
    assert (found.name, found.onset) == (MID_RUN, RESUME + begins)
    assert found.back is not None


def test_a_loss_that_falls_later_is_no_fault() -> None:
    """An epoch that ends, a learning rate that decays."""
    steps, loss = after()
    found = shape(steps, loss - np.where(np.array(steps) > RESUME + 80, 0.4, 0))
    assert (found.name, found.onset) == (CONTINUOUS, None)


def test_spikes_of_the_past_do_not_bend_the_trend() -> None:
    steps, loss = after()
    spoiled = loss.copy()
    spoiled[250:270] += 3.0
    assert shape(steps, spoiled).name == CONTINUOUS
    trends = [fit_trend(steps[:RESUME], each[:RESUME]) for each in (loss, spoiled)]
    one, other = (float(trend.expected([RESUME + 50])[0]) for trend in trends)
    assert one == pytest.approx(other, abs=NOISE)


def test_the_trend_knows_the_noise_and_where_the_curve_goes() -> None:
    steps = list(range(1, 1001))
    trend = fit_trend(steps, losses(3, np.array(steps, float)))
    assert trend.noise == pytest.approx(NOISE, rel=0.2)
    truth = 2 + 4 * np.arange(1001, 1101.0) ** -0.3
    assert float(np.abs(trend.expected(range(1001, 1101)) - truth).max()) < NOISE


def test_a_reference_that_differs_by_rounding_alone_is_met() -> None:
    """B97, random numbers only: not the same bits, within noise."""
    steps = list(range(RESUME + 1, RESUME + 301))
    clean = losses(1, np.array(steps, float))
    drift = np.random.default_rng(2).standard_normal(300) * 0.5 * NOISE
    reference = Reference(dict(zip(steps, clean.tolist(), strict=True)), NOISE, RESUME)
    assert classify(steps, (clean + drift).tolist(), reference, RESUME).name == CONTINUOUS
    assert classify(steps, (clean + 0.4).tolist(), reference, RESUME).name == PERSISTENT


def test_too_short_a_history_is_refused() -> None:
    steps = list(range(1, FEWEST))
    with pytest.raises(UsageError, match="too few steps before the resume"):
        fit_trend(steps, [3.0] * len(steps))
    with pytest.raises(UsageError, match="too few"):
        fit_trend(range(1, 101), [math.nan] * 100)
