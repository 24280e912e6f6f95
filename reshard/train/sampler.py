"""Which samples a step trains on, whatever the number of ranks.

    N   samples in the data set          B   samples in a step (the global batch)
    p   samples trained on so far        b   samples in a slot (the micro-batch)

A step takes the B samples at positions p..p+B-1 of the epoch's order and deals them to its slots, b to each, in
order. The position counts what was trained on, not what a prefetching loader has fetched: ``advance`` moves it, once a
step, and nothing else does.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import Sampler

from reshard.batch.plan import BatchPlan
from reshard.errors import StateMismatch, UsageError
from reshard.train.order import EpochOrder
from reshard.train.sample_streams import SampleIndex

T = TypeVar("T")
log = logging.getLogger("reshard")

LastBatch = Literal["keep", "drop", "wrap"]


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for one data-parallel rank, over a global order that does not know the world size.

    Give it to a plain loader, take steps from it, and tell it when a step is done::

        sampler = ElasticSampler(len(dataset), plan, dp_rank, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for micro_batches in sampler.steps(loader):      # up to the end of the epoch
            loss = accumulate(model, micro_batches, compute_loss, plan, sampler=sampler)   # advances the sampler
            ...

    A rank that has no slot in the last micro-step gets the samples of the step's last slot, to run along with
    weight zero. Stateful, the same state on every rank: position, epoch, seed, length.

    Args:
        length: samples in the data set.
        plan: global batch, micro-batch and data-parallel ranks.
        dp_rank: this rank's data-parallel coordinate, in [0, plan.ranks).
        seed: of the order; epochs differ by themselves.
        shuffle: False for the data set's own order.
        last: what to do when fewer than a global batch are left in the epoch. ``keep`` trains on them as a smaller
            step, ``drop`` leaves them out, ``wrap`` fills the step with the first samples of the next epoch.
        fingerprint: anything that tells one data set from another; a resume on a different one is refused.
    """

    world_independent = True

    def __init__(
        self,
        length: int,
        plan: BatchPlan,
        dp_rank: int = 0,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: LastBatch = "keep",
        fingerprint: str | None = None,
    ) -> None:
        if not 0 <= dp_rank < plan.ranks:
            raise UsageError(
                "not a data-parallel rank of the plan", key="dp_rank", expected=f"0..{plan.ranks - 1}", found=dp_rank
            )
        if last not in ("keep", "drop", "wrap"):
            raise UsageError("unknown policy", key="last", expected="keep, drop or wrap", found=last)
        if length < (plan.global_batch if last == "drop" else 1):
            raise UsageError(
                "the data set is too small for a single step",
                expected=f"at least {plan.global_batch if last == 'drop' else 1} samples",
                found=length,
            )
        self.length = length
        self.plan = plan
        self.dp_rank = dp_rank
        self.seed = seed
        self.shuffle = shuffle
        self.last = last
        self.fingerprint = fingerprint
        self.epoch = 0
        self.offset = 0
        self.samples = 0

    @property
    def next_samples(self) -> int:
        """How many samples the next step trains on: the global batch, or less at the end of an epoch."""
        return self._step_samples(self.offset)

    def advance(self) -> None:
        """The step is done: moves the position past its samples. Call it once a step, on every rank."""
        taken = self.next_samples
        self.samples += taken
        self.epoch, self.offset = self._after(self.epoch, self.offset)

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``; does nothing where that epoch has begun already, so that a resumed loop may call it."""
        if epoch != self.epoch:
            self.epoch, self.offset = epoch, 0

    def steps(self, loader: Iterable[T]) -> Iterator[list[T]]:
        """The micro-batches of each step from here to the end of the epoch, as ``loader`` gives them."""
        epoch, offset = self.epoch, self.offset
        batches = iter(loader)
        while self.epoch == epoch and self._has_step(offset):
            yield self._take(batches, self.plan.micro_steps(self._step_samples(offset)))
            if self._after(epoch, offset) != (self.epoch, self.offset):
                raise UsageError(
                    "the sampler was not advanced after a step",
                    expected=f"{self._after(epoch, offset)[1]} samples into the epoch",
                    found=self.offset,
                    hint="pass sampler= to accumulate, or call sampler.advance() once a step",
                )
            offset = self.offset

    def __iter__(self) -> Iterator[list[int]]:
        epoch, offset = self.epoch, self.offset
        while self._has_step(offset):
            samples = self._step_samples(offset)
            for micro_step in range(self.plan.micro_steps(samples)):
                yield self._slot_indices(epoch, offset, samples, micro_step)
            offset += samples

    def __len__(self) -> int:
        """Micro-batches that iterating now gives this rank."""
        whole, rest = divmod(self.length - self.offset, self.plan.global_batch)
        batches = whole * self.plan.accumulation
        if rest and self.last != "drop":
            batches += self.plan.micro_steps(self._step_samples(self.length - rest))
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "epoch": self.epoch,
            "offset": self.offset,
            "seed": self.seed,
            "length": self.length,
            "shuffle": self.shuffle,
            "last": self.last,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes position and seed.

        Raises:
            StateMismatch: the saved order is that of another data set or policy, so the position means nothing here.
        """
        for name in ("length", "shuffle", "last", "fingerprint"):
            if state[name] != getattr(self, name):
                raise StateMismatch(
                    "the data position belongs to another order of samples",
                    key=f"data.{name}",
                    expected=state[name],
                    found=getattr(self, name),
                    hint="resume on the data set it was saved with, or start the data anew with data='restart'",
                )
        if state["seed"] != self.seed:
            log.warning("data seed %s ignored; the checkpoint's %s restored", self.seed, state["seed"])
        self.seed = int(state["seed"])
        self.samples, self.epoch, self.offset = (int(state[name]) for name in ("samples", "epoch", "offset"))

    def _has_step(self, offset: int) -> bool:
        return offset + (self.plan.global_batch if self.last == "drop" else 1) <= self.length

    def _step_samples(self, offset: int) -> int:
        return self.plan.global_batch if self.last == "wrap" else min(self.plan.global_batch, self.length - offset)

    def _after(self, epoch: int, offset: int) -> tuple[int, int]:
        position = offset + self._step_samples(offset)
        if self._has_step(position):
            return epoch, position
        epochs, position = divmod(position, self.length) if self.last == "wrap" else (1, 0)
        return epoch + epochs, position

    def _take(self, batches: Iterator[T], count: int) -> list[T]:
        taken = list(itertools.islice(batches, count))
        if len(taken) < count:
            raise UsageError(
                "the loader ended in the middle of a step",
                expected=f"{count} micro-batches",
                found=len(taken),
                hint="build it as DataLoader(dataset, batch_sampler=sampler)",
            )
        return taken

    def _slot_indices(self, epoch: int, offset: int, samples: int, micro_step: int) -> list[int]:
        slot = micro_step * self.plan.ranks + self.dp_rank
        # An idle rank repeats the last slot: if its loss is not finite, neither is the step's without it.
        slot = min(slot, self.plan.active_slots(samples) - 1)
        first = offset + slot * self.plan.micro_batch
        positions = np.arange(first, first + self.plan.slot_samples(slot, samples))
        indices: list[int] = []
        for further in range(positions[0] // self.length, positions[-1] // self.length + 1):
            order = EpochOrder(self.length, self.seed, epoch + further, shuffle=self.shuffle)
            inside = positions[positions // self.length == further] - further * self.length
            indices += [SampleIndex(int(index), epoch + int(further)) for index in order[inside]]
        return indices
