"""Numbers replaced in random documents: read again by the stock readers, one value differs and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.batch.config_tree import Scalar
from reshard.batch.scalars import ConfigText, dotted, split_path
from reshard.errors import BatchError

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
KEYS = TEXTS | st.sampled_from(["<<", "8", "null", "a.b", "x[0]", "#", "- a", "'", '"', "é: ", "=", "~"])
LEAVES = st.none() | st.booleans() | st.integers(-9, 10**9) | st.floats(allow_nan=False) | KEYS
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=25
)


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in numbers_in(item, (*path, key))]
    if isinstance(value, list):
        return [found for at, item in enumerate(value) for found in numbers_in(item, (*path, at))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) and value > 0 else []


def with_number(value: Any, path: tuple[Any, ...], number: int) -> Any:
    if not path:
        return number
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_number(copy[path[0]], path[1:], number)
    return copy


def replaced(text: str, name: str, path: tuple[Any, ...], number: int) -> str:
    config = ConfigText(text, name)
    found = config.find(0, tuple(str(part) for part in path))
    assert found is not None and isinstance(found.node, Scalar)
    assert found.shared_line is None
    config.number(found)
    return config.replaced({found.node: number}).text


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, TREES, min_size=1), st.sampled_from([None, False, True]), st.booleans(), st.data())
def test_yaml_with_one_number_replaced_reads_the_same_but_for_it(
    tree: dict[str, Any], flow: bool | None, unicode: bool, data: st.DataObject
) -> None:
    tree = {**tree, "number": 7}
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=unicode, sort_keys=False, width=60)
    path = data.draw(st.sampled_from(numbers_in(tree)))
    number = data.draw(st.integers(1, 10**6))
    assert yaml.safe_load(replaced(text, "a.yaml", path, number)) == with_number(tree, path, number)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(KEYS, TREES, min_size=1), st.sampled_from([None, 1, "\t"]), st.booleans(), st.booleans(), st.data()
)
def test_json_with_one_number_replaced_reads_the_same_but_for_it(
    tree: dict[str, Any], indent: int | str | None, ascii_only: bool, is_crlf: bool, data: st.DataObject
) -> None:
    tree = {**tree, "number": 7}
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    text = text.replace("\n", "\r\n") if is_crlf else text
    path = data.draw(st.sampled_from(numbers_in(tree)))
    number = data.draw(st.integers(1, 10**6))
    assert json.loads(replaced(text, "a.json", path, number)) == with_number(tree, path, number)


@given(st.lists(KEYS.filter(lambda key: not set("[]\\\0") & set(key)), min_size=1).map(tuple))
def test_a_path_reads_as_it_was_written(path: tuple[str, ...]) -> None:
    assert split_path(dotted(path)) == path


def test_brackets_are_list_indices_at_the_root_too() -> None:
    config = ConfigText("- a: {b.c: [7, 8]}\n- 9\n")
    found = [config.find(0, split_path(text)) for text in ("[1]", "1", "[0].a.b\\.c[1]", "0.a.b\\.c.1")]
    assert [config.number(each) for each in found if each] == [9, 9, 8, 8]


def test_a_path_that_leads_nowhere_finds_nothing() -> None:
    config = ConfigText("a: {b: 1}\nc: &c [*c, 1]\n<<: &m {<<: *m}\n")
    for path in (("b",), ("a", "b", "c"), ("a", "0"), ("c", "2"), ("c", "-1"), ("c", "0", "0", "x")):
        assert config.find(0, path) is None
    assert config.find(0, ("c", "0", "0", "1")) is not None


def test_aliases_that_multiply_take_no_time() -> None:
    lines = ["a0: &a0 {per_device_train_batch_size: 8}"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 40)]
    config = ConfigText("\n".join(lines))
    assert len(list(config.mappings())) == 2


def test_the_first_of_several_merged_mappings_wins_as_in_the_stock_reader() -> None:
    text = "a: &a {x: 1}\nb: &b {x: 2, y: 3}\nc:\n  <<: [*a, *b]\n  z: 4\n"
    config = ConfigText(text)
    for key, value in yaml.safe_load(text)["c"].items():
        found = config.find(0, ("c", key))
        assert found is not None and config.number(found) == value
        assert (found.shared_line is None) == (key == "z")


def test_a_value_that_is_spelled_otherwise_is_not_taken_for_its_last_character() -> None:
    config = ConfigText(r'{"a": "\u0038", "b": "8"}', "x.json")
    found = config.find(0, ("a",))
    assert found is not None
    with pytest.raises(BatchError, match="plain digits"):
        config.number(found)
