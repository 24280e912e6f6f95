"""Which format a path holds, by evidence in the files, and the opened checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from reshard.errors import CheckpointNotFound
from reshard.formats import dcp_metadata
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import open_dcp


def open_checkpoint(path: str | os.PathLike[str], also: Sequence[str | os.PathLike[str]] = ()) -> Checkpoint:
    """Opens a checkpoint; reads what describes it, no tensor.

    Args:
        path: a DCP folder, a run folder (its newest committed step), a safetensors file, a Hugging Face folder, or a
            file of ``torch.save``.
        also: further folders with files of the same checkpoint.

    Raises:
        CheckpointNotFound: nothing there, or nothing that is known.
        CheckpointUnsound: it is damaged.
    """
    place = Path(path).expanduser()
    others = [Path(other).expanduser() for other in also]
    if (place / dcp_metadata.FILE_NAME).exists():
        return open_dcp(place, others)
    raise CheckpointNotFound("no checkpoint of a known format", path=place)
