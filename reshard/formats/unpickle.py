"""Reads a pickle without running what it names: the only module that unpickles.

A pickle is a program whose GLOBAL instructions name what to import and whose REDUCE instructions call it. Here a
name is only ever looked up in a table that the caller gives, and the table's value takes its place. Nothing is
imported; a name that the table does not have stops the reading before anything is called.

A damaged pickle can do harm without a foreign name as well: one flipped bit makes a LONG_BINPUT with an index of
two thousand million, for which the C unpickler fills 32 GiB of memory. So the instructions are walked once before
they run: every length must lie within the file, every memo index must be one that the file could have reached.

And a tuple of two times the same tuple, of two times the same tuple, and so on, takes three bytes a level; as a key of
a dict it is hashed, which takes twice as long with each level. So where a tuple is built, the walk puts in a call that
weighs it, before it can become a key. Tuples of plain numbers, as the millions of sizes in a large checkpoint are, need
none.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO, NoReturn

from reshard.errors import CheckpointUnsound, ReshardError, StorageError, UnsafePickle

_BLOCK_BYTES = 1 << 20
_LFS_HEAD = b"version https://git-lfs"
_RESTORE = "the file is damaged or cut short: copy it again, or use an earlier checkpoint"


class _Sealed(type):
    """A pickle may set attributes on whatever it can name; on a class they would outlive the reading."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"a pickle may not change the class {cls.__name__}")


class StandIn(metaclass=_Sealed):
    """An inert object in place of one that a pickle names: it keeps the attributes it is given and does nothing.

    Constructor arguments are dropped. A subclass that needs them, or a state that is not a dict of attributes,
    defines ``__init__`` or ``__setstate__``.
    """

    def __init__(self, *arguments: object) -> None:
        pass


def read(
    file: BinaryIO,
    allowed: Mapping[tuple[str, str], Any],
    *,
    path: str | os.PathLike[str],
    persistent: Callable[[Any], Any] | None = None,
    unknown: Callable[[str, str], Any] | None = None,
) -> Any:
    """Reads one pickle and leaves ``file`` just behind it.

    Args:
        file: where the pickle starts; must be seekable.
        allowed: what stands for each (module, qualified name) that the pickle may name, spelled as in the file:
            protocols 0 to 2 write ``__builtin__`` for ``builtins``.
        path: the file that errors name.
        persistent: resolves a persistent id; without it a pickle that has one is refused.
        unknown: gives what stands for a (module, qualified name) that is not in ``allowed``: something inert.

    Raises:
        UnsafePickle: the pickle names something that is not in ``allowed``, and there is no ``unknown``.
        CheckpointUnsound: it is damaged, cut short, empty or a Git LFS pointer.
        StorageError: the file system failed to read it.
    """
    try:
        data = _take(file, path)
        # Outside frames the unpickler asks for a byte at a time, unless the file lets it peek.
        reader = io.BufferedReader(io.BytesIO(data), _PEEKED_BYTES)
        return _Unpickler(reader, allowed, path, persistent, unknown, len(data) + _MOST_REPEATED).load()
    except ReshardError:
        raise
    except OSError as error:
        raise StorageError("cannot be read", path=path, found=error) from error
    except Exception as error:
        # Bytes that are not a pickle can raise nearly anything out of the unpickler and out of stand-ins.
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointUnsound(f"not a readable pickle ({reason})", path=path, hint=_RESTORE) from error


def missing_data(head: bytes) -> str | None:
    """Says why a file that begins with ``head`` holds no data at all, or None where it may hold some."""
    if not head:
        return "empty (0 bytes)"
    if head.startswith(_LFS_HEAD):
        return "a Git LFS pointer, not the data; run git lfs pull"
    return None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BufferedReader[Any],
        allowed: Mapping[tuple[str, str], Any],
        path: str | os.PathLike[str],
        persistent: Callable[[Any], Any] | None,
        unknown: Callable[[str, str], Any] | None,
        most_weight: int,
    ) -> None:
        super().__init__(file)
        self._allowed = allowed
        self._path = path
        self._persistent = persistent
        self._unknown = unknown
        self._most_weight = most_weight
        # By identity, of what is not light; the value beside it keeps the identity from being given to another.
        self._weights: dict[int, tuple[int, object]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            if self._unknown is not None:
                return self._unknown(module_name, global_name)
            raise UnsafePickle(
                f"the pickle names {module_name}.{global_name}, which is not on the allow-list; it was not run",
                path=self._path,
                hint="do not load this file elsewhere unless you trust who wrote it",
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        # What the walk put in comes as (value, None), what the pickle has itself as (pid,), or in protocol 0 as text.
        if type(pid) is tuple:
            if len(pid) == 2:
                self._weight(pid[0])
                return pid[0]
            (pid,) = pid
        if self._persistent is None:
            found = reprlib.repr(pid)[:100]
            raise CheckpointUnsound("the pickle refers to data outside itself", path=self._path, found=found)
        return self._persistent(pid)

    def _weight(self, value: object) -> int:
        """How many values are hashed for ``value``: what it holds counts as often as it is in it."""
        parts: Collection[object]
        if isinstance(value, (tuple, frozenset)):
            parts = value
        elif type(value) is slice:
            parts = (value.start, value.stop, value.step)
        else:
            return 1
        if (known := self._weights.get(id(value))) is not None:
            return known[0]
        weight = 1 + sum(map(self._weight, parts))
        if weight > self._most_weight:
            raise pickle.UnpicklingError(
                f"a {type(value).__name__} that holds the same values more than {weight} times"
            )
        if weight > _LIGHT:
            self._weights[id(value)] = weight, value
        return weight


class _Source:
    """A file's bytes from where it stands, read as far as they are asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.data = bytearray()

    def need(self, end: int) -> None:
        while len(self.data) < end:
            self._more()

    def line_end(self, start: int) -> int:
        while (end := self.data.find(b"\n", start)) < 0:
            self._more()
        return end + 1

    def _more(self) -> None:
        block = self._file.read(_BLOCK_BYTES)
        if not block:
            raise EOFError(f"ends after {len(self.data)} bytes, before the pickle does")
        self.data += block


def _take(file: BinaryIO, path: str | os.PathLike[str]) -> bytes:
    """The pickle at the file's position, walked to its STOP, with weighing put in; the file is left behind it."""
    source = _Source(file)
    source.data += file.read(_BLOCK_BYTES)
    if (reason := missing_data(bytes(source.data[: len(_LFS_HEAD)]))) is not None:
        raise CheckpointUnsound(reason, path=path)
    edits: list[tuple[int, int, bytes]] = []
    position = 0
    while True:
        source.need(position + 1)
        simple = _SIMPLE.match(source.data, position)
        position = simple.end() if simple else position
        source.need(position + 1)
        code = source.data[position]
        if code == _STOP:
            break
        end = _step(source, position)
        if code in _BUILDS:
            edits.append((end, end, _WEIGH))
        elif code == _BINPERSID:
            edits.append((position, end, _PERSISTENT))
        elif code == _FRAME:
            # Its length would be wrong now.
            edits.append((position, end, b""))
        position = end
    file.seek(position + 1 - len(source.data), os.SEEK_CUR)
    return _edited(source.data, position + 1, edits)


def _edited(data: bytearray, length: int, edits: list[tuple[int, int, bytes]]) -> bytes:
    pieces: list[bytes | memoryview] = []
    done = 0
    with memoryview(data) as view:
        for start, end, replacement in edits:
            pieces += view[done:start], replacement
            done = end
        return b"".join([*pieces, view[done:length]])


def _step(source: _Source, position: int) -> int:
    """Where the instruction after the one at ``position`` starts."""
    code = source.data[position]
    start = position + 1
    if code in _FIXED_BYTES:
        end = start + _FIXED_BYTES[code]
        source.need(end)
        if code == _LONG_BINPUT:
            _check_memo(int.from_bytes(source.data[start:end], "little"), position)
        return end
    if code in _LENGTH_BYTES:
        end = start + _LENGTH_BYTES[code]
        source.need(end)
        length_bytes = int.from_bytes(source.data[start:end], "little")
        source.need(end + length_bytes)
        # A frame only announces the instructions that follow.
        return end if code == _FRAME else end + length_bytes
    if code in _LINES:
        end = source.line_end(start)
        if code == _PUT:
            _check_memo(int(source.data[start:end]), position)
        return end if _LINES[code] == 1 else source.line_end(end)
    raise pickle.UnpicklingError(f"no instruction 0x{code:02x} (at byte {position})")


def _check_memo(index: int, position: int) -> None:
    # Whatever is memoised took at least a byte, so a sound index is below the position.
    if not 0 <= index <= position:
        raise pickle.UnpicklingError(f"memo index {index} at byte {position}")


# The copyreg extensions of this process are no part of any checkpoint, and bypass find_class once they are cached.
_OPCODES = {ord(op.code): op for op in pickletools.opcodes if not op.name.startswith("EXT")}
_STOP, _PUT, _LONG_BINPUT, _FRAME, _BINPERSID = b".pr\x95Q"

# Whatever may leave a tuple, a frozenset or a slice on the stack that was not there before.
_BUILDS = frozenset(pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.FROZENSET) | frozenset(
    pickle.REDUCE + pickle.NEWOBJ + pickle.NEWOBJ_EX + pickle.OBJ + pickle.INST
)
# A persistent id is the one way to call back with a value from the stack; a tuple tells the walk's from the pickle's.
_WEIGH = pickle.NONE + pickle.TUPLE2 + pickle.BINPERSID
_PERSISTENT = pickle.TUPLE1 + pickle.BINPERSID
# Keys that refer to what the file has once are fine in moderation. A light value is weighed anew wherever it is.
_MOST_REPEATED = 1 << 17
_LIGHT = 64
_PEEKED_BYTES = 1 << 17

_PREFIX_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_FIXED_BYTES: dict[int, int] = {}
_LENGTH_BYTES: dict[int, int] = {_FRAME: 8}
_LINES: dict[int, int] = {}
for _code, _op in _OPCODES.items():
    if _code in (_FRAME, _STOP):
        continue
    _argument_bytes = 0 if _op.arg is None else _op.arg.n
    if _argument_bytes >= 0:
        _FIXED_BYTES[_code] = _argument_bytes
    elif _argument_bytes == pickletools.UP_TO_NEWLINE:
        _LINES[_code] = 2 if _op.arg is pickletools.stringnl_noescape_pair else 1
    else:
        _LENGTH_BYTES[_code] = _PREFIX_BYTES[_argument_bytes]


def _simple_instructions() -> re.Pattern[bytes]:
    """Runs of instructions of fixed length, so that only strings cost a step of Python each.

    Of those that build something, only tuples of numbers are among them, and calls with nothing or with such a tuple.
    """
    by_length: dict[int, bytes] = {}
    for code, length_bytes in _FIXED_BYTES.items():
        if code not in (_LONG_BINPUT, _BINPERSID, *_BUILDS, *b"()hKMJ"):
            by_length[length_bytes] = by_length.get(length_bytes, b"") + re.escape(bytes([code]))
    # An index below 65536 costs at most a MiB of memo: no need to look at it one by one.
    long_put = rb"r..\x00\x00"
    put = rb"\x94?(?:q.|%s)?" % long_put
    call = rb"(?:%s\x85%sR)?" % (put, put)
    numbers = (b"K.", b"M..", b"J....")
    number = b"(?:%s)" % b"|".join(numbers)
    # Each begins with a byte of its own, the commonest first: what does not fit is found at a glance.
    kinds = [b"[%s]+" % by_length.pop(0), b"h."]
    kinds += [rb"%s(?:(?:\x85|%s(?:\x86|%s\x87))%s)?" % (first, number, number, call) for first in numbers]
    kinds += [rb"\)[R\x81]?", rb"\((?:%s+t%s)?" % (number, call)]
    kinds += [b"[%s].{%d}" % (codes, length_bytes) for length_bytes, codes in sorted(by_length.items())]
    return re.compile(b"(?:%s){1,1000}" % b"|".join([*kinds, long_put]), re.DOTALL)


_SIMPLE = _simple_instructions()
