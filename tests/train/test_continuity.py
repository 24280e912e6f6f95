"""The promise itself: killed and resumed is the same run."""

from __future__ import annotations

import pytest
from lab import Setup, resumed, straight, until
from ranks import run_ranks

STEPS = 20


def interrupted(setup: Setup, folder, before: int, after: int, at: int = 8):
    first = run_ranks(before, until, setup, str(folder), at)[0]
    second = run_ranks(after, resumed, setup, str(folder), STEPS)[0]
    rows, end, at_resume, report = second
    assert at_resume == first[1], "what was loaded is not what was saved"
    return first[0] + rows, end, report


@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1", "fsdp1-flat"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_same_world_size_is_bit_identical(tmp_path, wrap, optimizer):
    setup = Setup(wrap=wrap, optimizer=optimizer)
    reference_rows, reference_end = run_ranks(2, straight, setup, STEPS)[0]
    rows, end, _ = interrupted(setup, tmp_path, 2, 2)
    assert rows == reference_rows
    assert end == reference_end


WORLDS = [(4, 2), (2, 4), (4, 3), (3, 1), (1, 4)]


@pytest.mark.parametrize(("before", "after"), WORLDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_exact_mode_is_bit_identical_at_other_world_sizes(tmp_path, before, after, bf16):
    setup = Setup(exact=True, bf16=bf16)
    reference_rows, reference_end = run_ranks(2, straight, setup, STEPS)[0]
    rows, end, _ = interrupted(setup, tmp_path, before, after)
    assert rows == reference_rows
    assert end == reference_end


@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_stock_reduction_is_the_same_run_up_to_the_order_of_sums(tmp_path, before, after):
    setup = Setup()
    reference, _ = run_ranks(before, straight, setup, STEPS)[0]
    rows, _, report = interrupted(setup, tmp_path, before, after)
    assert [step for step, _, _ in rows] == [step for step, _, _ in reference]
    for (_, loss, lr), (_, expected_loss, expected_lr) in zip(rows, reference, strict=True):
        assert lr == expected_lr
        assert abs(loss - expected_loss) <= 1e-5
    assert report.step == 8
