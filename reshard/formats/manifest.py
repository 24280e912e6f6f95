"""``reshard.json``, the manifest beside a DCP checkpoint: all of the training state that is not a tensor.

UTF-8 JSON, one object, with these fields in format 2; a reader ignores any that it does not know::

    format       2
    step         int >= 0
    attempt      str, the run that wrote it
    world        {"ranks": int, "nodes": int, "gpus_per_node": int, "mesh": {axis: int}}
    parts        {part: "saved" | "none"}: model, optimizer, scheduler, scaler, rng, data, batch, step, extra.<name>;
                 "none" where the run had no such part, so that a loader can tell a missing part from one never there
    lr           [float or null], one a parameter group; null where it has none, or NaN or an infinity
    batch        {"global_batch": int, "micro_batch": int, "ranks": int, "accumulation": int}, or null
    data         {"shared": state}, one position for all ranks; {"ranks": [state, ...], "workers": int or null}, one
                 for each, with the number of loader workers; or null
    schedulers   {name: state}
    scaler       state or null
    rng          {"ranks": int}, whose random states are tensors rng.rank_<r>.<generator>; or null
    extra        {name: state}
    optimizers   {name: {"class": str, "groups": [int], "parameters": int, "with_state": int, "empty": [path]}}; groups
                 are the numbers of its parameter groups among all, with_state counts the parameters that have any,
                 empty has the paths (FQN, name, ...) of dictionaries in the state that are empty
    versions     {package: version}
    saved_at     ISO 8601
    files        optional: {file: {"bytes": int, "records": str}}, the fingerprints of the files with the tensors
                 (``reshard.formats.fingerprint``), by which a file of another save is found out
    metrics      optional: {name: float or null}, what the run measured at this step; null for NaN and infinities
    exact        optional: {"threads": int, "machine": str}, of a run in exact mode: its CPU threads, and the kind of
                 device, on which alone its bits are promised

States are tagged JSON (``reshard.formats.tagged``). NaN and Infinity, which are not JSON, and duplicate keys, of which
parsers keep one or the other, are forbidden.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from reshard.errors import CheckpointUnsound, StorageError, UsageError
from reshard.formats.tagged import Json
from reshard.formats.unpickle import missing_data

FORMAT = 2
FILE_NAME = "reshard.json"
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class World:
    """The machines that wrote a checkpoint; ``mesh`` is ranks by mesh axis."""

    ranks: int
    nodes: int
    gpus_per_node: int
    mesh: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """The fields of ``reshard.json``, as the module describes them."""

    step: int
    attempt: str
    world: World
    parts: dict[str, str]
    lr: list[float | None]
    batch: dict[str, Any] | None
    data: Json
    schedulers: dict[str, Json]
    scaler: Json
    rng: Json
    extra: dict[str, Json]
    optimizers: dict[str, Json]
    versions: dict[str, str]
    saved_at: str
    files: dict[str, dict[str, Any]] | None = None
    metrics: dict[str, float | None] | None = None
    exact: dict[str, Any] | None = None


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder has a manifest, readable or not."""
    return (Path(folder) / FILE_NAME).exists()


def metric(folder: str | os.PathLike[str], name: str) -> float | None:
    """What is recorded of a metric in a folder's manifest; None where nothing is, or the manifest cannot be used.

    Raises:
        StorageError: the file system failed to read it.
    """
    try:
        metrics = read(folder).metrics or {}
    except CheckpointUnsound:
        return None
    return metrics.get(name)


def as_metrics(given: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Measured values as the manifest has them: floats by name, None for NaN, infinities and what is None already.

    Raises:
        UsageError: a name is not a string, or a value not one number.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UsageError("not metrics", key="metrics", expected=_METRICS, found=_shown(given))
    metrics: dict[str, float | None] = {}
    for name, value in (given or {}).items():
        try:
            if type(name) is not str or isinstance(value, (str, bytes)):
                raise TypeError
            number = math.nan if value is None else float(value)
        # RuntimeError is what tensors of several elements raise.
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise UsageError("not a metric", key=f"metrics[{name!r}]", expected=_METRICS, found=_shown(value)) from None
        metrics[name] = number if math.isfinite(number) else None
    return metrics


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest's file content.

    Raises:
        UsageError: a field holds what JSON cannot.
    """
    fields = {"format": FORMAT, **dataclasses.asdict(manifest)}
    for name in _OPTIONAL_FIELDS:
        if fields[name] is None:
            del fields[name]
    for name, value in fields.items():
        _check_plain(name, value)
    return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode("ascii")


def _check_plain(name: str, value: object) -> None:
    """Refuses what would come back as something else: NaN, int keys, tuples."""
    try:
        came_back = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError("not plain JSON", key=name, found=error, hint="encode it with tagged.encode") from error
    if came_back != value:
        raise UsageError("not plain JSON", key=name, found=_shown(value), hint="encode it with tagged.encode")


def read(folder: str | os.PathLike[str]) -> Manifest:
    """Reads a folder's manifest.

    Raises:
        CheckpointUnsound: it is missing, not JSON, of a newer format, or its fields are not as the format says.
        StorageError: the file system failed to read it.
    """
    path = Path(folder) / FILE_NAME
    fields = _parse(_content(path), path)
    _check_format(fields.get("format"), path)
    _check_fields(fields, path)
    values = {name: fields[name] for name in (*_FIELDS, *_OPTIONAL_FIELDS) if name in fields}
    values["world"] = World(**{name: fields["world"][name] for name in _WORLD_FIELDS})
    values["lr"] = [None if value is None else float(value) for value in fields["lr"]]
    return Manifest(**values)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            length_bytes = os.fstat(file.fileno()).st_size
            if length_bytes > MAX_BYTES:
                hint = "this is not a manifest that reshard wrote"
                limit = f"at most {MAX_BYTES} bytes"
                raise CheckpointUnsound("too large", path=path, expected=limit, found=length_bytes, hint=hint)
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointUnsound(
            "missing",
            path=path,
            hint="stock dcp.save wrote this, or the save was not finished: load_state(..., allow_missing=[...]) takes "
            "what it has; or resume from a step that has a manifest",
        ) from None
    except OSError as error:
        raise StorageError("cannot be read", path=path, found=error) from error


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    if (reason := missing_data(content)) is not None:
        raise CheckpointUnsound(reason, path=path)
    try:
        fields = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        hint = "the file is damaged: copy it again, or use an earlier checkpoint"
        raise CheckpointUnsound("not valid JSON", path=path, found=error, hint=hint) from error
    if type(fields) is not dict:
        raise CheckpointUnsound("not a manifest", path=path, expected="an object", found=_shown(fields))
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"duplicate key {key[:100]!r}")
        fields[key] = value
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_format(found: object, path: Path) -> None:
    if type(found) is int and found == FORMAT:
        return
    if type(found) is int and found > FORMAT:
        hint = "it was written by a newer reshard: upgrade"
    else:
        hint = "it is not a manifest of reshard, or damaged: use an earlier checkpoint"
    what = "missing" if found is None else "unknown format"
    raise CheckpointUnsound(what, path=path, key="format", expected=FORMAT, found=_shown(found), hint=hint)


def _check_fields(fields: dict[str, Any], path: Path) -> None:
    world = fields.get("world")
    scopes: list[tuple[str, dict[str, Any], dict[str, _Check]]] = [("", fields, _FIELDS)]
    if type(world) is dict:
        scopes.append(("world.", world, _WORLD_FIELDS))
    scopes.append(("", fields, {name: check for name, check in _OPTIONAL_FIELDS.items() if name in fields}))
    missing = [prefix + name for prefix, scope, checks in scopes for name in checks if name not in scope]
    if missing:
        hint = "the file is damaged or was edited: use an earlier checkpoint"
        raise CheckpointUnsound("fields are missing", path=path, key=", ".join(missing), hint=hint)
    wrong = [
        (prefix + name, expected, _shown(scope[name]))
        for prefix, scope, checks in scopes
        for name, (expected, is_right) in checks.items()
        if not is_right(scope[name])
    ]
    if wrong:
        (key, expected, found), *others = wrong
        raise CheckpointUnsound(
            "a field of the wrong type",
            path=path,
            key=key,
            expected=expected,
            found=found,
            hint="the file is damaged or was edited: use an earlier checkpoint",
            details=[f"{key}: expected {expected}, found {found}" for key, expected, found in others],
        )


def _shown(value: object) -> str:
    if type(value) is list:
        return f"a list of {len(value)}: {reprlib.repr(value)}"
    if type(value) is dict:
        return f"an object with {len(value)} keys: {reprlib.repr(value)}"
    return "null" if value is None else reprlib.repr(value)


def _is_any(value: object) -> bool:
    return True


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    # A longer int could not be told from its neighbours as a float, or not become one at all.
    return (type(value) is int and abs(value) <= 1 << 53) or (type(value) is float and math.isfinite(value))


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_number(value)


def _is_part(value: object) -> bool:
    return value in ("saved", "none")


def _is_fingerprint(value: object) -> bool:
    if type(value) is not dict or not _is_count(value.get("bytes")):
        return False
    records = value.get("records")
    return type(records) is str and _CRC.fullmatch(records) is not None


def _is_exact(value: object) -> bool:
    return type(value) is dict and _is_count(value.get("threads")) and _is_text(value.get("machine"))


def _is_object(value: object) -> bool:
    return type(value) is dict


def _is_object_or_null(value: object) -> bool:
    return value is None or type(value) is dict


def _list_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: type(value) is list and all(map(is_right, value))


def _object_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: type(value) is dict and all(map(is_right, value.values()))


_METRICS = 'numbers by name, such as {"loss": 1.2}'
_CRC = re.compile(r"[0-9a-f]{8}")
_Check = tuple[str, Callable[[object], bool]]

_WORLD_FIELDS: dict[str, _Check] = {
    "ranks": ("a count", _is_count),
    "nodes": ("a count", _is_count),
    "gpus_per_node": ("a count", _is_count),
    "mesh": ("an object of counts", _object_of(_is_count)),
}
_FIELDS: dict[str, _Check] = {
    "step": ("an int of 0 or more", _is_count),
    "attempt": ("a string", _is_text),
    "world": ("an object", _is_object),
    "parts": ('an object of "saved" or "none"', _object_of(_is_part)),
    "lr": ("a list of numbers or null", _list_of(_is_number_or_null)),
    "batch": ("an object or null", _is_object_or_null),
    "data": ("any", _is_any),
    "schedulers": ("an object", _is_object),
    "scaler": ("any", _is_any),
    "rng": ("any", _is_any),
    "extra": ("an object", _is_object),
    "optimizers": ("an object", _is_object),
    "versions": ("an object of strings", _object_of(_is_text)),
    "saved_at": ("a string", _is_text),
}
_OPTIONAL_FIELDS: dict[str, _Check] = {
    "files": ("an object of bytes and 8 hex digits of records", _object_of(_is_fingerprint)),
    "metrics": ("an object of numbers or null", _object_of(_is_number_or_null)),
    "exact": ("an object of threads, a count, and machine, a string", _is_exact),
}
