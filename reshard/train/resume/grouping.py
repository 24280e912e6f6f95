"""Holding a saved optimizer's parameter groups and entries against a live one's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.train.optimizer_state import PARAMS
from reshard.train.resume.matching import Faults, Leniency
from reshard.train.resume.report import named

# What is in a group beside the optimizer's own hyperparameters: schedulers add theirs.
SCHEDULED = frozenset(
    {PARAMS, "param_names", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
)


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
        if not leniency.may_ignore(fqn, "optim.state."):
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
