"""The ranks of the job, and how they agree: small messages over CPU, never tensors of the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reshard.errors import ReshardError, StorageError

T = TypeVar("T")
log = logging.getLogger("reshard")


class Ranks:
    """All ranks of the process group, or the one process there is without a group.

    Every method but ``say`` and ``warn`` is a collective: each rank must call it, in the same order.
    """

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """A group that moves CPU tensors; None where there is no process group.

        Opened at its first use, which is therefore collective.
        """
        if not dist.is_initialized():
            return None
        if "gloo" in str(dist.get_backend_config()):
            return dist.group.WORLD
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[no-any-return]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers (float64, the same count on each rank), in rank order."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybody, mine, group=self.group)
        return [theirs.tolist() for theirs in everybody]

    def any(self, flag: bool) -> bool:
        """Whether any rank's flag is set."""
        if self.size == 1:
            return flag
        total = torch.tensor([int(flag)])
        dist.all_reduce(total, group=self.group)
        return bool(total.item())

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
        met = [fault for fault in self.gather(error) if fault is not None]
        if not met:
            return
        first = met[0]
        others = {str(fault) for fault in met[1:]} - {str(first)}
        first.details = (*first.details, *(f"also: {text}" for text in sorted(others)))
        raise first from cause

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
    global _ranks, _opened_for
    world = dist.group.WORLD if dist.is_initialized() else None
    if _ranks is None or _opened_for is not world:
        _ranks, _opened_for = Ranks(), world
    return _ranks


_ranks: Ranks | None = None
_opened_for: dist.ProcessGroup | None = None
