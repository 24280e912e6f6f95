"""Holding a checkpoint against a run: what fits, what does not, found before a live tensor is touched."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.dcp import StoredTensor
from reshard.errors import StateMismatch

PARAMS = "params"
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

    def may_miss(self, name: str) -> bool:
        return _matches(name, self.missing)

    def may_ignore(self, name: str) -> bool:
        return _matches(name, self.unexpected)


@dataclass
class Faults:
    """Everything that does not fit, collected so that one error tells it all."""

    lines: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add(self, line: str, hint: str) -> None:
        self.lines.append(line)
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
        return StateMismatch(first, path=str(path), hint="; ".join(self.hints), details=details)


def match_tensors(
    live: Mapping[str, Any],
    stored: Mapping[str, StoredTensor | None],
    aliases: Mapping[str, str],
    leniency: Leniency,
    faults: Faults,
) -> None:
    """Holds the model's names, shapes and dtypes against the stored ones.

    Args:
        live: FQN -> the model's tensor (or object).
        stored: FQN -> what the checkpoint has; None for an object.
        aliases: tied names, each with its partner: a missing one is filled through the other.
        leniency: what may differ.
        faults: collects the rest.
    """
    tied = _tied(aliases)
    missing = [
        fqn
        for fqn in live
        if fqn not in stored and not tied.get(fqn, set()) & stored.keys() and not leniency.may_miss(fqn)
    ]
    unexpected = [fqn for fqn in stored if fqn not in live and not leniency.may_ignore(fqn)]
    for fqn in missing:
        near = difflib.get_close_matches(fqn, unexpected, n=1)
        faults.add(
            f"model.{fqn}: not in the checkpoint" + (f" (closest there: {near[0]})" if near else ""),
            "allow_missing=[name] keeps the model's own values",
        )
    for fqn in unexpected:
        faults.add(f"model.{fqn}: in the checkpoint, not in the model", "allow_unexpected=[name] leaves it out")
    for fqn in live.keys() & stored.keys():
        _match_one(fqn, live[fqn], stored[fqn], leniency, faults)


def _match_one(fqn: str, live: Any, stored: StoredTensor | None, leniency: Leniency, faults: Faults) -> None:
    if stored is None or not isinstance(live, torch.Tensor):
        if (stored is None) == isinstance(live, torch.Tensor):
            faults.add(f"model.{fqn}: a tensor on one side, an object on the other", "use the model it was saved from")
        return
    if stored.shape != live.shape:
        faults.add(
            f"model.{fqn}: expected shape {tuple(live.shape)}, found {tuple(stored.shape)}",
            "use the model it was saved from",
        )
    elif not leniency.cast and is_lossy(stored.dtype, live.dtype):
        faults.add(
            f"model.{fqn}: expected {live.dtype}, found {stored.dtype}, a lossy cast", "allow_cast=True rounds weights"
        )


def is_lossy(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether casting may change a value. Between kinds (int and float) it always may."""
    if source == target:
        return False
    kinds = {(dtype.is_floating_point, dtype.is_complex, dtype == torch.bool) for dtype in (source, target)}
    return len(kinds) > 1 or torch.promote_types(source, target) != target


def match_groups(
    live: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    leniency: Leniency,
    faults: Faults,
    *,
    keep_live: bool = False,
) -> list[dict[str, Any]]:
    """For each live parameter group the hyperparameters it should get.

    Groups are matched by the parameters they hold, so their order does not matter; parameters that the saved
    optimizer did not know may have joined any of them.

    Args:
        live, saved: groups with their FQNs under ``params``.
        leniency: parameters that the saved optimizer has and the live one lacks.
        faults: gets the differences, parameter by parameter, where the grouping is another.
        keep_live: take the live hyperparameters, whatever the grouping.
    """
    if keep_live:
        return [dict(group) for group in live]
    held = {fqn for group in live for fqn in group[PARAMS]}
    known = {fqn for group in saved for fqn in group[PARAMS]}
    for fqn in sorted(known - held):
        if not leniency.may_ignore(fqn):
            faults.add(
                f"optim.state.{fqn}: the saved optimizer has this parameter, the run's does not",
                "allow_unexpected=[name] drops its moments",
            )
    by_members = {frozenset(group[PARAMS]) & held: group for group in saved if set(group[PARAMS]) & held}
    empty = iter([group for group in saved if not group[PARAMS]])
    matched = []
    for group in live:
        members = frozenset(group[PARAMS]) & known
        partner = by_members.get(members) if members else next(empty, None) if not group[PARAMS] else None
        if members and partner is None:
            _explain_grouping(live, saved, faults)
            return [dict(group) for group in live]
        matched.append({**group, **{k: v for k, v in (partner or {}).items() if k != PARAMS}})
    return matched


def _explain_grouping(live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], faults: Faults) -> None:
    hint = "group the parameters as before, or param_groups='target' keeps the run's hyperparameters"
    faults.add(
        f"optim.param_groups: expected the parameters grouped as saved, {_sizes(saved)}, found {_sizes(live)}",
        hint,
    )
    ours, theirs = _by_parameter(live), _by_parameter(saved)
    for fqn in sorted(ours.keys() & theirs.keys()):
        different = [
            f"{name} {theirs[fqn][name]!r} -> {ours[fqn][name]!r}"
            for name in sorted(ours[fqn].keys() & theirs[fqn].keys())
            if name not in (PARAMS, "param_names") and not _equal(ours[fqn][name], theirs[fqn][name])
        ]
        if different:
            faults.add(f"optim: {fqn}: saved -> run: {', '.join(different)}", hint)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(groups)} group{'s' * (len(groups) != 1)} of " + ", ".join(str(len(g[PARAMS])) for g in groups)


def _by_parameter(groups: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {fqn: group for group in groups for fqn in group[PARAMS]}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return bool(a == b)


def match_entries(
    saved: Mapping[str, Collection[tuple[str, ...]]],
    groups: Iterable[Mapping[str, Any]],
    faults: Faults,
) -> None:
    """Finds parameters of which only a part of the optimizer's entries was saved.

    Within a group every parameter that has state has the same entries, or (factored moments) ones that are no part
    of another's.
    """
    for group in groups:
        entries = {fqn: frozenset(saved[fqn]) for fqn in group[PARAMS] if fqn in saved}
        kinds = set(entries.values())
        for fqn, own in entries.items():
            fuller = max((kind for kind in kinds if own < kind), key=len, default=None)
            if fuller is not None:
                lacking = ", ".join(sorted(".".join(entry) for entry in fuller - own))
                faults.add(
                    f"optim.state.{fqn}.{lacking}: not in the checkpoint, though the parameter's other state is",
                    "the checkpoint is damaged: use another step",
                )


def _tied(aliases: Mapping[str, str]) -> dict[str, set[str]]:
    families: dict[str, set[str]] = {}
    for further, first in aliases.items():
        families.setdefault(first, {first}).add(further)
    return {name: family for family in families.values() for name in family}


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
