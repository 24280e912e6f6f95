"""What lies in a flat parameter of FSDP1, as a layout describes it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.index.names import canonical_names

Shape = tuple[int, ...]


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
        numels, is_padding = [math.prod(shape) for shape in shapes], [False] * len(shapes)
    kept = [numel for numel, padding in zip(numels, is_padding, strict=True) if not padding]
    if kept != [math.prod(shape) for shape in shapes]:
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


def unpadded_unit(
    name: str,
    fqns: Sequence[str],
    shapes: Mapping[str, Shape],
    shared: tuple[tuple[str, str], ...] = (),
    is_trainable: bool = True,
) -> FlatUnit:
    """A unit whose parameters, in full, lie without gaps, as far as anybody knows."""
    own = tuple(shapes[fqn] for fqn in fqns)
    return FlatUnit(name, tuple(fqns), own, tuple(map(math.prod, own)), (False,) * len(own), shared, is_trainable)


def innermost(fqn: str, units: Collection[str]) -> str | None:
    """Of the units around a parameter the one that no other lies between; None where it is in none."""
    name = fqn
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            return name
    return None
