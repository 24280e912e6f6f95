"""The parts of a run's state that are not tensors of model or optimizer, held against the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from reshard.errors import ReshardError
from reshard.formats import tagged
from reshard.formats.tagged import Json
from reshard.train.learning_rate import batch_factor
from reshard.train.model_state import empty_like_shard
from reshard.train.resume.matching import Faults, Leniency
from reshard.train.resume.report import LoadReport, named
from reshard.train.resume.source import Run, Source
from reshard.train.slot_sums import exact_reduction
from reshard.train.state import DATA, OPTIMIZER, RNG, SCALER, SCHEDULER, extra_part

DAMAGED = "the checkpoint is damaged: use another step"


@dataclass(frozen=True)
class Choices:
    """What the caller of ``load_state`` chose; its docstring has the meanings."""

    leniency: Leniency
    keep_live_groups: bool = False
    allow_global_batch_change: bool = False
    data: Literal["restore", "restart"] = "restore"
    scheduler_counts_ranks: bool = False
    keep_live_schedule: bool = False
    gives_lr: bool = False
    scales_lr: bool = False


def choose_parts(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> set[str]:
    """The parts to restore: those that both sides have. What only one side has is a fault, unless allowed."""
    lacking = [part for part, has in run.state.parts.items() if has and not source.has(part)]
    refused = [part for part in lacking if not choices.leniency.may_miss(part)]
    if OPTIMIZER in refused and (integers := source.inventory.integers):
        refused.remove(OPTIMIZER)
        faults.add(
            f"optim.state: keyed by integers ({named(integers, 3)}), which do not say whose state it is: "
            "expected parameter names",
            "save get_optimizer_state_dict(model, optimizer) instead of optimizer.state_dict(), or take the rest "
            "without it by allow_missing=['optimizer']",
        )
    if refused and source.manifest is None:
        faults.add(
            f"no reshard.json (stock dcp.save wrote this, or not all of it is here): it lacks {', '.join(refused)}",
            f"allow_missing={refused!r} goes on without",
        )
    elif refused:
        faults.add(
            f"the checkpoint lacks what the run has: {', '.join(refused)}",
            f"allow_missing={refused!r} leaves it as it is",
        )
    for part in source.parts:
        if run.state.parts.get(part):
            continue
        if choices.leniency.may_ignore(part):
            report.warnings.append(f"{part}: in the checkpoint, and left out, as asked")
        else:
            faults.add(
                f"{part}: in the checkpoint, and the run has none",
                f"give it to TrainState, or allow_unexpected=[{part!r}] leaves it out",
            )
    if source.manifest is None and (others := source.inventory.others):
        report.warnings.append(f"not read, since nothing says what it belongs to: {named(sorted(others))}")
    report.missing = [part for part in lacking if part not in refused]
    return {part for part, has in run.state.parts.items() if has and source.has(part)}


def check_batch(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> None:
    """Another global batch is refused unless asked for; the learning rate never follows it silently."""
    saved = source.manifest.batch if source.manifest else None
    plan = run.state.plan
    if saved is None or plan is None:
        return
    numbers = ("global_batch", "micro_batch", "ranks", "accumulation")
    if not all(type(value := saved.get(name)) is int and value > 0 for name in numbers):
        faults.add(f"reshard.json: batch: expected {', '.join(numbers)} as counts, found {saved}", DAMAGED)
        return
    report.saved_batch = {name: int(saved[name]) for name in numbers}
    before = report.saved_batch["global_batch"]
    if (micro_batch := report.saved_batch["micro_batch"]) != plan.micro_batch:
        report.warnings.append(
            f"micro-batch {micro_batch} -> {plan.micro_batch}: the global batch stays exact, but slots are cut "
            "elsewhere, so their random streams (dropout) differ from before"
        )
    if before == plan.global_batch:
        return
    linear, root = (batch_factor(scaling, before, plan.global_batch) for scaling in ("linear", "sqrt"))
    offer = f"lr_scaling='linear' would multiply the learning rate by {linear:.4g}, 'sqrt' by {root:.4g}"
    if choices.allow_global_batch_change:
        kept = "" if choices.scales_lr else f", learning rate as saved; {offer}"
        report.warnings.append(f"global batch {before} -> {plan.global_batch}{kept}")
    else:
        faults.add(
            f"global batch: expected {before}, as saved, found {plan.global_batch} in the run",
            f"set it back, or allow_global_batch_change=True; {offer}",
        )


def check_exact(run: Run, source: Source, report: LoadReport) -> None:
    """Nothing is refused here: the state is the same, and where the bits cannot be, that is said."""
    if source.manifest is None:
        return
    saved, reduction = source.manifest.exact, exact_reduction(run.state.model)
    if saved is None or reduction is None:
        if saved is not None:
            report.warnings.append("the run was in exact mode and is not now: from here on its bits follow the ranks")
        elif reduction is not None:
            report.notes.append("exact mode from here on; up to this step the bits followed the ranks")
        return
    before = {**saved, "torch": source.manifest.versions.get("torch")}
    now = {**reduction.described, "torch": torch.__version__}
    changes = [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]
    if changes:
        report.warnings.append(
            f"exact mode, but not as before: {', '.join(changes)}; the bits need not be those of a run without a break"
        )


def check_data(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> None:
    """A position kept per rank means nothing at another world size or number of workers."""
    manifest, live = source.manifest, run.state.data
    if manifest is None or manifest.data is None or live is None:
        return
    data = manifest.data
    if not isinstance(data, dict) or not ("shared" in data or isinstance(data.get("ranks"), list)):
        faults.add("reshard.json: data: expected a position, shared or one a rank, found neither", DAMAGED)
        return
    batch = (report.saved_batch or {}).get("global_batch")
    again = f"the {manifest.step * batch} samples trained on so far" if batch else "what was trained on so far"
    if choices.data == "restart":
        report.warnings.append(f"data started anew, as asked: {again} will be seen again")
        return
    restart = f"data='restart' starts it anew, and {again} will be seen again"
    shared = run.state.shares_data_position
    if ("shared" in data) != shared:
        faults.add(
            "data: the position was saved by another kind of loader: expected one "
            f"{'for all ranks' if 'shared' in data else 'for each rank'}, as saved, found {type(live).__name__}",
            f"use the kind it was saved with, or {restart}",
        )
        return
    if shared:
        return
    states = data["ranks"]
    saved_ranks = len(states) if isinstance(states, list) else 0
    if saved_ranks != run.ranks.size:
        faults.add(
            f"data: the loader knows only its own rank's position: saved on {saved_ranks} ranks, "
            f"this run has {run.ranks.size}",
            f"resume on {saved_ranks} ranks, train with reshard.ElasticSampler, or {restart}",
        )
    workers = getattr(live, "num_workers", None)
    if data.get("workers") != workers:
        faults.add(
            f"data: the loader's position was saved with {data.get('workers')} workers, this one has {workers}",
            f"set num_workers={data.get('workers')}, or {restart}",
        )


def check_states(run: Run, source: Source, parts: set[str], faults: Faults) -> None:
    """What the manifest says of each restored part must be there, readable, and with its tensors beside it."""
    kept = kept_states(run, source, parts)
    expected = [part for part in parts if part in (DATA, SCALER) or part.startswith(extra_part(""))]
    expected += [f"{SCHEDULER}.{name}" for name in run.state.schedulers if SCHEDULER in parts]
    for part in sorted(set(expected) - kept.keys()):
        faults.add(f"reshard.json: {part}: listed as saved, and not there", DAMAGED)
    for part, state in kept.items():
        try:
            tagged.decode(state, resolve=lambda key: None)
        except ReshardError as fault:
            faults.add(f"reshard.json: {part}: {fault}", DAMAGED)
        for key in tagged.stored_keys(state):
            if key not in source.stored.tensors:
                faults.add(f"{key}: named by reshard.json, not among the tensors", DAMAGED)
    if RNG in parts:
        recorded = source.manifest.rng if source.manifest else None
        ranks = recorded.get("ranks") if isinstance(recorded, dict) else len(source.inventory.rng)
        found = sorted(source.inventory.rng)
        if not found or found != list(range(len(found))) or len(found) != ranks:
            of = named([str(rank) for rank in found])
            faults.add(
                f"rng: expected random states of {ranks} ranks, found those of rank {of}",
                DAMAGED,
            )
        for rank, states in source.inventory.rng.items():
            if "torch" not in states:
                faults.add(f"rng.rank_{rank}.torch: not in the checkpoint", DAMAGED)


def stored_tensors(run: Run, source: Source, parts: set[str]) -> dict[str, Any]:
    """Room for the tensors that the restored parts keep beside the model's: key -> tensor to be filled."""
    live: dict[str, Any] = {}
    for name, value in run.state.extra.items():
        if extra_part(name) in parts:
            live.update(_tensors_in(value.state_dict(), extra_part(name)))
    room = {}
    for state in kept_states(run, source, parts).values():
        for key in tagged.stored_keys(state):
            entry = source.stored.tensors[key]
            room[key] = empty_like_shard(live[key], entry.shape, entry.dtype) if key in live else source.room(key)
    return room


def kept_states(run: Run, source: Source, parts: set[str]) -> dict[str, Json]:
    """What the manifest keeps of each restored part, by the part's name, schedulers one by one."""
    manifest = source.manifest
    if manifest is None:
        return {}
    kept: dict[str, Json] = {}
    if DATA in parts and manifest.data is not None:
        kept[DATA] = _own_position(manifest.data, run.ranks.rank)
    if SCALER in parts and manifest.scaler is not None:
        kept[SCALER] = manifest.scaler
    if SCHEDULER in parts:
        kept |= {
            f"{SCHEDULER}.{name}": state for name, state in manifest.schedulers.items() if name in run.state.schedulers
        }
    kept |= {extra_part(name): state for name, state in manifest.extra.items() if extra_part(name) in parts}
    return kept


def rng_keys(run: Run, source: Source, parts: set[str]) -> dict[str, str]:
    """Generator -> key of the states that this rank restores: its own, or rank 0's to derive new ones from."""
    if RNG not in parts:
        return {}
    same = len(source.inventory.rng) == run.ranks.size
    return source.inventory.rng.get(run.ranks.rank if same else 0, {})


def _own_position(data: Json, rank: int) -> Json:
    if not isinstance(data, dict):
        return None
    if "shared" in data:
        return data["shared"]
    states = data.get("ranks")
    return states[rank] if isinstance(states, list) and rank < len(states) else None


def _tensors_in(value: Any, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def keep(leaf: Any, path: str) -> str | None:
        if isinstance(leaf, torch.Tensor):
            found[path] = leaf
        return path

    tagged.encode(value, where=where, external=keep)
    return found
