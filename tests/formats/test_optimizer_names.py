"""Names for integer ids: what a shape can tell, what an order must fit, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.errors import UsageError
from reshard.formats.rescue.optimizer_names import names_by_id

PATH = Path("x/optim_rank_0.pt")
MODEL: dict[str, tuple[int, ...]] = {"emb": (7, 3), "a.w": (4, 4), "frozen.w": (4, 4), "b.w": (4, 4), "bias": (3,)}


def test_shapes_that_one_parameter_has_tell() -> None:
    groups = [[0], [1]]
    assert names_by_id(groups, {0: (3,), 1: (7, 3)}, MODEL, None, PATH) == {0: "bias", 1: "emb"}


def test_ids_without_state_stay_without_a_name() -> None:
    assert names_by_id([[0, 1]], {1: (3,)}, MODEL, None, PATH) == {1: "bias"}


def test_equal_shapes_do_not_tell() -> None:
    with pytest.raises(UsageError, match="several assignments") as raised:
        names_by_id([[0, 1, 2]], {0: (4, 4), 1: (3,), 2: (4, 4)}, MODEL, None, PATH)
    assert "0, 2 of (4, 4): any of a.w, frozen.w, b.w" in str(raised.value)
    assert names_by_id([[0, 1, 2]], {0: (4, 4), 1: (3,)}, MODEL, None, PATH, is_strict=False) == {1: "bias"}


def test_one_id_and_two_candidates_do_not_tell() -> None:
    """The frozen one of two equal layers has no id; which it is, nothing says."""
    with pytest.raises(UsageError, match="several assignments"):
        names_by_id([[0]], {0: (2,)}, {"a": (2,), "b": (2,)}, None, PATH)


@pytest.mark.parametrize("is_strict", [True, False])
def test_more_ids_than_parameters_of_a_shape(is_strict: bool) -> None:
    with pytest.raises(UsageError, match="an optimizer that is not of this model") as raised:
        names_by_id([[0, 1]], {0: (3,), 1: (3,)}, MODEL, None, PATH, is_strict=is_strict)
    assert "0, 1" in str(raised.value) and "bias" in str(raised.value)
    with pytest.raises(UsageError, match="found none"):
        names_by_id([[0]], {0: (9, 9)}, MODEL, None, PATH, is_strict=is_strict)


@pytest.mark.parametrize("order", [[["b.w", "emb", "a.w"]], [["b.w", "emb"], ["a.w"]]])
def test_an_order_is_that_of_the_groups(order: list[list[str]]) -> None:
    """The ids count as they stand in the groups, whatever their numbers are."""
    shapes: dict[int, tuple[int, ...]] = {5: (4, 4), 0: (7, 3), 2: (4, 4)}
    assert names_by_id([[5, 0], [2]], shapes, MODEL, order, PATH) == {5: "b.w", 0: "emb", 2: "a.w"}


@pytest.mark.parametrize(
    ("order", "expected", "found"),
    [
        ([["emb", "a.w"]], "3 names", "found 2"),
        ([["emb"], ["a.w", "b.w"]], r"groups of [2, 1]", "found [1, 2]"),
        ([["emb", "a.w", "c.w"]], "names of this model's parameters", "found c.w"),
        ([["emb", "a.w", "a.w"]], "each name once", "found a.w, a.w"),
        ([["a.w", "emb", "b.w"]], "the shape of the moments, (7, 3)", "found (4, 4)"),
    ],
)
def test_an_order_that_does_not_fit(order: list[list[str]], expected: str, found: str) -> None:
    shapes: dict[int, tuple[int, ...]] = {0: (7, 3), 1: (4, 4), 2: (4, 4)}
    with pytest.raises(UsageError, match="the order of the parameters does not fit the optimizer") as raised:
        names_by_id([[0, 1], [2]], shapes, MODEL, order, PATH)
    assert expected in str(raised.value) and found in str(raised.value)
    assert "--param-order" in str(raised.value)
