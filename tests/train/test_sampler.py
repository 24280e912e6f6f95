"""Which samples a step trains on: the same at every world size, however often the run is interrupted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from reshard import BatchPlan, ElasticSampler, ReshardError
from reshard.errors import StateMismatch, UsageError
from reshard.train.order import EpochOrder


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


class Job:
    """All data-parallel ranks of a job in one process: a sampler and a loader for each."""

    def __init__(self, length: int, plan: BatchPlan, state: dict[str, Any] | None = None, **options: Any) -> None:
        workers = {name: options.pop(name) for name in [*options] if name in LOADER_OPTIONS}
        self.plan = plan
        self.samplers = [ElasticSampler(length, plan, rank, **options) for rank in range(plan.ranks)]
        if state is not None:
            for sampler in self.samplers:
                sampler.load_state_dict(state)
        self.loaders = [DataLoader(Numbers(length), batch_sampler=sampler, **workers) for sampler in self.samplers]

    def train(self, steps: int) -> list[list[list[int]]]:
        """Trains; each step as the samples of its slots, in slot order. Checks that idle ranks repeat the last slot."""
        done: list[list[list[int]]] = []
        while len(done) < steps:
            streams = [sampler.steps(loader) for sampler, loader in zip(self.samplers, self.loaders, strict=True)]
            for by_rank in zip(*streams, strict=True):
                done.append(self._by_slot(by_rank))
                for sampler in self.samplers:
                    sampler.advance()
                if len(done) == steps:
                    break
        return done

    def _by_slot(self, by_rank: tuple[list[Any], ...]) -> list[list[int]]:
        rows = [batch.tolist() for micro_step in zip(*by_rank, strict=True) for batch in micro_step]
        active = self.plan.active_slots(self.samplers[0].next_samples)
        assert all(row == rows[active - 1] for row in rows[active:])
        return rows[:active]

    @property
    def state(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [sample for step in steps for slot in step for sample in slot]


LOADER_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers")


def expected_steps(
    length: int, global_batch: int, micro_batch: int, steps: int, last: str, seed: int, shuffle: bool
) -> list[list[list[int]]]:
    """The definition, written out: cut the epochs' orders into global batches, and those into slots."""
    whole = steps * global_batch // length + 2 + steps
    epochs = [EpochOrder(length, seed, epoch, shuffle=shuffle)[np.arange(length)].tolist() for epoch in range(whole)]
    if last == "wrap":
        flat = [sample for epoch in epochs for sample in epoch]
        cut = [flat[first : first + global_batch] for first in range(0, steps * global_batch, global_batch)]
    else:
        cut = [epoch[first : first + global_batch] for epoch in epochs for first in range(0, length, global_batch)]
        if last == "drop":
            cut = [step for step in cut if len(step) == global_batch]
    return [[step[first : first + micro_batch] for first in range(0, len(step), micro_batch)] for step in cut[:steps]]


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    micro_batch = draw(st.integers(1, 4))
    global_batch = micro_batch * draw(st.integers(1, 7))
    last = draw(st.sampled_from(["keep", "drop", "wrap"]))
    return {
        "length": draw(st.integers(global_batch if last == "drop" else 1, 50)),
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "last": last,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "shuffle": draw(st.booleans()),
        "legs": draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4)),
    }


@settings(max_examples=150, deadline=None)
@given(runs())
def test_interruptions_and_world_sizes_change_nothing(run: dict[str, Any]) -> None:
    legs = run.pop("legs")
    length, global_batch, micro_batch = run.pop("length"), run.pop("global_batch"), run.pop("micro_batch")
    trained: list[list[list[int]]] = []
    state = None
    for ranks, steps in legs:
        job = Job(length, BatchPlan(global_batch, micro_batch, ranks), state, **run)
        trained += job.train(steps)
        state = job.state
        assert state["samples"] == sum(len(slot) for step in trained for slot in step)
    assert trained == expected_steps(length, global_batch, micro_batch, len(trained), **run)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_length_is_what_iterating_gives(run: dict[str, Any]) -> None:
    legs = run.pop("legs")
    length, plan = run.pop("length"), BatchPlan(run.pop("global_batch"), run.pop("micro_batch"), legs[0][0])
    job = Job(length, plan, **run)
    for _, steps in legs:
        for sampler in job.samplers:
            assert len(sampler) == len(list(sampler))
        job.train(steps)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_interrupted_three_times_is_trained_on_exactly_once(workers: int) -> None:
    """Real loaders; the breaks come while workers have fetched ahead."""
    length, options = 100, {"seed": 5, "num_workers": workers}
    trained: list[list[list[int]]] = []
    state = None
    for ranks, steps in ((4, 3), (3, 2), (2, 3), (1, 1)):
        job = Job(length, BatchPlan(12, 2, ranks), state, **options)
        trained += job.train(steps)
        state = job.state
    assert state is not None and (state["epoch"], state["offset"]) == (1, 0)
    unbroken = Job(length, BatchPlan(12, 2, 1), **options).train(9)
    assert trained == unbroken
    samples = flat(trained)
    assert Counter(samples) == Counter(range(length))
    assert [len(slot) for slot in trained[-1]] == [2, 2]


@pytest.mark.parametrize("ranks", [2, 8])
def test_four_ranks_become_two_or_eight(ranks: int) -> None:
    """B70."""
    before = Job(100, BatchPlan(8, 1, 4), shuffle=False)
    consumed = before.train(3)
    assert sorted(flat(consumed)) == list(range(24))
    after = Job(100, BatchPlan(8, 1, ranks), before.state, shuffle=False)
    assert sorted(flat(after.train(1))) == list(range(24, 32))
    rest = flat(after.train(9))
    assert sorted(rest) == list(range(32, 100))


def test_a_run_saved_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    """B71."""
    job = Job(8, BatchPlan(2, 1, 2))
    job.train(4)
    assert (job.state["epoch"], job.state["offset"], job.state["samples"]) == (1, 0, 8)
    resumed = Job(8, BatchPlan(2, 1, 1), job.state)
    sampler, loader = resumed.samplers[0], resumed.loaders[0]
    steps = 0
    while sampler.epoch < 2:
        for _ in sampler.steps(loader):
            sampler.advance()
            steps += 1
    assert steps == 4


def test_an_epoch_loop_that_would_train_on_nothing_is_an_error_of_the_caller_and_said() -> None:
    """B71: a resumed loop that counts its epochs from 0 either repeats or runs no step; neither is silent."""
    sampler = ElasticSampler(8, BatchPlan(2, 1, 1))
    for _ in range(4):
        sampler.advance()
    with pytest.raises(
        UsageError, match=r"epoch is over: expected 1 or later, found 0; .*while sampler.epoch < epochs"
    ):
        sampler.set_epoch(0)


def test_what_a_larger_global_batch_cannot_fill_is_dropped_and_the_next_epoch_begins() -> None:
    """Otherwise a resumed ``while sampler.epoch < epochs`` would spin for ever without a step."""
    before = ElasticSampler(30, BatchPlan(4, 1, 1), last="drop")
    for _ in range(6):
        before.advance()
    after = ElasticSampler(30, BatchPlan(8, 1, 1), last="drop")
    after.load_state_dict(before.state_dict())
    assert (after.epoch, after.offset, after.samples) == (1, 0, 24)
    assert len(next(iter(after.steps(DataLoader(Numbers(30), batch_sampler=after))))) == 8


def test_a_stop_in_the_middle_leaves_the_complement_and_later_epochs_as_they_were() -> None:
    """B72: 64 samples, stop in epoch 2 after 20, on other ranks after the resume."""
    first = Job(64, BatchPlan(4, 1, 4))
    first.train(2 * 16 + 5)
    assert (first.state["epoch"], first.state["offset"]) == (2, 20)
    resumed = Job(64, BatchPlan(4, 1, 3), first.state)
    for sampler in resumed.samplers:
        sampler.set_epoch(2)
    epoch_2, epoch_3 = (EpochOrder(64, 0, epoch)[np.arange(64)].tolist() for epoch in (2, 3))
    assert flat(resumed.train(11)) == epoch_2[20:]
    assert flat(resumed.train(16)) == epoch_3


def test_set_epoch_skips_ahead() -> None:
    sampler = ElasticSampler(10, BatchPlan(4, 1, 1))
    sampler.advance()
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.offset, sampler.samples) == (3, 0, 4)


def test_wrapping_fills_steps_larger_than_the_data_set() -> None:
    job = Job(3, BatchPlan(8, 2, 3), last="wrap", shuffle=False)
    assert job.train(2) == [[[0, 1], [2, 0], [1, 2], [0, 1]], [[2, 0], [1, 2], [0, 1], [2, 0]]]
    assert (job.state["epoch"], job.state["offset"], job.state["samples"]) == (5, 1, 16)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "prefetch_factor": 4},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=str,
)
def test_position_counts_what_was_trained_on_not_what_was_fetched(options: dict[str, Any]) -> None:
    plan = BatchPlan(4, 2, 1)
    sampler = ElasticSampler(20, plan)
    loader = DataLoader(Numbers(20), batch_sampler=sampler, **options)
    seen: list[int] = []
    breaks = 0
    while sampler.epoch < 2:
        for micro_batches in sampler.steps(loader):
            seen += [sample for batch in micro_batches for sample in batch.tolist()]
            sampler.advance()
            assert sampler.samples == len(seen)
            breaks += 1
            if breaks % 3 == 0:
                # What workers have fetched by now is thrown away with the iterator.
                break
    expected = [EpochOrder(20, 0, epoch)[np.arange(20)].tolist() for epoch in (0, 1)]
    assert seen == expected[0] + expected[1]


def first_step(sampler: ElasticSampler, loader: Iterable[Any]) -> Any:
    return next(sampler.steps(loader))


def test_a_step_that_was_not_advanced_is_an_error() -> None:
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1))
    steps = sampler.steps(DataLoader(Numbers(20), batch_sampler=sampler))
    next(steps)
    with pytest.raises(
        UsageError, match=r"not advanced .*expected epoch 0, sample 4, found epoch 0, sample 0; pass samp"
    ):
        next(steps)


def test_a_step_that_was_advanced_twice_is_an_error() -> None:
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1))
    steps = sampler.steps(DataLoader(Numbers(20), batch_sampler=sampler))
    next(steps)
    sampler.advance()
    sampler.advance()
    with pytest.raises(UsageError, match="expected epoch 0, sample 4, found epoch 0, sample 8"):
        next(steps)


def test_a_loader_that_ends_early_is_an_error() -> None:
    sampler = ElasticSampler(20, BatchPlan(8, 2, 1))
    with pytest.raises(
        UsageError, match=r"ended in the middle of a step: expected 4 micro-batches, found 3; .*DataLoader"
    ):
        first_step(sampler, list(sampler)[:3])


@pytest.mark.parametrize(
    "loader", [DataLoader(Numbers(20), batch_size=2, shuffle=True), [[1, 2]] * 9], ids=["own", "list"]
)
def test_a_loader_that_does_not_draw_from_the_sampler_is_an_error(loader: Any) -> None:
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1))
    with pytest.raises(UsageError, match=r"not those of this sampler .*found nothing drawn from it; build it as DataL"):
        first_step(sampler, loader)


def test_an_iterator_from_before_the_resume_is_an_error() -> None:
    """Workers have fetched the first samples of the run by then; trained on, they would be seen twice."""
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1))
    loader = DataLoader(Numbers(20), batch_sampler=sampler, num_workers=1)
    early = iter(loader)
    sampler.load_state_dict({**sampler.state_dict(), "offset": 8, "samples": 8})
    with pytest.raises(UsageError, match="expected epoch 0, sample 8, found epoch 0, sample 0"):
        first_step(sampler, early)
    assert first_step(sampler, loader)[0].tolist() == EpochOrder(20, 0, 0)[np.array([8, 9])].tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"length": 21}, r"data\.length: .*expected 21, found 20; resume on the data set"),
        ({"fingerprint": "b"}, r"data\.fingerprint: .*expected b, found a"),
        ({"last": "wrap"}, r"data\.last: .*expected wrap, found keep"),
        ({"shuffle": False}, r"data\.shuffle: .*expected False, found True"),
        ({"offset": 20}, r"data\.offset: no such position .*expected 0\.\.19, found epoch 0, sample 20"),
        ({"offset": -1}, r"data\.offset: no such position"),
    ],
    ids=str,
)
def test_a_position_in_another_order_is_refused(changed: dict[str, Any], message: str) -> None:
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1), fingerprint="a", seed=3)
    before = sampler.state_dict()
    with pytest.raises(StateMismatch, match=message):
        sampler.load_state_dict({**before, "seed": 4, **changed})
    assert sampler.state_dict() == before


def test_the_state_of_something_else_is_refused() -> None:
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1))
    with pytest.raises(StateMismatch, match=r"data: not the position of an ElasticSampler: expected .*offset"):
        sampler.load_state_dict({"samples": 8, "epoch": 0})


@pytest.mark.parametrize(("saved", "live"), [("a", None), (None, "a")])
def test_a_fingerprint_on_one_side_only_is_pointed_out(
    saved: str | None, live: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1), fingerprint=live)
    with caplog.at_level(logging.WARNING, "reshard"):
        sampler.load_state_dict({**sampler.state_dict(), "fingerprint": saved, "offset": 4})
    assert sampler.offset == 4
    assert "cannot be told" in caplog.text


def test_the_checkpoints_seed_wins_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    saved = ElasticSampler(20, BatchPlan(4, 2, 1), seed=1).state_dict()
    sampler = ElasticSampler(20, BatchPlan(4, 2, 1), seed=2)
    with caplog.at_level(logging.WARNING, "reshard"):
        sampler.load_state_dict(saved)
    assert sampler.seed == 1
    assert "data seed 2 ignored; the checkpoint's 1 restored" in caplog.text


def test_the_state_is_plain_numbers_even_from_numpy_arguments() -> None:
    sampler = ElasticSampler(np.int64(20), BatchPlan(4, 2, 1), seed=np.int64(3))  # type: ignore[arg-type]
    assert {type(value) for value in sampler.state_dict().values()} == {int, bool, str, type(None)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "too small for a single step: expected at least 1"),
        ({"length": 3, "last": "drop"}, "too small for a single step: expected at least 4"),
        ({"dp_rank": 1}, r"dp_rank: .*expected 0\.\.0, found 1"),
        ({"dp_rank": -1}, r"dp_rank: .*expected 0\.\.0, found -1"),
        ({"last": "pad"}, "last: unknown policy: expected keep, drop or wrap, found pad"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ReshardError, match=message):
        ElasticSampler(**{"length": 20, "plan": BatchPlan(4, 2, 1), **arguments})
