"""From a checkpoint's optimizer entries to an :class:`OptimizerState` for the run's optimizers."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from reshard.dcp.stored import nested
from reshard.errors import StateMismatch
from reshard.index.names import canonical_names
from reshard.train.learning_rate import TOLERANCE, Rescale, base_lr, is_same_lr, lr_of
from reshard.train.model_state import empty_like_shard
from reshard.train.optimizer_state import PARAMS, OptimizerState
from reshard.train.resume.grouping import match_entries, match_groups, match_kinds
from reshard.train.resume.inventory import Path
from reshard.train.resume.matching import Faults
from reshard.train.resume.parts import Choices
from reshard.train.resume.report import LoadReport, named
from reshard.train.resume.source import Run, Source
from reshard.train.state import SCHEDULER


@dataclass
class OptimizerPlan:
    """Where each stored entry goes.

    Attributes:
        groups: for each live group, the hyperparameters it will have.
        saved_base_lrs: for each live group, the base learning rate that its hyperparameters bring.
        partners: for each live group, the saved one that it continues.
        rescales: for each live group, from the saved base learning rate to its own, where the run keeps its own.
        entries: FQN -> path below the parameter -> stored key.
        empty: FQN -> paths of the dictionaries that were empty, of which nothing is stored.
        room: stored key -> tensor to be filled, or None for an object.
    """

    groups: list[dict[str, Any]]
    saved_base_lrs: list[float] = field(default_factory=list)
    partners: list[int | None] = field(default_factory=list)
    rescales: list[Rescale] | None = None
    entries: dict[str, dict[Path, str]] = field(default_factory=dict)
    empty: dict[str, list[Path]] = field(default_factory=dict)
    room: dict[str, Any] = field(default_factory=dict)

    def filled(self, loaded: Mapping[str, Any]) -> OptimizerState:
        """The state to hand to the optimizers, from what was read into ``room``."""
        state = {}
        for fqn in self.entries.keys() | self.empty.keys():
            values: dict[Path, Any] = {path: {} for path in self.empty.get(fqn, [])}
            state[fqn] = nested(values | {path: loaded[key] for path, key in self.entries.get(fqn, {}).items()})
        return OptimizerState(state, self.groups)


def read_groups(run: Run, source: Source) -> list[dict[str, Any]]:
    """The saved parameter groups, FQNs under ``params``. Collective: reads the hyperparameters."""
    inventory = source.inventory
    keys = {key for names in inventory.groups.values() for key in names.values()}
    keys |= {key for names in inventory.per_parameter.values() for key in names.values()}
    values = source.read_objects(keys, run.ranks)
    groups = [
        nested({path: values[key] for path, key in inventory.groups[number].items()})
        for number in sorted(inventory.groups)
    ]
    raw = [fqn for group in groups for fqn in group.setdefault(PARAMS, [])]
    if not all(isinstance(fqn, str) for fqn in raw):
        raise StateMismatch(
            "parameters are listed as integers, which do not say which they are",
            path=source.folder,
            key="optim.param_groups",
            expected="parameter names",
            found=reprlib.repr(raw),
            hint="save get_optimizer_state_dict(model, optimizer) instead of optimizer.state_dict(), or leave the "
            "optimizer out of TrainState and pass allow_unexpected=['optimizer']",
        )
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
    run: Run,
    source: Source,
    parts: set[str],
    saved_groups: list[dict[str, Any]],
    choices: Choices,
    faults: Faults,
    report: LoadReport,
) -> OptimizerPlan:
    """Matches groups and entries, and makes room for the tensors. Touches nothing live.

    Args:
        parts: what will be restored.
        saved_groups: as :func:`read_groups` gave them.
        faults, report: get what does not fit, and what the user should know.
    """
    live = run.optimizer
    keep_live = choices.keep_live_groups
    if not saved_groups and live.groups and not keep_live:
        faults.add(
            "optim.param_groups: not in the checkpoint, though optimizer state is",
            "param_groups='target' keeps the run's hyperparameters",
        )
    matched = match_groups(live.groups, saved_groups, choices.leniency, faults, keep_live=keep_live)
    plan = OptimizerPlan(matched.groups, [base_lr(group) for group in matched.groups], matched.partners)
    match_kinds(live.groups, saved_groups, matched.partners, faults)
    _check_described(run, source, faults, report)
    _check_recorded_lr(source, saved_groups, faults)
    if keep_live:
        report.missing.append("hyperparameters")
        report.warnings.append("param_groups='target': moments restored, hyperparameters are the run's own")
        if SCHEDULER in parts:
            _continue_schedule(plan, saved_groups, faults)
    if not keep_live and not choices.gives_lr:
        # The saved group's own: one saved without a schedule lacks the initial rate that the live schedule has set.
        # Of a group that a schedule moves without noting where it began (ReduceLROnPlateau) nothing can be told.
        saved_bases = [
            None if number is None or (SCHEDULER in parts and "initial_lr" not in group) else base_lr(group)
            for number, group in ((n, saved_groups[n] if n is not None else {}) for n in plan.partners)
        ]
        _mention_config_lr(live.groups, saved_bases, report)
    saved = {fqn: set(entries) for fqn, entries in source.inventory.optimizer.items()}
    match_entries(saved, saved_groups or live.groups, faults)
    parameters = live.parameters
    for fqn in sorted(source.inventory.optimizer.keys() - set(parameters)):
        known_by_group = any(fqn in group[PARAMS] for group in saved_groups)
        if not known_by_group and not choices.leniency.may_ignore(fqn, "optim.state."):
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
    plan.empty = _empty_entries(source, set(parameters))
    for before, after in sorted(casts, key=str):
        report.warnings.append(f"optimizer state {before} -> {after}, as its parameters are now")
    if report.fresh and saved_groups:
        _tell_of_fresh(report, saved_groups)
    return plan


def _empty_entries(source: Source, parameters: set[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for described in source.manifest.optimizers.values() if source.manifest else ():
        listed = described.get("empty") if isinstance(described, dict) else None
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, list) and len(entry) > 1 and entry[0] in parameters:
                found.setdefault(str(entry[0]), []).append(tuple(entry[1:]))  # type: ignore[arg-type]
    return found


def _continue_schedule(plan: OptimizerPlan, saved_groups: list[dict[str, Any]], faults: Faults) -> None:
    """Puts the run's own learning rates where the restored schedule stands."""
    plan.rescales = []
    for group, partner, base in zip(plan.groups, plan.partners, plan.saved_base_lrs, strict=True):
        before = base_lr(saved_groups[partner]) if partner is not None else base
        if before == 0 != base:
            faults.add(
                "optim.param_groups: the saved base learning rate is 0, from which the schedule cannot be rescaled",
                "leave the scheduler out of TrainState and pass allow_unexpected=['scheduler']",
            )
            return
        rescale = Rescale(before or 1.0, base if before else 1.0)
        plan.rescales.append(rescale)
        if partner is not None:
            group["lr"] = _as_kept(group["lr"], rescale(float(saved_groups[partner]["lr"])))


def _as_kept(live: Any, value: float) -> Any:
    return torch.full_like(live, value) if isinstance(live, torch.Tensor) else value


def _check_described(run: Run, source: Source, faults: Faults, report: LoadReport) -> None:
    """Optimizers must have the names they were saved under; another class is mentioned."""
    if source.manifest is None:
        return
    saved, live = source.manifest.optimizers, run.state.optimizers
    if saved.keys() != live.keys():
        faults.add(
            f"optimizers: expected {named(sorted(saved))}, as saved, found {named(sorted(live))}",
            "name them in TrainState(optimizer={name: ...}) as they were saved",
        )
    for name in sorted(saved.keys() & live.keys()):
        described = saved[name]
        before = described.get("class") if isinstance(described, dict) else None
        if before is not None and before != (now := type(live[name]).__name__):
            report.warnings.append(f"optimizer {name!r} was {before} and is {now} now; its state was taken over")


def _check_recorded_lr(source: Source, saved_groups: list[dict[str, Any]], faults: Faults) -> None:
    # What was converted from the flattened form had no groups to record.
    if source.manifest is None or not source.manifest.lr:
        return
    stored = [lr_of(group) for group in saved_groups]
    recorded = source.manifest.lr
    if len(stored) != len(recorded) or not all(map(is_same_lr, stored, recorded)):
        faults.add(
            f"learning rates: expected {recorded}, as reshard.json says, found {stored} among the tensors",
            "the two files are of different saves: use another step",
        )


def _mention_config_lr(live: list[dict[str, Any]], saved_bases: list[float | None], report: LoadReport) -> None:
    for group, saved in zip(live, saved_bases, strict=True):
        if saved is None or abs(base_lr(group) - saved) <= TOLERANCE:
            continue
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
    path: Path,
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


def _at(value: Any, path: Path) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = value[name] if isinstance(value, list) and isinstance(name, int) and name < len(value) else None
    return value


def _tell_of_fresh(report: LoadReport, saved_groups: list[dict[str, Any]]) -> None:
    known = {fqn for group in saved_groups for fqn in group[PARAMS]}
    joined = [fqn for fqn in report.fresh if fqn not in known]
    stateless = [fqn for fqn in report.fresh if fqn in known]
    if joined:
        report.warnings.append(f"new to the optimizer, so without moments: {_counted(joined)}")
    if not stateless:
        return
    if len(stateless) < len(known):
        report.notes.append(f"had no optimizer state when saved, and start fresh: {_counted(stateless)}")
    elif any(group.get("momentum", 1) != 0 for group in saved_groups):
        report.missing.append("optimizer state")
        report.warnings.append(
            f"the checkpoint holds no optimizer state for any of its {len(known)} parameters: was it saved before the "
            "first optimizer step, or with gradients set by a tool that then writes an empty state?"
        )


def _counted(names: list[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) != 1)} ({named(names)})"
