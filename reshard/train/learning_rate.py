"""The learning rate across a resume: asserted to be the saved one, or changed because somebody asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from reshard.errors import StateMismatch
from reshard.train.state import Stateful

TOLERANCE = 1e-12
SCALED_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")
SCALED_SCHEDULER_KEYS = ("base_lrs", "max_lrs", "_last_lr")

Scaling = Literal["linear", "sqrt"]


def base_lr(group: Mapping[str, Any]) -> float:
    """What the schedule starts from: the configured learning rate of a group."""
    return float(group.get("initial_lr", group["lr"]))


def batch_factor(scaling: Scaling, saved_global_batch: int, global_batch: int) -> float:
    """By how much another global batch scales the learning rate (Goyal et al. 2017; Krizhevsky 2014)."""
    ratio = global_batch / saved_global_batch
    return ratio if scaling == "linear" else math.sqrt(ratio)


def scale_learning_rates(
    groups: Sequence[dict[str, Any]], schedulers: Mapping[str, Stateful], factors: Sequence[float]
) -> None:
    """Multiplies every learning rate of group i, and of its schedule, by ``factors[i]``.

    A schedule is thus rescaled as a whole: at its present place it gives ``factor`` times the saved rate.
    """
    for group, factor in zip(groups, factors, strict=True):
        for key in SCALED_GROUP_KEYS:
            if key in group:
                group[key] = _times(group[key], factor)
    for scheduler in schedulers.values():
        scheduler.load_state_dict(_scaled_schedule(scheduler.state_dict(), factors))


def assert_restored(groups: Sequence[Mapping[str, Any]], saved: Sequence[float], path: object) -> None:
    """Raises StateMismatch unless the learning rate of every group is the saved one to 1e-12."""
    for number, (group, expected) in enumerate(zip(groups, saved, strict=True)):
        if not abs(float(group["lr"]) - expected) <= TOLERANCE:
            raise StateMismatch(
                "the learning rate was not restored",
                path=str(path),
                key=f"param_groups.{number}.lr",
                expected=expected,
                found=float(group["lr"]),
                hint="manifest and tensors of this step contradict each other: use another step",
            )


def _scaled_schedule(state: Any, factors: Sequence[float]) -> Any:
    if isinstance(state, dict):
        return {
            key: [_times(value, factor) for value, factor in zip(values, factors, strict=False)]
            if key in SCALED_SCHEDULER_KEYS and isinstance(values, (list, tuple))
            else _scaled_schedule(values, factors)
            for key, values in state.items()
        }
    if isinstance(state, (list, tuple)) and any(isinstance(item, dict) for item in state):
        return type(state)(_scaled_schedule(item, factors) for item in state)
    return state


def _times(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, (int, float, torch.Tensor)) else value
