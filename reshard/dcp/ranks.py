"""The ranks of the job, and how they agree: small messages over CPU, never tensors of the model."""

from __future__ import annotations

import contextlib
import datetime
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from reshard.dcp.messages import broadcast, collect, hand_out, largest, total
from reshard.environment import control_timeout_s
from reshard.errors import ReshardError, StorageError

T = TypeVar("T")
log = logging.getLogger("reshard")

MOST_OTHERS = 8


class Ranks:
    """All ranks of a process group, or the one process there is without a group.

    Every method but ``say`` and ``warn`` is a collective: each rank must call it, in the same order.

    Args:
        members: the group; by default, at each call, the default group that there is then.
        is_alone: one process, whatever groups there are.
    """

    def __init__(self, members: dist.ProcessGroup | None = None, *, is_alone: bool = False) -> None:
        # Weakly: a group that outlives destroy_process_group ends with the interpreter, whose threads are gone by then.
        self._members = weakref.ref(members) if members is not None else None
        self._is_alone = is_alone
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._groups: dict[str, weakref.ref[dist.ProcessGroup]] = {}

    @property
    def members(self) -> dist.ProcessGroup | None:
        """The group whose ranks these are; None where there is one process only."""
        if self._is_alone or not dist.is_initialized():
            return None
        return self._members() if self._members is not None else dist.group.WORLD

    @property
    def size(self) -> int:
        return 1 if self.members is None else dist.get_world_size(self.members)

    @property
    def rank(self) -> int:
        return 0 if self.members is None else dist.get_rank(self.members)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """A group that moves CPU tensors and is patient, for saving and loading; None where there is no process group.

        Opened at its first use, which is therefore collective, and anew for another default group. Never the default
        group, not even a gloo one: its timeout is meant for training steps, and one rank that writes to a slow file
        system makes all the others wait.
        """
        return self._opened("patient", datetime.timedelta(seconds=control_timeout_s()))

    @property
    def step_group(self) -> dist.ProcessGroup | None:
        """Likewise with torch's default timeout, for what ranks tell each other at every step."""
        return self._opened("step", None)

    def _opened(self, purpose: str, timeout: datetime.timedelta | None) -> dist.ProcessGroup | None:
        members = self.members
        if members is None:
            return None
        if self._world is None or self._world() is not members:
            self._world, self._groups = weakref.ref(members), {}
        group = self._groups[purpose]() if purpose in self._groups else None
        if group is None:
            if self._members is None:
                group = dist.new_group(backend="gloo", timeout=timeout)
            else:
                # Ranks outside of it do not take part.
                inside = dist.get_process_group_ranks(members)
                group = dist.new_group(inside, timeout=timeout, backend="gloo", use_local_synchronization=True)
            self._groups[purpose] = weakref.ref(group)
        return group

    def open(self) -> None:
        """Opens the group now, for another thread to use."""
        self._opened("patient", datetime.timedelta(seconds=control_timeout_s()))

    def apart(self) -> Ranks:
        """The same ranks with groups of their own, to agree over in another thread."""
        return Ranks(self._members() if self._members is not None else None, is_alone=self._is_alone)

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        # By way of rank 0: gloo's own all-gather takes as many turns as there are ranks.
        values = self.broadcast(self.collect(value))
        assert values is not None
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        with self.contact():
            return broadcast(value, self.group)

    def collect(self, value: T) -> list[T] | None:
        """Everybody's value, in rank order, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        with self.contact():
            return collect(value, self.group)

    def hand_out(self, values: Sequence[T] | None) -> T:
        """To each rank its own of the values, one a rank, that rank 0 gives; the others give None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        with self.contact():
            return hand_out(values, self.group)

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers (float64, the same count on each rank), in rank order."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        with self.contact():
            dist.all_gather(everybody, mine, group=self.step_group)
        return [theirs.tolist() for theirs in everybody]

    def maxima(self, numbers: Sequence[float]) -> list[float]:
        """The largest over all ranks of each number (float64, the same count on each rank)."""
        if self.size == 1:
            return list(numbers)
        box = torch.tensor(numbers, dtype=torch.float64)
        with self.contact():
            dist.all_reduce(box, dist.ReduceOp.MAX, group=self.step_group)
        return box.tolist()

    def total(self, number: int) -> int:
        """The sum over all ranks."""
        if self.size == 1:
            return number
        with self.contact():
            return total(number, self.group)

    def is_any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        if self.size == 1:
            return value
        with self.contact():
            return largest(int(value), self.group) > 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Runs a block in which any rank may fail alone; if one does, every rank raises its error.

        The block itself must not hold collectives: a rank that failed would be missing from them.
        """
        error: ReshardError | None = None
        cause: Exception | None = None
        try:
            yield
        except ReshardError as fault:
            error, cause = fault, fault
        except OSError as fault:
            error, cause = StorageError(fault.strerror or str(fault), path=fault.filename, rank=self.rank), fault
        except Exception as fault:
            error, cause = ReshardError(f"{type(fault).__name__}: {fault}", rank=self.rank), fault
        if not self.is_any(error is not None):
            return
        met = [(rank, fault) for rank, fault in enumerate(self.gather(error)) if fault is not None]
        # What several ranks ran into alike is told once.
        distinct = list({str(fault): (rank, fault) for rank, fault in reversed(met)}.values())[::-1]
        for rank, theirs in distinct:
            # Rank 0 does what is done once for all, and needs no mention there.
            if rank > 0 and theirs.rank is None:
                theirs.rank = rank
        (_, first), *others = distinct
        also = [f"also: {theirs}" for _, theirs in others[:MOST_OTHERS]]
        if len(others) > MOST_OTHERS:
            also.append(f"and {len(others) - MOST_OTHERS} more ranks")
        first.details = (*first.details, *also)
        first.is_shared = True
        if first is cause:
            raise first
        raise first from cause

    @contextlib.contextmanager
    def contact(self) -> Iterator[None]:
        """Around collectives of torch's own: gives their failure a name."""
        try:
            yield
        except RuntimeError as fault:
            if self.size == 1:
                raise
            raise ReshardError(
                "lost contact with the other ranks",
                rank=self.rank,
                hint="one of them ended or hangs: the first error in the logs of the ranks says why",
                details=str(fault).splitlines()[:1],
            ) from fault

    def say(self, message: str) -> None:
        """Logs on rank 0."""
        if self.rank == 0:
            log.info(message)

    def warn(self, message: str) -> None:
        """Warns on rank 0."""
        if self.rank == 0:
            log.warning(message)


def all_ranks() -> Ranks:
    """The ranks of the default process group. The object is shared, so that it opens one group at most."""
    return _ranks


def ranks_of(members: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a process group, of the default one for None; likewise one object a group."""
    if members is None or members is dist.group.WORLD:
        return _ranks
    if members not in _of_groups:
        _of_groups[members] = Ranks(members)
    return _of_groups[members]


def alone() -> Ranks:
    """This process by itself, whatever groups there are."""
    return _alone


_ranks = Ranks()
_alone = Ranks(is_alone=True)
_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()
