"""The order of an epoch: a fair permutation that is the same for ever, at any length and without memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from reshard.train.order import EpochOrder

LENGTHS = [*range(1, 35), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 16385, 10**5]


def order(length: int, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> np.ndarray:
    return EpochOrder(length, seed, epoch, shuffle=shuffle)[np.arange(length)]


def chi_square_bound(cells: int) -> float:
    """What a fair chi-square over so many cells exceeds about once in a million (Wilson and Hilferty)."""
    freedom = cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_a_permutation(length: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        assert np.array_equal(np.sort(order(length, seed, epoch)), np.arange(length))


def test_without_shuffling_it_is_the_data_sets_own_order() -> None:
    assert np.array_equal(order(100, seed=5, epoch=3, shuffle=False), np.arange(100))


def test_the_order_is_a_format_and_stays_as_it_is() -> None:
    """Positions in checkpoints mean samples by it: if this fails, every saved run would go on with other samples."""
    assert order(10).tolist() == GOLDEN_10
    assert order(10, seed=1, epoch=2).tolist() == GOLDEN_10_SEED_1_EPOCH_2
    assert EpochOrder(10**12, 3, 4)[np.array([0, 1, 10**12 - 1])].tolist() == GOLDEN_HUGE


GOLDEN_10 = [4, 5, 7, 9, 0, 6, 2, 3, 8, 1]
GOLDEN_10_SEED_1_EPOCH_2 = [9, 8, 2, 4, 6, 1, 7, 5, 0, 3]
GOLDEN_HUGE = [95666718434, 220599086569, 744418866354]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(12) for epoch in range(12)}
    assert len(orders) == 144


@pytest.mark.parametrize("length", [3, 257, 1000])
def test_all_at_once_is_the_same_as_one_by_one(length: int) -> None:
    at_once = EpochOrder(length, 1, 2)
    one_by_one = [int(EpochOrder(length, 1, 2)[np.array([position])][0]) for position in range(length)]
    assert at_once[np.arange(length)].tolist() == one_by_one
    backwards = at_once[np.arange(length)[::-1]]
    assert backwards.tolist() == one_by_one[::-1]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 11, 16, 17])
def test_every_sample_is_as_likely_at_every_position(length: int) -> None:
    seeds = 1200
    counts = np.zeros((length, length))
    for seed in range(seeds):
        counts[np.arange(length), order(length, seed)] += 1
    for at_position in counts:
        assert ((at_position - seeds / length) ** 2 / (seeds / length)).sum() < chi_square_bound(length)


@pytest.mark.parametrize("length", [3, 4])
def test_every_permutation_is_as_likely(length: int) -> None:
    seeds = 3000
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(seeds):
        key = tuple(order(length, seed).tolist())
        seen[key] = seen.get(key, 0) + 1
    cells = math.factorial(length)
    assert len(seen) == cells
    expected = seeds / cells
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < chi_square_bound(cells)


@pytest.mark.parametrize("length", [1000, 65_536, 100_000])
def test_neighbours_are_unrelated(length: int) -> None:
    for seed in range(5):
        values = order(length, seed).astype(np.float64)
        for lag in (1, 2, 3, 8, 64):
            related = np.corrcoef(values[:-lag], values[lag:])[0, 1]
            assert abs(related) < 5 / math.sqrt(length), (seed, lag)
        # Steps between neighbours are spread like those between random numbers, without a favourite.
        steps = np.bincount((np.diff(values).astype(np.int64) % length) * 50 // length, minlength=50)
        expected = (length - 1) / 50
        assert ((steps - expected) ** 2 / expected).sum() < chi_square_bound(50)


def test_epochs_are_unrelated() -> None:
    epochs = [order(50_000, 0, epoch).astype(np.float64) for epoch in range(6)]
    related = np.corrcoef(epochs)[np.triu_indices(6, 1)]
    assert np.abs(related).max() < 5 / math.sqrt(50_000)


def test_a_huge_epoch_costs_no_memory() -> None:
    length = 10**12
    positions = np.concatenate([np.arange(500), np.arange(length - 500, length), np.arange(10**6, length, 10**9)])
    tracemalloc.start()
    indices = EpochOrder(length, 0, 0)[positions]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert indices.dtype == np.int64
    assert len(np.unique(indices)) == len(positions)
    assert indices.min() >= 0 and indices.max() < length
    assert abs(indices.mean() / length - 0.5) < 5 / math.sqrt(12 * len(positions))


@pytest.mark.parametrize("position", [-1, 10, 2**40])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match="an epoch of 10 samples"):
        EpochOrder(10, 0, 0)[np.array([3, position])]
