"""The rows of a dim that a rank of a mesh holds, by the placements of a DTensor, without torch.

Placements cut a dim one after the other, in the order of the mesh axes, each as ``torch.chunk`` does: parts of equal
length, the last ones shorter or empty. A strided placement, which FSDP makes of a dim that tensor parallelism cuts as
well, first cuts the dim into ``split_factor`` stripes, takes its part of each, and leaves them to the axes that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.index.index import Int


class Cut(NamedTuple):
    """What one mesh axis does to a dim.

    Attributes:
        parts: ranks along the axis.
        part: the one that is asked about.
        split_factor: stripes of a strided placement; 1 otherwise.
    """

    parts: int
    part: int
    split_factor: int = 1


def rows_after(length: int, cuts: Sequence[Cut]) -> tuple[int, int] | None:
    """First row and number of rows that are left of a dim; None where they do not follow one another.

    Args:
        cuts: in the order of the mesh axes.
    """
    rows = np.arange(length, dtype=np.int64)
    for cut in cuts:
        stripes = _chunks(rows, cut.split_factor)
        rows = np.concatenate([_part(stripe, cut) for stripe in stripes]) if stripes else rows
    if not len(rows):
        return length, 0
    first = int(rows[0])
    return (first, len(rows)) if int(rows[-1]) - first + 1 == len(rows) else None


def _part(rows: Int, cut: Cut) -> Int:
    parts = _chunks(rows, cut.parts)
    return parts[cut.part] if cut.part < len(parts) else rows[:0]


def _chunks(rows: Int, parts: int) -> list[Int]:
    length = -(-len(rows) // parts)
    return [rows[start : start + length] for start in range(0, len(rows), length)] if length else []
