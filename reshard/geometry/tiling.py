"""Do boxes tile a tensor, every element exactly once?

The proof takes time linear in the boxes. Let m(x) count the boxes that hold the element x. Where a box starts and ends,
m steps up and down; a box of n dims adds +1 or -1 at each of its 2**n corners (an even or an odd number of ends), and
the sum of these point weights over all boxes determines m, for m is its cumulative sum along every dim. So the boxes
tile a tensor exactly if and only if the weights that remain after cancelling are those of the tensor's own box. Dims
that every box spans are left out: FSDP's shards have one that counts.

`tiling_fault` says in words where a tiling is wrong, which needs a search; it is asked after the proof has failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.box import Box

Int = NDArray[np.int64]

_MOST_CORNER_DIMS = 8


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
    # Of a tensor without elements nothing has to be stored, and what is stored has no elements unless it sticks out.
    asked = (shapes > 0).all(axis=1)
    # A dim is cut where some chunk does not span it. The first stands in where none is cut: a scalar can be missing.
    cut = np.zeros(shapes.shape, dtype=bool)
    for dim in range(shapes.shape[1]):
        cut[owner[sizes[:, dim] != shapes[owner, dim]], dim] = True
    cut[:, 0] |= ~cut.any(axis=1)
    for dims in _distinct(cut[asked], axis=0):
        chosen = asked & ~wrong & (cut == dims).all(axis=1)
        if not chosen.any():
            continue
        rows = chosen[owner]
        group = np.flatnonzero(dims)
        if len(group) > _MOST_CORNER_DIMS:
            wrong[_searched(np.flatnonzero(chosen), shapes, owner, offsets, sizes)] = True
            continue
        faulty = _uneven(owner[rows], offsets[rows][:, group], ends[rows][:, group], chosen, shapes[:, group])
        wrong[faulty] = True
    return np.flatnonzero(wrong)


def _distinct(values: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
    # Asked for nothing else, numpy imports numpy.ma first, which takes longer than the proof.
    return np.unique(values, axis=axis, return_index=True)[0]


def _uneven(owner: Int, offsets: Int, ends: Int, chosen: NDArray[np.bool_], shapes: Int) -> Int:
    """The chosen tensors whose corner weights do not cancel against those of the whole."""
    wanted = np.flatnonzero(chosen)
    owners = np.concatenate([owner, wanted])
    low = np.concatenate([offsets, np.zeros((len(wanted), offsets.shape[1]), dtype=np.int64)])
    high = np.concatenate([ends, shapes[wanted]])
    sign = np.concatenate([np.ones(len(owner), dtype=np.int64), -np.ones(len(wanted), dtype=np.int64)])
    if offsets.shape[1] == 1:
        # One sort of twice the chunks, instead of a lexicographic one; what FSDP's checkpoints consist of.
        return _uneven_rows(owners, low[:, 0], high[:, 0], sign, shapes[:, 0])
    points, weights = [], []
    for corner in itertools.product((False, True), repeat=offsets.shape[1]):
        points.append(np.column_stack([owners, np.where(corner, high, low)]))
        weights.append(sign * (-1) ** sum(corner))
    places, number = np.unique(np.concatenate(points), axis=0, return_inverse=True)
    total = np.zeros(len(places), dtype=np.int64)
    np.add.at(total, number.ravel(), np.concatenate(weights))
    return np.unique(places[total != 0, 0])


def _searched(tensors: Int, shapes: Int, owner: Int, offsets: Int, sizes: Int) -> list[int]:
    """Those of some tensors that are not tiled, by search: of a box of 30 dims the corners alone fill the memory."""
    faulty = []
    for tensor in tensors.tolist():
        rows = np.flatnonzero(owner == tensor)
        boxes = [Box(tuple(o), tuple(s)) for o, s in zip(offsets[rows].tolist(), sizes[rows].tolist(), strict=True)]
        if tiling_fault(shapes[tensor].tolist(), boxes) is not None:
            faulty.append(tensor)
    return faulty


def _uneven_rows(owner: Int, low: Int, high: Int, sign: Int, lengths: Int) -> Int:
    base = np.concatenate([[0], np.cumsum(lengths + 1)])
    points = np.concatenate([base[owner] + low, base[owner] + high])
    order = np.argsort(points, kind="stable")
    points = points[order]
    weights = np.concatenate([sign, -sign])[order]
    starts = np.flatnonzero(np.concatenate([[True], points[1:] != points[:-1]]))
    unequal = np.add.reduceat(weights, starts) != 0
    return _distinct(np.concatenate([owner, owner])[order][starts[unequal]])


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
    for box in sorted(inside):
        active = [other for other in active if not box.sizes or other.ends[0] > box.offsets[0]]
        for other in active:
            if 0 not in (both := box.intersection(other)).sizes:
                return f"two chunks hold {both}"
        active.append(box)
    if sum(math.prod(box.sizes) for box in inside) != math.prod(region.sizes):
        return f"no chunk holds a part of {region}"
    return None
