"""Nested state dicts as flat ones, under the keys that stock DCP gives: the steps of the path with dots between them.

Dictionaries are walked through, and lists that hold dictionaries, tensors or such lists; anything else is a leaf, a
tuple too. Empty dictionaries leave no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.errors import UsageError

Steps = tuple[str | int, ...]


@dataclass
class FlatState:
    """The leaves of a nested state dict.

    Attributes:
        values: flat key -> leaf.
        paths: flat key -> the steps to it, strings into dictionaries and numbers into lists.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Steps] = field(default_factory=dict)
    _holders: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], *, nested: bool = True) -> FlatState:
        """Flattens a state dict; with ``nested=False`` its values are the leaves, whatever they are.

        Raises:
            UsageError: two leaves would have one flat key.
        """
        flat = cls()
        for key, value in state.items():
            if nested:
                flat._add((str(key),), value, state, key)
            else:
                flat._leaf((str(key),), value, state, key)
        return flat

    def replace(self, key: str, value: Any) -> None:
        """Puts another leaf where the one of this key was, in the nested state too."""
        holder, place = self._holders[key]
        holder[place] = value
        self.values[key] = value

    def _add(self, path: Steps, value: Any, holder: Any, place: Any) -> None:
        if isinstance(value, Mapping):
            for name, entry in value.items():
                self._add((*path, str(name)), entry, value, name)
        elif isinstance(value, list) and not _is_leaf(value):
            for number, entry in enumerate(value):
                self._add((*path, number), entry, value, number)
        else:
            self._leaf(path, value, holder, place)

    def _leaf(self, path: Steps, value: Any, holder: Any, place: Any) -> None:
        key = ".".join(map(str, path))
        if key in self.values:
            raise UsageError(
                "two values of the state dict have one flat key",
                key=key,
                found=f"{self.paths[key]} and {path}",
                hint="rename one of them: the steps to a value are joined by dots",
            )
        self.values[key], self.paths[key], self._holders[key] = value, path, (holder, place)


def _is_leaf(values: list[Any]) -> bool:
    return not any(
        isinstance(value, (Mapping, torch.Tensor)) or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )
