"""Comparing traces: what counts as the same run, and where the first difference is found."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from reshard.errors import UsageError
from reshard.verify.traces.compare import compare_traces, format_table, verdict
from reshard.verify.traces.trace import TraceRow


def run(steps: range = range(1, 11), ranks: int = 4) -> list[TraceRow]:
    return [TraceRow(s, 3 / s, (1e-3 / s, 1e-4), 1.0, None, ranks, 8 // ranks, s * 64, None, "a") for s in steps]


def changed(step: int, **fields: object) -> list[TraceRow]:
    return [replace(row, **fields) if row.step == step else row for row in run()]  # type: ignore[arg-type]


def test_the_same_losses_on_other_ranks_agree() -> None:
    comparison = compare_traces(run(ranks=4), run(ranks=2))
    assert comparison.agrees
    assert comparison.first_differing_step is None
    assert comparison.missing_steps == []
    assert (comparison.largest_loss_difference, comparison.largest_lr_difference) == (0.0, 0.0)
    assert {(row.ranks, row.accumulation, row.samples_equal) for row in comparison.rows} == {(2, 4, True)}


def test_the_last_bit_of_a_loss_differs_unless_epsilon_allows_it() -> None:
    one_bit = math.nextafter(3 / 7, 1)
    exact = compare_traces(run(), changed(7, loss=one_bit))
    assert (exact.agrees, exact.first_differing_step) == (False, 7)
    assert exact.largest_loss_difference == one_bit - 3 / 7
    assert compare_traces(run(), changed(7, loss=one_bit), epsilon=1e-9).agrees


def test_epsilon_is_the_largest_difference_that_agrees() -> None:
    resumed = changed(3, loss=1.25)
    assert compare_traces(run(), resumed, epsilon=0.25).agrees
    assert not compare_traces(run(), resumed, epsilon=0.2499).agrees


def test_a_learning_rate_of_any_group_counts() -> None:
    comparison = compare_traces(run(), changed(4, lr=(1e-3 / 4, 2e-4)), epsilon=1.0)
    assert comparison.first_differing_step == 4
    assert comparison.largest_lr_difference == pytest.approx(1e-4)
    assert compare_traces(run(), changed(4, lr=(1e-3 / 4 + 1e-13, 1e-4))).agrees


def test_another_number_of_groups_is_an_infinite_difference() -> None:
    comparison = compare_traces(run(), changed(4, lr=(1e-3 / 4,)))
    assert comparison.first_differing_step == 4
    assert comparison.largest_lr_difference == math.inf


def test_what_a_trace_does_not_say_is_not_compared() -> None:
    comparison = compare_traces(run(), [TraceRow(row.step, row.loss) for row in run()])
    assert comparison.agrees
    assert comparison.largest_lr_difference is None
    assert {row.samples_equal for row in comparison.rows} == {None}


def test_another_number_of_samples_differs() -> None:
    comparison = compare_traces(run(), changed(5, samples=5 * 64 + 1))
    assert comparison.first_differing_step == 5
    assert "number of samples" in verdict(comparison)


@pytest.mark.parametrize(("side", "other"), [(range(1, 11), range(1, 9)), (range(1, 9), range(1, 11))])
def test_a_step_missing_on_either_side_differs(side: range, other: range) -> None:
    comparison = compare_traces(run(side), run(other))
    assert (comparison.agrees, comparison.first_differing_step, comparison.missing_steps) == (False, 9, [9, 10])
    assert comparison.largest_loss_difference == 0.0
    assert comparison.common_steps == 8


@pytest.mark.parametrize(
    ("reference", "resumed"), [(range(0), range(0)), (range(1, 5), range(5, 9)), (range(1, 5), range(0))]
)
def test_traces_without_a_common_step_do_not_agree(reference: range, resumed: range) -> None:
    comparison = compare_traces(run(reference), run(resumed))
    assert not comparison.agrees
    assert comparison.largest_loss_difference is None
    assert verdict(comparison) == "the traces differ: they have no step in common"


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.nan, 1.0, math.inf),
        (math.nan, math.inf, math.inf),
        (-math.inf, math.inf, math.inf),
        (0.0, -0.0, 0.0),
    ],
)
def test_losses_that_are_not_finite(one: float, other: float, difference: float) -> None:
    for reference, resumed in ((one, other), (other, one)):
        comparison = compare_traces([TraceRow(1, reference)], [TraceRow(1, resumed)], epsilon=1e9)
        assert comparison.rows[0].loss_difference == difference
        assert comparison.agrees == (difference == 0)


@pytest.mark.parametrize("epsilon", [-1e-9, math.nan, math.inf])
def test_an_epsilon_that_is_no_distance_is_refused(epsilon: float) -> None:
    with pytest.raises(UsageError, match="epsilon"):
        compare_traces(run(), run(), epsilon=epsilon)


def test_the_table_says_where_and_what() -> None:
    lines = format_table(compare_traces(run(), changed(3, loss=1.001, ranks=2))).splitlines()
    assert [title.strip() for title in lines[0].split("  ") if title] == [
        "step",
        "reference loss",
        "resumed loss",
        "|difference|",
        "lr difference",
        "ranks",
        "accumulation",
    ]
    assert lines[1].split() == ["1", "3", "3", "0", "0", "4", "2"]
    assert lines[3].split() == ["3", "1", "1.001", "0.001", "0", "2", "2", "*"]
    assert lines[7].split()[1] == "0.428571429"
    assert lines[-2] == "largest difference over 10 common steps: loss 0.001, lr 0; steps in one trace only: 0"
    assert lines[-1] == "the traces differ from step 3 (epsilon 0): loss differs by 0.001"


def test_the_table_marks_what_is_missing() -> None:
    lines = format_table(compare_traces(run(range(1, 3)), run(range(2, 4)))).splitlines()
    assert lines[1].split() == ["1", "3", "-", "-", "-", "-", "-", "*"]
    assert lines[3].split() == ["3", "-", "1", "-", "-", "4", "2", "*"]
    assert lines[-1].endswith("missing in the resumed trace")


def test_the_table_of_nothing() -> None:
    assert len(format_table(compare_traces([], [])).splitlines()) == 3


def test_json_holds_the_verdict_and_every_row() -> None:
    fields = json.loads(json.dumps(compare_traces(run(), changed(3, loss=math.nan), epsilon=0.5).to_json()))
    assert fields["agrees"] is False
    assert fields["first_differing_step"] == 3
    assert fields["epsilon"] == 0.5
    assert fields["largest_loss_difference"] == math.inf
    assert [row["step"] for row in fields["rows"]] == list(range(1, 11))
    assert math.isnan(fields["rows"][2]["resumed_loss"])
