"""Do boxes tile a tensor, every element exactly once?

The proof takes time linear in the boxes and their dims. Let m(x) count the boxes that hold the element x. Where a box
starts and ends, m steps up and down; a box of n dims adds +1 or -1 at each of its 2**n corners (an even or an odd
number of ends), and the sum of these point weights over all boxes determines m, for m is its cumulative sum along every
dim. So the boxes tile a tensor exactly if and only if the weights that remain after cancelling are those of the
tensor's own box.

The corners are not listed, though. Give each position of each dim a random number h, and a point the product of the
numbers of its positions. Then the corners of a box, with their signs, sum up to the product of h(start) - h(end) over
its dims. For boxes that tile the tensor these products sum up to that of the tensor, whatever h is. For others the
difference is a polynomial in h that is not zero, of one degree a dim. Modulo the prime 2**31 - 1 it is zero for at most
dims / (2**31 - 1) of all choices of h: three trials overlook a fault in 64 dims with a probability below 2**-74.

`tiling_fault` says in words where a tiling is wrong, which needs a search; it is asked after the proof has failed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.box import Box

Int = NDArray[np.int64]

_PRIME = (1 << 31) - 1
_TRIALS = 3


def inexact_tensors(shapes: Int, first: Int, offsets: Int, sizes: Int) -> Int:
    """The tensors that their chunks do not tile exactly, by number.

    Args:
        shapes: (tensors, dims), padded with 1.
        first: (tensors + 1,); the chunks of tensor t are rows first[t] to first[t + 1].
        offsets: (chunks, dims), padded with 0. Any non-negative values.
        sizes: (chunks, dims), padded with 1.
    """
    owner = np.repeat(np.arange(len(shapes)), np.diff(first))
    real = (sizes > 0).all(axis=1)
    owner, offsets, sizes = owner[real], offsets[real], sizes[real]
    ends = offsets + sizes
    wrong = np.zeros(len(shapes), dtype=bool)
    wrong[owner[(ends > shapes[owner]).any(axis=1)]] = True
    found = np.ones((_TRIALS, len(owner)), dtype=np.int64)
    wanted = np.ones((_TRIALS, len(shapes)), dtype=np.int64)
    for dim in range(shapes.shape[1]):
        # A dim that every chunk of a tensor spans has one factor on both sides.
        cut = np.zeros(len(shapes), dtype=bool)
        cut[owner[sizes[:, dim] != shapes[owner, dim]]] = True
        rows, tensors = np.flatnonzero(cut[owner]), np.flatnonzero(cut)
        if not len(tensors):
            continue
        bounds = [offsets[rows, dim], ends[rows, dim], np.zeros(1, dtype=np.int64), shapes[tensors, dim]]
        places, number = np.unique(np.concatenate(bounds), return_inverse=True)
        low, high, start, end = np.split(number, np.cumsum([len(positions) for positions in bounds[:-1]]))
        for trial in range(_TRIALS):
            drawn = _random(len(places))
            found[trial, rows] = found[trial, rows] * (drawn[low] - drawn[high]) % _PRIME
            wanted[trial, tensors] = wanted[trial, tensors] * (drawn[start] - drawn[end]) % _PRIME
    first = np.searchsorted(owner, np.arange(len(shapes) + 1))
    for products, whole in zip(found, wanted, strict=True):
        sums = np.concatenate([[0], np.cumsum(products)])
        # Of a tensor without elements nothing has to be stored, and what is stored has none unless it sticks out.
        wrong |= ((sums[first[1:]] - sums[first[:-1]]) % _PRIME != whole) & (shapes > 0).all(axis=1)
    return np.flatnonzero(wrong)


def _random(count: int) -> Int:
    """Numbers below the prime. Not from a seed: nobody can choose boxes that fit them."""
    drawn = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) % np.uint64(_PRIME)
    numbers: Int = drawn.astype(np.int64)
    return numbers


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What keeps boxes from tiling a tensor exactly once, with the place; None where they do."""
    whole = Box.whole(shape)
    boxes = [box for box in boxes if 0 not in box.sizes]
    for box in boxes:
        if any(end > limit for end, limit in zip(box.ends, shape, strict=True)):
            return f"the chunk {box} sticks out of the shape {whole.sizes}"
    if 0 in shape:
        return None
    # Slabs that no box crosses are independent. Any grid comes apart along its cuts, a dim after the other, down to
    # single boxes: n log n, and the place of a fault is known.
    regions: list[tuple[Box, Sequence[Box]]] = [(whole, boxes)]
    while regions:
        region, inside = regions.pop()
        if len(inside) < 2:
            if (hole := _hole(region, inside)) is not None:
                return f"no chunk holds {hole} of the shape {whole.sizes}"
            continue
        slabs = _slabs(region, inside)
        if slabs is None:
            if (fault := _knot_fault(region, inside)) is not None:
                return f"{fault} of the shape {whole.sizes}"
            continue
        regions.extend(reversed(slabs))
    return None


def _slab(region: Box, dim: int, low: int, high: int) -> Box:
    """The part of a region between two positions along a dim."""
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim], sizes[dim] = low, high - low
    return Box(tuple(offsets), tuple(sizes))


def _hole(region: Box, inside: Sequence[Box]) -> Box | None:
    """A part of the region that its only box does not hold."""
    if not inside:
        return region
    (box,) = inside
    for dim, (start, end) in enumerate(zip(region.offsets, region.ends, strict=True)):
        if start < box.offsets[dim]:
            return _slab(region, dim, start, box.offsets[dim])
        if box.ends[dim] < end:
            return _slab(region, dim, box.ends[dim], end)
    return None


def _slabs(region: Box, inside: Sequence[Box]) -> list[tuple[Box, Sequence[Box]]] | None:
    """The region cut wherever no box crosses, along the first dim that has such a cut; gaps are slabs without a box."""
    for dim in range(len(region.sizes)):
        slabs: list[tuple[Box, Sequence[Box]]] = []
        reached = region.offsets[dim]
        for low, high, group in _runs(inside, dim):
            if low > reached:
                slabs.append((_slab(region, dim, reached, low), []))
            slabs.append((_slab(region, dim, low, high), group))
            reached = high
        if reached < region.ends[dim]:
            slabs.append((_slab(region, dim, reached, region.ends[dim]), []))
        if len(slabs) > 1:
            return slabs
    return None


def _runs(boxes: Sequence[Box], dim: int) -> Iterator[tuple[int, int, list[Box]]]:
    """The boxes grouped by the stretches that they cover together along a dim, in order."""
    group: list[Box] = []
    low = high = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if group and box.offsets[dim] >= high:
            yield low, high, group
            group = []
        low = box.offsets[dim] if not group else low
        high = box.ends[dim] if not group else max(high, box.ends[dim])
        group.append(box)
    if group:
        yield low, high, group


def _knot_fault(region: Box, inside: Sequence[Box]) -> str | None:
    """For boxes that no cut separates: they overlap, or are wound around each other like a pinwheel."""
    active: list[Box] = []
    # Along the dim where the fewest stand side by side, as far as that can be told at a glance.
    dims = range(len(region.sizes))
    sweep = max(dims, key=lambda dim: len({box.offsets[dim] for box in inside}), default=0)
    for box in sorted(inside, key=lambda box: box.offsets[sweep : sweep + 1]):
        active = [other for other in active if not box.sizes or other.ends[sweep] > box.offsets[sweep]]
        for other in active:
            if 0 not in (both := box.intersection(other)).sizes:
                return f"two chunks hold {both}"
        active.append(box)
    if sum(math.prod(box.sizes) for box in inside) != math.prod(region.sizes):
        return f"no chunk holds a part of {region}"
    return None
