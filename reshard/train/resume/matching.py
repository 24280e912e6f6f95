"""Holding a checkpoint against a run: what fits, what does not, found before a live tensor is touched."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.dcp import StoredTensor
from reshard.errors import StateMismatch, UsageError
from reshard.train.names import EXTRA_STATE
from reshard.train.resume.report import named

PARAMS = "params"
# What is in a group beside the optimizer's own hyperparameters: schedulers add theirs.
SCHEDULED = frozenset(
    {PARAMS, "param_names", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
)
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
    stored: Mapping[str, StoredTensor | None],
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
    passed = Passed([n for n in missing if leniency.may_miss(n)], [n for n in unexpected if leniency.may_ignore(n)])
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
    fqn: str, live: Any, stored: StoredTensor | None, leniency: Leniency, faults: Faults, passed: Passed
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
    elif _kind(stored.dtype) != _kind(live.dtype):
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


def is_lossy(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether casting may change a value. Between kinds (int and float) it always may."""
    if source == target:
        return False
    if _kind(source) != _kind(target):
        return True
    try:
        if source.is_floating_point or source.is_complex:
            a, b = torch.finfo(source), torch.finfo(target)
            return b.eps > a.eps or b.max < a.max or b.smallest_normal > a.smallest_normal
        whole, other = torch.iinfo(source), torch.iinfo(target)
    except TypeError:
        return True
    return other.max < whole.max or other.min > whole.min


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


@dataclass
class MatchedGroups:
    """For each live parameter group: the hyperparameters it should get, and the saved group it continues, if any."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    partners: list[int | None] = field(default_factory=list)


def match_groups(
    live: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    leniency: Leniency,
    faults: Faults,
    *,
    keep_live: bool = False,
) -> MatchedGroups:
    """Finds for each live parameter group the saved one.

    Groups are matched by the parameters they hold, so their order does not matter; parameters that the saved
    optimizer did not know may have joined any of them.

    Args:
        live, saved: groups with their FQNs under ``params``.
        leniency: parameters that the saved optimizer has and the live one lacks.
        faults: gets the differences, parameter by parameter, where the grouping is another.
        keep_live: take the live hyperparameters, whatever the grouping.
    """
    held = {fqn for group in live for fqn in group[PARAMS]}
    known = {fqn: number for number, group in enumerate(saved) for fqn in group[PARAMS]}
    for fqn in sorted(known.keys() - held):
        if not leniency.may_ignore(fqn):
            faults.add(
                f"optim.state.{fqn}: the saved optimizer has this parameter, the run's does not",
                "allow_unexpected=[name] drops its moments",
            )
    if keep_live:
        first = [next((known[fqn] for fqn in group[PARAMS] if fqn in known), None) for group in live]
        return MatchedGroups([dict(group) for group in live], first)
    by_members = {
        frozenset(group[PARAMS]) & held: number
        for number, group in enumerate(saved)
        if held.intersection(group[PARAMS])
    }
    empty = iter([number for number, group in enumerate(saved) if not group[PARAMS]])
    matched = MatchedGroups()
    for group in live:
        members = frozenset(fqn for fqn in group[PARAMS] if fqn in known)
        partner = by_members.get(members) if members else next(empty, None) if not group[PARAMS] else None
        if members and partner is None:
            _explain_grouping(live, saved, faults)
            return MatchedGroups([dict(group) for group in live], [None] * len(live))
        taken = saved[partner] if partner is not None else {}
        matched.groups.append({**group, **{k: _like(group.get(k), v) for k, v in taken.items() if k != PARAMS}})
        matched.partners.append(partner)
    return matched


def _like(live: Any, saved: Any) -> Any:
    """A saved hyperparameter as the live optimizer keeps it: one that it keeps as a number comes back as a number."""
    if isinstance(saved, torch.Tensor) and saved.numel() == 1 and isinstance(live, (int, float)):
        return saved.item()
    return saved


def _explain_grouping(live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], faults: Faults) -> None:
    hint = "group the parameters as before, or param_groups='target' keeps the run's hyperparameters"
    faults.add(
        f"optim.param_groups: expected the parameters in {_sizes(saved)}, as saved, found {_sizes(live)}",
        hint,
    )
    ours, theirs = _by_parameter(live), _by_parameter(saved)
    for fqn in sorted(ours.keys() & theirs.keys()):
        # With a schedule, the rates differ by where it stands.
        skipped = {PARAMS, "param_names"} | ({"lr"} if "initial_lr" in ours[fqn].keys() & theirs[fqn].keys() else set())
        different = [
            f"{name} {theirs[fqn][name]!r} -> {ours[fqn][name]!r}"
            for name in sorted(ours[fqn].keys() & theirs[fqn].keys() - skipped)
            if not _equal(ours[fqn][name], theirs[fqn][name])
        ]
        if different:
            faults.add(f"optim: {fqn}: with the run's groups {', '.join(different)}", hint)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> str:
    listed = "; ".join(f"[{named(group[PARAMS], 3)}]" for group in groups[:4])
    return f"{len(groups)} group{'s' * (len(groups) != 1)} {listed}" + ("; ..." if len(groups) > 4 else "")


def _by_parameter(groups: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {fqn: group for group in groups for fqn in group[PARAMS]}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return bool(a == b)


def match_kinds(
    live: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    partners: Sequence[int | None],
    faults: Faults,
) -> None:
    """Finds groups that another kind of optimizer saved: hyperparameters that only it has, for ones that only we have.

    A surplus on one side alone is what another version of the same optimizer leaves.
    """
    for number, (group, partner) in enumerate(zip(live, partners, strict=True)):
        if partner is None:
            continue
        ours, theirs = group.keys() - SCHEDULED, saved[partner].keys() - SCHEDULED
        if ours - theirs and theirs - ours:
            faults.add(
                f"optim.param_groups.{number}: another kind of optimizer: expected one with "
                f"{', '.join(sorted(theirs - ours))}, as saved, found one with {', '.join(sorted(ours - theirs))}",
                "use the optimizer it was saved with, or leave it out of TrainState and pass "
                "allow_unexpected=['optimizer']",
            )
            return


def match_entries(
    saved: Mapping[str, Collection[tuple[str | int, ...]]],
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
                lacking = ", ".join(sorted(".".join(map(str, entry)) for entry in fuller - own))
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
