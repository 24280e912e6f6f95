"""The batch arithmetic: every slot exactly once, at every number of ranks."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.batch.plan import BatchPlan
from reshard.errors import BatchError, StateMismatch


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    micro_batch = draw(st.integers(1, 9))
    return BatchPlan(micro_batch * draw(st.integers(1, 60)), micro_batch, draw(st.integers(1, 80)))


@given(plans())
def test_every_slot_is_run_exactly_once(plan: BatchPlan) -> None:
    places = [plan.slot(step, rank) for step in range(plan.accumulation) for rank in range(plan.ranks)]
    assert sorted(slot for slot in places if slot is not None) == list(range(plan.slots))
    assert places.count(None) == plan.idle_slots


@given(plans())
def test_a_rank_runs_its_slots_in_micro_step_order(plan: BatchPlan) -> None:
    for rank in range(plan.ranks):
        places = [plan.slot(step, rank) for step in range(plan.accumulation)]
        assert [slot for slot in places if slot is not None] == list(range(rank, plan.slots, plan.ranks))


@given(plans())
def test_only_the_last_micro_step_idles(plan: BatchPlan) -> None:
    assert 0 <= plan.idle_slots < plan.ranks
    assert plan.idle_share == pytest.approx(1 - plan.slots / (plan.accumulation * plan.ranks))


@given(plans(), st.data())
def test_the_samples_of_an_incomplete_step_are_shared_out_exactly(plan: BatchPlan, data: st.DataObject) -> None:
    samples = data.draw(st.integers(0, plan.global_batch))
    shares = [plan.slot_samples(slot, samples) for slot in range(plan.slots)]
    active = plan.active_slots(samples)
    assert sum(shares) == samples
    assert all(share == plan.micro_batch for share in shares[: max(active - 1, 0)])
    assert [share > 0 for share in shares] == [slot < active for slot in range(plan.slots)]
    assert plan.micro_steps(samples) == len({slot // plan.ranks for slot in range(active)})


@given(plans())
def test_a_complete_step_is_the_special_case(plan: BatchPlan) -> None:
    assert plan.active_slots(plan.global_batch) == plan.slots
    assert plan.micro_steps(plan.global_batch) == plan.accumulation


@given(plans())
def test_what_is_called_free_idles_nothing(plan: BatchPlan) -> None:
    for ranks in plan.free_ranks():
        assert plan.for_ranks(ranks).idle_slots == 0
    for micro_batch in plan.free_micro_batches():
        assert BatchPlan(plan.global_batch, micro_batch, plan.ranks).idle_slots == 0
    assert bool(plan.free_micro_batches()) == (plan.global_batch % plan.ranks == 0)
    assert bool(plan.advice()) == (plan.idle_slots > 0)


@pytest.mark.parametrize(("ranks", "accumulation"), [(8, 2), (4, 4), (16, 1), (1, 16)])
def test_b63_accumulation_makes_up_for_ranks(ranks: int, accumulation: int) -> None:
    plan = BatchPlan(64, 4, 8).for_ranks(ranks)
    assert (plan.slots, plan.accumulation, plan.idle_slots, plan.idle_share) == (16, accumulation, 0, 0.0)
    assert plan.advice() == []


def test_b63_more_ranks_than_slots_proposes_a_smaller_micro_batch() -> None:
    plan = BatchPlan(64, 4, 32)
    assert (plan.accumulation, plan.idle_slots, plan.idle_share, plan.is_costly) == (1, 16, 0.5, True)
    assert plan.free_micro_batches() == [1, 2]
    assert "micro-batches that cost nothing on 32 ranks: 1, 2" in plan.advice()


@pytest.mark.parametrize(
    ("ranks", "accumulation", "least", "global_batches"), [(6, 3, 1, "48 or 72"), (3, 6, 2, "60 or 72")]
)
def test_b63_ranks_that_do_not_divide_stay_exact_and_hear_the_price(
    ranks: int, accumulation: int, least: int, global_batches: str
) -> None:
    plan = BatchPlan(64, 4, ranks)
    assert (plan.accumulation, plan.idle_slots) == (accumulation, 2)
    assert plan.free_ranks() == [1, 2, 4, 8, 16]
    assert plan.free_micro_batches() == []
    cost, worlds, micro_batches = plan.advice()
    assert cost == "2 of 18 slot places idle: 11.1 % of the step's compute"
    assert worlds == "world sizes that cost nothing at micro-batch 4: 1, 2, 4, 8, 16"
    assert f"micro-batch {least} idles the least, 3.03 %" in micro_batches
    assert f"a global batch of {global_batches} would cost nothing" in micro_batches


def test_a_tenth_is_not_yet_costly() -> None:
    assert BatchPlan(9, 1, 10).idle_share == 0.1
    assert not BatchPlan(9, 1, 10).is_costly
    assert BatchPlan(8, 1, 9).is_costly


def test_free_ranks_are_those_around_the_plan() -> None:
    plan = BatchPlan(2**20, 1, 1000)
    assert plan.free_ranks(4) == [256, 512, 1024, 2048]
    assert plan.free_ranks(1) == [1024]
    assert plan.for_ranks(1).free_ranks(3) == [1, 2, 4]
    assert plan.for_ranks(2**30).free_ranks(2) == [2**19, 2**20]


@pytest.mark.parametrize(
    ("global_batch", "ranks", "limit", "micro_batch"),
    [
        (64, 8, 16, 8),  # the largest that idles nothing
        (64, 8, 5, 4),  # a limit that is no divisor
        (64, 6, 64, 1),  # nothing is free: the least idle
        (96, 6, 8, 8),  # 16, 8 ... are free, the limit decides
        (7, 1, 100, 7),
    ],
)
def test_choose(global_batch: int, ranks: int, limit: int, micro_batch: int) -> None:
    assert BatchPlan.choose(global_batch, ranks, limit) == BatchPlan(global_batch, micro_batch, ranks)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 250))
def test_choose_is_never_beaten(global_batch: int, ranks: int, limit: int) -> None:
    chosen = BatchPlan.choose(global_batch, ranks, limit)
    others = [BatchPlan(global_batch, m, ranks) for m in range(1, limit + 1) if global_batch % m == 0]
    assert chosen in others
    assert all((chosen.idle_share, -chosen.micro_batch) <= (other.idle_share, -other.micro_batch) for other in others)


def test_a_batch_of_64_bits_is_quick() -> None:
    begin = time.monotonic()
    plan = BatchPlan(2**62, 2, 6)
    assert plan.slots == 2**61
    assert plan.slot(plan.accumulation - 1, 5) is None
    assert plan.advice()
    with pytest.raises(BatchError, match="not divisible"):
        BatchPlan(2**63 - 25, 2, 1)  # a prime, the worst there is to factor
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("wrong", [0, -4, 4.0, "4", True, None])
def test_only_whole_numbers_above_zero(wrong: object) -> None:
    for place in range(3):
        numbers: list[object] = [8, 4, 2]
        numbers[place] = wrong
        with pytest.raises(BatchError, match="whole number above zero"):
            BatchPlan(*numbers)  # type: ignore[arg-type]


def test_all_wrong_numbers_are_named_at_once() -> None:
    with pytest.raises(BatchError) as caught:
        BatchPlan(0, 4, -1)
    assert "global_batch" in str(caught.value)
    assert "ranks" in str(caught.value)


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "global_batches", "micro_batches"),
    [(250, 8, "248 or 256", "5 or 10"), (6, 8, "8", "6"), (7, 2, "6 or 8", "1 or 7")],
)
def test_an_uneven_micro_batch_is_refused_with_the_nearest_that_work(
    global_batch: int, micro_batch: int, global_batches: str, micro_batches: str
) -> None:
    with pytest.raises(BatchError) as caught:
        BatchPlan(global_batch, micro_batch, 4)
    assert caught.value.hint == f"take a global batch of {global_batches}, or a micro-batch of {micro_batches}"
    assert caught.value.exit_code == 2


def test_places_outside_the_plan_are_refused() -> None:
    plan = BatchPlan(64, 4, 6)
    for call in (
        lambda: plan.slot(3, 0),
        lambda: plan.slot(-1, 0),
        lambda: plan.slot(0, 6),
        lambda: plan.slot(0, -1),
        lambda: plan.slot(0, 0, plan.global_batch + 1),
        lambda: plan.active_slots(65),
        lambda: plan.micro_steps(-1),
        lambda: plan.slot_samples(16, 64),
        lambda: plan.slot_samples(0, 65),
    ):
        with pytest.raises(BatchError, match="no such"):
            call()


def test_a_plan_is_a_value() -> None:
    assert BatchPlan(64, 4, 6) == BatchPlan(64, 4, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchPlan(64, 4, 6).ranks = 5  # type: ignore[misc]


def test_loading_on_other_ranks_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    saved = BatchPlan(64, 4, 8).state_dict()
    assert saved == {"global_batch": 64, "micro_batch": 4, "ranks": 8, "accumulation": 2}
    BatchPlan(64, 4, 6).load_state_dict(saved)
    assert caplog.records == []


def test_loading_another_global_batch_is_refused() -> None:
    with pytest.raises(StateMismatch, match="expected 64, found 60; train with"):
        BatchPlan(60, 4, 8).load_state_dict(BatchPlan(64, 4, 8).state_dict())
    with pytest.raises(StateMismatch, match="expected a recorded number"):
        BatchPlan(60, 4, 8).load_state_dict({})


def test_loading_another_micro_batch_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    BatchPlan(64, 2, 8).load_state_dict(BatchPlan(64, 4, 8).state_dict())
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("reshard", logging.WARNING)
    assert "micro-batch 4 -> 2" in record.getMessage()
    assert "random streams" in record.getMessage()
