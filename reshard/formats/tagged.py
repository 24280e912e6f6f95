"""JSON for Python values that JSON lacks: what is decoded equals what was encoded, in value and in every type.

None, bool, int, finite float, str, list, and dict with str keys are themselves. All else is an object with one key that
begins with "!"; a dict that has such a key of its own is written as pairs, so the two are never confused::

    {"!tuple": [item, ...]}               also !set, !frozenset (items in the order of their JSON text)
    {"!dict": [[key, value], ...]}        also !OrderedDict, !Counter
    {"!defaultdict": [factory, pairs]}    factory null or one of int, float, list, dict, set
    {"!deque": [maxlen, [item, ...]]}
    {"!float": "nan" | "inf" | "-inf"}    {"!complex": [real, imaginary]}
    {"!int": "0x..."}                     an int too long for JSON parsers
    {"!str": base64}                      UTF-8 of a str with lone surrogates, which JSON would pair up
    {"!bytes": base64}                    also !bytearray
    {"!array": [dtype, [n, ...], base64]} a numpy array in C order; {"!scalar": [dtype, base64]} a numpy scalar
    {"!datetime": [ISO 8601, fold]}       {"!timedelta": [days, seconds, microseconds]}
    {"!path": str}
    {"!stored": key}                      kept elsewhere, by whoever encoded it, under that key

Subclasses of these types (enum members, named tuples, ...) are refused: decoding would have to import them.
References are not kept: an object that occurs twice is decoded as two.
"""

from __future__ import annotations

import base64
import collections
import datetime
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Sized
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from reshard.errors import CheckpointUnsound, ReshardError, UsageError

_T = TypeVar("_T")
_Sized = TypeVar("_Sized", bound=Sized)

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

MAX_DEPTH = 100
MAX_ARRAY_BYTES = 1 << 20

_MAX_INT_BITS = 4096
_ARRAY_KINDS = frozenset("biufcmMSU")
_FACTORIES: dict[str | None, Any] = {kind.__name__: kind for kind in (int, float, list, dict, set)}
_FACTORIES[None] = None
_KINDS = (
    "possible are None, bool, int, float, complex, str, bytes, list, tuple, dict, set, deque, datetime, timedelta, "
    f"Path, and numpy arrays up to {MAX_ARRAY_BYTES >> 10} KiB: convert it, or leave it out of the state"
)


def encode(value: Any, *, where: str, external: Callable[[Any, str], str | None] | None = None) -> Json:
    """Encodes a value as JSON.

    Args:
        value: what to encode.
        where: the name of the value; errors and ``external`` get dotted paths that begin with it.
        external: called with each leaf of a type that is none of the above, and its dotted path. It may keep the leaf
            elsewhere and return the key to find it by. Paths of different leaves coincide where keys contain dots:
            it is for ``external`` to return distinct keys.

    Raises:
        UsageError: a leaf of another type, or nesting deeper than ``MAX_DEPTH``.
    """
    return _Encoder(external).encode(value, where, 0)


def stored_keys(value: Json) -> list[str]:
    """The keys of everything within that was kept elsewhere."""
    if isinstance(value, list):
        return [key for item in value for key in stored_keys(item)]
    if isinstance(value, dict):
        if isinstance(key := value.get("!stored"), str) and len(value) == 1:
            return [key]
        return [key for item in value.values() for key in stored_keys(item)]
    return []


def is_plain(value: Json) -> bool:
    """Whether it is an object that stands for a dict with str keys, and not a tag."""
    return isinstance(value, dict) and not any(key.startswith("!") for key in value)


def decode(value: Json, *, resolve: Callable[[str], Any] | None = None) -> Any:
    """The value that was encoded; ``resolve`` returns what ``external`` kept under a key.

    Raises:
        CheckpointUnsound: an unknown tag, content that does not fit its tag, or nesting deeper than ``MAX_DEPTH``.
    """
    return _Decoder(resolve).decode(value, 0)


class _Encoder:
    def __init__(self, external: Callable[[Any, str], str | None] | None) -> None:
        self._external = external

    def encode(self, value: Any, where: str, depth: int) -> Json:
        if depth > MAX_DEPTH:
            hint = "does it contain itself?"
            raise UsageError(f"nested deeper than {MAX_DEPTH} levels", key=where[:200], hint=hint)
        # By exact type: a bool is an int, a numpy.float64 is a float, and each must come back as what it was.
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _SEQUENCES:
            return self._sequence(value, where, depth)
        if kind in _MAPPINGS:
            return self._mapping(value, where, depth)
        if kind is np.ndarray:
            tagged = _array(value)
        elif isinstance(value, np.generic):
            tagged = _numpy_scalar(value)
        else:
            tagged = _datetime(value) if kind is datetime.datetime else None
        return self._leaf(value, where) if tagged is None else tagged

    def _leaf(self, value: Any, where: str) -> Json:
        key = None if self._external is None or isinstance(value, Enum) else self._external(value, where)
        if key is not None:
            return {"!stored": key}
        kind = type(value)
        hint = "store its .value instead" if isinstance(value, Enum) else _KINDS
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UsageError("cannot be written to the checkpoint", key=where, found=name, hint=hint)

    def _sequence(self, value: Iterable[Any], where: str, depth: int) -> Json:
        items = [self.encode(item, f"{where}.{position}", depth + 1) for position, item in enumerate(value)]
        if isinstance(value, list):
            return items
        if isinstance(value, collections.deque):
            return {"!deque": [value.maxlen, items]}
        if isinstance(value, (set, frozenset)):
            # Sets of equal content may iterate in different orders; the file should be the same all the same.
            items.sort(key=json.dumps)
        return {f"!{type(value).__name__}": items}

    def _mapping(self, value: dict[Any, Any], where: str, depth: int) -> Json:
        if type(value) is dict and all(type(key) is str and _is_plain_key(key) for key in value):
            return {key: self.encode(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
        pairs: list[Json] = []
        for position, (key, item) in enumerate(value.items()):
            first = self.encode(key, f"{where}.#{position}", depth + 1)
            pairs.append([first, self.encode(item, _below(where, key, position), depth + 1)])
        if not isinstance(value, collections.defaultdict):
            return {f"!{type(value).__name__}": pairs}
        factory: Any = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", None)
        if name not in _FACTORIES or _FACTORIES[name] is not factory:
            hint = "use one of int, float, list, dict, set, or None"
            raise UsageError("a defaultdict whose factory cannot be stored", key=where, found=repr(factory), hint=hint)
        return {"!defaultdict": [name, pairs]}


def _is_plain_key(key: str) -> bool:
    return not key.startswith("!") and _is_text(key)


def _is_text(value: str) -> bool:
    # The check is free for ASCII, and a surrogate is the only character that UTF-8 lacks.
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _below(where: str, key: Any, position: int) -> str:
    """The path of an item. Only short keys make readable steps, and the repr of a huge int raises."""
    named = type(key) is str or (type(key) is int and key.bit_length() <= 64)
    return f"{where}.{key}" if named else f"{where}.#{position}"


def _int(value: int) -> Json:
    return value if value.bit_length() <= _MAX_INT_BITS else {"!int": hex(value)}


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"!float": repr(value)}


def _str(value: str) -> Json:
    return value if _is_text(value) else {"!str": _text(value.encode("utf-8", "surrogatepass"))}


def _text(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _datetime(value: datetime.datetime) -> Json:
    """None where the time zone is a named one: only its offset would be kept."""
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return None
    return {"!datetime": [value.isoformat(), value.fold]}


def _array(value: np.ndarray[Any, Any]) -> Json:
    """None where the bytes do not say what the array is, or are too many."""
    if not _is_plain_dtype(value.dtype) or value.nbytes > MAX_ARRAY_BYTES:
        return None
    return {"!array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}


def _numpy_scalar(value: np.generic) -> Json:
    # An array of str drops the NULs at the end of its elements, so a scalar cannot travel through one.
    if not _is_plain_dtype(value.dtype) or value.dtype.kind in "SU":
        return None
    return {"!scalar": [value.dtype.str, _text(value.tobytes())]}


def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    if dtype.kind not in _ARRAY_KINDS or dtype.itemsize == 0:
        return False
    try:
        # Types that packages add, such as float8, share the codes of numpy's own.
        return bool(np.dtype(dtype.str) == dtype)
    except TypeError:
        return False


_SCALARS: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: _int,
    float: _float,
    str: _str,
    complex: lambda value: {"!complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"!bytes": _text(value)},
    bytearray: lambda value: {"!bytearray": _text(value)},
    datetime.timedelta: lambda value: {"!timedelta": [value.days, value.seconds, value.microseconds]},
    type(Path()): lambda value: {"!path": _str(str(value))},
}
_SEQUENCES = frozenset([list, tuple, set, frozenset, collections.deque])
_MAPPINGS = frozenset([dict, collections.OrderedDict, collections.defaultdict, collections.Counter])


class _Decoder:
    def __init__(self, resolve: Callable[[str], Any] | None) -> None:
        self._resolve = resolve

    def decode(self, value: Json, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointUnsound(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            return self._items(value, depth)
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("!")), None)
        if tag is None:
            return {key: self.decode(item, depth + 1) for key, item in value.items()}
        if len(value) > 1:
            raise CheckpointUnsound("a tag beside other keys", key=tag, found=f"{len(value)} keys")
        if tag == "!stored":
            return self._stored(value[tag])
        return self._tagged(tag, value[tag], depth)

    def _stored(self, key: Json) -> Any:
        if not isinstance(key, str) or self._resolve is None:
            raise CheckpointUnsound("refers to a value stored elsewhere", key="!stored", found=reprlib.repr(key))
        try:
            return self._resolve(key)
        except LookupError as error:
            raise CheckpointUnsound("refers to a value that is not there", key="!stored", found=key) from error

    def _tagged(self, tag: str, content: Json, depth: int) -> Any:
        try:
            if tag in _FROM_TEXT:
                return _FROM_TEXT[tag](_expect(content, str))
            if tag in _FROM_LIST:
                return _FROM_LIST[tag](*_expect(content, list))
            if tag in _FROM_ITEMS:
                return _FROM_ITEMS[tag](self._items(content, depth))
            if tag in _FROM_PAIRS:
                return _FROM_PAIRS[tag](self._pairs(content, depth))
            return self._rest(tag, content, depth)
        except ReshardError:
            raise
        except Exception as error:
            # Any JSON may stand under a tag, and numpy, datetime and the rest have no error in common.
            found = f"{reprlib.repr(content)} ({type(error).__name__}: {error})"
            raise CheckpointUnsound("content that does not fit its tag", key=tag, found=found) from error

    def _rest(self, tag: str, content: Json, depth: int) -> Any:
        if tag == "!path":
            return Path(_expect(self.decode(content, depth), str))
        if tag not in ("!complex", "!deque", "!defaultdict"):
            hint = "a newer reshard wrote it: upgrade, or use an earlier checkpoint"
            raise CheckpointUnsound("an unknown tag", key=tag[:100], hint=hint)
        first, second = _expect(content, list)
        if tag == "!complex":
            return complex(*(_expect(self.decode(part, depth), float) for part in (first, second)))
        if tag == "!deque":
            return _sized(collections.deque(self._items(second, depth), first), len(second))
        return collections.defaultdict(_FACTORIES[first], self._pairs(second, depth))

    def _items(self, content: Json, depth: int) -> list[Any]:
        return [self.decode(item, depth + 1) for item in _expect(content, list)]

    def _pairs(self, content: Json, depth: int) -> dict[Any, Any]:
        pairs = [(self.decode(key, depth + 1), self.decode(item, depth + 1)) for key, item in _expect(content, list)]
        return _sized(dict(pairs), len(pairs))


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _to_float(text: str) -> float:
    return float({"nan": text, "inf": text, "-inf": text}[text])


def _to_array(code: str, shape: list[int], text: str) -> np.ndarray[Any, Any]:
    # Not for numpy to judge: the bytes of an object array would be taken for addresses.
    if _expect(code, str)[1:2] not in _ARRAY_KINDS:
        raise ValueError(f"no dtype {code}")
    dtype = np.dtype(code)
    content = _bytes(text)
    if not _is_plain_dtype(dtype) or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"not {shape} of {code}")
    return np.array(np.ndarray(tuple(shape), dtype, content))


def _to_datetime(text: str, fold: int) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(fold=fold)


def _to_set(items: list[Any]) -> set[Any]:
    return _sized(set(items), len(items))


def _sized(value: _Sized, length: int) -> _Sized:
    if len(value) != length:
        raise ValueError(f"{length} items, of which {len(value)} are left")
    return value


def _expect(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "!float": _to_float,
    "!int": lambda text: int(text, 16),
    "!str": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "!bytes": _bytes,
    "!bytearray": lambda text: bytearray(_bytes(text)),
}
_FROM_LIST: dict[str, Callable[..., Any]] = {
    "!array": _to_array,
    "!scalar": lambda code, text: _to_array(code, [], text)[()],
    "!datetime": _to_datetime,
    "!timedelta": datetime.timedelta,
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "!tuple": tuple,
    "!set": _to_set,
    "!frozenset": lambda items: frozenset(_to_set(items)),
}
_FROM_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "!dict": dict,
    "!OrderedDict": collections.OrderedDict,
    "!Counter": collections.Counter,
}
