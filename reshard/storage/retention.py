"""Retention: which steps of a run stay and why, and the removal of the others.

A step stays where it is one of the newest, a multiple of a number, one of the best by a metric that was recorded with
it, or pinned. Whatever was asked for, the newest sound step stays, and where no step is sound all of them do: none of
those that stay could stand in for one that goes.

    run/
      PINNED-step-40        step 40 is never removed
      RESUMED-step-80       the run was set back to step 80 and has committed nothing since
      FALLBACK-step-60      the run goes back to step 60 if its loss does not come back; the number of the step that
                            it resumed from is in it

Markers are files, one a step, written whole: processes that pin at once have nothing of each other's to overwrite.
Their names are not those of steps.

THE REMOVAL RULE: who marks a step writes the marker first and looks for the step then; who removes a step takes its
name away first and looks for a marker then. So one of the two sees the other, and a step whose `pin` has returned
stays. Between the two a step is called `.replaced-...`, so that after a crash the next `claim` gives it its name back.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointNotFound, StorageError, UsageError
from reshard.storage.durable import (
    read_existing,
    remove_tree,
    rename_durably,
    storage_errors,
    temporary_target,
    write_atomic,
)
from reshard.storage.steps import REPLACED, committed_steps, move_to_trash, step_number, step_path

PINNED = "PINNED-"
RESUMED = "RESUMED-"
FALLBACK = "FALLBACK-"
_MARKERS = (PINNED, RESUMED, FALLBACK)

DIRECTIONS = ("min", "max")

_MARKER = re.compile(f"({'|'.join(_MARKERS)})(.+)")


@dataclass(frozen=True)
class Best:
    """The `count` steps with the smallest recorded values of a metric, or with the largest.

    Raises:
        UsageError: it is not that.
    """

    metric: str
    count: int
    direction: str = "min"

    def __post_init__(self) -> None:
        is_right = type(self.metric) is str and self.metric and type(self.count) is int and self.count > 0
        if not is_right or self.direction not in DIRECTIONS:
            raise _not_best((self.metric, self.count, self.direction))

    @classmethod
    def of(cls, given: object) -> Best:
        """From `("loss", 2)` or `("accuracy", 2, "max")`.

        Raises:
            UsageError: it is neither.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
            raise _not_best(given)
        return cls(*given)


def _not_best(found: object) -> UsageError:
    return UsageError(
        "not a metric and how many steps to keep by it",
        key="keep_best",
        expected='(metric, count) or (metric, count, "max")',
        found=repr(found),
        hint='such as ("loss", 2): the two steps with the smallest loss; "max" where more is better',
    )


@dataclass(frozen=True)
class Retention:
    """What to keep: the newest steps, the multiples of a number, the best by a metric. A step needs one reason.

    Raises:
        UsageError: a number is not an int of at least 1.
    """

    keep_latest_k: int
    keep_every: int | None = None
    keep_best: Best | None = None

    def __post_init__(self) -> None:
        for name, count in (("keep_latest_k", self.keep_latest_k), ("keep_every", self.keep_every)):
            if (name == "keep_every" and count is None) or (type(count) is int and count > 0):
                continue
            raise UsageError(
                "not a count",
                key=name,
                expected="an int of at least 1",
                found=repr(count),
                hint="at least one step is kept; a number beyond all steps keeps every one",
            )


def reasons_to_stay(
    steps: Collection[int],
    retention: Retention,
    is_sound: Callable[[int], bool],
    *,
    values: Mapping[int, float] | None = None,
    pinned: Collection[int] = (),
    resumed: Collection[int] = (),
    fallback: Collection[int] = (),
) -> dict[int, tuple[str, ...]]:
    """Why each step stays, ascending by step; the steps without a reason go. Nothing is read or removed here.

    Args:
        steps: the committed ones.
        retention: what was asked for.
        is_sound: whether a step passes its check; asked newest first and up to the first sound step only, and not at
            all where nothing is to go.
        values: of the metric of `keep_best`, by step. NaN and infinities are never best; of equal values the newer
            step's is.
        pinned, resumed, fallback: steps with a marker.
    """
    reasons: dict[int, list[str]] = {step: [] for step in sorted(steps)}
    ascending = list(reasons)
    for step in ascending[-retention.keep_latest_k :]:
        reasons[step].append("latest")
    for step in ascending if retention.keep_every else ():
        if step % (retention.keep_every or 1) == 0:
            reasons[step].append(f"every {retention.keep_every}")
    if retention.keep_best is not None:
        for step, value in _best(retention.keep_best, values or {}, reasons):
            reasons[step].append(f"best {retention.keep_best.metric} {value:g}")
    for step in ascending:
        if step in pinned:
            reasons[step].append("pinned")
        if step in resumed:
            reasons[step].append("resumed from")
        if step in fallback:
            reasons[step].append("fallback")
    if not all(reasons.values()):
        newest_sound = next((step for step in reversed(ascending) if is_sound(step)), None)
        if newest_sound is not None:
            reasons[newest_sound].append("newest sound")
        else:
            for step in ascending:
                reasons[step] = reasons[step] or ["no step is sound"]
    return {step: tuple(found) for step, found in reasons.items()}


def _best(best: Best, values: Mapping[int, float], steps: Collection[int]) -> list[tuple[int, float]]:
    sign = -1 if best.direction == "max" else 1
    known = [(step, value) for step, value in values.items() if step in steps and math.isfinite(value)]
    return sorted(known, key=lambda entry: (sign * entry[1], -entry[0]))[: best.count]


@dataclass(frozen=True)
class Plan:
    """What retention would do to a run directory.

    Attributes:
        reasons: why each committed step stays, ascending by step; empty for those that go.
        values: what is recorded of the metric of `keep_best`, by step.
        pinned: every step with such a marker, there or not.
    """

    run_dir: Path
    reasons: dict[int, tuple[str, ...]]
    values: dict[int, float]
    pinned: frozenset[int]

    @property
    def going(self) -> list[int]:
        """The steps to remove, ascending."""
        return [step for step, found in self.reasons.items() if not found]


def plan_retention(
    run_dir: str | os.PathLike[str],
    retention: Retention,
    is_sound: Callable[[Path], bool],
    value_of: Callable[[Path, str], float | None] | None = None,
) -> Plan:
    """What `retention` would remove, and why the other steps stay.

    Args:
        run_dir: where the steps are.
        retention: what is asked for.
        is_sound: whether the step in a folder passes its check; asked as `reasons_to_stay` does.
        value_of: what is recorded of a metric with the step in a folder; asked only for `keep_best`.

    Raises:
        StorageError: the file system refused; likewise what the two functions raise.
    """
    steps = {folder.step: folder.path for folder in committed_steps(run_dir)}
    values: dict[int, float] = {}
    if retention.keep_best is not None and value_of is not None:
        found = {step: value_of(path, retention.keep_best.metric) for step, path in steps.items()}
        values = {step: value for step, value in found.items() if value is not None}
    pinned, resumed, fallback = _marked(run_dir)
    reasons = reasons_to_stay(
        steps,
        retention,
        lambda step: is_sound(steps[step]),
        values=values,
        pinned=pinned,
        resumed=resumed,
        fallback=fallback,
    )
    return Plan(Path(run_dir), reasons, values, pinned)


def remove(plan: Plan) -> list[int]:
    """Remove the steps that the plan lets go, and return which: not one that was marked or has disappeared meanwhile.

    Each loses its name first and whole, so a reader and a crash find complete steps only. Of a symbolic link only the
    link goes.

    Raises:
        StorageError: the file system refused; steps before it in order are removed, the others are whole.
    """
    return [step for step in plan.going if _take_away(step_path(plan.run_dir, step))]


def prune(
    run_dir: str | os.PathLike[str],
    retention: Retention,
    is_sound: Callable[[Path], bool],
    value_of: Callable[[Path, str], float | None] | None = None,
) -> list[int]:
    """`plan_retention` and `remove` in one: the steps removed, ascending."""
    return remove(plan_retention(run_dir, retention, is_sound, value_of))


def _take_away(path: Path) -> bool:
    # One that was marked since the plan keeps its name all along, unless that is in this very moment.
    if any(os.path.lexists(_marker(path, prefix)) for prefix in _MARKERS):
        return False
    aside = path.with_name(f"{REPLACED}{path.name}-{secrets.token_hex(4)}")
    try:
        rename_durably(path, aside)
    except StorageError:
        if os.path.lexists(path) or os.path.lexists(aside):
            raise
        return False
    # By listing: a lookup of a name may be answered from what a client of a shared file system remembers.
    number = step_number(path.name)
    if not any(number in marked for marked in _marked(path.parent)):
        move_to_trash(aside)
        return True
    # Marked in between, by someone who relies on it. A claim may have given it its name back already, and
    # the run may have come to the step again.
    if os.path.lexists(path):
        move_to_trash(aside)
    elif os.path.lexists(aside):
        rename_durably(aside, path)
    return False


def pin(run_dir: str | os.PathLike[str], step: int) -> None:
    """Keep a committed step until `unpin`, whatever any process's retention says. Pinning it again is fine.

    Raises:
        CheckpointNotFound: the step is not there.
        UsageError: it is negative.
        StorageError: the file system refused.
    """
    _mark(run_dir, PINNED, step)


def unpin(run_dir: str | os.PathLike[str], step: int) -> None:
    """Leave a step to retention again, also one that was kept to go back to; one that is not pinned is fine.

    A power cut may bring the pin back.

    Raises:
        UsageError: the step is negative.
        StorageError: the file system refused.
    """
    for prefix in (PINNED, FALLBACK):
        remove_tree(_marker(step_path(run_dir, step), prefix))


def record_resumed(run_dir: str | os.PathLike[str], step: int | None) -> None:
    """Keep the step that a run has been set back to, in place of what was recorded before; None keeps none any more.

    For the attempt that owns the run. Of a run that goes on from its newest sound step there is nothing to record:
    that step stays anyway until a newer one is sound.

    Raises:
        CheckpointNotFound: the step is not there.
        StorageError: the file system refused.
    """
    _record(run_dir, RESUMED, step)


def record_fallback(run_dir: str | os.PathLike[str], step: int | None, resume_step: int | None = None) -> None:
    """Likewise the step that a run would go back to if its loss did not come back after it resumed from another.

    Raises:
        CheckpointNotFound: the step is not there.
        StorageError: the file system refused.
    """
    _record(run_dir, FALLBACK, step, b"" if resume_step is None else str(resume_step).encode())


def recorded_fallback(run_dir: str | os.PathLike[str]) -> tuple[int, int] | None:
    """The step that a run would go back to, and the one that it had resumed from; None where none is there.

    Raises:
        StorageError: the file system refused.
    """
    for name in _names(run_dir):
        step = step_number(name.removeprefix(FALLBACK)) if name.startswith(FALLBACK) else None
        if step is None or not step_path(run_dir, step).is_dir():
            continue
        content = read_existing(Path(run_dir, name))
        if content is not None and content.isdigit():
            return step, int(content)
    return None


def _record(run_dir: str | os.PathLike[str], prefix: str, step: int | None, content: bytes = b"") -> None:
    if step is not None:
        _mark(run_dir, prefix, step, content)
    for name in _names(run_dir):
        target = temporary_target(name)
        if (target or name).startswith(prefix) and (target or step is None or name != f"{prefix}step-{step}"):
            remove_tree(Path(run_dir, name))


def _mark(run_dir: str | os.PathLike[str], prefix: str, step: int, content: bytes = b"") -> None:
    path = step_path(run_dir, step)
    _require_step(path)
    write_atomic(_marker(path, prefix), content)
    # If it has just gone, the marker stays: another process may rely on it, or be about to give the step back for it.
    _require_step(path)


def _require_step(path: Path) -> None:
    if path.is_dir():
        return
    there = [folder.step for folder in committed_steps(path.parent)]
    raise CheckpointNotFound(
        "the step to keep is not there",
        path=path,
        hint=f"there are steps {there}" if there else "save it first: nothing is committed there",
    )


def _marker(path: Path, prefix: str) -> Path:
    return path.with_name(prefix + path.name)


def _marked(run_dir: str | os.PathLike[str]) -> tuple[frozenset[int], ...]:
    """The steps with each of the markers, there or not."""
    found: dict[str, set[int]] = {prefix: set() for prefix in _MARKERS}
    for name in _names(run_dir):
        if (match := _MARKER.fullmatch(name)) and (step := step_number(match[2])) is not None:
            found[match[1]].add(step)
    return tuple(frozenset(found[prefix]) for prefix in _MARKERS)


def _names(run_dir: str | os.PathLike[str]) -> list[str]:
    with storage_errors("list the run directory", run_dir):
        try:
            return sorted(os.listdir(run_dir))  # noqa: PTH208  (names are all that is needed)
        except FileNotFoundError:
            return []
