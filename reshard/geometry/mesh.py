"""The mesh that shards a model, and the rows that FSDP2 gives to each rank of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError

REPLICATE = "dp_replicate"
SHARD = "dp_shard"
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Mesh:
    """Data-parallel ranks: ``replicate`` copies of the model, each cut into ``shard`` parts.

    Rank r has shard r % shard of replica r // shard, as in a ``DeviceMesh`` with the replicate axis first.
    """

    shard: int
    replicate: int = 1

    def __post_init__(self) -> None:
        if self.ranks > MOST_RANKS:
            raise UsageError("more ranks than any job has", expected=f"at most {MOST_RANKS}", found=self.ranks)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """From ``dp_replicate=2,dp_shard=4``; an axis that is left out has 1 rank.

        Raises:
            UsageError: another axis, one twice, or a number below 1.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            is_count = number.isascii() and number.isdigit() and int(number) > 0
            if name not in (REPLICATE, SHARD) or name in axes or not is_count:
                hint = "give each axis once, with the number of its ranks"
                expected = f"{REPLICATE}=R,{SHARD}=S"
                raise UsageError("not a mesh", key="--mesh", expected=expected, found=repr(text), hint=hint)
            axes[name] = int(number)
        return cls(axes.get(SHARD, 1), axes.get(REPLICATE, 1))

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.shard * self.replicate

    @property
    def axes(self) -> dict[str, int]:
        """Ranks by mesh axis."""
        if self.replicate == 1:
            return {SHARD: self.shard}
        return {REPLICATE: self.replicate, SHARD: self.shard}


def shard_rows(
    rows: NDArray[np.int64], shards: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """How ``torch.chunk`` cuts dim 0 of many tensors: all parts that have rows.

    Every part but the last has ceil(rows / shards) rows; so trailing shards may have none, although there are more rows
    than shards (6 over 4: 2, 2, 2, 0).

    Args:
        rows: of each tensor.

    Returns:
        For each part: the tensor (position in ``rows``), the shard, its first row, its number of rows.
    """
    per_part = np.maximum(1, -(-rows // shards))
    parts = -(-rows // per_part)
    tensor = np.repeat(np.arange(len(rows), dtype=np.int64), parts)
    shard = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    first = shard * per_part[tensor]
    return tensor, shard, first, np.minimum(per_part[tensor], rows[tensor] - first)
