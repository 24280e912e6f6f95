"""Holding a checkpoint's tensors against a model's, and collecting what does not fit, before a live one is touched."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.dcp.stored import TensorSpec, is_lossy, number_kind
from reshard.errors import StateMismatch, UsageError
from reshard.index.names import EXTRA_STATE

LISTED_FAULTS = 20


@dataclass
class Leniency:
    """What the caller said is all right. Patterns are part names, or FQNs with ``*``.

    Attributes:
        missing: the run has it, the checkpoint does not.
        unexpected: the checkpoint has it, the run does not.
        cast: lossy casts of weights.
    """

    missing: Collection[str] = ()
    unexpected: Collection[str] = ()
    cast: bool = False

    def __post_init__(self) -> None:
        for name, patterns in (("allow_missing", self.missing), ("allow_unexpected", self.unexpected)):
            # A lone string would be taken letter by letter, and a "*" in it would allow everything.
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise UsageError("a list of names", key=name, expected=f"such as [{str(patterns)!r}]", found=patterns)

    def may_miss(self, name: str, root: str = "") -> bool:
        """Whether the checkpoint may lack a part, or an FQN: bare, or below ``root`` as messages spell it."""
        return _matches(name, self.missing) or _matches(root + name, self.missing)

    def may_ignore(self, name: str, root: str = "") -> bool:
        """Whether the checkpoint may have it and the run not; likewise."""
        return _matches(name, self.unexpected) or _matches(root + name, self.unexpected)


@dataclass
class Faults:
    """Everything that does not fit, collected so that one error tells it all."""

    lines: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add(self, line: str, hint: str) -> None:
        """Notes a fault; its way out is told with the first fault that has the same."""
        self.lines.append(line if hint in self.hints or not self.lines else f"{line}; {hint}")
        if hint not in self.hints:
            self.hints.append(hint)

    def error(self, path: object) -> StateMismatch | None:
        """One error for all of them, or None; its first line is the first fault."""
        if not self.lines:
            return None
        first, *others = self.lines
        details = others[:LISTED_FAULTS]
        if len(others) > LISTED_FAULTS:
            details.append(f"and {len(others) - LISTED_FAULTS} more")
        return StateMismatch(first, path=str(path), hint=self.hints[0], details=details)


@dataclass
class Passed:
    """What does not fit and was let pass, for the report.

    Attributes:
        missing: FQNs of the model that the checkpoint lacks.
        unexpected: FQNs of the checkpoint that the model lacks.
        casts: pairs of dtypes, stored and live.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    casts: set[tuple[torch.dtype, torch.dtype]] = field(default_factory=set)


def match_tensors(
    live: Mapping[str, Any],
    stored: Mapping[str, TensorSpec | None],
    aliases: Mapping[str, str],
    leniency: Leniency,
    faults: Faults,
) -> Passed:
    """Holds the model's names, shapes and dtypes against the stored ones.

    Args:
        live: FQN -> the model's tensor (or object).
        stored: FQN -> what the checkpoint has; None for an object.
        aliases: tied names, each with its partner: a missing one is filled through the other.
        leniency: what may differ.
        faults: collects the rest.
    """
    tied = _tied(aliases)
    missing = [fqn for fqn in live if fqn not in stored and not tied.get(fqn, set()) & stored.keys()]
    unexpected = [fqn for fqn in stored if fqn not in live]
    passed = Passed(
        [fqn for fqn in missing if leniency.may_miss(fqn, "model.")],
        [fqn for fqn in unexpected if leniency.may_ignore(fqn, "model.")],
    )
    refused = [fqn for fqn in unexpected if fqn not in passed.unexpected]
    for fqn in missing:
        if fqn in passed.missing:
            continue
        near = difflib.get_close_matches(fqn, refused, n=1) if len(refused) <= LISTED_FAULTS else []
        faults.add(
            f"model.{fqn}: not in the checkpoint" + (f" (closest there: {near[0]})" if near else ""),
            "allow_missing=[name] keeps the model's own values",
        )
    for fqn in refused:
        faults.add(f"model.{fqn}: in the checkpoint, not in the model", "allow_unexpected=[name] leaves it out")
    for fqn, tensor in live.items():
        if fqn in stored:
            _match_one(fqn, tensor, stored[fqn], leniency, faults, passed)
    return passed


def _match_one(
    fqn: str, live: Any, stored: TensorSpec | None, leniency: Leniency, faults: Faults, passed: Passed
) -> None:
    if fqn.split(".")[-1] == EXTRA_STATE:
        # Its form is the module's own affair: nothing in a fresh model, a tensor of any length in a trained one.
        return
    if stored is None or not isinstance(live, torch.Tensor):
        if (stored is None) == isinstance(live, torch.Tensor):
            faults.add(f"model.{fqn}: a tensor on one side, an object on the other", "use the model it was saved from")
        return
    if stored.shape != live.shape:
        faults.add(
            f"model.{fqn}: expected shape {tuple(live.shape)}, found {tuple(stored.shape)}",
            "use the model it was saved from",
        )
    elif number_kind(stored.dtype) != number_kind(live.dtype):
        faults.add(
            f"model.{fqn}: expected {live.dtype}, found {stored.dtype}, which is another kind of number",
            "use the model it was saved from",
        )
    elif is_lossy(stored.dtype, live.dtype) and not leniency.cast:
        faults.add(
            f"model.{fqn}: expected {live.dtype}, found {stored.dtype}, a lossy cast", "allow_cast=True rounds weights"
        )
    elif stored.dtype != live.dtype:
        passed.casts.add((stored.dtype, live.dtype))


def _tied(aliases: Mapping[str, str]) -> dict[str, set[str]]:
    families: dict[str, set[str]] = {}
    for further, first in aliases.items():
        families.setdefault(first, {first}).add(further)
    return {name: family for family in families.values() for name in family}


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
