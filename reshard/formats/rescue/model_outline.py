"""What a model is made of, as a user may give it: names, shapes and classes, in the order in which torch has them.

It stands in for what files of ranks lack. Files that name the wrapped modules need no more than that::

    blocks.0._flat_param, _flat_param     ->  the parameters below blocks.0, and all others, each in the model's order

Where they do not, whoever gives the model says which modules were wrapped. And an optimizer numbers the parameters in
the order of its groups, in each of which they stand as in ``model.parameters()``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import UsageError
from reshard.formats.rescue.flat.layout import FlatUnit, innermost, unpadded_unit

_SHOWN = 8


@dataclass(frozen=True)
class ModelOutline:
    """A model without its values; all names are without wrappers.

    Attributes:
        parameters: name -> shape, in the order of ``model.parameters()``; what has several names is here by the first.
        frozen: those that need no gradient.
        tied: (name, of which parameter it is another name).
        modules: name -> name of the class, in the order of ``model.modules()``; the root's is empty.
        wrap: names of classes, or last parts of names of modules, that say which were wrapped; none where nobody did.
    """

    parameters: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str] = frozenset()
    tied: tuple[tuple[str, str], ...] = ()
    modules: Mapping[str, str] | None = None
    wrap: tuple[str, ...] = ()

    @property
    def orders(self) -> list[list[str]]:
        """What an optimizer may have been given: the parameters that are trained, or all."""
        names = list(self.parameters)
        return [[name for name in names if name not in self.frozen], names]

    def unit_orders(self, units: Mapping[str, bool]) -> list[list[str]]:
        """As `orders`, of the flat parameters of units.

        Args:
            units: name of each -> whether it is trained.
        """
        names = [name for name in self.modules or () if name in units]
        return [[name for name in names if units[name]], names]

    def units(self, found: Collection[str], path: Path, outside: Collection[str] = ()) -> dict[str, FlatUnit]:
        """The units of a model of which files name them.

        Args:
            outside: parameters that are in none of them.

        Raises:
            UsageError: it has no such modules, or others were to be wrapped.
        """
        modules = self.modules or {}
        if unknown := [name for name in found if name not in modules]:
            raise UsageError(
                "a model without the modules that the files name", path=path, key="--model",
                expected=_listed(map(repr, unknown)), found=_listed(repr(name) for name in modules if name),
            )  # fmt: skip
        if self.wrap and (wrapped := self._wrapped().keys()) != set(found):
            classes = dict.fromkeys(modules[name] for name in found if name)
            raise UsageError(
                "other modules than the files name", path=path, key=f"--wrap {' '.join(self.wrap)}",
                expected=_listed(map(repr, sorted(found))), found=_listed(map(repr, sorted(wrapped))),
                hint=f"leave --wrap out, or give the classes at these names: {_listed(classes) or 'none'}",
            )  # fmt: skip
        return self._split(found, outside)

    def wrapped_units(self) -> dict[str, FlatUnit]:
        """The units as ``wrap`` has them, in a model whose files do not name any.

        Raises:
            UsageError: there is no such module.
        """
        return self._wrapped()

    def _wrapped(self) -> dict[str, FlatUnit]:
        modules = self.modules or {}
        names = {wanted: [name for name in modules if self._is_meant(name, wanted)] for wanted in self.wrap}
        if unknown := [wanted for wanted, found in names.items() if not found]:
            raise UsageError(
                "no module of this class or name in the model", key=f"--wrap {unknown[0]}",
                found=_listed(dict.fromkeys(modules.values())),
            )  # fmt: skip
        units = self._split({"", *(name for found in names.values() for name in found)})
        return {name: unit for name, unit in units.items() if unit.fqns}

    def _is_meant(self, name: str, wanted: str) -> bool:
        return bool(name) and ((self.modules or {})[name] == wanted or f".{name}".endswith(f".{wanted}"))

    def _split(self, names: Collection[str], outside: Collection[str] = ()) -> dict[str, FlatUnit]:
        """Each parameter is in the innermost unit around it."""
        inside: dict[str, list[str]] = {name: [] for name in names}
        for fqn in self.parameters:
            if fqn not in outside and (unit := innermost(fqn, inside)) is not None:
                inside[unit].append(fqn)
        return {
            name: unpadded_unit(
                name,
                fqns,
                self.parameters,
                tuple((other, of) for other, of in self.tied if of in fqns),
                is_trainable=not fqns or not self.frozen.issuperset(fqns),
            )
            for name, fqns in inside.items()
        }


def _listed(values: Iterable[str]) -> str:
    names = list(values)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
