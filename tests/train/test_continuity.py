"""The promise itself: a run that is killed and resumed is the same run.

In CI a pairwise subset of the world sizes and options runs; ``-m slow`` runs the whole grid.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lab import Setup, resumed, straight, until
from ranks import run_ranks

STEPS = 20
SAVED_AT = 8
WORLDS = [(4, 2), (2, 4), (4, 3), (3, 1), (1, 4)]


@cache
def reference(world: int, **options: Any) -> Any:
    """The run that never stopped: (rows, digest)."""
    return run_ranks(world, straight, Setup(**options), STEPS)[0]


def interrupted(folder: Path, before: int, after: int, **options: Any) -> Any:
    """The same run, stopped at step 8 and resumed: (rows, digest, report)."""
    setup = Setup(**options)
    rows, saved = run_ranks(before, until, setup, str(folder), SAVED_AT)[0]
    further, end, loaded, report = run_ranks(after, resumed, setup, str(folder), STEPS)[0]
    assert loaded == saved, "what was loaded is not what was saved"
    assert report.step == SAVED_AT
    return rows + further, end, report


def assert_identical(folder: Path, reference_world: int, before: int, after: int, **options: Any) -> None:
    expected_rows, expected_end = reference(reference_world, **options)
    rows, end, _ = interrupted(folder, before, after, **options)
    assert rows == expected_rows
    assert end == expected_end


@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1", pytest.param("fsdp1-flat", marks=pytest.mark.slow)])
def test_same_world_size_is_bit_identical(tmp_path: Path, wrap: str) -> None:
    assert_identical(tmp_path, 2, 2, 2, wrap=wrap)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1", "fsdp1-flat"])
def test_same_world_size_grid(tmp_path: Path, wrap: str, optimizer: str, world: int) -> None:
    assert_identical(tmp_path, world, world, world, wrap=wrap, optimizer=optimizer)


@pytest.mark.parametrize(
    ("before", "after", "bf16"),
    [(4, 2, False), pytest.param(2, 4, True, marks=pytest.mark.slow), (1, 4, False)],
    ids=str,
)
def test_exact_mode_is_bit_identical_at_other_world_sizes(tmp_path: Path, before: int, after: int, bf16: bool) -> None:
    assert_identical(tmp_path, 2, before, after, exact=True, bf16=bf16)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [12, 7])
@pytest.mark.parametrize("clip_norm", [0.5, None])
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("before", "after"), [*WORLDS, (2, 3), (4, 1)])
def test_exact_grid(
    tmp_path: Path, before: int, after: int, bf16: bool, dropout: float, clip_norm: float | None, slots: int
) -> None:
    options = {"exact": True, "bf16": bf16, "dropout": dropout, "clip_norm": clip_norm, "global_batch": slots}
    assert_identical(tmp_path, 2, before, after, **options)


def test_uneven_slots_and_the_last_incomplete_batch_are_exact_too(tmp_path: Path) -> None:
    assert_identical(tmp_path, 2, 4, 3, exact=True, global_batch=14, micro_batch=2, last="keep")


@pytest.mark.parametrize(
    ("before", "after"),
    [(4, 2), *(pytest.param(*worlds, marks=pytest.mark.slow) for worlds in [(3, 1), (2, 4), (4, 3), (1, 4)])],
)
def test_stock_reduction_differs_by_the_order_of_sums_only(tmp_path: Path, before: int, after: int) -> None:
    expected, _ = reference(before)
    rows, _, _ = interrupted(tmp_path, before, after)
    assert [step for step, _, _ in rows] == [step for step, _, _ in expected]
    assert [lr for _, _, lr in rows] == [lr for _, _, lr in expected]
    assert all(abs(row[1] - other[1]) <= 1e-5 for row, other in zip(rows, expected, strict=True))


def test_the_stock_reduction_is_not_exact() -> None:
    """Else the tests of the exact mode would prove nothing."""
    assert reference(4)[1] != reference(2)[1]
