"""What `RangeReader` and `RangeWriter` have in common: their checkpoint is a folder."""

from __future__ import annotations

import os
from pathlib import Path


class InFolder:
    """The part of stock's storage interfaces that tells where a checkpoint is.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path on a file system of this machine."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another folder if one is given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
