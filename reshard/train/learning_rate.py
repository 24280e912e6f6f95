"""The learning rate across a resume: asserted to be the saved one, or changed because somebody asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from reshard.errors import StateMismatch, UsageError

TOLERANCE = 1e-12
SCALED_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCALED_SCHEDULER_KEYS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
# The floor of a schedule: one number for all groups.
SCALED_FLOORS = ("eta_min",)

Scaling = Literal["linear", "sqrt"]


@dataclass(frozen=True)
class Rescale:
    """From one base learning rate of a group to another: every rate of its schedule follows in proportion."""

    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value * self.ratio
        # 1e-4 * (5e-5 / 1e-4) need not be 5e-5 to the last bit, and the base rate should be.
        return self.new if value == self.old else value * self.ratio


def base_lr(group: Mapping[str, Any]) -> float:
    """What the schedule starts from: the configured learning rate of a group."""
    rate = group.get("initial_lr", group.get("lr"))
    return math.nan if rate is None else float(rate)


def lr_of(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a group; None where it has none (some optimizers), or one that JSON cannot hold."""
    rate = group.get("lr")
    return None if rate is None or not math.isfinite(float(rate)) else float(rate)


def is_same_lr(a: float | None, b: float | None) -> bool:
    """Whether two rates as ``lr_of`` gives them agree to 1e-12."""
    return a is b if a is None or b is None else abs(a - b) <= TOLERANCE


def batch_factor(scaling: Scaling, saved_global_batch: int, global_batch: int) -> float:
    """By how much another global batch scales the learning rate (Goyal et al. 2017; Krizhevsky 2014)."""
    ratio = global_batch / saved_global_batch
    return ratio if scaling == "linear" else math.sqrt(ratio)


def rescales_to(wanted: float | Sequence[float], base: Sequence[float]) -> list[Rescale]:
    """From each group's base learning rate to the one asked for: one for all groups, or one a group.

    Raises:
        UsageError: not a rate for each group, not a usable number, or a base of 0 (of which no multiple is another).
    """
    new = [float(wanted)] * len(base) if isinstance(wanted, (int, float)) else [float(value) for value in wanted]
    if len(new) != len(base):
        raise UsageError("one learning rate a parameter group", key="lr", expected=len(base), found=len(new))
    for old, value in zip(base, new, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError("not a learning rate", key="lr", expected="a number of 0 or more", found=value)
        if not math.isfinite(old) or old == 0 != value:
            raise UsageError(
                f"a schedule whose base learning rate is {old:g} cannot be rescaled",
                key="lr",
                found=value,
                hint="set the learning rate in the optimizer and load with param_groups='target'",
            )
    return [Rescale(old or 1.0, value if old else 1.0) for old, value in zip(base, new, strict=True)]


def scale_groups(groups: Sequence[dict[str, Any]], rescales: Sequence[Rescale]) -> None:
    """Rescales every learning rate of each group in place."""
    for group, rescale in zip(groups, rescales, strict=True):
        for key in SCALED_GROUP_KEYS:
            if isinstance(value := group.get(key), torch.Tensor):
                # A captured or compiled step holds on to the tensor itself.
                value.copy_(rescale(value))
            elif isinstance(value, (int, float)):
                group[key] = rescale(value)


def scaled_schedule(state: Any, rescales: Sequence[Rescale]) -> Any:
    """A scheduler's state, schedulers within schedulers included, with every learning rate rescaled.

    The schedule is thus rescaled as a whole: at each step it gives ``ratio`` times what it would have given.

    Raises:
        UsageError: it has one floor for groups that are rescaled differently.
    """
    if isinstance(state, dict):
        return {key: _scaled_entry(key, value, rescales) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and any(isinstance(item, dict) for item in state):
        return type(state)(scaled_schedule(item, rescales) for item in state)
    return state


def _scaled_entry(key: object, value: Any, rescales: Sequence[Rescale]) -> Any:
    if key in SCALED_SCHEDULER_KEYS and isinstance(value, (list, tuple)) and len(value) == len(rescales):
        return [rescale(item) for item, rescale in zip(value, rescales, strict=True)]
    if key in SCALED_FLOORS and isinstance(value, (int, float)) and value:
        ratios = {rescale.ratio for rescale in rescales}
        if len(ratios) > 1:
            raise UsageError(
                f"groups are rescaled differently, and their schedule has one {key} for all of them",
                key="lr",
                found=sorted(ratios),
                hint=f"scale all groups alike, or save from a schedule with {key}=0",
            )
        return value * ratios.pop() if ratios else value
    return scaled_schedule(value, rescales)


def assert_restored(groups: Sequence[Mapping[str, Any]], saved: Sequence[float | None], path: object) -> None:
    """Raises StateMismatch unless the learning rate of every group is the saved one to 1e-12."""
    for number, (group, expected) in enumerate(zip(groups, saved, strict=True)):
        if not is_same_lr(found := lr_of(group), expected):
            raise StateMismatch(
                "the learning rate was not restored",
                path=str(path),
                key=f"param_groups.{number}.lr",
                expected=expected,
                found=found,
                hint="manifest and tensors of this step contradict each other: use another step",
            )
