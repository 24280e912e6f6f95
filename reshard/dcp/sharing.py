"""Boxes that several ranks hold: one of them reads or writes each, or each of them a part of its rows.

Rank 0 works it out from what all ranks tell of their boxes, a few numbers each. Boxes are told apart by 128-bit
digests, so that neither names nor shapes travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.dcp.ranks import Ranks
from reshard.index.index import Int

# Smaller boxes are dealt out as they are; larger ones are cut, so that all have the same to do.
CUT_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Held:
    """What a rank holds, as columns.

    Attributes:
        mark: (boxes, 2) 64-bit words that tell a box from all others.
        length_bytes, rows: of each box; rows are the size of dim 0, or 1.
        is_dealt: whether any holder may take it; else the lowest rank does.
    """

    mark: NDArray[np.uint64]
    length_bytes: Int
    rows: Int
    is_dealt: NDArray[np.bool_]

    @classmethod
    def of(
        cls, texts: Iterable[str], length_bytes: Sequence[int], rows: Sequence[int], is_dealt: Sequence[bool]
    ) -> Held:
        """Of boxes that are the same where their texts are."""
        digests = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts]
        return cls(
            np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2),
            np.array(length_bytes, dtype=np.int64),
            np.array(rows, dtype=np.int64),
            np.array(is_dealt, dtype=bool),
        )


@dataclass(frozen=True, eq=False)
class Shares:
    """What a rank is to do of the boxes that it holds.

    Attributes:
        taker: the rank that takes the box; -1 where each holder takes a part, as `part_rows` cuts it.
        group: number of the group of its holders; -1 where this rank alone holds it.
        groups: ranks, ascending, of each group that this rank is in, in an order that is the same for all ranks.
    """

    taker: Int
    group: Int
    groups: list[tuple[int, ...]]


def share(held: Held, ranks: Ranks) -> Shares:
    """Who takes what. Collective."""
    if ranks.size == 1:
        alone = np.zeros(len(held.rows), dtype=np.int64)
        return Shares(alone, alone - 1, [])
    everybodys = ranks.collect(held)
    return ranks.hand_out(_dealt(everybodys) if everybodys is not None else None)


def part_rows(rows: int, part: int, parts: int) -> tuple[int, int]:
    """First and last row (exclusive) of one of several equal parts."""
    return rows * part // parts, rows * (part + 1) // parts


def _dealt(everybodys: Sequence[Held]) -> list[Shares]:
    """The shares of all ranks."""
    counts = [len(held.rows) for held in everybodys]
    rank = np.repeat(np.arange(len(everybodys)), counts)
    marks = np.concatenate([held.mark for held in everybodys])
    _, first, box, holders = np.unique(
        marks.view([("high", np.uint64), ("low", np.uint64)]).reshape(-1),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    length_bytes, rows, is_dealt = (
        np.concatenate([getattr(held, name) for held in everybodys])[first]
        for name in ("length_bytes", "rows", "is_dealt")
    )
    # By box, and within a box by rank.
    order = np.lexsort((rank, box))
    begin = np.cumsum(holders) - holders
    group, groups = _groups(rank[order], begin, holders)

    position = _deal(group, length_bytes, holders)
    taker = rank[order][begin + np.where(is_dealt, position, 0)]
    taker[is_dealt & (holders > 1) & (length_bytes >= CUT_BYTES) & (rows >= holders)] = -1
    shares = []
    for number, end in enumerate(np.cumsum(counts).tolist()):
        own = box[end - counts[number] : end]
        mine, numbers = np.unique(group[own], return_inverse=True)
        is_alone = mine < 0
        shares.append(
            Shares(
                taker[own], (numbers - is_alone.sum()).clip(-1), [groups[which] for which in mine[~is_alone].tolist()]
            )
        )
    return shares


def _groups(rank: Int, begin: Int, holders: Int) -> tuple[Int, list[tuple[int, ...]]]:
    """The number of the group of each box (-1: one holder), and the ranks of each group, in the order of the ranks."""
    group = np.full(len(begin), -1, dtype=np.int64)
    shared = np.flatnonzero(holders > 1)
    found: dict[bytes, list[int]] = {}
    narrow = rank.astype(np.int32)
    for which in shared.tolist():
        found.setdefault(narrow[begin[which] : begin[which] + holders[which]].tobytes(), []).append(which)
    named = sorted((tuple(np.frombuffer(ranks, dtype=np.int32).tolist()), boxes) for ranks, boxes in found.items())
    for number, (_, boxes) in enumerate(named):
        group[boxes] = number
    return group, [ranks for ranks, _ in named]


def _deal(group: Int, length_bytes: Int, holders: Int) -> Int:
    """Which of its holders takes each box: within a group the largest first, to and fro."""
    order = np.lexsort((-length_bytes, group))
    sorted_group = group[order]
    is_first = (
        np.concatenate([[True], sorted_group[1:] != sorted_group[:-1]]) if len(order) else np.zeros(0, dtype=bool)
    )
    starts = np.flatnonzero(is_first)
    turn = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    count = holders[order]
    forth, at = np.divmod(turn, count)
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.where(forth % 2 == 0, at, count - 1 - at)
    return position
