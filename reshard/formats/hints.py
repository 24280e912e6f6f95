"""What a user adds to a checkpoint that does not hold enough of it: names, shapes and orders, from JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.index.names import canonical_names
from reshard.storage.durable import storage_errors


@dataclass(frozen=True)
class FlatUnit:
    """One flat parameter of FSDP1: the parameters of a wrapped module, one after the other.

    Attributes:
        name: of the module; empty for the root.
        fqns: of its parameters, in full, in the order in which they lie.
        shapes: of each.
        entry_numels: elements of each entry that lies in it, paddings among them.
        is_padding: of each entry, whether it is one.
        shared: (name, of which parameter it is another name), both in full.
        is_trainable: whether an optimizer may have moments of it.
    """

    name: str
    fqns: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    entry_numels: tuple[int, ...]
    is_padding: tuple[bool, ...]
    shared: tuple[tuple[str, str], ...] = ()
    is_trainable: bool = True


@dataclass(frozen=True)
class Hints:
    """All of them; None where nothing was given.

    Attributes:
        units: of a model under FSDP1, by name.
        param_order: names in the order of the optimizer's ids, by parameter group where they were given so.
        weights: which copy becomes the model's tensors where a source has fp32 masters beside the weights: ``masters``
            or ``stored``.
        optimizer: ``named``, every entry by the parameter that it belongs to; ``as stored``, where the names cannot be
            told with the integer that the file has, enough to look at a checkpoint; or ``left out``.
    """

    units: dict[str, FlatUnit] | None = None
    param_order: tuple[tuple[str, ...], ...] | None = None
    weights: str = "masters"
    optimizer: str = "as stored"

    @classmethod
    def read(
        cls,
        layout: str | os.PathLike[str] | None = None,
        param_order: str | os.PathLike[str] | None = None,
        weights: str = "masters",
    ) -> Hints:
        """From files.

        Raises:
            UsageError: one is not what it should be.
        """
        if weights not in ("masters", "stored"):
            raise UsageError("not a kind of weights", key="--weights", expected="masters or stored", found=weights)
        return cls(
            None if layout is None else read_layout(Path(layout)),
            None if param_order is None else read_param_order(Path(param_order)),
            weights,
        )


def read_layout(path: Path) -> dict[str, FlatUnit]:
    """Reads a layout of flat parameters: ``{"units": [{"unit", "fqns", "shapes", ...}, ...]}``.

    ``fqns`` are relative to the unit. ``numels_incl_padding_entries`` and ``is_padding`` list the entries of the flat
    parameter with the alignment paddings among them; by default there are none. ``shared_params`` are pairs of names.

    Raises:
        UsageError: it is not such a file.
    """
    content = _json(path)
    try:
        units = [flat_unit(unit) for unit in content["units"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            "not a layout of flat parameters",
            path=path,
            found=f"{type(error).__name__}: {error}",
            hint="write one from the live model: reshard.describe_flat(model)",
        ) from error
    return {unit.name: unit for unit in units}


def flat_unit(unit: Any) -> FlatUnit:
    """One unit of a layout.

    Raises:
        KeyError, TypeError, ValueError: it is not what it should be.
    """
    name = ".".join(canonical_names([unit["unit"]]).values()) if unit["unit"] else ""
    prefix = f"{name}." if name else ""
    fqns = tuple(prefix + fqn for fqn in canonical_names(unit["fqns"]).values())
    shapes = tuple(tuple(int(size) for size in shape) for shape in unit["shapes"])
    if len(fqns) != len(shapes):
        raise ValueError(f"{len(fqns)} names and {len(shapes)} shapes in unit {name!r}")
    numels = unit.get("numels_incl_padding_entries")
    is_padding = unit.get("is_padding")
    if numels is None or is_padding is None:
        numels, is_padding = [_numel(shape) for shape in shapes], [False] * len(shapes)
    kept = [numel for numel, padding in zip(numels, is_padding, strict=True) if not padding]
    if kept != [_numel(shape) for shape in shapes]:
        raise ValueError(f"numbers of elements of unit {name!r} that are not those of its shapes")
    return FlatUnit(
        name,
        fqns,
        shapes,
        tuple(map(int, numels)),
        tuple(map(bool, is_padding)),
        _shared(unit, prefix),
        bool(unit.get("requires_grad", True)),
    )


def _shared(unit: Any, prefix: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for entry in unit.get("shared_params", ()):
        name, of = (entry["name"], entry["of"]) if isinstance(entry, dict) else entry
        pairs.append((prefix + name, prefix + of))
    return tuple(pairs)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def read_param_order(path: Path) -> tuple[tuple[str, ...], ...]:
    """Reads names in the order of an optimizer's ids: one JSON list, or one a parameter group.

    Raises:
        UsageError: it is not such a file.
    """
    content = _json(path)
    groups = content if isinstance(content, list) and content and isinstance(content[0], list) else [content]
    for group in groups:
        if not isinstance(group, list) or not all(isinstance(name, str) for name in group):
            raise UsageError("not lists of parameter names", path=path, expected="a JSON list, or one a group")
    short = canonical_names(name for group in groups for name in group)
    return tuple(tuple(short[name] for name in group) for group in groups)


def _json(path: Path) -> Any:
    with storage_errors("read", path):
        content = path.read_bytes()
    try:
        return json.loads(content)
    except ValueError as error:
        raise UsageError("not JSON", path=path, found=str(error)) from error
