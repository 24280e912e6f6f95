"""What stands for the ordinary values of a pickled training state, beside its tensors: names and how they are built.

Numbers, text and containers come back as they are, and so do dates. What would drag in more than that comes back as
something inert: a path and a device as text, ``argparse.Namespace`` as a dict, numpy's scalars and arrays of plain
numbers or text as Python numbers and arrays. Whatever a pickle calls here costs no more than the bytes it gives.
"""

from __future__ import annotations

import datetime
import math
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import numpy as np

from reshard.formats.torch_archive import Stored
from reshard.formats.unpickle import StandIn


class Attributes(StandIn):
    """An argparse.Namespace; its attributes are entries."""


class NotPlain(Exception):
    """A value with something else in it, in words."""


class Budget:
    """How many more entries may be looked at.

    A list that stands in several places is walked once in each, and so a few bytes can stand for any number of entries.
    """

    def __init__(self, entries: int) -> None:
        self._left = entries

    def spend(self, level: int) -> None:
        """Counts an entry.

        Raises:
            NotPlain: there have been too many, or it lies too deep.
        """
        self._left -= 1
        if self._left < 0:
            raise NotPlain("the same entries stand in too many places")
        if level > MOST_LEVELS:
            raise NotPlain(f"nested more than {MOST_LEVELS} levels deep, or in itself")


# A state is some levels deep; deeper, Python's own stack would end first.
MOST_LEVELS = 100


def entries(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dict or a namespace."""
    # A pickle may give a stand-in any attributes, "items" among them.
    return list(dict.items(vars(value) if isinstance(value, Attributes) else value))


def plain(value: Any, budget: Budget, level: int = 0) -> Any:
    """A copy with nothing in it but Python's own types and numpy arrays.

    Raises:
        NotPlain: it holds something else, is nested too deep or in itself.
    """
    budget.spend(level)
    if isinstance(value, (dict, Attributes)):
        return {
            _hashable(plain(key, budget, level + 1)): plain(entry, budget, level + 1) for key, entry in entries(value)
        }
    if type(value) in (list, tuple, set, frozenset):
        copies = (plain(entry, budget, level + 1) for entry in value)
        return type(value)(map(_hashable, copies) if isinstance(value, (set, frozenset)) else copies)
    if type(value) is slice:
        return slice(*(plain(part, budget, level + 1) for part in (value.start, value.stop, value.step)))
    if isinstance(value, (_Array, _Dtype)) and value.content is not None:
        return value.content
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Stored):
        raise NotPlain("a tensor where it cannot have a name, below keys that are not text or numbers")
    raise NotPlain(f"a {type(value).__name__} among plain values")


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        raise NotPlain(f"a {type(key).__name__} as a key") from None
    return key


class _Dict(dict[Any, Any], StandIn):
    """An OrderedDict: the state dict of a module carries its ``_metadata`` as an attribute."""


class _Dtype(StandIn):
    """A numpy dtype; the content is its name."""

    content: str | None = None

    def __init__(self, name: str, *_: object) -> None:
        self.content = _number_type(name).str

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order in ("<", ">"):
            self.content = _number_type(self.content).newbyteorder(order).str


class _Array(StandIn):
    """A numpy array; the content is a copy of it."""

    content: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_column_major, content = state
        kind = _number_type(dtype.content)
        if not isinstance(content, bytes) or math.prod(shape) * kind.itemsize != len(content):
            raise ValueError(f"a numpy array of {shape} with {len(content)} bytes")
        self.content = np.ndarray(shape, kind, content, order="F" if is_column_major else "C").copy()


def _number_type(name: object) -> np.dtype[Any]:
    kind = np.dtype(name if isinstance(name, str) else "O")
    if kind.kind not in "biufcSU" or not kind.itemsize:
        raise TypeError(f"numpy's {name} is not a type of plain numbers or text")
    return kind


def _scalar(dtype: Any, content: Any) -> Any:
    array = _Array()
    array.__setstate__((1, (), dtype, False, content))
    return array.content.item()


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _dict(*content: Any) -> dict[Any, Any]:
    return dict(*content)


def _default_dict(*_: object) -> dict[Any, Any]:
    return {}


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    # Protocol 2, that of torch.save, has no other way to spell bytes.
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes that are not spelled as latin-1 text")
    return text.encode("latin-1")


def _byte_array(content: str | bytes = b"", *encoding: str) -> bytearray:
    # Of a number, bytearray would make as many zeros.
    return bytearray(content if isinstance(content, bytes) else _bytes(content, *encoding))


def _device(kind: str, number: int | None = None) -> str:
    return kind if number is None else f"{kind}:{number}"


def _posix_path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _windows_path(*parts: str) -> str:
    return str(PureWindowsPath(*parts))


def _factory(*_: object) -> NoReturn:
    raise TypeError("a type is called that a state only names, for a defaultdict")


_DATES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_PLAIN = frozenset([str, bytes, bytearray, bool, int, float, complex, *_DATES])

_BUILTINS: dict[str, Any] = {
    "set": set, "frozenset": frozenset, "complex": complex, "slice": slice, "bytearray": _byte_array, "bytes": _bytes,
    "dict": _dict, "list": list, "tuple": tuple,
    "int": _factory, "float": _factory, "bool": _factory, "str": _factory,
}  # fmt: skip

VALUE_CLASSES: dict[tuple[str, str], Any] = {
    # Protocols 0 to 2 spell the module as Python 2 did.
    **{(module, name): value for module in ("builtins", "__builtin__") for name, value in _BUILTINS.items()},
    ("collections", "OrderedDict"): _Dict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _dict,
    ("_codecs", "encode"): _bytes,
    ("torch", "device"): _device,
    ("argparse", "Namespace"): Attributes,
    **{("datetime", kind.__name__): kind for kind in _DATES},
    **{
        (module, prefix + name): make
        for module in ("pathlib", "pathlib._local")
        for prefix in ("", "Pure")
        for name, make in (("PosixPath", _posix_path), ("WindowsPath", _windows_path))
    },
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    **{
        (f"{module}.multiarray", name): make
        for module in ("numpy.core", "numpy._core")
        for name, make in (("scalar", _scalar), ("_reconstruct", _reconstruct))
    },
}
