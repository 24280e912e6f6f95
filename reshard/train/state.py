"""What a run consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from reshard.batch.plan import BatchPlan
from reshard.errors import UsageError

# The parts of a run's state, as manifests and messages name them; objects in ``extra`` follow as ``extra.<name>``.
MODEL, OPTIMIZER, SCHEDULER, SCALER = "model", "optimizer", "scheduler", "scaler"
RNG, DATA, BATCH, STEP = "rng", "data", "batch", "step"


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class TrainState:
    """Everything a resumed run needs. What the run does not have stays None, and a checkpoint records that.

    Attributes:
        model: FSDP2 (``fully_shard``), FSDP1, or plain.
        optimizer: one, or several by name, over disjoint parameters of the model.
        scheduler: one, several by name, or a list of them.
        scaler: the gradient scaler (fp16).
        data: the data position: an ``ElasticSampler``, or a loader that knows its own rank only, whose states are
            then kept per rank.
        plan: global batch, micro-batch and data-parallel ranks.
        extra: further objects with ``state_dict``, by name (an EMA, random streams). Tensors in their state go beside
            the model's; the rest is taken from rank 0.
        step: optimizer steps done.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    data: Stateful | None = None
    plan: BatchPlan | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    step: int = 0

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return _by_name(self.optimizer, "optimizer")

    @property
    def schedulers(self) -> dict[str, Stateful]:
        return _by_name(self.scheduler, "scheduler")

    @property
    def shares_data_position(self) -> bool:
        """Whether ``data`` has one position for all ranks, as an ``ElasticSampler`` does, and not one for each."""
        return bool(getattr(self.data, "world_independent", False))

    @property
    def parts(self) -> dict[str, bool]:
        """Each part, and whether this run has it. Every run has a model, random states and a step."""
        return {
            MODEL: True,
            OPTIMIZER: bool(self.optimizers),
            SCHEDULER: bool(self.schedulers),
            # A disabled one has no state; scripts make it all the same, for every precision.
            SCALER: self.scaler is not None and self.scaler.is_enabled(),
            RNG: True,
            DATA: self.data is not None,
            BATCH: self.plan is not None,
            STEP: True,
            **{extra_part(name): True for name in self.extra},
        }

    def validate(self) -> None:
        """Raises UsageError where something in it is not what it should be."""
        if not isinstance(self.model, torch.nn.Module):
            raise UsageError("not a model", key="model", expected="torch.nn.Module", found=type(self.model).__name__)
        if type(self.step) is not int or self.step < 0:
            raise UsageError(
                "not a number of steps", key="step", expected="an int of at least 0", found=repr(self.step)
            )
        for name, optimizer in self.optimizers.items():
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(
                    "not an optimizer", key=name, expected="torch.optim.Optimizer", found=type(optimizer).__name__
                )
        for name, value in {
            **self.schedulers,
            **{extra_part(name): value for name, value in self.extra.items()},
            **({DATA: self.data} if self.data is not None else {}),
        }.items():
            if not isinstance(value, Stateful):
                raise UsageError(
                    "not an object with state_dict and load_state_dict", key=name, found=type(value).__name__
                )


def extra_part(name: str) -> str:
    return f"extra.{name}"


def _by_name(value: Any, only: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return {str(number): item for number, item in enumerate(value)}
    return {only: value}
