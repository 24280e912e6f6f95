"""Which tensors and objects of a checkpoint are carried over, and in which dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.index.dtypes import CASTABLE, SHORT_NAMES, item_bytes
from reshard.index.index import Int, Place
from reshard.index.kinds import COUNTERS, OTHERS, WEIGHTS, is_of_model, is_of_one_rank, kinds_of


@dataclass(frozen=True)
class Selection:
    """What is carried over.

    Attributes:
        tensors: numbers in the index, ascending.
        dtypes: of every tensor of the index, as it is to be written.
        objects: key -> where it lies.
        of_one_rank: objects among these that belong to a single rank of the job that wrote them.
        dropped: keys that are left out because they were named.
    """

    tensors: Int
    dtypes: list[str]
    objects: dict[str, Place]
    of_one_rank: list[str]
    dropped: list[str]


def select(
    checkpoint: Checkpoint, only: str | None, dtype: str | None, drop: Iterable[str], beside: Iterable[str] = ()
) -> Selection:
    """Applies ``--only``, ``--dtype`` and ``--drop``, which may also name files beside the tensors.

    Raises:
        UsageError: nothing of that name, an unknown dtype, or nothing is left.
        CheckpointUnsound: a tensor has quantised or packed elements.
    """
    index = checkpoint.index
    kinds = kinds_of(index.names, index.shapes)
    prefixes = tuple(drop)
    keys = [*index.names, *index.objects, *beside]
    for prefix in prefixes:
        if not any(key.startswith(prefix) for key in keys):
            raise UsageError("nothing to drop begins so", key=f"--drop {prefix}", hint="`reshard inspect --tree` lists")
    dropped = [key for key in keys if key.startswith(prefixes)] if prefixes else []
    out = set(dropped)
    if only is not None:
        if only != "model":
            raise UsageError("only the model can be had alone", key="--only", expected="model", found=only)
        out.update(name for name, kind in zip(index.names, kinds, strict=True) if kind != WEIGHTS)
        out.update(key for key in index.objects if not is_of_model(key))
    tensors = np.array([number for number, name in enumerate(index.names) if name not in out], dtype=np.int64)
    objects = {key: place for key, place in index.objects.items() if key not in out}
    if not len(tensors):
        raise UsageError("nothing is left to write", path=checkpoint.path, hint="select less strictly")
    for number in tensors.tolist():
        item_bytes(index.dtypes[number], index.names[number], checkpoint.path)
    return Selection(
        tensors=tensors,
        dtypes=_dtypes(index.dtypes, kinds, dtype),
        objects=objects,
        of_one_rank=[key for key in objects if is_of_one_rank(key)],
        dropped=dropped,
    )


def stored_whole(checkpoint: Checkpoint, tensors: Int) -> NDArray[np.bool_]:
    """Which tensors are not sharded in the model: stored in one chunk by a job that stored others in several.

    Chunks of ranks without rows count. Where no tensor is in several chunks, the job had one rank, and only what is
    never sharded (step counters, random states) is known.
    """
    index = checkpoint.index
    counts = np.diff(index.first)
    single = counts == 1
    if not (counts > 1).any():
        single &= np.array([kind in (COUNTERS, OTHERS) for kind in kinds_of(index.names, index.shapes)])
    chosen: NDArray[np.bool_] = single[tensors]
    return chosen


def _dtypes(stored: list[str], kinds: list[str], wanted: str | None) -> list[str]:
    if wanted is None:
        return list(stored)
    target = SHORT_NAMES.get(wanted, wanted)
    if target not in CASTABLE:
        raise UsageError("weights cannot be cast to this", key="--dtype", expected=" ".join(SHORT_NAMES), found=wanted)
    return [
        target if kind == WEIGHTS and dtype in CASTABLE else dtype for dtype, kind in zip(stored, kinds, strict=True)
    ]
