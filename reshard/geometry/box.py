"""Boxes: the rectangular parts of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.errors import UsageError


class Box(NamedTuple):
    """Elements ``[offset, offset + size)`` along every dim of a global tensor; of a 0-dim tensor, its one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def within(cls, shape: Sequence[int], part: Box | slice | Sequence[slice] | None) -> Box:
        """A part of a tensor, given as a box or as slices of its leading dims; None is all of it.

        Raises:
            UsageError: it has more dims than the tensor, a step other than 1, or leaves the tensor.
        """
        if part is None:
            return cls.whole(shape)
        if isinstance(part, Box):
            box = part
        else:
            box = _of_slices(shape, (part,) if isinstance(part, slice) else part)
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= limit
            for offset, size, limit in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise UsageError("not a part of the tensor", expected=f"a box within {tuple(shape)}", found=box)
        return box

    @property
    def ends(self) -> tuple[int, ...]:
        """The first position past the box, along every dim."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box:
        """What two boxes share; without elements where they share nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.ends, other.ends))
        return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, counted from ``origin``."""
        return Box(tuple(offset - start for offset, start in zip(self.offsets, origin, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(self.offsets, self.sizes, strict=True)) + "]"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements to step over per dim where the last dim is dense."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie in row-major order without gaps; strides of dims of one element do not matter."""
    if 0 in shape:
        return True
    dense = row_major_strides(shape)
    return all(size == 1 or stride == want for size, stride, want in zip(shape, strides, dense, strict=True))


def _of_slices(shape: Sequence[int], slices: Sequence[slice]) -> Box:
    if not isinstance(slices, (tuple, list)) or not all(isinstance(part, slice) for part in slices):
        raise UsageError("not slices", expected="a Box, or slices of the leading dims", found=slices)
    if len(slices) > len(shape):
        raise UsageError(f"{len(slices)} slices of a tensor with {len(shape)} dims", found=list(slices))
    ranges = [part.indices(limit) for part, limit in zip(slices, shape)]  # noqa: B905 (leading dims only)
    if any(step != 1 for _, _, step in ranges):
        raise UsageError("a slice with a step", found=list(slices), hint="read the box around it and slice that")
    offsets = tuple(start for start, _, _ in ranges)
    sizes = tuple(max(0, stop - start) for start, stop, _ in ranges)
    rest = len(shape) - len(slices)
    return Box((*offsets, *(0,) * rest), (*sizes, *shape[len(slices) :]))
