"""The ranks of the job, and how they agree: small messages over CPU, never tensors of the model."""

from __future__ import annotations

import contextlib
import datetime
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reshard.environment import control_timeout_s
from reshard.errors import ReshardError, StorageError

T = TypeVar("T")
log = logging.getLogger("reshard")

MOST_OTHERS = 8


class Ranks:
    """All ranks of the process group, or the one process there is without a group.

    Every method but ``say`` and ``warn`` is a collective: each rank must call it, in the same order.
    """

    def __init__(self) -> None:
        # Weakly: a group that outlives destroy_process_group ends with the interpreter, whose threads are gone by then.
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._groups: dict[str, weakref.ref[dist.ProcessGroup]] = {}

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

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
        if not dist.is_initialized():
            return None
        world = dist.group.WORLD
        assert world is not None
        if self._world is None or self._world() is not world:
            self._world, self._groups = weakref.ref(world), {}
        group = self._groups[purpose]() if purpose in self._groups else None
        if group is None:
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._groups[purpose] = weakref.ref(group)
        return group

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.contact():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        with self.contact():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[no-any-return]

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
        largest = torch.tensor(numbers, dtype=torch.float64)
        with self.contact():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.step_group)
        return largest.tolist()

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
        met = [(rank, fault) for rank, fault in enumerate(self.gather(error)) if fault is not None]
        if not met:
            return
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


_ranks = Ranks()
