"""Which samples a step trains on, whatever the number of ranks.

    N   samples in the data set          B   samples in a step (the global batch)
    p   samples trained on so far        b   samples in a slot (the micro-batch)

A step takes the B samples at positions p..p+B-1 of the epoch's order and deals them to its slots, b to each, in
order. The position counts what was trained on, not what a prefetching loader has fetched: ``advance`` moves it, once a
step, and nothing else does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import Sampler

from reshard.batch.plan import BatchPlan
from reshard.dcp.ranks import all_ranks
from reshard.errors import StateMismatch, UsageError
from reshard.train.order import EpochOrder
from reshard.train.rng import cpu_stream, derive_seed
from reshard.train.streams import SampleIndex

T = TypeVar("T")

LastBatch = Literal["keep", "drop", "wrap"]


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for one data-parallel rank, over a global order that does not know the world size.

    Give it to a plain loader, take steps from it, and tell it when a step is done::

        sampler = ElasticSampler(len(dataset), plan, dp_rank, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)      # see StopSignal on data workers
        while sampler.epoch < epochs:                        # right after a resume, too
            for micro_batches in sampler.steps(loader):      # up to the end of the epoch
                result = accumulate(model, micro_batches, compute_loss, plan, sampler=sampler)   # advances the sampler
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
        fingerprint: anything that tells one data set from another; a resume on a different one is refused. Where only
            one side has it, that is pointed out.
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
        self.length = int(length)
        self.plan = plan
        self.dp_rank = dp_rank
        self.seed = int(seed)
        self.shuffle = shuffle
        self.last = last
        self.fingerprint = fingerprint
        self.epoch = 0
        self.offset = 0
        self.samples = 0
        self._fetched_from: tuple[int, int] | None = None

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
        """Skips to the start of ``epoch``; does nothing within that epoch, so that a resumed loop may call it.

        Raises:
            UsageError: an epoch that is over: a resumed loop that counts from 0 would train on everything again.
        """
        if epoch < self.epoch:
            raise UsageError(
                "that epoch is over",
                key="epoch",
                expected=f"{self.epoch} or later",
                found=epoch,
                hint="loop with: while sampler.epoch < epochs",
            )
        if epoch > self.epoch:
            self.epoch, self.offset = epoch, 0

    def steps(self, loader: Iterable[T]) -> Iterator[list[T]]:
        """The micro-batches of each step from here to the end of the epoch, as ``loader`` gives them.

        Raises:
            UsageError: the loader does not draw from this sampler at this position, it ended in the middle of a step,
                or a step was taken and the sampler not advanced.
        """
        epoch, offset = start = self.epoch, self.offset
        # A loader draws a seed for its workers from the process's stream. A resumed run begins to iterate elsewhere, so
        # that one draw would shift all that follows.
        with cpu_stream(derive_seed("loader", self.seed, epoch, offset, self.dp_rank)):
            batches = iter(loader)
        while self.epoch == epoch and self._has_step(offset):
            micro_batches = self._take(batches, self.plan.micro_steps(self._step_samples(offset)))
            if self._fetched_from != start:
                # Trained on, they would be other samples than the position says, and nothing would show it.
                raise UsageError(
                    "the loader's batches are not those of this sampler at its position",
                    expected=_place(start),
                    found="nothing drawn from it" if self._fetched_from is None else _place(self._fetched_from),
                    hint="build it as DataLoader(dataset, batch_sampler=sampler), and begin iterating after the resume",
                )
            yield micro_batches
            if self._after(epoch, offset) != (self.epoch, self.offset):
                raise UsageError(
                    "the sampler was not advanced after a step",
                    expected=_place(self._after(epoch, offset)),
                    found=_place((self.epoch, self.offset)),
                    hint="pass sampler= to accumulate, or call sampler.advance() once a step",
                )
            offset = self.offset

    def __iter__(self) -> Iterator[list[int]]:
        epoch, offset = self._fetched_from = self.epoch, self.offset
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
        if lacking := [name for name in self.state_dict() if name not in state]:
            raise StateMismatch(
                "not the position of an ElasticSampler", key="data", expected=", ".join(lacking), found="none of them"
            )
        restart = "resume on the data set it was saved with, or start the data anew with data='restart'"
        for name in ("length", "shuffle", "last", "fingerprint"):
            saved, live = state[name], getattr(self, name)
            if name == "fingerprint" and saved != live and None in (saved, live):
                all_ranks().warn(
                    f"data.fingerprint: {saved} in the checkpoint, {live} in the run: "
                    "whether it is the same data set cannot be told"
                )
            elif saved != live:
                raise StateMismatch(
                    "the data position belongs to another order of samples",
                    key=f"data.{name}",
                    expected=saved,
                    found=live,
                    hint=restart,
                )
        samples, epoch, offset = (int(state[name]) for name in ("samples", "epoch", "offset"))
        if not 0 <= offset < self.length or samples < 0 or epoch < 0:
            raise StateMismatch(
                "no such position in the data",
                key="data.offset",
                expected=f"0..{self.length - 1}",
                found=_place((epoch, offset)),
                hint=restart,
            )
        if state["seed"] != self.seed:
            all_ranks().warn(f"data seed {self.seed} ignored; the checkpoint's {state['seed']} restored")
        self.seed = int(state["seed"])
        self.samples, self.epoch, self.offset = samples, epoch, offset
        if not self._has_step(offset):
            # Saved with a smaller global batch, what is left does not fill a step now, and is dropped as always.
            self.epoch, self.offset = epoch + 1, 0

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
        slot = self.plan.slot(micro_step, self.dp_rank, samples)
        if slot is None:
            # An idle rank repeats the last slot: if its loss is not finite, neither is the step's without it.
            slot = self.plan.active_slots(samples) - 1
        first = offset + slot * self.plan.micro_batch
        positions = np.arange(first, first + self.plan.slot_samples(slot, samples))
        indices: list[int] = []
        for further in range(positions[0] // self.length, positions[-1] // self.length + 1):
            order = EpochOrder(self.length, self.seed, epoch + further, shuffle=self.shuffle)
            inside = positions[positions // self.length == further] - further * self.length
            indices += [SampleIndex(int(index), epoch + int(further)) for index in order[inside]]
        return indices


def _place(position: tuple[int, int]) -> str:
    return f"epoch {position[0]}, sample {position[1]}"
