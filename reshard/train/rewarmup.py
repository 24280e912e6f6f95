"""Climbing back onto a learning rate schedule, where a run has to go on without the moments of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from reshard.errors import StateMismatch, UsageError
from reshard.train.state import OPTIMIZER

_INNER, _DONE, _STEPS, _RATES = "scheduler", "done", "steps", "_last_lr"
_NEEDED = ("optimizer", "step", "state_dict", "load_state_dict")


class Rewarmup:
    """A scheduler around another. After ``begin``, the learning rate climbs linearly from a fraction of the scheduled
    one back onto the schedule; before and after that it is the schedule's, to the bit.

    ::

        scheduler = Rewarmup(CosineAnnealingLR(optimizer, 10_000), steps=200)
        state = TrainState(model, optimizer, scheduler, ...)
        checkpointer.resume(lost_optimizer="rewarm")    # begins it if the checkpoint has no moments

    Adam's first updates after its moments are lost have the size of the learning rate in every element, as at the very
    beginning of a run, for which there is a warm-up, too. Step k of n after ``begin`` (from 0) has
    ``start + (1 - start) k / n`` times the scheduled rate. It is part of the saved state: a run that is interrupted on
    the way climbs on. A checkpoint that was saved with the inner scheduler alone is taken as well.

    Args:
        scheduler: any with ``optimizer``, ``step``, ``state_dict`` and ``load_state_dict``.
        steps: how many optimizer steps the climb takes.
        start: the fraction that it begins with.

    Raises:
        UsageError: ``steps`` is no count, ``start`` not between 0 and 1, or ``scheduler`` none or a Rewarmup itself.
    """

    def __init__(self, scheduler: Any, steps: int = 100, start: float = 0.01) -> None:
        if type(steps) is not int or steps < 1:
            raise UsageError("not a count", key="steps", expected="an int of at least 1", found=repr(steps))
        if isinstance(start, bool) or not isinstance(start, (int, float)) or not 0 <= start <= 1:
            raise UsageError("not a fraction", key="start", expected="0 to 1", found=repr(start))
        lacking = [name for name in _NEEDED if not hasattr(scheduler, name)]
        if lacking or isinstance(scheduler, Rewarmup):
            raise UsageError(
                "not a scheduler to climb back onto",
                key="scheduler",
                expected=f"one with {', '.join(_NEEDED)}",
                found=f"{type(scheduler).__name__}" + (f" without {', '.join(lacking)}" if lacking else ""),
                hint="wrap the schedule itself, once: reshard.Rewarmup(CosineAnnealingLR(optimizer, 10_000))",
            )
        self.scheduler = scheduler
        self.steps = steps
        self.start = start
        self._done: int | None = None
        self._scheduled: list[float] = []

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.scheduler.optimizer
        return optimizer

    @property
    def is_climbing(self) -> bool:
        """Whether the learning rate is below the schedule's."""
        return self._done is not None

    def begin(self) -> None:
        """The next optimizer step has the smallest learning rate. A climb that is under way begins anew."""
        if self._done is None:
            last = getattr(self.scheduler, "_last_lr", None)
            # Where the optimizer was not restored, its groups have the rates of a fresh run, not the schedule's.
            rates = last if isinstance(last, list) else [group["lr"] for group in self.optimizer.param_groups]
            self._scheduled = [float(rate) for rate in rates]
        self._done = 0
        self._set([rate * self._factor for rate in self._scheduled])

    def step(self, *args: Any, **options: Any) -> None:
        """As the inner scheduler's."""
        if self._done is None:
            self.scheduler.step(*args, **options)
            return
        # Many schedules compute the next rate from the present one.
        self._set(self._scheduled)
        self.scheduler.step(*args, **options)
        self._scheduled = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._done += 1
        if self._done >= self.steps:
            self._done = None
            return
        self._set([rate * self._factor for rate in self._scheduled])

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group, as the next optimizer step will have it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's, and how far the climb is."""
        climbing = self._done is not None
        return {
            _INNER: self.scheduler.state_dict(),
            _DONE: self._done,
            _STEPS: self.steps,
            "start": self.start,
            # Under a name that follows when the schedule is rescaled to another learning rate.
            _RATES: list(self._scheduled) if climbing else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From ``state_dict``, of this class or of the inner scheduler. A climb goes on as it was begun.

        Raises:
            StateMismatch: a climb of another number of parameter groups.
        """
        if not is_rewarmup_state(state):
            self.scheduler.load_state_dict(dict(state))
            self._done, self._scheduled = None, []
            return
        if state[_DONE] is not None:
            self._require_groups(len(state[_RATES]))
        self.scheduler.load_state_dict(state[_INNER])
        self._done = state[_DONE]
        self._scheduled = list(state[_RATES] or [])
        if self._done is not None:
            self.steps, self.start = state[_STEPS], state["start"]

    @property
    def _factor(self) -> float:
        assert self._done is not None
        return self.start + (1 - self.start) * self._done / self.steps

    def _require_groups(self, count: int) -> None:
        if count != len(self.optimizer.param_groups):
            raise StateMismatch(
                "the schedule is that of another number of parameter groups",
                key="param_groups",
                expected=count,
                found=len(self.optimizer.param_groups),
                hint="build the optimizer with the groups that the schedule was saved with",
            )

    def _set(self, rates: list[float]) -> None:
        self._require_groups(len(rates))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                # A captured or compiled step holds on to the tensor itself.
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def is_rewarmup_state(state: object) -> bool:
    """Whether a scheduler's state is that of a Rewarmup."""
    return isinstance(state, Mapping) and _INNER in state and _DONE in state


def is_climbing(state: object) -> bool:
    """Whether a scheduler's state was saved on the way back to the schedule."""
    return isinstance(state, Mapping) and is_rewarmup_state(state) and state[_DONE] is not None


def inner_scheduler(scheduler: Any) -> Any:
    """What a Rewarmup is around; any other scheduler is itself."""
    return scheduler.scheduler if isinstance(scheduler, Rewarmup) else scheduler


def inner_state(state: Any) -> Any:
    """The state of what a Rewarmup is around; any other is itself."""
    return state[_INNER] if is_rewarmup_state(state) else state


def with_inner_state(state: Any, inner: Any) -> Any:
    """A scheduler's state with another one inside, if it is a Rewarmup's; else the other."""
    return {**state, _INNER: inner} if is_rewarmup_state(state) else inner


def with_climb(state: Any, rates: Any = None, per_step: Fraction = Fraction(1)) -> Any:
    """A scheduler's state with its climb, if it has one, at other rates of the schedule, a list, or where each of its
    steps is counted another number of times."""
    if not is_climbing(state):
        return state
    counts = {key: max(1 if key == _STEPS else 0, int(state[key] * per_step)) for key in (_DONE, _STEPS)}
    return {**state, **counts, _RATES: state[_RATES] if rates is None else rates}


def climb_rates(state: Any) -> Any:
    """The rates of the schedule below a climb, one a parameter group; None where there is no climb."""
    return state[_RATES] if is_climbing(state) else None


def with_lost_optimizer(options: Mapping[str, Any], choice: str, *, can_climb: bool) -> dict[str, Any]:
    """The options of ``load_state`` with which a run goes on without the state of its optimizer, or does not.

    Raises:
        UsageError: no such choice; nothing there to climb with; or the optimizer given up in another way, after which
            the run would go on with full steps.
    """
    if choice not in ("refuse", "rewarm"):
        raise UsageError("no such choice", key="lost_optimizer", expected="'refuse' or 'rewarm'", found=repr(choice))
    missing = options.get("allow_missing", ())
    if choice == "rewarm":
        if not can_climb:
            raise UsageError(
                "no schedule that can climb",
                key="lost_optimizer",
                expected="a reshard.Rewarmup among the schedulers",
                found="none",
                hint="wrap the scheduler: reshard.Rewarmup(scheduler)",
            )
        return {**options, "allow_missing": [*missing, OPTIMIZER]}
    if not isinstance(missing, str) and OPTIMIZER in missing:
        raise lost_moments()
    return dict(options)


def lost_moments() -> UsageError:
    """What is said to a run that would go on with full steps."""
    return UsageError(
        "a run without the moments of its optimizer takes full steps, which spoil it",
        key="allow_missing",
        found=OPTIMIZER,
        hint="resume(lost_optimizer='rewarm') with a reshard.Rewarmup; or load_state, if the moments do not matter",
    )
