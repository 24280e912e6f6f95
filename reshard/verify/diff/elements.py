"""Two arrays of elements held against each other: how many differ, by how much, and where.

Equal means the same bits, except that a NaN equals any NaN; of two different types, the same numbers. So -0.0 and 0.0
differ in their bits, by 0. With a tolerance, elements differ where ``|a - b| <= atol + rtol * |b|`` does not hold, as
``numpy.allclose`` has it: infinities only equal themselves. Distances between integers of one type are exact, all
others are computed in float64. Elements whose bits have no meaning as a number are equal or different, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.index.dtypes import values

# Decoding to float64 takes some ten times the bytes of an element: it is done for this many at a time.
_BLOCK_ELEMENTS = 1 << 16

Array = NDArray[Any]


@dataclass(frozen=True)
class Tolerance:
    """How far apart equal elements may be; nothing by default, which asks for the same bits."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether bits are compared."""
        return self.atol == 0 and self.rtol == 0


@dataclass
class Tally:
    """How two arrays differ; that of their parts adds up.

    Attributes:
        elements: how many were compared.
        unequal: how many are not equal.
        outside: how many of those the tolerance does not cover.
        nan_a, nan_b: how many are NaN in one and a number in the other.
        max_abs: largest |a - b| over the unequal ones; None where none has a distance.
        max_rel: largest |a - b| / |b|.
        where: position of the largest |a - b|, else of the first that is unequal, in row-major order.
    """

    elements: int = 0
    unequal: int = 0
    outside: int = 0
    nan_a: int = 0
    nan_b: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    where: int | None = None

    def add(self, other: Tally, where: int | None) -> None:
        """Adds that of another part, whose own ``where`` is at ``where`` in the whole."""
        self.elements += other.elements
        self.unequal += other.unequal
        self.outside += other.outside
        self.nan_a += other.nan_a
        self.nan_b += other.nan_b
        if other.max_abs is not None and (self.max_abs is None or other.max_abs > self.max_abs):
            self.max_abs, self.where = other.max_abs, where
        elif self.where is None:
            self.where = where
        if other.max_rel is not None:
            self.max_rel = max(other.max_rel, self.max_rel or 0.0)


def have_distance(a_dtype: str, b_dtype: str) -> bool:
    """Whether the elements of two types are numbers that can be subtracted."""
    return not (_is_opaque(a_dtype) or _is_opaque(b_dtype))


def compare(a: Array, b: Array, a_dtype: str, b_dtype: str, tolerance: Tolerance) -> Tally:
    """Compares raw elements, as ``Checkpoint.read_array`` gives them, of one shape.

    The types are the same, or they `have_distance`.
    """
    a, b = a.reshape(-1), b.reshape(-1)
    tally = Tally()
    for start in range(0, len(a), _BLOCK_ELEMENTS):
        part_a, part_b = a[start : start + _BLOCK_ELEMENTS], b[start : start + _BLOCK_ELEMENTS]
        if a_dtype == b_dtype and np.array_equal(_bits(part_a), _bits(part_b)):
            tally.elements += len(part_a)
            continue
        found = _compare(part_a, part_b, a_dtype, b_dtype, tolerance)
        tally.add(found, None if found.where is None else start + found.where)
    return tally


def _compare(a: Array, b: Array, a_dtype: str, b_dtype: str, tolerance: Tolerance) -> Tally:
    if a_dtype == b_dtype and _is_opaque(a_dtype):
        places = np.flatnonzero(a != b)
        return Tally(a.size, len(places), len(places), where=int(places[0]))
    x, y = _numbers(a, a_dtype), _numbers(b, b_dtype)
    if a_dtype == b_dtype:
        unequal = _other_bits(a, b, x, y)
    else:
        unequal = _other_numbers(x, y)
    places = np.flatnonzero(unequal)
    if not len(places):
        return Tally(a.size)
    x, y = x[places], y[places]
    with np.errstate(all="ignore"):
        distance, against = _distance(x, y)
        relative = np.where(distance == 0, 0.0, distance / against)
        relative[np.isnan(relative)] = np.inf
        if tolerance.is_exact:
            outside = len(places)
        else:
            within = distance <= tolerance.atol + tolerance.rtol * against
            outside = int((~(within & np.isfinite(x) & np.isfinite(y))).sum())
    no_x, no_y = np.isnan(x), np.isnan(y)
    measured = ~np.isnan(distance) if distance.dtype.kind == "f" else np.ones(len(places), dtype=bool)
    tally = Tally(a.size, len(places), outside, int((no_x & ~no_y).sum()), int((no_y & ~no_x).sum()))
    tally.where = int(places[0])
    if measured.any():
        candidates = np.flatnonzero(measured)
        largest = candidates[distance[candidates].argmax()]
        tally.max_abs = distance[largest].item()
        tally.max_rel = float(relative[candidates].max())
        tally.where = int(places[largest])
    return tally


def _other_bits(a: Array, b: Array, x: Array, y: Array) -> NDArray[np.bool_]:
    if x.dtype.kind == "c":
        # The two parts of a complex number are compared one by one.
        bits, part = np.dtype(f"u{a.itemsize // 2}"), np.dtype(f"f{x.itemsize // 2}")
        other = (a.view(bits) != b.view(bits)) & ~(np.isnan(x.view(part)) & np.isnan(y.view(part)))
        return np.asarray(other.reshape(-1, 2).any(axis=1))
    other = a != b
    return np.asarray(other & ~(np.isnan(x) & np.isnan(y)) if x.dtype.kind == "f" else other)


def _other_numbers(x: Array, y: Array) -> NDArray[np.bool_]:
    kinds = x.dtype.kind + y.dtype.kind
    if "c" in kinds:
        x, y = x.astype(np.complex128), y.astype(np.complex128)
    elif kinds in ("fi", "fu"):
        return _other_than_integers(y, x)
    elif kinds in ("if", "uf"):
        return _other_than_integers(x, y)
    return np.asarray((x != y) & ~(np.isnan(x) & np.isnan(y)))


def _other_than_integers(integers: Array, floats: Array) -> NDArray[np.bool_]:
    """As float64 the integer could round to the float: back as an integer, the float is exact or out of range."""
    rounded = integers.astype(np.float64)
    bits = 8 * integers.itemsize - (integers.dtype.kind == "i")
    inside = np.abs(rounded) < 2.0**bits
    back = np.where(inside, rounded, 0.0).astype(integers.dtype)
    lowest = (rounded == -(2.0**bits)) & (integers == np.iinfo(integers.dtype).min)
    return np.asarray((rounded != floats) | ~((inside & (back == integers)) | lowest))


def _distance(x: Array, y: Array) -> tuple[Array, Array]:
    """|x - y| and |y|."""
    if x.dtype.kind in "iu" and x.dtype.kind == y.dtype.kind:
        # Modulo 2**64, so that the distance of the two ends is right as well.
        low, high = (part.astype(np.int64 if x.dtype.kind == "i" else np.uint64).view(np.uint64) for part in (x, y))
        return np.where(x > y, low - high, high - low), np.abs(y.astype(np.float64))
    wide = np.complex128 if "c" in x.dtype.kind + y.dtype.kind else np.float64
    x, y = x.astype(wide), y.astype(wide)
    return np.abs(x - y), np.abs(y)


def _numbers(raw: Array, dtype: str) -> Array:
    # A byte of a bool may be neither 0 nor 1.
    return raw if dtype == "bool" else values(raw, dtype)


def _bits(raw: Array) -> Array:
    """Unsigned integers: what a complex stand-in calls equal may not be."""
    return raw.view(np.uint64) if raw.dtype.kind == "c" else raw


def _is_opaque(dtype: str) -> bool:
    return dtype.startswith(("bits", "float4"))
