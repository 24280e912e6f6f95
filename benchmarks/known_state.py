"""A state dict whose every element follows from its place in the global tensor, so that any rank can tell what it got.

Floats of random bits between 1 and 2: nothing that a file system or a contender could save itself moving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

State = dict[str, torch.Tensor]


def empty_tensor(shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh) -> torch.Tensor:
    """Zeros: of a shard as FSDP2 has it, or, without dims, of the whole on every rank.

    Args:
        mesh: shards along its last axis, replicates along the others.
    """
    shape = torch.Size(shape)
    if not shape:
        return torch.zeros((), dtype=dtype, device=mesh.device_type)
    first, last = own_rows(shape[0], mesh)
    local = torch.zeros((last - first, *shape[1:]), dtype=dtype, device=mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First and last row (exclusive) that this rank holds of a tensor."""
    axis = mesh.ndim - 1
    of_each = -(-rows // mesh.size(axis))
    first = min(rows, of_each * mesh.get_local_rank(axis))
    return first, min(rows, first + of_each)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class KnownState:
    """A state, and what it should hold.

    Attributes:
        tensors: the flat state dict, full of what it should hold at first.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], mesh: DeviceMesh, prefix: str = "") -> None:
        self.tensors: State = {}
        self._expected: list[torch.Tensor] = []
        for number, (name, shape) in enumerate(shapes.items()):
            tensor = empty_tensor(shape, torch.float32, mesh)
            words = _words(number, shape, own_rows(shape[0], mesh) if shape else (0, 1))
            local(tensor).copy_(words.view(torch.float32))
            self.tensors[prefix + name] = tensor
            self._expected.append(words)

    def forget(self) -> None:
        """Zeros everywhere: what a load is to overwrite."""
        for tensor in self.tensors.values():
            local(tensor).zero_()

    def wrong(self) -> list[str]:
        """Names of tensors that do not hold what they should, to the bit."""
        return [
            name
            for (name, tensor), words in zip(self.tensors.items(), self._expected, strict=True)
            if not torch.equal(local(tensor).cpu().view(torch.int32), words)
        ]


def _words(number: int, shape: Sequence[int], rows: tuple[int, int]) -> torch.Tensor:
    """The bits of some rows of a tensor."""
    row_elements = math.prod(shape[1:])
    count = (rows[1] - rows[0]) * row_elements
    words = torch.arange(count, dtype=torch.int32).add_(rows[0] * row_elements % (1 << 30))
    words = words.mul_(-1640531535).add_(number * 40503 % (1 << 30)).bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)
    return words.reshape((rows[1] - rows[0], *shape[1:]) if shape else ())
