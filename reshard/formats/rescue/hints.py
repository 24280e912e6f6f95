"""What a user adds to a checkpoint that does not hold enough of it: names, shapes and orders, from JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.formats.rescue.flat.layout import FlatUnit, flat_unit
from reshard.formats.rescue.model_outline import ModelOutline
from reshard.index.names import canonical_names
from reshard.storage.durable import storage_errors


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
        model: its parameters and modules, which may stand in for units and for an order.
        shapes: of parameters, as another part of the checkpoint records them.
    """

    units: Mapping[str, FlatUnit] | None = None
    param_order: tuple[tuple[str, ...], ...] | None = None
    weights: str = "masters"
    optimizer: str = "as stored"
    model: ModelOutline | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None

    def units_of(
        self, names: Collection[str], path: Path, outside: Collection[str] = ()
    ) -> Mapping[str, FlatUnit] | None:
        """The units that were given, or those of the model where files name its wrapped modules; None without either.

        Args:
            outside: parameters that the files have by themselves, in no unit.

        Raises:
            UsageError: the model has no such modules.
        """
        return self.model.units(names, path, outside) if self.units is None and self.model is not None else self.units

    @property
    def orders(self) -> list[list[str]]:
        """In which the optimizer may have been given the model's parameters; none where there is no model."""
        return [] if self.model is None else self.model.orders

    @classmethod
    def read(
        cls,
        layout: str | os.PathLike[str] | None = None,
        param_order: str | os.PathLike[str] | None = None,
        weights: str = "masters",
        model: ModelOutline | None = None,
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
            model=model,
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
