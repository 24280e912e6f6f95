from __future__ import annotations

import collections
import io
import os
import pickle
import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import CheckpointUnsound, ReshardError, UnsafePickle
from reshard.formats.unpickle import StandIn, missing_data, read

ALLOWED: dict[tuple[str, str], Any] = {("collections", "OrderedDict"): dict, ("collections", "Counter"): StandIn}


def load_bytes(content: bytes, allowed: dict[tuple[str, str], Any] = ALLOWED, **options: Any) -> Any:
    return read(io.BytesIO(content), allowed, path="ckpt/.metadata", **options)


class _RunsCommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


PLAIN = [
    None,
    True,
    1,
    -(2**40),
    2**5000,
    1.5,
    "name",
    "å" * 300,
    b"x" * 300,
    (1, (2,)),
    {"a": [{}]},
    {1},
    bytearray(b"q"),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_of_every_protocol(protocol: int) -> None:
    # Sets, bytes and bytearrays of old protocols are built by names, which are spelled as in Python 2.
    names: dict[tuple[str, str], Any] = {
        ("__builtin__", "set"): set,
        ("builtins", "set"): set,
        ("__builtin__", "bytearray"): bytearray,
        ("builtins", "bytearray"): bytearray,
        ("_codecs", "encode"): str.encode,
    }
    value = [*PLAIN, list(range(1000)), [str(n) for n in range(70_000)]]
    assert load_bytes(pickle.dumps(value, protocol), names) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_a_command_is_refused_by_name(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "created"
    content = pickle.dumps({"model": _RunsCommand(f"touch {victim}")}, protocol)
    with pytest.raises(UnsafePickle, match=r"ckpt/.metadata: .*posix.system"):
        load_bytes(content)
    assert not victim.exists()


def test_a_name_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "innocent_looking.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsafePickle, match=r"innocent_looking\.thing"):
        load_bytes(b"cinnocent_looking\nthing\n.")


def test_a_dotted_name_does_not_reach_through_an_allowed_one() -> None:
    with pytest.raises(UnsafePickle, match=r"OrderedDict\.fromkeys"):
        load_bytes(b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.")


def test_a_pickle_cannot_change_a_stand_in_class() -> None:
    poison = b"ccollections\nCounter\n(N}S'__setstate__'\nI1\nstb."
    with pytest.raises(CheckpointUnsound, match="may not change the class"):
        load_bytes(poison)
    assert not hasattr(StandIn, "poisoned")


def test_extension_codes_are_refused() -> None:
    with pytest.raises(CheckpointUnsound, match="0x82"):
        load_bytes(b"\x80\x02\x82\x01.")


def test_names_are_replaced_and_constructor_arguments_dropped() -> None:
    value = load_bytes(pickle.dumps([collections.OrderedDict(a=1), collections.Counter("aab")]))
    assert value[0] == {"a": 1} and type(value[0]) is dict
    assert type(value[1]) is StandIn


def test_persistent_ids_need_a_resolver() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", 7) if isinstance(value, bytes) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump([b"weights"])
    with pytest.raises(CheckpointUnsound, match="outside itself"):
        load_bytes(buffer.getvalue())
    assert load_bytes(buffer.getvalue(), persistent=lambda pid: pid) == [("storage", 7)]


def test_leaves_the_file_behind_the_pickle() -> None:
    file = io.BytesIO(pickle.dumps("first") + pickle.dumps(["second"] * 9) + b"raw")
    assert read(file, {}, path="f") == "first"
    assert read(file, {}, path="f") == ["second"] * 9
    assert file.read() == b"raw"


def test_empty_and_lfs_pointer_are_named() -> None:
    with pytest.raises(CheckpointUnsound, match=r"ckpt/.metadata: empty \(0 bytes\)"):
        load_bytes(b"")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    with pytest.raises(CheckpointUnsound, match="a Git LFS pointer, not the data; run git lfs pull"):
        load_bytes(pointer)
    assert missing_data(b"PK\x03\x04") is None


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_every_truncation_is_unsound(protocol: int) -> None:
    content = pickle.dumps({"a": [1, "text", (2.5, b"bytes")], "b": 2**70}, protocol)
    for length in range(len(content)):
        with pytest.raises(CheckpointUnsound):
            load_bytes(content[:length])


@pytest.mark.parametrize(
    "content",
    [
        b"]r\xff\xff\xff\x7f.",
        b"]p2147483647\n.",
        b"]p-1\n.",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        b"B" + struct.pack("<I", 0xFFFFFFFF) + b".",
    ],
    ids=["memo index", "memo index as text", "negative memo index", "bytearray", "str", "frame", "bytes"],
)
def test_lengths_beyond_the_file_cost_no_memory(content: bytes) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointUnsound):
        load_bytes(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100_000


def _doubled(levels: int, first: bytes, step: bytes) -> bytes:
    """``first``, and then as often as asked ``step`` on the memoised value before; each is memoised."""
    body = first + b"\x94"
    for level in range(levels):
        body += step.replace(b"GET", b"j" + struct.pack("<I", level)) + b"\x94"
    return body


_MANY = 48
_NESTED = {
    "pair": _doubled(_MANY, b")", b"GETGET\x86"),
    "triple": _doubled(_MANY, b")", b"GETK\x01GET\x87"),
    "marked": _doubled(_MANY, b")", b"(GETGETt"),
    "single of a pair": _doubled(_MANY, b")", b"GETGET\x86\x85"),
    "wide": _doubled(5, b"K\x01\x85", b"(" + 999 * b"GET" + b"t"),
    "duplicated": b")" + _MANY * b"2\x86",
    "frozen": _doubled(_MANY, b")", b"(GETGET\x85\x91"),
    "of lists": _doubled(_MANY, b")", b"cbuiltins\ntuple\n](GETGETe\x85R"),
    "of lists, new": _doubled(_MANY, b")", b"cbuiltins\ntuple\n](GETGETe\x85\x81"),
    "inst": _doubled(_MANY, b")", b"(](GETGETeibuiltins\ntuple\n"),
    "obj": _doubled(_MANY, b")", b"(cbuiltins\ntuple\n](GETGETeo"),
    "of numbers": _doubled(_MANY, b"K\x01K\x02\x86\x85", b"GETGET\x86"),
}
_HASHING = {"key": b"}%bNs.", "keys": b"}(%bNu.", "set": b"\x8f(%b\x90.", "frozenset": b"(%b\x91."}


@pytest.mark.parametrize("hashing", _HASHING)
@pytest.mark.parametrize("nested", _NESTED)
def test_keys_that_unfold_without_end_are_refused_at_once(nested: str, hashing: str) -> None:
    before, _, after = _HASHING[hashing].partition(b"%b")
    # Memo indexes are counted from the first value, so that what is hashed into comes before them.
    content = b"\x80\x04" + before + _NESTED[nested] + after
    allowed: dict[tuple[str, str], Any] = {("builtins", "tuple"): tuple}
    start_s = time.process_time()
    with pytest.raises(CheckpointUnsound, match="holds the same values more than"):
        load_bytes(content, allowed)
    assert time.process_time() - start_s < 2


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_tuples_within_tuples(protocol: int) -> None:
    """As they come in real states: shared, deep, and long."""
    shape = (1, 2)
    row: Any = (shape, "name", (shape, (3, (4,))))
    deep: Any = ()
    for level in range(60):
        deep = (deep, level)
    value = {
        row: [row, row],
        deep: (deep,),
        tuple(range(200_000)): (row,) * 5000,
        (shape,) * 3: frozenset([shape, row]),
    }
    names: dict[tuple[str, str], Any] = {("__builtin__", "frozenset"): frozenset, ("builtins", "frozenset"): frozenset}
    assert load_bytes(pickle.dumps(value, protocol), names) == value


def test_persistent_ids_of_any_form_reach_the_resolver() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ids[value] if isinstance(value, bytes) else None

    ids: dict[bytes, object] = {b"a": ("x", None), b"b": ("y",), b"c": "text", b"d": 7, b"e": ((1, None), None)}
    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump([*ids, ("pair", None)])
    seen: list[object] = []
    assert load_bytes(buffer.getvalue(), persistent=seen.append) == [None] * 5 + [("pair", None)]
    assert seen == list(ids.values())


def test_strings_across_frames() -> None:
    value = [("n" * length, (length, ("x",))) for length in (10, 70_000, 3, 140_000, 66_000)] * 3
    file = io.BytesIO(pickle.dumps(value, 4) + b"behind")
    assert read(file, {}, path="f") == value
    assert file.read() == b"behind"


@pytest.mark.parametrize(
    "content", [b"not a pickle at all", b"\x00" * 100, b"PK\x03\x04", b"{}", b"0.", b".", b"(N}", b"]S'x\n."]
)
def test_what_is_not_a_pickle_is_unsound(content: bytes) -> None:
    with pytest.raises(CheckpointUnsound, match="not a readable pickle"):
        load_bytes(content)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_flipped_bytes_raise_only_our_errors(protocol: int) -> None:
    original = pickle.dumps([*PLAIN, collections.OrderedDict(x=1), {f"k{n}": n for n in range(50)}], protocol)
    chance = random.Random(protocol)
    for _ in range(2000):
        content = bytearray(original)
        for _ in range(chance.choice([1, 1, 3])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            load_bytes(bytes(content))
        except ReshardError as error:
            assert "ckpt/.metadata" in str(error)
