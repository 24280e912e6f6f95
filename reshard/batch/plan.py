"""The batch arithmetic: a global batch as slots, and which rank runs which slot when.

A global batch of B samples is V = B / micro_batch slots, numbered 0..V-1. Slot v owns the samples
[v * micro_batch, (v + 1) * micro_batch) of its step, at any world size. R ranks run the slots in rows:

    V = 7, R = 3          rank 0   rank 1   rank 2
    micro-step 0             0        1        2
    micro-step 1             3        4        5
    micro-step 2             6        -        -      accumulation 3, 2 of 9 places idle

So the effective batch is exact at every world size. Where R does not divide V, the price is idle places.

Gradients are the same at two world sizes only if the loss is a mean over the whole global batch. A mean within each
micro-batch, over unequal numbers of tokens, depends on how the samples are grouped.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import BatchError, StateMismatch

COSTLY_IDLE_SHARE = 0.10

# Without a bound, a mistyped batch of 19 digits would hang; up to here it takes less than 0.1 s, and batches up to
# 10**12 are factored completely.
_LARGEST_FACTOR_TRIED = 10**6

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class BatchPlan:
    """How `ranks` data-parallel ranks run one global batch.

    Args:
        global_batch: samples that one optimizer step trains on.
        micro_batch: samples that one rank passes through the model at once; it divides `global_batch`.
        ranks: data-parallel coordinates: the world size divided by the tensor, pipeline and context parallel sizes.

    It is a `Stateful` too: its state says which batch a checkpoint was trained with, and loading verifies it.

    Raises:
        BatchError: a number that is not a whole number above zero, or a micro-batch that does not divide the
            global batch.
    """

    global_batch: int
    micro_batch: int
    ranks: int

    def __post_init__(self) -> None:
        _require_counts(global_batch=self.global_batch, micro_batch=self.micro_batch, ranks=self.ranks)
        if self.global_batch % self.micro_batch:
            raise _uneven(self.global_batch, self.micro_batch)

    @classmethod
    def choose(cls, global_batch: int, ranks: int, max_micro_batch: int) -> BatchPlan:
        """The plan for `micro_batch: auto`.

        Of the micro-batches up to `max_micro_batch` samples that divide the global batch, this takes the one that
        idles the smallest share, and of equals the largest.

        Raises:
            BatchError: a number that is not a whole number above zero.
        """
        _require_counts(global_batch=global_batch, ranks=ranks, max_micro_batch=max_micro_batch)
        plans = [cls(global_batch, micro, ranks) for micro in _divisors(global_batch) if micro <= max_micro_batch]
        return min(plans, key=lambda plan: (plan.idle_share, -plan.micro_batch))

    @property
    def slots(self) -> int:
        """Slots in a global batch."""
        return self.global_batch // self.micro_batch

    @property
    def accumulation(self) -> int:
        """Micro-steps that every rank takes for one optimizer step."""
        return -(-self.slots // self.ranks)

    @property
    def idle_slots(self) -> int:
        """Places of the last micro-step that have no slot; those ranks run along and weigh zero."""
        return self.accumulation * self.ranks - self.slots

    @property
    def idle_share(self) -> float:
        """Share of a step's compute that idle places waste, from 0 up to below 1."""
        return self.idle_slots / (self.accumulation * self.ranks)

    @property
    def is_costly(self) -> bool:
        """Whether more than a tenth of the step's compute is idle."""
        return self.idle_share > COSTLY_IDLE_SHARE

    def slot(self, micro_step: int, rank: int, samples: int | None = None) -> int | None:
        """The slot that `rank` runs in `micro_step` of a step of `samples` samples, or None where it idles.

        Without `samples` the step has a whole global batch.

        Raises:
            BatchError: a micro-step, a rank or a number of samples that this plan does not have.
        """
        _require_within("rank", rank, self.ranks - 1)
        _require_within("micro-step", micro_step, self.accumulation - 1)
        slot = micro_step * self.ranks + rank
        return slot if slot < self.active_slots(self.global_batch if samples is None else samples) else None

    def active_slots(self, samples: int) -> int:
        """How many slots a step has work for if it gets only `samples` samples, as the last step of a data set may.

        Slots fill in order: the last active one may be partial, those after it are empty.

        Raises:
            BatchError: fewer than 0 samples, or more than the global batch.
        """
        _require_within("number of samples", samples, self.global_batch)
        return -(-samples // self.micro_batch)

    def micro_steps(self, samples: int) -> int:
        """Micro-steps that every rank takes for a step of `samples` samples; 0 for none.

        Raises:
            BatchError: fewer than 0 samples, or more than the global batch.
        """
        return -(-self.active_slots(samples) // self.ranks)

    def slot_samples(self, slot: int, samples: int) -> int:
        """How many of a step's `samples` samples `slot` owns: a full micro-batch, the rest, or 0.

        Raises:
            BatchError: a slot that this plan does not have, or a number of samples outside 0..global batch.
        """
        _require_within("slot", slot, self.slots - 1)
        _require_within("number of samples", samples, self.global_batch)
        return min(max(samples - slot * self.micro_batch, 0), self.micro_batch)

    def for_ranks(self, ranks: int) -> BatchPlan:
        """The same batch on another number of ranks."""
        return replace(self, ranks=ranks)

    def free_ranks(self, limit: int = 8) -> list[int]:
        """Up to `limit` numbers of ranks that idle nothing, those around this plan's, ascending."""
        return _around(_divisors(self.slots), self.ranks, limit)

    def free_micro_batches(self, limit: int = 8) -> list[int]:
        """Up to `limit` micro-batches that idle nothing on these ranks, those around this plan's, ascending.

        Empty where the ranks do not divide the global batch: then no micro-batch comes out even.
        """
        if self.global_batch % self.ranks:
            return []
        return _around(_divisors(self.global_batch // self.ranks), self.micro_batch, limit)

    def advice(self) -> list[str]:
        """What the idle places cost and what would cost nothing, a line each; empty where nothing is idle."""
        if not self.idle_slots:
            return []
        places = self.accumulation * self.ranks
        free_ranks = ", ".join(map(str, self.free_ranks()))
        return [
            f"{self.idle_slots} of {places} slot places idle: {_percent(self.idle_share)} of the step's compute",
            f"world sizes that cost nothing at micro-batch {self.micro_batch}: {free_ranks}",
            self._micro_batch_advice(),
        ]

    def state_dict(self) -> dict[str, int]:
        """The plan as a checkpoint records it."""
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "ranks": self.ranks,
            "accumulation": self.accumulation,
        }

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Verify that this plan continues the training that `saved` describes; nothing is changed.

        Another number of ranks is the normal case. Another micro-batch is legal and warned of.

        Raises:
            StateMismatch: another global batch, or none recorded.
        """
        if saved.get("global_batch") != self.global_batch:
            raise StateMismatch(
                "the checkpoint was trained with another global batch, for which its learning rate was chosen",
                key="global_batch",
                expected=saved.get("global_batch", "a recorded number"),
                found=self.global_batch,
                hint="train with the recorded global batch, or begin a new run from the weights alone",
            )
        if saved.get("micro_batch") != self.micro_batch:
            _log.warning(
                "micro-batch %s -> %d: the global batch of %d stays exact, but slots are cut elsewhere, "
                "so their random streams (dropout) differ from before",
                saved.get("micro_batch", "not recorded"),
                self.micro_batch,
                self.global_batch,
            )

    def _micro_batch_advice(self) -> str:
        free = self.free_micro_batches()
        if free:
            return f"micro-batches that cost nothing on {self.ranks} ranks: {', '.join(map(str, free))}"
        least = BatchPlan.choose(self.global_batch, self.ranks, self.micro_batch)
        line = f"no micro-batch costs nothing: {self.ranks} ranks do not divide a global batch of {self.global_batch}"
        if least.idle_share < self.idle_share:
            line += f"; micro-batch {least.micro_batch} idles the least, {_percent(least.idle_share)}"
        others = _either(_multiples_around(self.global_batch, self.micro_batch * self.ranks))
        return f"{line}; a global batch of {others} would cost nothing, but is another training"


def _require_counts(**counts: object) -> None:
    """All faults at once: someone who mistyped two numbers should not have to run twice."""
    faults = [
        f"{name} must be a whole number above zero, not {value!r}"
        for name, value in counts.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if faults:
        raise BatchError(faults[0], details=faults[1:])


def _require_within(what: str, value: int, last: int) -> None:
    if not 0 <= value <= last:
        raise BatchError(f"no such {what} in this batch plan", expected=f"0..{last}", found=value)


def _uneven(global_batch: int, micro_batch: int) -> BatchError:
    divisors = _divisors(global_batch)
    split = bisect_left(divisors, micro_batch)
    global_batches = _either(_multiples_around(global_batch, micro_batch))
    micro_batches = _either([*divisors[max(split - 1, 0) : split], *divisors[split : split + 1]])
    return BatchError(
        f"a global batch of {global_batch} samples is not divisible by a micro-batch of {micro_batch}",
        hint=f"take a global batch of {global_batches}, or a micro-batch of {micro_batches}",
    )


def _around(ascending: Sequence[int], centre: int, limit: int) -> list[int]:
    """The `limit` values around `centre`, half of them up to it where there are so many."""
    split = bisect_right(ascending, centre)
    start = max(0, min(split - limit // 2, len(ascending) - limit))
    return list(ascending[start : start + limit])


def _multiples_around(number: int, unit: int) -> list[int]:
    """The multiples of `unit` below and above a number that is none itself; only those above zero."""
    below = number - number % unit
    return [multiple for multiple in (below, below + unit) if multiple]


def _divisors(number: int) -> list[int]:
    """The divisors, ascending.

    Above 10**12 some may be missing, for what trial division leaves counts as one prime: they are only ever proposed.
    """
    divisors = [1]
    factor = 2
    while number > 1:
        if factor * factor > number or factor > _LARGEST_FACTOR_TRIED:
            factor = number
        powers = [1]
        while number % factor == 0:
            number //= factor
            powers.append(powers[-1] * factor)
        divisors = [divisor * power for divisor in divisors for power in powers]
        factor += 1 if factor == 2 else 2
    return sorted(divisors)


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
