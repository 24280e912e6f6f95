from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import inspect
import json
import math
import random
import struct
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from reshard.errors import CheckpointUnsound, ReshardError, UsageError
from reshard.formats.tagged import MAX_ARRAY_BYTES, MAX_DEPTH, decode, encode


def through_json(value: Any, **options: Any) -> Any:
    resolve = options.pop("resolve", None)
    text = json.dumps(encode(value, where="state", **options), allow_nan=False)
    return decode(json.loads(text), resolve=resolve)


def assert_identical(found: Any, expected: Any) -> None:
    """Equal in value and in every type, however deep."""
    assert type(found) is type(expected)
    if isinstance(expected, float):
        assert struct.pack("d", found) == struct.pack("d", expected) or (math.isnan(found) and math.isnan(expected))
    elif isinstance(expected, complex):
        assert_identical(found.real, expected.real)
        assert_identical(found.imag, expected.imag)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, dict):
        assert_identical([*found.items()], [*expected.items()])
        assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None)
    elif isinstance(expected, set | frozenset):
        assert found == expected
        assert {(type(item), item) for item in found} == {(type(item), item) for item in expected}
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(found) == len(expected)
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other)
    else:
        assert found == expected


hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.sampled_from(["!tuple", "!", "\ud83d\ude00"])
    | st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc))
    | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashables | st.floats() | st.complex_numbers() | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(hashables, inner, max_size=3).map(lambda pairs: collections.defaultdict(list, pairs))
        | st.dictionaries(hashables, st.integers(), max_size=3).map(collections.Counter)
        | st.sets(hashables, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, maxlen=len(items) + 1))
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_what_is_decoded_is_what_was_encoded(value: Any) -> None:
    assert_identical(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        [-0.0, 5e-324, 1.7976931348623157e308, math.nan, -math.inf, complex(-0.0, math.nan)],
        [2**63, -(2**20_000), True],
        [{True: 1}, {1: True, 2: {0.5: None}}, {"1": 0, 1: 0}, {math.nan: 1}],
        [{"!tuple": [1]}, {"!": 0, "plain": ()}, {(): {(1, (2,)): b""}}],
        collections.OrderedDict([("b", 1), ("a", (2,))]),
        collections.defaultdict(None, {1: 2}),
        collections.defaultdict(int, {"x": 2}),
        collections.Counter([30, 30, 80]),
        collections.deque([1, 2], maxlen=2),
        collections.deque(),
        [Path("/data/run 1"), Path(), Path("\udcff-undecodable")],
        ["\ud83d\ude00", {"\ud83d\ude00": "\ud800"}],
        datetime.datetime(2026, 3, 1, 2, 30, fold=1),
        datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, seconds=1))),
        datetime.timedelta.max,
        bytearray(b"\x00\xff"),
        frozenset([1, "1", (1,)]),
        np.float32(0.1),
        np.float64("nan"),
        np.longdouble(1) / 3,
        np.bool_(True),
        np.datetime64("2026-03-01T00:00", "m"),
        np.int64(-1),
        np.complex64(1j),
        np.array(3.5),
        np.zeros((0, 3), dtype=">i2"),
        np.arange(6, dtype=np.float16).reshape(2, 3).T,
        np.array(["a", "bcd"]),
        np.array([True, False]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_edges(value: Any) -> None:
    assert_identical(through_json(value), value)


def test_random_states_go_on_where_they_were() -> None:
    random.seed(3)
    numpy_legacy, generator = np.random.RandomState(3), np.random.default_rng(3)
    numpy_legacy.normal()
    states = {"python": random.getstate(), "legacy": numpy_legacy.get_state(), "new": generator.bit_generator.state}
    expected = random.random(), numpy_legacy.normal(), generator.random()
    back = through_json(states)
    assert_identical(back, states)
    random.setstate(back["python"])
    numpy_legacy.set_state(back["legacy"])
    generator.bit_generator.state = back["new"]
    assert (random.random(), numpy_legacy.normal(), generator.random()) == expected


def test_decoded_arrays_can_be_written() -> None:
    array = through_json(np.arange(4))
    array[0] = 9
    assert array.flags.c_contiguous


def test_equal_sets_are_encoded_equally() -> None:
    one, other = {8, 16, 0, "a"}, {"a", 0, 16, 8}
    assert json.dumps(encode(one, where="s")) == json.dumps(encode(other, where="s"))


def test_plain_values_stay_readable() -> None:
    value = {"lr": [0.1, 1e-05], "epoch": 3, "name": "run", "done": False, "best": None}
    assert encode(value, where="state") == value


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int


class Text(str):
    pass


class Sub(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "leaf",
    [
        Color.RED,
        Level.LOW,
        Point(1),
        Text("t"),
        Sub(a=1),
        object(),
        len,
        lambda: 0,
        int,
        PurePosixPath("p"),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros(MAX_ARRAY_BYTES + 1, dtype=np.uint8),
        np.ma.array([1]),
        np.str_("s"),
        torch.zeros(1),
        torch.float32,
        collections.defaultdict(lambda: 0),
        {"k": {Level.LOW: 1}},
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_other_types_are_refused_with_their_place(leaf: Any) -> None:
    with pytest.raises(UsageError) as caught:
        encode({"a": [0, {"b": leaf}]}, where="extra.tokens")
    assert caught.value.key is not None and caught.value.key.startswith("extra.tokens.a.1.b")
    assert caught.value.found and caught.value.hint


def test_a_refusal_names_type_and_way_out() -> None:
    with pytest.raises(UsageError, match=r"^s: .*found torch\.Tensor; possible are None, bool, int"):
        encode(torch.zeros(1), where="s")
    with pytest.raises(UsageError, match=r"found .*Level; store its \.value instead"):
        encode(Level.LOW, where="s", external=lambda leaf, path: "never asked")


def test_leaves_can_be_stored_elsewhere() -> None:
    stored: dict[str, Any] = {}

    def keep(leaf: Any, path: str) -> str | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        stored[path] = leaf
        return path

    first, second = torch.ones(2), torch.zeros(3)
    state = {"ema": {"w": first}, 7: (1, second)}
    back = through_json(state, external=keep, resolve=stored.__getitem__)
    assert list(stored) == ["state.ema.w", "state.7.1"]
    assert back["ema"]["w"] is first and back[7] == (1, second)
    with pytest.raises(UsageError, match=r"builtins\.object"):
        encode([object()], where="state", external=keep)


def test_stored_leaves_that_are_gone_are_unsound() -> None:
    for state in ({"!stored": "w"}, {"!tuple": [{"!stored": "w"}]}):
        with pytest.raises(CheckpointUnsound, match="!stored"):
            decode(state)  # type: ignore[arg-type]
        with pytest.raises(CheckpointUnsound, match=r"!stored.*is not there"):
            decode(state, resolve={}.__getitem__)  # type: ignore[arg-type]


def test_depth_is_bounded() -> None:
    def nested(levels: int) -> Any:
        value: Any = complex(math.nan, 1)
        for _ in range(levels):
            value = ({1: value},)
        return value

    deepest = nested(MAX_DEPTH // 2)
    assert_identical(through_json(deepest), deepest)
    with pytest.raises(UsageError, match="nested deeper"):
        encode(nested(MAX_DEPTH // 2 + 1), where="s")
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UsageError, match="does it contain itself"):
        encode(cycle, where="s")
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointUnsound, match="nested deeper"):
        decode(deep)


@pytest.mark.parametrize(
    "value",
    [
        {"!unknown": 1},
        {"!": []},
        {"!tuple": [], "other": 1},
        {"!tuple": "abc"},
        {"!set": [[1]]},
        {"!set": [1, 1]},
        {"!dict": [[1]]},
        {"!dict": [[1, 2], [1, 3]]},
        {"!dict": [[{"!dict": []}, 1]]},
        {"!defaultdict": ["open", []]},
        {"!defaultdict": [["int"], []]},
        {"!defaultdict": []},
        {"!deque": [1, [1, 2]]},
        {"!deque": ["x", []]},
        {"!deque": [-1, []]},
        {"!float": "1e999"},
        {"!int": "ten"},
        {"!bytes": "not base64!"},
        {"!bytes": ["YQ=="]},
        {"!str": "/w=="},
        {"!complex": [1, 2]},
        {"!complex": [1.0]},
        {"!array": ["|O", [1], "AAAAAAAAAAA="]},
        {"!array": ["<f4", [2], "AAAAAA=="]},
        {"!array": ["<f4", [-1, -1], "AAAAAA=="]},
        {"!array": ["<f4", [10**30, 0], ""]},
        {"!array": ["nonsense", [], ""]},
        {"!array": ["(", [], ""]},
        {"!array": [[["a", "O"]], [1], "AAAAAAAAAAA="]},
        {"!scalar": ["<U99999999999", ""]},
        {"!scalar": ["<f4", ""]},
        {"!datetime": ["yesterday", 0]},
        {"!datetime": ["2026-01-01T00:00:00", 7]},
        {"!timedelta": [10**20, 0, 0]},
        {"!path": 3},
        {"!stored": 3},
    ],
    ids=json.dumps,
)
def test_malformed_tags_are_unsound_and_named(value: Any) -> None:
    with pytest.raises(CheckpointUnsound) as caught:
        decode([value], resolve=lambda key: key)
    assert caught.value.key == next(iter(value))


def test_flipped_bytes_raise_only_our_errors() -> None:
    state = {"a": (1, np.arange(3)), "b": {1: collections.deque([b"x"], 3)}, "t": datetime.timedelta(1), "p": Path("x")}
    original = json.dumps(encode(state, where="s")).encode()
    chance = random.Random(1)
    for _ in range(3000):
        content = bytearray(original)
        content[chance.randrange(len(content))] = chance.randrange(128)
        try:
            parsed = json.loads(content)
        except ValueError:
            continue
        with contextlib.suppress(ReshardError):
            decode(parsed)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    )


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": _sequential,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
}


def test_every_public_scheduler_is_tried() -> None:
    public = {name for name in lr_scheduler.__all__ if inspect.isclass(getattr(lr_scheduler, name))}
    assert public - {"LRScheduler"} == SCHEDULERS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_states_go_on_where_they_were(name: str) -> None:
    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first = _optimizer()
    scheduler = SCHEDULERS[name](first)
    run(first, scheduler, 3)
    state = scheduler.state_dict()
    stored: list[Any] = []

    def keep(leaf: Any, path: str) -> str | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        stored.append(leaf)
        return str(len(stored) - 1)

    back = through_json(state, external=keep, resolve=lambda key: stored[int(key)])
    assert_identical(back, state)
    second = _optimizer()
    resumed = SCHEDULERS[name](second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(back)
    assert run(second, resumed, 6) == run(first, scheduler, 6)
