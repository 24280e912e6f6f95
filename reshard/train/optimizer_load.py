"""From a checkpoint's optimizer entries to an :class:`OptimizerState` for the run's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from reshard.train.learning_rate import TOLERANCE, base_lr
from reshard.train.matching import PARAMS, Faults, match_entries, match_groups
from reshard.train.model_state import empty_like_shard
from reshard.train.names import canonical_names
from reshard.train.optimizer_state import OptimizerState
from reshard.train.parts import Choices
from reshard.train.report import LoadReport, named
from reshard.train.source import Run, Source


@dataclass
class OptimizerPlan:
    """Where each stored entry goes.

    Attributes:
        groups: for each live group, the hyperparameters it will have.
        saved_base_lrs: for each live group, the base learning rate that its hyperparameters bring.
        entries: FQN -> path below the parameter -> stored key.
        room: stored key -> tensor to be filled, or None for an object.
    """

    groups: list[dict[str, Any]]
    saved_base_lrs: list[float] = field(default_factory=list)
    entries: dict[str, dict[tuple[str, ...], str]] = field(default_factory=dict)
    room: dict[str, Any] = field(default_factory=dict)

    def filled(self, loaded: Mapping[str, Any]) -> OptimizerState:
        """The state to hand to the optimizers, from what was read into ``room``."""
        state: dict[str, dict[str, Any]] = {}
        for fqn, entries in self.entries.items():
            for path, key in entries.items():
                place = state.setdefault(fqn, {})
                for name in path[:-1]:
                    place = place.setdefault(name, {})
                place[path[-1]] = loaded[key]
        return OptimizerState(state, self.groups)


def read_groups(run: Run, source: Source) -> list[dict[str, Any]]:
    """The saved parameter groups, FQNs under ``params``. Collective: reads the hyperparameters."""
    inventory = source.inventory
    keys = {key for names in inventory.groups.values() for key in names.values()}
    keys |= {key for names in inventory.per_parameter.values() for key in names.values()}
    values = source.read_objects(keys, run.ranks)
    groups = [
        {name: values[key] for name, key in inventory.groups[number].items()} for number in sorted(inventory.groups)
    ]
    raw = [fqn for group in groups for fqn in group.setdefault(PARAMS, [])]
    names = canonical_names(raw, like=[key.split(".", 1)[1] for key in inventory.model.values()] or raw)
    groups = [{**group, PARAMS: [names[fqn] for fqn in group[PARAMS]]} for group in groups]
    by_parameter = {
        fqn: {name: values[key] for name, key in names.items()} for fqn, names in inventory.per_parameter.items()
    }
    return groups + _regrouped(by_parameter, run.optimizer.groups)


def _regrouped(by_parameter: Mapping[str, dict[str, Any]], live: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups out of hyperparameters that were kept per parameter: the live ones, split where values differ."""
    groups = []
    remaining = dict(by_parameter)
    for members in [*([fqn for fqn in group[PARAMS] if fqn in by_parameter] for group in live), list(by_parameter)]:
        alike: dict[str, list[str]] = {}
        for fqn in members:
            if fqn in remaining:
                alike.setdefault(repr(sorted(remaining.pop(fqn).items())), []).append(fqn)
        groups += [{**by_parameter[fqns[0]], PARAMS: fqns} for fqns in alike.values()]
    return groups


def plan_optimizer(
    run: Run, source: Source, saved_groups: list[dict[str, Any]], choices: Choices, faults: Faults, report: LoadReport
) -> OptimizerPlan:
    """Matches groups and entries, and makes room for the tensors. Touches nothing live.

    Args:
        saved_groups: as :func:`read_groups` gave them.
        faults, report: get what does not fit, and what the user should know.
    """
    live = run.optimizer
    groups = match_groups(live.groups, saved_groups, choices.leniency, faults, keep_live=choices.keep_live_groups)
    plan = OptimizerPlan(groups, [base_lr(group) for group in groups])
    _check_recorded_lr(source, saved_groups, faults)
    _mention_config_lr(live.groups, plan.saved_base_lrs, choices, report)
    saved = {fqn: set(entries) for fqn, entries in source.inventory.optimizer.items()}
    match_entries(saved, saved_groups or live.groups, faults)
    parameters = live.parameters
    for fqn in sorted(source.inventory.optimizer.keys() - set(parameters)):
        known_by_group = any(fqn in group[PARAMS] for group in saved_groups)
        if not known_by_group and not choices.leniency.may_ignore(fqn):
            faults.add(
                f"optim.state.{fqn}: in the checkpoint, not in the run's optimizer",
                "allow_unexpected=[name] drops its moments",
            )
    report.fresh = [fqn for fqn in parameters if fqn not in source.inventory.optimizer]
    casts: set[tuple[torch.dtype, torch.dtype]] = set()
    for fqn in parameters:
        for path, key in source.inventory.optimizer.get(fqn, {}).items():
            plan.entries.setdefault(fqn, {})[path] = key
            plan.room[key] = _room(run, source, fqn, path, key, casts)
    for before, after in sorted(casts, key=str):
        report.warnings.append(f"optimizer state {before} -> {after}, as its parameters are now")
    if report.fresh and saved_groups:
        report.warnings += _about_fresh(report.fresh, saved_groups)
    return plan


def _check_recorded_lr(source: Source, saved_groups: list[dict[str, Any]], faults: Faults) -> None:
    if source.manifest is None:
        return
    stored = [float(group["lr"]) for group in saved_groups if "lr" in group]
    recorded = source.manifest.lr
    if len(stored) != len(recorded) or any(abs(a - b) > TOLERANCE for a, b in zip(stored, recorded, strict=True)):
        faults.add(
            f"learning rates: the manifest says {recorded}, the tensors' file {stored}",
            "the two are of different saves: use another step",
        )


def _mention_config_lr(
    live: list[dict[str, Any]], saved_base_lrs: list[float], choices: Choices, report: LoadReport
) -> None:
    if choices.keep_live_groups:
        return
    for group, saved in zip(live, saved_base_lrs, strict=True):
        if abs(base_lr(group) - saved) > TOLERANCE:
            message = (
                f"config lr {base_lr(group):g} ignored; checkpoint lr {saved:g} restored; "
                f"pass lr={base_lr(group):g} to override"
            )
            if message not in report.warnings:
                report.warnings.append(message)


def _room(
    run: Run,
    source: Source,
    fqn: str,
    path: tuple[str, ...],
    key: str,
    casts: set[tuple[torch.dtype, torch.dtype]],
) -> Any:
    stored = source.stored.tensors.get(key)
    parameter = run.model.get(fqn)
    if stored is None or parameter is None or path[-1] == "step":
        return source.room(key)
    dtype = stored.dtype
    weights = source.stored.tensors.get(source.inventory.model.get(fqn, ""))
    if weights is not None and dtype == weights.dtype != parameter.dtype and dtype.is_floating_point:
        # Element-wise optimizers need moments in their parameter's dtype; those kept at another one stay there.
        dtype = parameter.dtype
        casts.add((stored.dtype, dtype))
    held = _at(run.optimizer.state.get(fqn), path)
    if isinstance(held, torch.Tensor) and held.shape == stored.shape and held.dtype == dtype:
        return held
    if isinstance(parameter, DTensor) and stored.shape != parameter.shape:
        whole = torch.empty(stored.shape, dtype=dtype, device=parameter.to_local().device)
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return empty_like_shard(parameter, stored.shape, dtype)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _about_fresh(fresh: list[str], saved_groups: list[dict[str, Any]]) -> list[str]:
    known = {fqn for group in saved_groups for fqn in group[PARAMS]}
    joined = [fqn for fqn in fresh if fqn not in known]
    stateless = [fqn for fqn in fresh if fqn in known]
    messages = []
    if joined:
        messages.append(f"{len(joined)} parameters are new to the optimizer and start fresh: {named(joined)}")
    if stateless:
        messages.append(
            f"{len(stateless)} parameters had no optimizer state when saved and start fresh: {named(stateless)}"
        )
    return messages
