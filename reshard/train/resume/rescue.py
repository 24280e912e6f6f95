"""A checkpoint of another tool's ranks, opened for a resume: by rank 0, which tells the others where all lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from reshard.dcp.ranks import Ranks
from reshard.errors import CheckpointNotFound
from reshard.formats import dcp, safetensors_file, torch_file
from reshard.formats.checkpoint import Checkpoint, all_known
from reshard.formats.identify import identify
from reshard.formats.opening import open_checkpoint
from reshard.formats.rescue.hints import Hints
from reshard.rewrite.manifest_found import with_manifest
from reshard.rewrite.training_keys import with_training_keys

# These are opened as they are, or hold too little to go on from.
_NOT_RESCUED = (dcp.NAME, safetensors_file.NAME, torch_file.NAME)


def is_rescued(path: Path) -> bool:
    """Whether a folder is one of another tool, with the state of a run in it."""
    try:
        return identify(path).format not in _NOT_RESCUED
    except CheckpointNotFound:
        return False


def open_rescued(path: Path, ranks: Ranks) -> Checkpoint:
    """Opens it on every rank. Collective.

    Raises:
        UsageError: on every rank, if the files do not tell which parameter an entry of the optimizer belongs to.
        ReshardError: on every rank, if it cannot be read.
    """
    checkpoint: Checkpoint | None = None
    with ranks.together():
        if ranks.rank == 0:
            opened = open_checkpoint(path, hints=Hints(optimizer="named"))
            checkpoint = with_manifest(with_training_keys(opened))
            checkpoint.locate(np.arange(len(checkpoint.index.file)))
            checkpoint = replace(checkpoint, locate=all_known)
            checkpoint.close()
    checkpoint = ranks.broadcast(checkpoint)
    assert checkpoint is not None
    for note in checkpoint.notes:
        ranks.warn(note)
    return checkpoint
