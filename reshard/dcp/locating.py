"""Finding where the elements of chunks lie: once for all ranks, where several of them want the same chunks.

In DCP's files each chunk is an archive, whose ends have to be read to know. On twice the ranks that wrote them, every
archive is wanted by two.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from reshard.dcp.ranks import Ranks
from reshard.errors import ReshardError
from reshard.formats.checkpoint import Checkpoint
from reshard.index.index import Int, Payloads

# Of larger checkpoints, what all ranks would be told is more than it saves.
_MOST_CHUNKS = 1 << 16


class _Found(NamedTuple):
    """What one rank has found, by chunk row."""

    rows: Int
    columns: Int
    strides: dict[int, tuple[int, ...]]
    contents: dict[int, bytes]


def locate(source: Checkpoint, rows: Int, ranks: Ranks) -> None:
    """Makes the places of some rows known. Collective; every rank may give other rows of the same checkpoint.

    Raises:
        CheckpointUnsound: on every rank, if an archive that any of them wants is damaged.
        ReshardError: on every rank, if any failed.
    """
    count = len(source.index.file)
    if ranks.size > 1 and count <= _MOST_CHUNKS and ranks.total(len(rows)) >= 2 * count:
        # Each takes a share of all, wanted or not, which needs no further agreement: neighbours, of few files.
        order = np.lexsort((source.index.start_bytes, source.index.file))
        mine = order[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size]
        # A damaged archive is the affair of whoever wants it, below.
        with suppress(ReshardError, OSError):
            source.locate(mine)
        for found in ranks.gather(_found(source.payloads, mine)):
            _take(source.payloads, found)
    with ranks.together():
        source.locate(rows)


def _found(payloads: Payloads, rows: Int) -> _Found:
    rows = rows[payloads.start_bytes[rows] >= 0]
    columns = (payloads.start_bytes, payloads.crc, payloads.record_start_bytes, payloads.record_bytes)
    chosen = set(rows.tolist())
    return _Found(
        rows,
        np.stack([column[rows] for column in columns]),
        {row: strides for row, strides in payloads.strides.items() if row in chosen},
        {row: content for row, content in payloads.contents.items() if row in chosen},
    )


def _take(payloads: Payloads, found: _Found) -> None:
    rows = found.rows
    # The start last: it is what tells that a row is known.
    payloads.crc[rows], payloads.record_start_bytes[rows], payloads.record_bytes[rows] = found.columns[1:]
    payloads.strides.update(found.strides)
    payloads.contents.update(found.contents)
    payloads.start_bytes[rows] = found.columns[0]
