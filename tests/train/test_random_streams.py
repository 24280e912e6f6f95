"""Random streams: by slot, by sample and by rank; what resumes exactly, and what follows a rule."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lab import Setup, resumed, straight, until
from ranks import run_ranks
from torch.utils.data import DataLoader, Dataset

import reshard
from reshard import BatchPlan, ElasticSampler, SeededDataset, SlotStreams, TrainState
from reshard.errors import CheckpointUnsound
from reshard.train.rng import capture_rng, cpu_stream, derive_seed, reseed, restore_rng, seed_everything


def draws(count: int = 3) -> tuple[list[Any], ...]:
    """The next numbers of every generator on the CPU, normal ones too: those keep a spare in their state."""
    return (
        [random.random() for _ in range(count)] + [random.gauss(0, 1)],
        [*np.random.random(count).tolist(), np.random.standard_normal()],
        torch.rand(count).tolist() + torch.randn(1).tolist(),
    )


def test_states_round_trip_bit_for_bit() -> None:
    seed_everything(3)
    draws()
    saved = capture_rng()
    assert {(state.dtype, state.dim()) for state in saved.values()} == {(torch.uint8, 1)}
    expected = draws(1000)
    seed_everything(4)
    draws(7)
    restore_rng(saved)
    again = capture_rng()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    assert draws(1000) == expected


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("python", b"{"),
        ("python", b"[3, [1, 2], null]"),
        ("numpy", b'["MT19937", [1099511627776], 0, 0, 0.0]'),
        ("numpy", b'["other", [1], 0, 0, 0.0]'),
        ("torch", b"too short"),
        ("abacus", b""),
    ],
)
def test_a_damaged_state_is_named(name: str, state: bytes) -> None:
    with pytest.raises(CheckpointUnsound, match=rf"rng\.{name}: not a random state: "):
        restore_rng({name: torch.tensor(list(state), dtype=torch.uint8)})


def test_cuda_streams_that_cannot_go_on_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("about a machine without CUDA")
    with caplog.at_level(logging.WARNING, "reshard"):
        restore_rng({"cuda_0": torch.zeros(16, dtype=torch.uint8)})
    assert "random states of 1 CUDA devices in the checkpoint, 0 devices here" in caplog.text


def test_derived_seeds_are_a_format_and_stay_as_they_are() -> None:
    assert derive_seed("sample", 1, 2, 3) == GOLDEN_SEED
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert len({derive_seed(step, slot) for step in range(100) for slot in range(100)}) == 10_000


GOLDEN_SEED = 2549131491698796252


def test_a_stream_leaves_no_trace_outside_even_when_it_fails() -> None:
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with pytest.raises(ZeroDivisionError), cpu_stream(5):
        draws()
        raise ZeroDivisionError
    assert draws() == expected


def mask(streams: SlotStreams, slot: int) -> list[float]:
    with streams.slot(slot):
        return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def test_a_slots_stream_does_not_know_the_rank_or_what_came_before() -> None:
    torch.manual_seed(1)
    first = mask(SlotStreams(7), 3)
    torch.manual_seed(2)
    streams = SlotStreams(7)
    mask(streams, 0)
    assert mask(streams, 3) == first


def test_slots_steps_and_seeds_have_streams_of_their_own() -> None:
    seen = set()
    for seed in (0, 1, 2):
        streams = SlotStreams(seed)
        for _ in range(10):
            seen |= {tuple(mask(streams, slot)) for slot in range(10)}
            streams.advance()
    assert len(seen) == 300


def test_outside_a_slot_the_process_stream_goes_on_undisturbed() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    found = torch.rand(1).tolist()
    with pytest.raises(ZeroDivisionError), SlotStreams(7).slot(0):
        torch.rand(100)
        raise ZeroDivisionError
    assert found + torch.rand(1).tolist() == expected


def test_recomputed_activations_see_the_same_mask() -> None:
    x = torch.ones(64, requires_grad=True)
    with SlotStreams(7).slot(2):
        out = torch.utils.checkpoint.checkpoint(
            lambda x: torch.nn.functional.dropout(x, 0.5) * x, x, use_reentrant=False
        )
        forward = out.tolist()
        out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2 * value for value in forward]


def test_streams_resume_where_they_were_and_say_whose_seed_counts(caplog: pytest.LogCaptureFixture) -> None:
    before = SlotStreams(7)
    before.advance()
    after = SlotStreams(8)
    with caplog.at_level(logging.WARNING, "reshard"):
        after.load_state_dict(before.state_dict())
    assert mask(after, 1) == mask(before, 1)
    assert "seed 8 of the slots' streams ignored; the checkpoint's 7 restored" in caplog.text


class Augmented(Dataset[tuple[int, float, float, float]]):
    """An item with something random from each generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), torch.rand(()).item()


def epochs(count: int, ranks: int = 1, **options: Any) -> list[dict[int, tuple[float, ...]]]:
    """Every item of each epoch, by sample, over all ranks."""
    plan = BatchPlan(6, 1, ranks)
    samplers = [ElasticSampler(12, plan, rank) for rank in range(ranks)]
    data = SeededDataset(Augmented(), seed=5)
    loaders = [DataLoader(data, batch_sampler=sampler, **options) for sampler in samplers]
    seen: list[dict[int, tuple[float, ...]]] = []
    for epoch in range(count):
        seen.append({})
        for sampler, loader in zip(samplers, loaders, strict=True):
            for micro_batches in sampler.steps(loader):
                for index, *values in micro_batches:
                    seen[epoch][int(index)] = tuple(float(value) for value in values)
                sampler.advance()
    return seen


def test_an_item_is_the_same_whatever_worker_or_rank_makes_it() -> None:
    expected = epochs(3)
    torch.manual_seed(99)
    assert all(len(epoch) == 12 for epoch in expected)
    assert epochs(3, num_workers=1) == expected
    assert epochs(3, num_workers=3) == expected
    assert epochs(3, num_workers=2, persistent_workers=True) == expected
    assert epochs(3, ranks=3) == expected


def test_items_differ_by_sample_and_by_epoch() -> None:
    seen = epochs(3)
    for generator in range(3):
        assert len({values[generator] for epoch in seen for values in epoch.values()}) == 36


def test_the_data_set_gets_a_plain_number() -> None:
    class Kinds(Augmented):
        def __getitem__(self, index: int) -> Any:
            return type(index)

    assert SeededDataset(Kinds())[next(iter(ElasticSampler(12, BatchPlan(1, 1, 1))))[0]] is int


def test_making_an_item_leaves_the_process_streams_alone() -> None:
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    assert SeededDataset(Augmented())[3] == SeededDataset(Augmented())[3]
    assert SeededDataset(Augmented(), seed=1)[3] != SeededDataset(Augmented())[3]
    assert draws() == expected


def test_iterating_leaves_the_process_streams_alone() -> None:
    """A DataLoader draws its workers' seed from torch's stream; a resume iterates once more than the unbroken run."""
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    epochs(2)
    epochs(1, num_workers=1)
    assert draws() == expected


def test_plain_workers_have_another_seed_each_epoch_and_rank() -> None:
    """What the draw above was good for: unseeded augmentations must not repeat."""
    seen = set()
    for rank in (0, 1):
        sampler = ElasticSampler(12, BatchPlan(2, 1, 2), rank)
        loader = DataLoader(Augmented(), batch_sampler=sampler, num_workers=1)
        while sampler.epoch < 3:
            for micro_batches in sampler.steps(loader):
                seen.add(micro_batches[0][3].item())
                sampler.advance()
    assert len(seen) == 2 * 3 * 6


def new_streams(world: int, step: int = 4) -> list[tuple[list[Any], ...]]:
    seed_everything(3)
    saved = capture_rng()
    seen = []
    for rank in range(world):
        reseed(saved, step, rank, world)
        seen.append(draws())
    return seen


def test_new_streams_are_deterministic_and_distinct() -> None:
    assert new_streams(4) == new_streams(4)
    for generator in range(3):
        firsts = [streams[generator][0] for args in ((4,), (2,), (4, 5)) for streams in new_streams(*args)]
        assert len(set(firsts)) == 10


def test_many_ranks_never_share_a_stream() -> None:
    """torch's CPU generator looks at 32 bits of its seed: hashes of 100 000 ranks would meet in them."""
    seed_everything(3)
    saved = {"torch": capture_rng()["torch"]}
    seeds = set()
    for rank in range(0, 100_000, 997):
        reseed(saved, 1, rank, 100_000)
        seeds.add(torch.initial_seed() & 0xFFFFFFFF)
    assert len(seeds) == len(range(0, 100_000, 997))


def save_streams(folder: str) -> Any:
    seed_everything(100 + dist.get_rank())
    draws()
    reshard.save_state(folder, TrainState(torch.nn.Linear(1, 1), step=4))
    return draws()


def load_streams(folder: str) -> Any:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reshard").addHandler(handler)
    seed_everything(0)
    reshard.load_state(folder, TrainState(torch.nn.Linear(1, 1)))
    return draws(), messages


def test_each_rank_goes_on_with_its_own_stream(tmp_path: Path) -> None:
    """B61, 4 -> 4."""
    expected = run_ranks(4, save_streams, str(tmp_path))
    found = run_ranks(4, load_streams, str(tmp_path))
    assert [streams for streams, _ in found] == expected
    assert len({str(streams) for streams in expected}) == 4
    assert not any(messages for _, messages in found)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_other_ranks_get_streams_of_their_own_and_one_warning(tmp_path: Path, before: int, after: int) -> None:
    """B61, 4 -> 2, 2 -> 4."""
    saved = run_ranks(before, save_streams, str(tmp_path))
    found = run_ranks(after, load_streams, str(tmp_path))
    assert run_ranks(after, load_streams, str(tmp_path)) == found
    for generator in range(3):
        firsts = [streams[generator][0] for streams in (*saved, *(streams for streams, _ in found))]
        assert len(set(firsts)) == before + after
    messages = [message for _, rank in found for message in rank]
    assert len(messages) == 1
    assert "not bit-reproducible" in messages[0]


def test_without_slot_streams_the_same_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Dropout from each rank's own stream, resumed in the middle of an epoch."""
    setup = Setup(streams=False, dropout=0.3)
    expected_rows, expected_end = run_ranks(2, straight, setup, 12)[0]
    rows, _ = run_ranks(2, until, setup, str(tmp_path), 5)[0]
    further, end, _, _ = run_ranks(2, resumed, setup, str(tmp_path), 12)[0]
    assert rows + further == expected_rows
    assert end == expected_end
