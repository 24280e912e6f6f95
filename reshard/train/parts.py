"""The parts of a run's state that are not tensors of model or optimizer: held against the run, and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from reshard.formats import tagged
from reshard.formats.tagged import Json
from reshard.train.learning_rate import batch_factor
from reshard.train.matching import Faults, Leniency
from reshard.train.model_state import empty_like_shard
from reshard.train.report import LoadReport
from reshard.train.rng import reseed, restore_rng
from reshard.train.source import Run, Source
from reshard.train.state import BATCH, DATA, RNG, SCALER, SCHEDULER, STEP, extra_part

STORED = "!stored"


@dataclass(frozen=True)
class Choices:
    """What the caller of ``load_state`` chose; its docstring has the meanings."""

    leniency: Leniency
    keep_live_groups: bool = False
    allow_global_batch_change: bool = False
    data: Literal["restore", "restart"] = "restore"
    scheduler_counts_ranks: bool = False


def choose_parts(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> set[str]:
    """The parts to restore: those that both sides have. What only one side has is a fault, unless allowed."""
    lacking = [part for part, has in run.state.parts.items() if has and not source.has(part)]
    refused = [part for part in lacking if not choices.leniency.may_miss(part)]
    if refused and source.manifest is None:
        faults.add(
            f"no reshard.json (stock dcp.save wrote this, or not all of it is here): it lacks {', '.join(refused)}",
            f"allow_missing={refused!r} goes on without them",
        )
    elif refused:
        faults.add(
            f"the checkpoint lacks what the run has: {', '.join(refused)}",
            f"allow_missing={refused!r} leaves them as they are",
        )
    surplus = [part for part in _saved_parts(source) if not run.state.parts.get(part)]
    for part in surplus:
        if not choices.leniency.may_ignore(part):
            faults.add(
                f"{part}: in the checkpoint, and the run has none",
                f"give it to TrainState, or allow_unexpected=[{part!r}] leaves it out",
            )
    report.missing = [part for part in lacking if part not in refused]
    return {part for part, has in run.state.parts.items() if has and source.has(part)}


def _saved_parts(source: Source) -> list[str]:
    if source.manifest is None:
        return [part for part in ("model", "optimizer") if source.has(part)]
    return [part for part, kept in source.manifest.parts.items() if kept == "saved"]


def check_batch(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> None:
    """Another global batch is refused unless asked for; the learning rate never follows it silently."""
    saved = source.manifest.batch if source.manifest else None
    plan = run.state.plan
    if saved is None or plan is None:
        return
    report.saved_batch = {name: int(value) for name, value in saved.items()}
    before = report.saved_batch["global_batch"]
    if before == plan.global_batch:
        return
    linear, root = (batch_factor(scaling, before, plan.global_batch) for scaling in ("linear", "sqrt"))
    offer = f"lr_scaling='linear' would multiply the learning rate by {linear:.4g}, 'sqrt' by {root:.4g}"
    if choices.allow_global_batch_change:
        report.warnings.append(f"global batch {before} -> {plan.global_batch}, learning rate as saved; {offer}")
    else:
        faults.add(
            f"global batch: expected {before}, as saved, found {plan.global_batch} in the run",
            f"set it back, or allow_global_batch_change=True; {offer}",
        )


def check_data(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> None:
    """A position kept per rank means nothing at another world size or number of workers."""
    data, live = source.manifest.data if source.manifest else None, run.state.data
    if not isinstance(data, dict) or live is None:
        return
    seen = "" if run.state.plan is None else f" ({source.manifest.step * run.state.plan.global_batch} samples)"  # type: ignore[union-attr]
    if choices.data == "restart":
        report.warnings.append(f"data started anew: what the run has seen so far{seen} is seen again")
        return
    restart = f"data='restart' starts it anew{seen} are seen again" if seen else "data='restart' starts it anew"
    shared = getattr(live, "world_independent", False)
    if ("shared" in data) != shared:
        faults.add(
            "data: the position was saved by another kind of loader", f"use the kind it was saved with, or {restart}"
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


def check_schedulers(run: Run, source: Source, choices: Choices, faults: Faults, report: LoadReport) -> None:
    """Names must be the same; a schedule that counted ranks instead of steps is pointed out."""
    if source.manifest is None or not source.manifest.schedulers or not run.state.schedulers:
        return
    saved, live = source.manifest.schedulers, run.state.schedulers
    if saved.keys() != live.keys():
        faults.add(
            f"schedulers: expected {', '.join(sorted(saved))}, found {', '.join(sorted(live))}", "name them as saved"
        )
    ranks, step = source.manifest.world.ranks, source.manifest.step
    for name, state in saved.items():
        counts_ranks = isinstance(state, dict) and state.get("last_epoch") == ranks * step
        if ranks > 1 and step > 0 and counts_ranks and not choices.scheduler_counts_ranks:
            report.warnings.append(
                f"{SCHEDULER}.{name} stands at {ranks * step} = {ranks} ranks x {step} steps: if it is stepped "
                "once a rank (accelerate does), pass scheduler_counts_ranks=True, or the schedule is off by the "
                "change in ranks"
            )


def stored_tensors(run: Run, source: Source, parts: set[str]) -> dict[str, Any]:
    """Room for the tensors that the restored parts keep beside the model's: key -> tensor to be filled."""
    manifest = source.manifest
    if manifest is None:
        return {}
    kept: list[Json] = []
    if SCHEDULER in parts:
        kept.extend(manifest.schedulers.values())
    if SCALER in parts:
        kept.append(manifest.scaler)
    if DATA in parts:
        kept.append(_own_position(manifest.data, run.ranks.rank))
    live: dict[str, Any] = {}
    for name, value in run.state.extra.items():
        if extra_part(name) in parts:
            kept.append(manifest.extra[name])
            live.update(_tensors_in(value.state_dict(), extra_part(name)))
    room = {}
    for key in _references(kept):
        entry = source.stored.tensors[key]
        room[key] = empty_like_shard(live[key], entry.shape, entry.dtype) if key in live else source.room(key)
    return room


def rng_keys(run: Run, source: Source, parts: set[str]) -> dict[str, str]:
    """Generator -> key of the states that this rank restores: its own, or rank 0's to derive new ones from."""
    if RNG not in parts:
        return {}
    same = len(source.inventory.rng) == run.ranks.size
    return source.inventory.rng.get(run.ranks.rank if same else 0, {})


def restore_parts(run: Run, source: Source, choices: Choices, parts: set[str], tensors: Mapping[str, Any]) -> None:
    """Everything but model, optimizer and random states, from the manifest and the tensors beside it."""
    manifest, state = source.manifest, run.state
    if manifest is None:
        return

    def decode(value: Json) -> Any:
        return tagged.decode(value, resolve=lambda key: tensors[key])

    if SCHEDULER in parts:
        for name, scheduler in state.schedulers.items():
            saved = decode(manifest.schedulers[name])
            if choices.scheduler_counts_ranks:
                saved = _recounted(saved, scheduler.state_dict(), manifest.world.ranks, run.ranks.size)
            scheduler.load_state_dict(saved)
    if SCALER in parts and state.scaler is not None:
        state.scaler.load_state_dict(decode(manifest.scaler))
    for name, value in state.extra.items():
        if extra_part(name) in parts:
            value.load_state_dict(decode(manifest.extra[name]))
    if DATA in parts and state.data is not None and choices.data == "restore":
        state.data.load_state_dict(decode(_own_position(manifest.data, run.ranks.rank)))
    plan, batch = state.plan, manifest.batch
    if BATCH in parts and plan and batch and batch["global_batch"] == plan.global_batch:
        plan.load_state_dict(batch)
    if STEP in parts:
        state.step = manifest.step


def restore_random(run: Run, source: Source, states: Mapping[str, torch.Tensor], report: LoadReport) -> None:
    """This rank's own streams at an equal world size, new distinct ones at another."""
    saved_ranks = len(source.inventory.rng)
    if saved_ranks == run.ranks.size:
        restore_rng(states)
        return
    reseed(states, report.step, run.ranks.rank, run.ranks.size)
    report.warnings.append(
        f"random states of {saved_ranks} ranks cannot go on as {run.ranks.size}: each rank has a new stream, derived "
        "from the saved ones (not bit-reproducible unless randomness follows slots: reshard.SlotStreams)"
    )


def _own_position(data: Json, rank: int) -> Json:
    if not isinstance(data, dict):
        return None
    if "shared" in data:
        return data["shared"]
    states = data["ranks"]
    return states[rank] if isinstance(states, list) and rank < len(states) else None


def _recounted(saved: Any, live: Any, saved_ranks: int, ranks: int) -> Any:
    """The live schedule with the saved counters, from one count a rank then to one count a rank now."""
    return {
        **live,
        **{
            name: value * ranks // saved_ranks if name in ("last_epoch", "_step_count") else value
            for name, value in saved.items()
            if name in ("last_epoch", "_step_count", "_last_lr", "base_lrs")
        },
    }


def _tensors_in(value: Any, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def keep(leaf: Any, path: str) -> str | None:
        found[path] = leaf
        return path

    tagged.encode(value, where=where, external=keep)
    return found


def _references(value: Json) -> list[str]:
    if isinstance(value, list):
        return [key for item in value for key in _references(item)]
    if isinstance(value, dict):
        if isinstance(key := value.get(STORED), str) and len(value) == 1:
            return [key]
        return [key for item in value.values() for key in _references(item)]
    return []
