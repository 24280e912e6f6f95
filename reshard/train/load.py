"""Bringing a run back from a checkpoint, on any number of ranks.

What can be known from the manifest, from ``.metadata`` and from the few small objects in the files is held against the
run first; all that does not fit becomes one error, before a live tensor is touched. Then each rank reads its own part
of the tensors in place, and the rest follows.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from reshard import dcp
from reshard.dcp import StoredTensor
from reshard.errors import ReshardError, UsageError
from reshard.train import optimizer_state
from reshard.train.learning_rate import Scaling, assert_restored, batch_factor, scale_learning_rates
from reshard.train.matching import Faults, Leniency, match_tensors
from reshard.train.model_state import load_model_tensors
from reshard.train.optimizer_load import OptimizerPlan, plan_optimizer, read_groups
from reshard.train.parts import (
    Choices,
    check_batch,
    check_data,
    check_schedulers,
    choose_parts,
    restore_parts,
    restore_random,
    rng_keys,
    stored_tensors,
)
from reshard.train.ranks import all_ranks
from reshard.train.report import LoadReport
from reshard.train.source import Run, Source, find_step
from reshard.train.state import MODEL, OPTIMIZER, RNG, TrainState


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
) -> LoadReport:
    """Restores ``state`` from a step folder, or from the newest committed step of a run's folder.

    Every rank must call it, before any forward pass, on a state built as for a fresh run. Nothing of the user's is
    stepped. At another world size than the saved one the global batch stays as it was, and the random states of the
    process follow the rule of :func:`reshard.train.rng.reseed`.

    Args:
        path: ``.../step-<n>``, a run's folder, or a folder that stock ``dcp.save`` wrote.
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

    Returns:
        What was restored, with the number of the step.

    Raises:
        ReshardError: on every rank. Until tensors are read ``state`` is untouched; a fault while they are read leaves
            it undefined, and the message says so.
    """
    began = time.monotonic()
    state.validate()
    if lr_scaling is not None and (lr is not None or not allow_global_batch_change):
        raise UsageError("lr_scaling goes with allow_global_batch_change=True and without lr", key="lr_scaling")
    choices = Choices(
        Leniency(allow_missing, allow_unexpected, allow_cast),
        param_groups == "target",
        allow_global_batch_change,
        data,
        scheduler_counts_ranks,
    )
    run = Run.of(state, all_ranks())
    source = _open(Path(path), run)
    step = source.manifest.step if source.manifest else state.step
    saved_ranks = source.manifest.world.ranks if source.manifest else None
    report = LoadReport(source.folder, step, run.ranks.size, saved_ranks, state.plan)
    parts, optimizer, room = _plan(run, source, choices, report)
    factors = _lr_factors(optimizer, lr, lr_scaling, report)
    _read(room, run, source)
    if MODEL in parts:
        load_model_tensors(state.model, {fqn: room[key] for fqn, key in source.inventory.model.items() if key in room})
    if OPTIMIZER in parts:
        optimizer_state.restore(state.model, state.optimizers, optimizer.filled(room))
    with run.ranks.together():
        restore_parts(run, source, choices, parts, room)
        live_groups = [group for each in state.optimizers.values() for group in each.param_groups]
        if OPTIMIZER in parts:
            assert_restored(live_groups, [float(group["lr"]) for group in optimizer.groups], source.folder)
        if factors is not None:
            scale_learning_rates(live_groups, state.schedulers, factors)
        if RNG in parts:
            restore_random(run, source, {name: room[key] for name, key in rng_keys(run, source, parts).items()}, report)
    report.restored = sorted(parts)
    report.elapsed_s = time.monotonic() - began
    _tell(report, run)
    return report


def _open(path: Path, run: Run) -> Source:
    folder: Path | None = None
    with run.ranks.together():
        if run.ranks.rank == 0:
            folder = find_step(path)
    folder = run.ranks.broadcast(folder)
    assert folder is not None
    source: Source | None = None
    with run.ranks.together():
        source = Source.open(folder, run)
    assert source is not None
    return source


def _plan(
    run: Run, source: Source, choices: Choices, report: LoadReport
) -> tuple[set[str], OptimizerPlan, dict[str, Any]]:
    """Holds the two sides against each other; the parts to restore, and room for every stored value they need."""
    faults = Faults()
    parts = choose_parts(run, source, choices, faults, report)
    saved_groups = read_groups(run, source) if OPTIMIZER in parts else []
    optimizer = OptimizerPlan([])
    room: dict[str, Any] = {}
    with run.ranks.together():
        for check in (check_batch, check_data, check_schedulers):
            check(run, source, choices, faults, report)
        if MODEL in parts:
            stored: dict[str, StoredTensor | None] = {
                fqn: source.stored.tensors.get(key) for fqn, key in source.inventory.model.items()
            }
            match_tensors(run.model, stored, run.aliases, choices.leniency, faults)
            room.update({key: run.model[fqn] for fqn, key in source.inventory.model.items() if fqn in run.model})
        if OPTIMIZER in parts:
            optimizer = plan_optimizer(run, source, saved_groups, choices, faults, report)
            room.update(optimizer.room)
        if error := faults.error(source.folder):
            raise error
        room.update(stored_tensors(run, source, parts))
        room.update({key: source.room(key) for key in rng_keys(run, source, parts).values()})
    return parts, optimizer, room


def _lr_factors(
    optimizer: OptimizerPlan, lr: float | Sequence[float] | None, scaling: Scaling | None, report: LoadReport
) -> list[float] | None:
    base = optimizer.saved_base_lrs
    if lr is not None:
        wanted = [float(lr)] * len(base) if isinstance(lr, (int, float)) else [float(value) for value in lr]
        if len(wanted) != len(base):
            raise UsageError("one learning rate a parameter group", key="lr", expected=len(base), found=len(wanted))
        report.warnings = [text for text in report.warnings if not text.startswith("config lr ")]
        report.warnings.append(f"base learning rate {base} -> {wanted}, as asked; moments kept")
        return [new / old for new, old in zip(wanted, base, strict=True)]
    if scaling is not None and report.saved_batch is not None and report.plan is not None:
        factor = batch_factor(scaling, report.saved_batch["global_batch"], report.plan.global_batch)
        report.warnings.append(f"learning rate x {factor:.6g} ({scaling} scaling), as asked")
        return [factor] * len(base)
    return None


def _read(room: dict[str, Any], run: Run, source: Source) -> None:
    try:
        dcp.load(room, source.folder, run.ranks.group)
    except ReshardError as fault:
        fault.details = (*fault.details, "model and optimizer are undefined now: build them anew before another load")
        raise


def _tell(report: LoadReport, run: Run) -> None:
    for warning in report.warnings:
        run.ranks.warn(warning)
    (run.ranks.warn if report.missing else run.ranks.say)(report.line)
