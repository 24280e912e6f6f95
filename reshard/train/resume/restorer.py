"""Handing the restored parts back to their owners, and taking them back where one refuses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reshard.errors import ReshardError, StateMismatch
from reshard.formats import tagged
from reshard.train.learning_rate import Rescale
from reshard.train.resume.parts import Choices, kept_states
from reshard.train.resume.report import LoadReport
from reshard.train.resume.schedules import fitted
from reshard.train.resume.source import Run, Source
from reshard.train.rng import reseed, restore_rng
from reshard.train.state import DATA, SCALER, SCHEDULER, Stateful, extra_part


@dataclass
class Restorer:
    """Hands the restored parts back one after the other, and takes it back if one of them refuses.

    Attributes:
        partners, rescales: of the live parameter groups, as the schedules need them.
        lost: what was handed over and has no way back: state with tensors of its own is not copied for that.
    """

    run: Run
    source: Source
    choices: Choices
    partners: Sequence[int | None] = ()
    rescales: Sequence[Rescale] | None = None

    def __post_init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self.lost: list[str] = []

    def restore(self, parts: set[str], tensors: Mapping[str, Any]) -> None:
        """Everything but model, optimizer and random states, from the manifest and the tensors beside it."""
        run, state = self.run, self.run.state
        targets: dict[str, Stateful] = {
            **({DATA: state.data} if state.data is not None else {}),
            **({SCALER: state.scaler} if state.scaler is not None else {}),
            **{f"{SCHEDULER}.{name}": scheduler for name, scheduler in state.schedulers.items()},
            **{extra_part(name): value for name, value in state.extra.items()},
        }
        for part, kept in kept_states(run, self.source, parts).items():
            if part == DATA and self.choices.data == "restart":
                continue
            value = tagged.decode(kept, resolve=lambda key: tensors[key])
            if part.startswith(f"{SCHEDULER}."):
                value = fitted(
                    run,
                    self.source,
                    part.removeprefix(f"{SCHEDULER}."),
                    value,
                    self.partners,
                    self.rescales,
                    counts_ranks=self.choices.scheduler_counts_ranks,
                    keep_live=self.choices.keep_live_schedule,
                )
            self._hand_over(part, targets[part], value, can_undo=not tagged.stored_keys(kept))

    def take_back(self) -> None:
        """Puts every part back that was handed over; ``lost`` has the names of those that have no way back."""
        for back in reversed(self._undo):
            # A part whose own state it refuses could not be helped anyway; the first error is the one to tell.
            with contextlib.suppress(Exception):
                back()

    def _hand_over(self, part: str, target: Stateful, value: Any, *, can_undo: bool) -> None:
        # A loader of the user's may start its workers when asked for its state.
        if can_undo and (part != DATA or self.run.state.shares_data_position):
            self._undo.append(partial(target.load_state_dict, copy.deepcopy(target.state_dict())))
        else:
            self.lost.append(part)
        try:
            target.load_state_dict(value)
        except ReshardError:
            raise
        except Exception as fault:
            raise StateMismatch(
                f"{type(target).__name__}.load_state_dict refused the saved state ({type(fault).__name__}: {fault})",
                path=self.source.folder,
                key=part,
                hint="build it as it was when saved, or leave it out of TrainState and name it in allow_unexpected",
            ) from fault


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
