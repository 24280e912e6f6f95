"""The search for NaN and infinities in the elements of chunks, and what of it is a fault.

NaN is a fault in weights, moments and masters. So is an infinity, except that a weight which no optimizer state belongs
to may hold negative ones: attention masks are stored so, as buffers. Counters and all that is neither (random states,
caches of the loader) are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.checkpoint import Checkpoint
from reshard.geometry.box import Box, row_major_strides
from reshard.index.dtypes import FLOATS, ITEM_BYTES, values
from reshard.index.index import Index
from reshard.index.kinds import MASTERS, MOMENTS, WEIGHTS, kinds_of, parameter_of

# Decoded elements take up to four times the memory of what they are decoded from; this much stays in cache.
_STEP_BYTES = 1 << 19

Position = tuple[int, ...]


@dataclass
class NotFinite:
    """How many elements of a tensor are not finite, and the first in the tensor of each sort."""

    nans: int = 0
    positive: int = 0
    negative: int = 0
    first_nan: Position | None = None
    first_infinity: Position | None = None

    def __bool__(self) -> bool:
        return bool(self.nans or self.positive or self.negative)

    def add(self, other: NotFinite) -> None:
        """Counts those of another part of the same tensor as well."""
        self.nans += other.nans
        self.positive += other.positive
        self.negative += other.negative
        self.first_nan = _first(self.first_nan, other.first_nan)
        self.first_infinity = _first(self.first_infinity, other.first_infinity)


def _first(one: Position | None, other: Position | None) -> Position | None:
    return min((place for place in (one, other) if place is not None), default=None)


def is_finite(content: bytes, dtype: str) -> bool:
    """Whether bytes are elements without NaN and infinities. False also where that is not seen at once."""
    if dtype not in FLOATS:
        return True
    return not len(content) % ITEM_BYTES[dtype] and bool(np.isfinite(values(content, dtype)).all())


class ElementScan:
    """Looks at the elements of one located chunk while the bytes of its file pass by in order."""

    def __init__(self, checkpoint: Checkpoint, row: int) -> None:
        index = checkpoint.index
        self.row = row
        self._checkpoint = checkpoint
        self._dtype = index.dtypes[int(index.owner[row])]
        self._box = index.box(row)
        self._width = ITEM_BYTES[self._dtype]
        self._strides = checkpoint.payloads.strides.get(row) or row_major_strides(self._box.sizes)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(self._box.sizes, self._strides, strict=True))
        # With gaps between its elements, a chunk is read once more by itself: what is in the gaps is not its own.
        self._is_dense = reach == self._box.elements
        self._start = int(checkpoint.payloads.start_bytes[row])
        self._end = self._start + self._box.elements * self._width if self._is_dense else self._start
        self._found = NotFinite()

    def feed(self, position: int, block: memoryview) -> None:
        """Takes the bytes of the file from ``position`` on."""
        begin, end = max(position, self._start), min(position + len(block), self._end)
        for start in range(begin, end, _STEP_BYTES):
            stop = min(start + _STEP_BYTES, end)
            numbers = values(block[start - position : stop - position], self._dtype)
            self._found.add(_tally(numbers, partial(self._position_at, (start - self._start) // self._width)))

    def result(self) -> NotFinite:
        """What was found in all."""
        if not self._is_dense:
            for slab in slabs(self._box.sizes):
                numbers = values(self._checkpoint.read_chunk(self.row, slab), self._dtype)
                self._found.add(_tally(numbers.reshape(-1), partial(self._position_in, slab)))
        return self._found

    def _position_at(self, first: int, place: int) -> Position:
        """The place in the global tensor of an element, given by how many lie before it in memory."""
        inside, rest = [0] * len(self._strides), first + place
        for dim in sorted(range(len(inside)), key=lambda dim: -self._strides[dim]):
            if self._box.sizes[dim] > 1:
                inside[dim], rest = divmod(rest, self._strides[dim])
        return tuple(place + offset for place, offset in zip(inside, self._box.offsets, strict=True))

    def _position_in(self, slab: Box, place: int) -> Position:
        inside = np.unravel_index(place, slab.sizes)
        return tuple(
            int(place) + inner + outer
            for place, inner, outer in zip(inside, slab.offsets, self._box.offsets, strict=True)
        )


def _tally(numbers: NDArray[np.generic], position: Callable[[int], Position]) -> NotFinite:
    """Counts what is not finite in a run of elements.

    Args:
        position: from the place in the run to that in the tensor. Not needed where all are finite, as nearly always.
    """
    found = NotFinite()
    if np.isfinite(numbers).all():
        return found
    nan = np.isnan(numbers)
    infinite = np.isinf(numbers)
    negative = infinite & (numbers.real < 0)
    found.nans = int(nan.sum())
    found.negative = int(negative.sum())
    found.positive = int(infinite.sum()) - found.negative
    if found.nans:
        found.first_nan = position(int(nan.argmax()))
    if infinite.any():
        found.first_infinity = position(int(infinite.argmax()))
    return found


def slabs(sizes: tuple[int, ...]) -> Iterator[Box]:
    """A box of these sizes in parts along its first dim, which take little memory as far as its rows are small."""
    whole = Box.whole(sizes)
    if not sizes:
        yield whole
        return
    rows = max(1, _STEP_BYTES // max(1, math.prod(sizes[1:])))
    for start in range(0, sizes[0], rows):
        yield Box((start, *whole.offsets[1:]), (min(rows, sizes[0] - start), *sizes[1:]))


class Verdict(NamedTuple):
    """What the elements that are not finite mean for one tensor.

    Attributes:
        number: of the tensor.
        found: how many there are of what, and where the first is.
        at: the place of the first.
    """

    number: int
    is_fault: bool
    what: str
    found: str
    at: Position


def verdicts(index: Index, not_finite: Mapping[int, NotFinite]) -> Iterator[Verdict]:
    """Judges, by the rule above, the tensors that have elements which are not finite."""
    if not not_finite:
        return
    kinds = kinds_of(index.names, index.shapes)
    weights = {name for name, kind in zip(index.names, kinds, strict=True) if kind == WEIGHTS}
    trained = {parameter_of(name, weights) for name, kind in zip(index.names, kinds, strict=True) if kind != WEIGHTS}
    for number, found in sorted(not_finite.items()):
        kind = kinds[number]
        if kind not in (WEIGHTS, MOMENTS, MASTERS):
            continue
        elements = math.prod(index.shapes[number])
        if found.first_nan is not None:
            count = f"{found.nans} of {elements} elements, the first at {found.first_nan}"
            yield Verdict(number, True, f"NaN in its {kind}", count, found.first_nan)
        if found.first_infinity is not None:
            may_be_mask = kind == WEIGHTS and not found.positive and index.names[number] not in trained
            count = (
                f"{found.positive} positive and {found.negative} negative of {elements} elements, the first at "
                f"{found.first_infinity}"
            )
            yield Verdict(number, not may_be_mask, f"infinities in its {kind}", count, found.first_infinity)
