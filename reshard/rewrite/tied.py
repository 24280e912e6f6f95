"""Tensors of a model that lie in the same bytes: names of one weight, as tied embeddings are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.formats.checkpoint import Checkpoint
from reshard.index.kinds import is_of_model
from reshard.rewrite.selection import Selection


def aliases_of(checkpoint: Checkpoint, selection: Selection) -> dict[int, int]:
    """Number of each selected tensor of the model that repeats another -> number of that one, which comes before it.

    Only what the source stores once counts: equal values may be a coincidence, as after an initialisation.
    """
    index = checkpoint.index
    seen: dict[object, int] = {}
    aliases: dict[int, int] = {}
    for number in selection.tensors.tolist():
        if not is_of_model(index.names[number]) or 0 in index.shapes[number]:
            continue
        rows = slice(int(index.first[number]), int(index.first[number + 1]))
        places = (index.file[rows].tobytes(), index.start_bytes[rows].tobytes(), index.offsets[rows].tobytes())
        key = (index.dtypes[number], index.shapes[number], places)
        first = seen.setdefault(key, number)
        if first != number:
            aliases[number] = first
    return aliases


def without(selection: Selection, aliases: dict[int, int]) -> Selection:
    """The selection without the repeated tensors."""
    if not aliases:
        return selection
    kept = selection.tensors[~np.isin(selection.tensors, list(aliases))]
    return replace(selection, tensors=kept)
