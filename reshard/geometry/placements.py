"""The rows of a dim that a rank of a mesh holds, by the placements of a DTensor, without torch.

Placements cut a dim one after the other, in the order of the mesh axes, each as ``torch.chunk`` does: parts of equal
length, the last ones shorter or empty. A strided placement is what FSDP makes of a dim that tensor parallelism had cut
before: it stands before the axes that cut first, and its ``split_factor`` is the number of parts that they made. So it
cuts after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """What one mesh axis does to a dim.

    Attributes:
        parts: ranks along the axis.
        part: the one that is asked about.
        split_factor: of a strided placement, into how many parts the axes behind it cut before; 1 otherwise.
    """

    parts: int
    part: int
    split_factor: int = 1


def rows_after(length: int, cuts: Sequence[Cut]) -> tuple[int, int] | None:
    """First row and number of rows that are left of a dim; None where they do not follow one another.

    Args:
        cuts: in the order of the mesh axes.
    """
    first, rows = 0, length
    ordered = _as_they_cut(cuts)
    if ordered is None:
        return None
    for cut in ordered:
        part = -(-rows // cut.parts)
        before = min(cut.part * part, rows)
        first, rows = first + before, min(part, rows - before)
    return (first, rows) if rows else (length, 0)


def _as_they_cut(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The cuts, one after the other; None where a strided one is not the last of what made its stripes."""
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        place, stripes = 0, 1
        while stripes < cut.split_factor and place < len(ordered):
            stripes *= ordered[place].parts
            place += 1
        if stripes != cut.split_factor and cut.parts > 1:
            return None
        ordered.insert(place, cut)
    return ordered
