"""Objects that ranks send each other: over CPU, in as few turns as gloo allows.

Torch's own collectives of objects begin with an all-gather of the lengths, in which gloo takes as many turns as there
are ranks; the largest of the lengths is known after a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from reshard.dcp.torch_private import object_to_tensor, tensor_to_object

T = TypeVar("T")


def largest(number: int, group: dist.ProcessGroup | None) -> int:
    """The largest over all ranks of the group, on each of them."""
    return _reduced(number, dist.ReduceOp.MAX, group)


def total(number: int, group: dist.ProcessGroup | None) -> int:
    """The sum over all ranks of the group, on each of them."""
    return _reduced(number, dist.ReduceOp.SUM, group)


def _reduced(number: int, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> int:
    box = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(box, operation, group=group)
    return int(box.item())


def broadcast(value: T, group: dist.ProcessGroup | None) -> T:
    """Rank 0's value on every rank; the others' is ignored."""
    is_first = dist.get_rank(group) == 0
    content = object_to_tensor(value) if is_first else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(content)], dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=0)
    if not is_first:
        content = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return value if is_first else tensor_to_object(content)


def collect(value: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """Everybody's value, in rank order, on rank 0; None on the others."""
    content = object_to_tensor(value)
    content = _padded(content, largest(len(content), group))
    is_first = dist.get_rank(group) == 0
    everybodys = [torch.empty_like(content) for _ in range(dist.get_world_size(group))] if is_first else None
    dist.gather(content, everybodys, group=group, group_dst=0)
    return [tensor_to_object(theirs) for theirs in everybodys] if everybodys is not None else None


def hand_out(values: Sequence[T] | None, group: dist.ProcessGroup | None) -> T:
    """To each rank its own of the values, one a rank, that rank 0 gives; the others give None."""
    contents = [object_to_tensor(value) for value in values] if values is not None else None
    length = torch.tensor([max(map(len, contents)) if contents is not None else 0], dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=0)
    longest = int(length.item())
    parts = [_padded(content, longest) for content in contents] if contents is not None else None
    mine = torch.empty(longest, dtype=torch.uint8)
    dist.scatter(mine, parts, group=group, group_src=0)
    return tensor_to_object(mine)  # type: ignore[no-any-return]


def _padded(content: torch.Tensor, length: int) -> torch.Tensor:
    """Collectives want the same length everywhere; what stands behind a pickle is not read."""
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: len(content)] = content
    return padded
