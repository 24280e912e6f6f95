"""Bringing a run back from a checkpoint, on any number of ranks.

What can be known from the manifest, from ``.metadata`` and from the few small objects in the files is held against the
run first; all that does not fit becomes one error, before a live tensor is touched. Then each rank reads its own part
of the tensors in place, and the rest follows.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from reshard.dcp.filling import open_on
from reshard.dcp.ranks import all_ranks
from reshard.dcp.stored import TensorSpec, is_lossy, nested
from reshard.errors import ReshardError, StateMismatch, UsageError
from reshard.train import optimizer_state
from reshard.train.learning_rate import Rescale, Scaling, assert_restored, lr_of
from reshard.train.model_state import empty_like_shard, load_model_tensors, local_parts
from reshard.train.resume.matching import Faults, Leniency, match_tensors
from reshard.train.resume.optimizer_load import OptimizerPlan, plan_optimizer, read_groups
from reshard.train.resume.parts import (
    Choices,
    check_batch,
    check_data,
    check_exact,
    check_states,
    choose_parts,
    rng_keys,
    stored_tensors,
)
from reshard.train.resume.report import LoadReport, named
from reshard.train.resume.rescue import open_rescued
from reshard.train.resume.restorer import Restorer, restore_random
from reshard.train.resume.schedules import check_schedulers, requested_rescales, rescale
from reshard.train.resume.source import Run, Source, find_step, holds_dcp
from reshard.train.state import DATA, MODEL, OPTIMIZER, RNG, SCHEDULER, STEP, TrainState


def load_state(
    path: str | Path,
    state: TrainState,
    *,
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
    allow_cast: bool = False,
    param_groups: Literal["checkpoint", "target"] = "checkpoint",
    lr: float | Sequence[float] | None = None,
    allow_global_batch_change: bool = False,
    lr_scaling: Scaling | None = None,
    data: Literal["restore", "restart"] = "restore",
    scheduler_counts_ranks: bool = False,
    schedule: Literal["checkpoint", "target"] = "checkpoint",
) -> LoadReport:
    """Restores ``state`` from a step folder, or from the newest committed step of a run's folder.

    Every rank must call it, before any forward pass, on a state built as for a fresh run, schedulers included. Nothing
    of the user's is stepped. Where a scheduler can only be built after the optimizer is restored, call twice: first
    with ``scheduler=None`` in the state and ``allow_unexpected=["scheduler"]``, then with the scheduler.

    At another world size than the saved one the global batch stays as it was, and the random states of the process
    follow the rule of :func:`reshard.train.rng.reseed`.

    Args:
        path: ``.../step-<n>``, a run's folder, a folder that stock ``dcp.save`` wrote, or one that another tool's ranks
            wrote, as `reshard.convert` reads it, where its files say all that is needed.
        state: filled in place.
        allow_missing: what the run has and the checkpoint may lack: part names (``optimizer``, ``scheduler``,
            ``scaler``, ``rng``, ``data``, ``batch``, ``step``, ``extra.<name>``) or FQNs, with ``*``. It is left as is.
        allow_unexpected: what the checkpoint may have and the run does not, likewise.
        allow_cast: round weights into a dtype that cannot hold them exactly.
        param_groups: ``target`` restores moments but keeps the run's own groups and hyperparameters.
        lr: a new base learning rate, for all groups or one a group; the schedule is rescaled to it.
        allow_global_batch_change: go on with another global batch than the saved one.
        lr_scaling: with another global batch, scale the learning rate linearly or by the square root.
        data: ``restart`` begins the data anew instead of restoring the position; samples repeat.
        scheduler_counts_ranks: the scheduler is stepped once a rank for each update (accelerate does); its counters
            are converted to the present world size.
        schedule: ``target`` takes from the checkpoint only where the schedule stands; how long it is and what it looks
            like is the run's own, from the next ``scheduler.step()`` on.

    Returns:
        What was restored, with the number of the step.

    Raises:
        ReshardError: on every rank. Until tensors of model and optimizer are read ``state`` is as it was; a fault while
            they are read leaves it undefined, and the message says so.
    """
    began = time.monotonic()
    _require("param_groups", param_groups, ("checkpoint", "target"))
    _require("data", data, ("restore", "restart"))
    _require("schedule", schedule, ("checkpoint", "target"))
    choices = Choices(
        Leniency(allow_missing, allow_unexpected, allow_cast),
        keep_live_groups=param_groups == "target",
        allow_global_batch_change=allow_global_batch_change,
        data=data,
        scheduler_counts_ranks=scheduler_counts_ranks,
        keep_live_schedule=schedule == "target",
        gives_lr=lr is not None,
        scales_lr=lr_scaling is not None,
    )
    _check_usage(state, lr, lr_scaling, choices)
    run = Run.of(state, all_ranks())
    source = _open(Path(path), run)
    with source.checkpoint:
        report = _restore(run, source, choices, lr, lr_scaling)
    report.elapsed_s = time.monotonic() - began
    _tell(report, run)
    return report


def _restore(
    run: Run, source: Source, choices: Choices, lr: float | Sequence[float] | None, lr_scaling: Scaling | None
) -> LoadReport:
    run.ranks.say(source.contents)
    step = source.manifest.step if source.manifest else run.state.step
    saved_ranks = source.manifest.world.ranks if source.manifest else None
    report = LoadReport(source.folder, step, run.ranks.size, saved_ranks, run.state.plan)
    plan = _plan(run, source, choices, report)
    if (lr is not None or lr_scaling is not None) and OPTIMIZER not in plan.parts:
        raise UsageError(
            "the optimizer is not restored, so there is no saved learning rate to change",
            key="lr",
            hint="set the learning rate in the optimizer",
        )
    saved_schedules = source.manifest.schedulers if source.manifest and SCHEDULER in plan.parts else {}
    rescales = requested_rescales(run, saved_schedules, plan.optimizer.saved_base_lrs, lr, lr_scaling, report)
    # All that is small or can refuse comes first: whatever happens until then, the run is as it was.
    source.plan_filling(plan.beside, run.ranks).run()
    filling = source.plan_filling(plan.room, run.ranks)
    restorer = Restorer(run, source, choices, plan.optimizer.partners, plan.optimizer.rescales)
    reading: list[str] = []
    try:
        with run.ranks.together():
            restorer.restore(plan.parts, plan.beside)
        reading = sorted(plan.parts & {MODEL, OPTIMIZER})
        filling.run()
        _restore_tensors(run, source, plan)
        with run.ranks.together():
            _finish(run, source, plan, rescales, report)
    except ReshardError as fault:
        restorer.take_back()
        if undefined := [*restorer.lost, *reading]:
            told = f"undefined now: {', '.join(undefined)}; the rest is as it was. Build them anew before another load"
            fault.details = (*fault.details, told)
        raise
    if DATA in plan.parts and choices.data == "restart":
        report.missing.append(DATA)
    report.restored = sorted(plan.parts - set(report.missing))
    return report


@dataclass
class _Plan:
    """What will be restored, and room for it.

    Attributes:
        parts: of the run's state.
        optimizer: for the optimizers.
        beside: stored key -> what is filled first: small values and the tensors of extra objects.
        room: stored key -> tensors of model and optimizer, most of them the live ones.
        tied: stored key -> the key of its partner, where the model has one tensor for the two.
    """

    parts: set[str]
    optimizer: OptimizerPlan
    beside: dict[str, Any] = field(default_factory=dict)
    room: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def _check_usage(
    state: TrainState, lr: float | Sequence[float] | None, lr_scaling: Scaling | None, choices: Choices
) -> None:
    state.validate()
    if lr_scaling is not None:
        _require("lr_scaling", lr_scaling, ("linear", "sqrt"))
        if lr is not None or not choices.allow_global_batch_change:
            raise UsageError("lr_scaling goes with allow_global_batch_change=True and without lr", key="lr_scaling")
    if (lr is not None or lr_scaling is not None) and not state.optimizers:
        raise UsageError(
            "there is no optimizer in the TrainState to give a learning rate to",
            key="lr",
            hint="pass TrainState(optimizer=...)",
        )


def _require(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError("no such choice", key=name, expected=" or ".join(map(repr, allowed)), found=repr(value))


def _open(path: Path, run: Run) -> Source:
    folder: Path | None = None
    is_dcp = True
    with run.ranks.together():
        if run.ranks.rank == 0:
            folder = find_step(path)
            is_dcp = holds_dcp(folder)
    folder, is_dcp = run.ranks.broadcast((folder, is_dcp))
    assert folder is not None
    checkpoint = open_on(folder, run.ranks) if is_dcp else open_rescued(folder, run.ranks)
    source: Source | None = None
    with run.ranks.together():
        source = Source.of(checkpoint, run)
    assert source is not None
    return source


def _plan(run: Run, source: Source, choices: Choices, report: LoadReport) -> _Plan:
    """Holds the two sides against each other.

    Raises:
        StateMismatch: with everything that does not fit.
    """
    faults = Faults()
    parts = choose_parts(run, source, choices, faults, report)
    saved_groups = read_groups(run, source) if OPTIMIZER in parts else []
    plan = _Plan(parts, OptimizerPlan([]))
    with run.ranks.together():
        for check in (check_batch, check_data):
            check(run, source, choices, faults, report)
        check_exact(run, source, report)
        check_schedulers(
            run,
            source,
            faults,
            report,
            counts_ranks=choices.scheduler_counts_ranks,
            keep_live=choices.keep_live_schedule,
        )
        check_states(run, source, parts, faults)
        if MODEL in parts:
            _plan_model(run, source, choices, plan, faults, report)
        if OPTIMIZER in parts:
            plan.optimizer = plan_optimizer(run, source, parts, saved_groups, choices, faults, report)
            plan.room.update(plan.optimizer.room)
        if error := faults.error(source.folder):
            raise error
        plan.beside.update(stored_tensors(run, source, parts))
        plan.beside.update({key: source.room(key) for key in rng_keys(run, source, parts).values()})
    return plan


def _plan_model(run: Run, source: Source, choices: Choices, plan: _Plan, faults: Faults, report: LoadReport) -> None:
    inventory = source.inventory
    stored: dict[str, TensorSpec | None] = {fqn: source.stored.tensors.get(key) for fqn, key in inventory.model.items()}
    stored |= dict.fromkeys(inventory.extra_state)
    passed = match_tensors(run.model, stored, run.aliases, choices.leniency, faults)
    for fqn, tensor in run.model.items():
        if isinstance(tensor, torch.Tensor) and any(part.is_meta for part in local_parts(tensor)):
            faults.add(
                f"model.{fqn}: on the meta device, so there is no memory to load into",
                "call model.to_empty(device=...) before",
            )
    report.missing += [f"model.{fqn}" for fqn in passed.missing]
    if passed.unexpected:
        report.warnings.append(f"in the checkpoint, and left out, as asked: {named(passed.unexpected)}")
    for before, after in sorted(passed.casts, key=str):
        lossy = ", rounded, as asked" if is_lossy(before, after) else ""
        report.warnings.append(f"weights {before} -> {after}{lossy}")
    if getattr(getattr(run.state.model, "config", None), "tie_word_embeddings", False) and not run.aliases:
        report.warnings.append(
            "the model's config says tie_word_embeddings, and no two of its parameters are one: each is restored"
        )
    plan.room.update({key: run.model[fqn] for fqn, key in inventory.model.items() if fqn in run.model})
    for further, first in run.aliases.items():
        if further in inventory.model and first in inventory.model and isinstance(run.model[further], torch.Tensor):
            key = inventory.model[further]
            plan.tied[key] = inventory.model[first]
            # Read on its own: two stored values in one tensor would leave whichever came last.
            plan.room[key] = empty_like_shard(run.model[further], run.model[further].shape, run.model[further].dtype)
    plan.room.update(
        {
            key: source.room(key)
            for fqn, entries in inventory.extra_state.items()
            if fqn in run.model
            for key in entries.values()
        }
    )


def _restore_tensors(run: Run, source: Source, plan: _Plan) -> None:
    inventory, state = source.inventory, run.state
    with run.ranks.together():
        for key, partner in plan.tied.items():
            if not _is_same(plan.room[key], plan.room[partner]):
                raise StateMismatch(
                    "tied in the model, and stored with another value than its partner",
                    path=source.folder,
                    key=key,
                    expected=f"the value of {partner}",
                    found="a different one",
                    hint="untie the weights of the model, as they were when saved",
                )
    if MODEL in plan.parts:
        loaded = {fqn: plan.room[key] for fqn, key in inventory.model.items() if key in plan.room}
        for fqn, entries in inventory.extra_state.items():
            if fqn in run.model:
                loaded[fqn] = nested({path: plan.room[key] for path, key in entries.items()})
        load_model_tensors(state.model, loaded)
    if OPTIMIZER in plan.parts:
        optimizer_state.restore(state.model, state.optimizers, plan.optimizer.filled(plan.room))


def _finish(run: Run, source: Source, plan: _Plan, rescales: list[Rescale] | None, report: LoadReport) -> None:
    live_groups = [group for each in run.state.optimizers.values() for group in each.param_groups]
    if OPTIMIZER in plan.parts:
        assert_restored(live_groups, [lr_of(group) for group in plan.optimizer.groups], source.folder)
    if rescales is not None:
        rescale(run, live_groups, rescales)
    if RNG in plan.parts:
        keys = rng_keys(run, source, plan.parts)
        restore_random(run, source, {name: plan.beside[key] for name, key in keys.items()}, report)
    if STEP in plan.parts and source.manifest is not None:
        run.state.step = source.manifest.step


def _is_same(a: Any, b: Any) -> bool:
    """Whether this rank's parts of two tensors are equal, NaN to NaN."""
    return all(
        bool(torch.all((x == y) | ((x != x) & (y != y)))) for x, y in zip(local_parts(a), local_parts(b), strict=True)
    )


def _tell(report: LoadReport, run: Run) -> None:
    for note in report.notes:
        run.ranks.say(note)
    for warning in report.warnings:
        run.ranks.warn(warning)
    (run.ranks.warn if report.missing else run.ranks.say)(report.line)
