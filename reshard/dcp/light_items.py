"""The items of a stock load plan, as plain tuples while they travel.

Stock gathers the plans of all ranks on rank 0 and sends them back. Its own objects take tens of times as long to
pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem


class LightItems(Sequence[ReadItem]):
    """Read items, each made when it is asked for."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = rows

    @classmethod
    def of(cls, items: Iterable[ReadItem]) -> LightItems:
        return cls(
            [
                (
                    item.type.value,
                    *_plain_index(item.dest_index),
                    tuple(item.dest_offsets),
                    *_plain_index(item.storage_index),
                    tuple(item.storage_offsets),
                    tuple(item.lengths),
                )
                for item in items
            ]
        )

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> ReadItem: ...
    @overload
    def __getitem__(self, place: slice) -> LightItems: ...
    def __getitem__(self, place: int | slice) -> ReadItem | LightItems:
        if isinstance(place, slice):
            return LightItems(self._rows[place])
        kind, *rest = self._rows[place]
        return ReadItem(
            LoadItemType(kind),
            _stock_index(*rest[:3]),
            torch.Size(rest[3]),
            _stock_index(*rest[4:7]),
            torch.Size(rest[7]),
            torch.Size(rest[8]),
        )


def _plain_index(index: MetadataIndex) -> tuple[str, tuple[int, ...] | None, int | None]:
    return index.fqn, None if index.offset is None else tuple(index.offset), index.index


def _stock_index(key: str, offsets: tuple[int, ...] | None, hint: int | None) -> MetadataIndex:
    return MetadataIndex(key, None if offsets is None else torch.Size(offsets), hint)
