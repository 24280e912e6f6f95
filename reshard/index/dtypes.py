"""The element types of stored tensors, by torch's name, without torch.

Bytes are moved as they are, whatever they mean; only a cast, a comparison and the search for NaN look at values. For
those the types that numpy lacks are decoded here: bfloat16 is the upper half of a float32; the 8-bit floats are so few
that a table of their 256 values is exact.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointUnsound, UsageError

_BY_BYTES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits1x8 bits2x4 bits4x2",
    2: "float16 bfloat16 int16 uint16 bits16",
    4: "float32 int32 uint32 complex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: item_bytes for item_bytes, names in _BY_BYTES.items() for name in names.split()}

# Known, and refused: their elements do not fill bytes, or mean nothing without scales that lie elsewhere.
REFUSED = frozenset(
    ["qint8", "qint32", "quint8", "quint4x2", "quint2x4"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
)

FLOATS = frozenset(name for name in ITEM_BYTES if name.startswith(("float", "bfloat", "complex")))
CASTABLE = ("float64", "float32", "float16", "bfloat16")
SHORT_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

# sign, exponent and mantissa bits, exponent bias, what the highest exponent means
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "nan at all ones"),
    "float8_e4m3fnuz": (4, 3, 8, "nan at negative zero"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "nan at negative zero"),
}


def item_bytes(dtype: str, key: str, path: object = None) -> int:
    """Bytes of one element.

    Raises:
        CheckpointUnsound: the type is quantised, packed below a byte, or unknown.
    """
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise CheckpointUnsound(
            "quantised or packed elements cannot be resharded" if dtype in REFUSED else "an unknown dtype",
            path=None if path is None else str(path),
            key=key,
            found=dtype,
            hint="dequantise it before saving, or leave it out",
        ) from None


def raw(dtype: str) -> np.dtype[np.generic]:
    """A numpy type of the same width, in which elements are moved without being looked at."""
    width = ITEM_BYTES[dtype]
    return np.dtype(f"u{width}" if width <= 8 else "c16")


def values(data: NDArray[np.generic] | memoryview | bytes | bytearray, dtype: str) -> NDArray[np.generic]:
    """Little-endian elements as numbers that numpy computes with; the exact values in every case.

    8-bit floats and bfloat16 become float32, complex32 complex64; bits and packed types stay integers.
    """
    plain = np.frombuffer(data, dtype=raw(dtype)) if not isinstance(data, np.ndarray) else data.view(raw(dtype))
    if dtype == "bfloat16":
        return (plain.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        decoded: NDArray[np.generic] = _table(dtype)[plain]
        return decoded
    if dtype == "complex32":
        pairs = np.ascontiguousarray(plain).view(np.float16).astype(np.float32)
        return pairs.view(np.complex64)
    if dtype.startswith(("bits", "float4")):
        return plain
    return plain.view(np.dtype(dtype))


def cast(data: NDArray[np.generic], source: str, target: str) -> NDArray[np.generic]:
    """Elements of one floating type as another, rounded to nearest even as torch does; raw in, raw out.

    Raises:
        UsageError: one of the two is not a 16, 32 or 64 bit float.
    """
    for dtype in (source, target):
        if dtype not in CASTABLE:
            raise UsageError("no cast from or to this dtype", found=dtype, expected=" ".join(CASTABLE))
    if source == target:
        return data
    numbers = values(data, source)
    # What is too large becomes infinite and NaN stays NaN, as in torch; numpy would have something to say to it.
    with np.errstate(over="ignore", invalid="ignore"):
        if target in ("bfloat16", "float16"):
            # Torch has no shorter way from float64: it rounds twice.
            single = numbers.astype(np.float32)
            return _to_bfloat16(single) if target == "bfloat16" else single.astype(np.float16).view(raw(target))
        return numbers.astype(np.dtype(target)).view(raw(target))


def _to_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.generic]:
    # In place, and the upper halves by a view: each pass over memory costs as much as reading the numbers.
    bits = numbers.view(np.uint32)
    rounded = np.empty(bits.shape, np.uint32)
    np.right_shift(bits, 16, out=rounded)
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    halves = rounded.reshape(-1).view(np.uint16)[1::2].reshape(bits.shape)
    # Rounding would carry some NaN into infinity.
    is_nan = np.isnan(numbers)
    quieted: NDArray[np.generic] = np.where(is_nan, np.uint16(0x7FC0), halves) if is_nan.any() else halves
    return quieted


@functools.cache
def _table(dtype: str) -> NDArray[np.float32]:
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        table = np.ldexp(np.ones(256), codes - 127)
        table[255] = np.nan
        return table.astype(np.float32)
    exponent_bits, mantissa_bits, bias, top = _FLOAT8[dtype]
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    subnormal = exponent == 0
    table = sign * np.ldexp(np.where(subnormal, mantissa, 1 + mantissa), np.where(subnormal, 1, exponent) - bias)
    if top == "ieee":
        highest = exponent == (1 << exponent_bits) - 1
        table[highest] = np.where(mantissa[highest] == 0, sign[highest] * np.inf, np.nan)
    elif top == "nan at all ones":
        table[(codes & 0x7F) == 0x7F] = np.nan
    else:
        table[0x80] = np.nan
    decoded: NDArray[np.float32] = table.astype(np.float32)
    return decoded
