"""Waiting for what another node has written: network file systems show it late, and disks of a node's own never."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from reshard.errors import StorageError
from reshard.storage.durable import storage_errors

VISIBILITY_TIMEOUT_S = 30.0
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


def wait_until_seen(folder: Path, length_bytes: Mapping[str, int], timeout_s: float = VISIBILITY_TIMEOUT_S) -> None:
    """Passes once a folder is there, with files of these lengths in it, as this node sees it.

    Raises:
        StorageError: it is not after ``timeout_s``, so the nodes do not share it.
    """
    wait_s = _FIRST_WAIT_S
    end_s = time.monotonic() + timeout_s
    while (unseen := _unseen(folder, length_bytes)) is not None:
        if time.monotonic() >= end_s:
            raise StorageError(
                "written by another rank, and not seen from here",
                path=unseen,
                found=f"nothing after {timeout_s:g} s on {os.uname().nodename}",
                hint="save to a file system that all nodes share: this one looks like a disk of each node's own",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _unseen(folder: Path, length_bytes: Mapping[str, int]) -> Path | None:
    """The first thing that is not there; None if all is."""
    with storage_errors("list the folder", folder):
        try:
            # Listing makes NFS ask the server again, which looking up a name does not.
            names = set(os.listdir(folder))  # noqa: PTH208
            for name, expected in length_bytes.items():
                if name not in names or (folder / name).stat().st_size != expected:
                    return folder / name
        except FileNotFoundError:
            return folder
    return None
