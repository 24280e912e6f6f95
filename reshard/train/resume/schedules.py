"""Schedules across a resume: held against the run's, and their state fitted to the run's groups and ranks.

A torch scheduler keeps one number a parameter group in lists, in the order of its optimizer's groups at the save, and
takes any state whatever: that of another kind of schedule, or of another number of groups, trains on at wrong rates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from reshard.errors import UsageError
from reshard.formats import tagged
from reshard.formats.tagged import Json
from reshard.train.learning_rate import (
    Rescale,
    Scaling,
    batch_factor,
    rescales_to,
    scale_groups,
    scaled_schedule,
)
from reshard.train.resume.matching import Faults
from reshard.train.resume.report import LoadReport, named
from reshard.train.resume.source import Run, Source
from reshard.train.rewarmup import (
    Rewarmup,
    climb_rates,
    inner_scheduler,
    inner_state,
    is_climbing,
    with_climb,
    with_inner_state,
)
from reshard.train.state import OPTIMIZER, SCHEDULER

RATE_KEYS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
PER_GROUP_KEYS = (*RATE_KEYS, "lr_lambdas")
UNCONVERTIBLE_COUNTERS = ("T_cur", "num_bad_epochs", "cooldown_counter")
# Where a schedule stands, as opposed to what it is configured with; base rates are told of with the optimizer.
STANDING = frozenset(
    {
        *("last_epoch", "_step_count", "_last_lr", "base_lrs", "max_lrs", "min_lrs", "_schedulers", "best"),
        *("num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "_is_initial", "_get_lr_called_within_step"),
    }
)
SHOWN_CHARACTERS = 40
# Other versions of torch have them and this one may not.
VERSION_DEPENDENT = {"verbose"}


def check_schedulers(
    run: Run,
    source: Source,
    faults: Faults,
    report: LoadReport,
    *,
    counts_ranks: bool,
    keep_live: bool,
) -> None:
    """Names and kinds must be the same; a schedule that counted ranks instead of steps is pointed out."""
    if source.manifest is None or not source.manifest.schedulers or not run.state.schedulers:
        return
    saved, live = source.manifest.schedulers, run.state.schedulers
    if saved.keys() != live.keys():
        faults.add(
            f"{SCHEDULER}: expected schedulers named {named(sorted(saved))}, as saved, found {named(sorted(live))}",
            "name them as they were saved",
        )
    for name in saved.keys() & live.keys():
        state = saved[name]
        if not isinstance(state, dict) or not tagged.is_plain(state):
            continue
        if is_climbing(state) and not isinstance(live[name], Rewarmup):
            faults.add(
                f"{SCHEDULER}.{name}: saved on the way back to its schedule: expected a Rewarmup, "
                f"found {type(live[name]).__name__}",
                "wrap the scheduler: reshard.Rewarmup(scheduler)",
            )
        state, scheduler = inner_state(state), inner_scheduler(live[name])
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and not keep_live:
            kind = type(scheduler).__name__
            _check_kind(f"{SCHEDULER}.{name}", state, scheduler.state_dict(), kind, faults, report)
        if not source.has(OPTIMIZER):
            _check_group_count(f"{SCHEDULER}.{name}", state, own_groups(run, scheduler), faults)
        if counts_ranks:
            _check_countable(f"{SCHEDULER}.{name}", state, source.manifest.world.ranks, faults)
        else:
            _warn_of_counted_ranks(f"{SCHEDULER}.{name}", state, source, report)


def _check_kind(
    where: str, saved: Mapping[str, Any], own: Mapping[str, Any], kind: str, faults: Faults, report: LoadReport
) -> None:
    lacking = sorted(_public(saved) - _public(own))
    added = sorted(_public(own) - _public(saved))
    children, own_children = saved.get("_schedulers"), own.get("_schedulers")
    count = len(children) if isinstance(children, list) else 0
    own_count = len(own_children) if isinstance(own_children, list) else 0
    if lacking or added or count != own_count:
        expected = [*lacking, *([f"{count} schedules within it"] if count != own_count else [])]
        found = [*added, *([f"{own_count} within it"] if count != own_count else [])]
        faults.add(
            f"{where}: another kind of schedule: expected one with {', '.join(expected) or 'less to it'}, as saved, "
            f"found {kind}" + (f" with {', '.join(found)}" if found else ""),
            "build the schedule that it was saved with, or leave it out of TrainState and pass "
            f"allow_unexpected=[{SCHEDULER!r}]",
        )
        return
    configured = {key: value for key, value in own.items() if key in saved and key not in STANDING | VERSION_DEPENDENT}
    encoded = tagged.encode(configured, where=where, external=lambda leaf, path: path)
    changed = [
        f"{path}={_shown(ours)} ignored, the checkpoint's {_shown(theirs)} restored"
        for path, ours, theirs in _differences(encoded, {key: saved[key] for key in configured})
    ]
    if changed:
        report.warnings.append(f"{where}: config {'; '.join(changed)}; schedule='target' keeps the run's own schedule")
    for number in range(count):
        child, own_child = children[number], own_children[number]  # type: ignore[index]
        if isinstance(child, Mapping) and isinstance(own_child, Mapping):
            _check_kind(f"{where}.{number}", child, own_child, f"schedule {number}", faults, report)


def _differences(own: Json, saved: Json, path: str = "") -> Iterator[tuple[str, Json, Json]]:
    """Where two states differ, as paths with both values."""
    if isinstance(own, dict) and isinstance(saved, dict) and own.keys() == saved.keys() and tagged.is_plain(own):
        for key in own:
            yield from _differences(own[key], saved[key], f"{path}.{key}" if path else key)
    elif isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        for number, (ours, theirs) in enumerate(zip(own, saved, strict=True)):
            yield from _differences(ours, theirs, f"{path}.{number}")
    elif own != saved:
        yield path, own, saved


def _shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _public(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if not key.startswith("_")} - VERSION_DEPENDENT


def _check_group_count(
    where: str, state: Mapping[str, Json], own: tuple[str, list[int]] | None, faults: Faults
) -> None:
    """Where the checkpoint has the optimizer, its groups say which rate is whose; else they have to be as many."""
    rates = state.get("_last_lr")
    if own is not None and isinstance(rates, list) and len(rates) != len(own[1]):
        faults.add(
            f"{where}: a schedule of another number of parameter groups: expected {len(rates)}, as saved, "
            f"found {len(own[1])}",
            "build the optimizer with the groups that it was saved with, for it is not there to tell them apart",
        )


def _check_countable(where: str, state: Mapping[str, Json], saved_ranks: int, faults: Faults) -> None:
    hint = "load without scheduler_counts_ranks, and set the schedule's place by hand"
    stands = state.get("last_epoch")
    if not isinstance(stands, int):
        faults.add(f"{where}: it has no last_epoch to convert", hint)
    elif stands % saved_ranks:
        faults.add(f"{where}: last_epoch {stands} is no multiple of the {saved_ranks} ranks it is said to count", hint)
    for key in UNCONVERTIBLE_COUNTERS:
        if key in state:
            faults.add(f"{where}: {key} cannot be converted to another number of ranks", hint)
    children = state.get("_schedulers")
    for number, child in enumerate(children if isinstance(children, list) else []):
        if isinstance(child, dict):
            # The children of a sequence start where the one before ended, so they need not stand at a multiple.
            own = {**child, "last_epoch": 0} if isinstance(child.get("last_epoch"), int) else child
            _check_countable(f"{where}.{number}", own, saved_ranks, faults)


def _warn_of_counted_ranks(where: str, state: Mapping[str, Json], source: Source, report: LoadReport) -> None:
    assert source.manifest is not None
    ranks, step = source.manifest.world.ranks, source.manifest.step
    if ranks > 1 and step > 0 and state.get("last_epoch") == ranks * step:
        report.warnings.append(
            f"{where} stands at {ranks * step} = {ranks} ranks x {step} steps: if it is stepped once a rank "
            "(accelerate does), pass scheduler_counts_ranks=True, or the schedule is off by the change in ranks"
        )


def fitted(
    run: Run,
    source: Source,
    name: str,
    saved: Any,
    partners: Sequence[int | None],
    rescales: Sequence[Rescale] | None,
    *,
    counts_ranks: bool,
    keep_live: bool,
) -> Any:
    """A scheduler's saved state as the run's groups and ranks need it.

    Args:
        name: the scheduler's.
        saved: its state.
        partners: live group -> the saved group it continues; none where the optimizer is not restored.
        rescales: for each live group, where the run keeps its own base learning rate.
        counts_ranks: it counts ranks, not steps.
        keep_live: take its place from the checkpoint, and all else from the run.
    """
    whole, saved = saved, inner_state(saved)
    scheduler = inner_scheduler(run.state.schedulers[name])
    own = own_groups(run, scheduler)
    if partners and own is not None and source.manifest is not None:
        owner, live_groups = own
        described = source.manifest.optimizers.get(owner)
        saved_groups = described.get("groups") if isinstance(described, dict) else None
        if isinstance(saved_groups, list):
            places = [_place(saved_groups, partners[number]) for number in live_groups]
            if places != list(range(len(saved_groups))):
                saved = _regrouped(saved, scheduler.state_dict(), places, len(saved_groups))
                whole = with_climb(whole, _regrouped_climb(whole, scheduler, places))
        if rescales is not None:
            whole = scaled_schedule(with_inner_state(whole, saved), [rescales[number] for number in live_groups])
            saved = inner_state(whole)
    if counts_ranks and source.manifest is not None:
        saved = _recounted(saved, scheduler.state_dict(), source.manifest.world.ranks, run.ranks.size)
        whole = with_climb(whole, per_step=Fraction(run.ranks.size, source.manifest.world.ranks))
    elif keep_live:
        saved = _recounted(saved, scheduler.state_dict(), 1, 1)
    return with_inner_state(whole, saved) if isinstance(run.state.schedulers[name], Rewarmup) else saved


def own_groups(run: Run, scheduler: Any) -> tuple[str, list[int]] | None:
    """The optimizer that a scheduler drives and the numbers of its groups; None where that cannot be told."""
    optimizers = run.state.optimizers
    if len(optimizers) == 1:
        name = next(iter(optimizers))
        return name, run.optimizer.owners[name]
    driven = getattr(scheduler, "optimizer", None)
    for name, optimizer in optimizers.items():
        if driven is not None and driven is optimizer:
            return name, run.optimizer.owners[name]
    return None


def _place(saved_groups: Sequence[Any], partner: int | None) -> int | None:
    return saved_groups.index(partner) if partner in saved_groups else None


def _regrouped(saved: Any, live: Any, places: Sequence[int | None], saved_count: int) -> Any:
    """The per-group lists in the order of the live groups; a group that is new keeps the live schedule's entry."""
    if isinstance(saved, list):
        others = live if isinstance(live, (list, tuple)) and len(live) == len(saved) else [None] * len(saved)
        return [_regrouped(item, other, places, saved_count) for item, other in zip(saved, others, strict=True)]
    if not isinstance(saved, dict):
        return saved
    own = live if isinstance(live, Mapping) else {}
    return {
        key: [
            value[place] if place is not None else own[key][number] if key in own else None
            for number, place in enumerate(places)
        ]
        if key in PER_GROUP_KEYS and isinstance(value, list) and len(value) == saved_count
        else _regrouped(value, own.get(key), places, saved_count)
        for key, value in saved.items()
    }


def _regrouped_climb(state: Any, scheduler: Any, places: Sequence[int | None]) -> list[float] | None:
    """The rates below a climb in the order of the live groups; a group that is new has its own."""
    rates = climb_rates(state)
    if rates is None:
        return None
    live = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    return [rates[place] if place is not None else live[number] for number, place in enumerate(places)]


def _recounted(saved: Any, live: Any, saved_ranks: int, ranks: int) -> Any:
    """The live schedule with the saved counters, from one count a rank then to one count a rank now.

    Its lengths (``T_max``, milestones) are the live ones: whoever counts ranks configures them in ranks too.
    """
    state = {**live, **{key: saved[key] for key in RATE_KEYS if key in saved}}
    if isinstance(before := saved.get("last_epoch"), int):
        state["last_epoch"] = before * ranks // saved_ranks
        if isinstance(count := saved.get("_step_count"), int):
            # It runs ahead of last_epoch by the step that the constructor takes.
            state["_step_count"] = state["last_epoch"] + count - before
    children, own_children = saved.get("_schedulers"), live.get("_schedulers")
    if isinstance(children, (list, tuple)) and isinstance(own_children, list) and len(children) == len(own_children):
        state["_schedulers"] = [
            _recounted(child, own, saved_ranks, ranks) for child, own in zip(children, own_children, strict=True)
        ]
    return state


def requested_rescales(
    run: Run,
    saved: Mapping[str, Any],
    base: Sequence[float],
    lr: float | Sequence[float] | None,
    scaling: Scaling | None,
    report: LoadReport,
) -> list[Rescale] | None:
    """What was asked of the learning rates, for each live group.

    Args:
        saved: the states of the schedulers that will be restored, by name.
        base: the base learning rate that each group will have.

    Raises:
        UsageError: it cannot be done.
    """
    if lr is not None:
        rescales = rescales_to(lr, base)
        changes = ", ".join(dict.fromkeys(f"{change.old:g} -> {change.new:g}" for change in rescales))
        report.warnings.append(f"base learning rate {changes}, as asked; moments kept")
    elif scaling is not None:
        if report.saved_batch is None or report.plan is None:
            raise UsageError(
                "needs the global batch at the save and now", key="lr_scaling", hint="give TrainState the plan"
            )
        factor = batch_factor(scaling, report.saved_batch["global_batch"], report.plan.global_batch)
        report.warnings.append(f"learning rate x {factor:.6g} ({scaling} scaling), as asked")
        rescales = [Rescale(rate or 1.0, (rate or 1.0) * factor) for rate in base]
    else:
        return None
    for name, scheduler in run.state.schedulers.items():
        # Only to learn now, before anything is touched, whether it can be done.
        scaled_schedule(saved.get(name) or scheduler.state_dict(), _own_rescales(run, name, rescales))
    return rescales


def rescale(run: Run, groups: list[dict[str, Any]], rescales: list[Rescale]) -> None:
    """Rescales the learning rates of all groups, and their schedules."""
    scale_groups(groups, rescales)
    for name, scheduler in run.state.schedulers.items():
        scheduler.load_state_dict(scaled_schedule(scheduler.state_dict(), _own_rescales(run, name, rescales)))


def _own_rescales(run: Run, scheduler: str, rescales: list[Rescale]) -> list[Rescale]:
    own = own_groups(run, run.state.schedulers[scheduler])
    if own is not None:
        return [rescales[number] for number in own[1]]
    if len({change.ratio for change in rescales}) > 1:
        raise UsageError(
            f"nothing says which optimizer the scheduler {scheduler!r} drives, and their rates change differently",
            key="lr",
            hint="give the scheduler an attribute optimizer",
        )
    return rescales
