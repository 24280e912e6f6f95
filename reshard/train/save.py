"""Writing the complete state of a run as one committed step folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from reshard.dcp.ranks import Ranks, all_ranks
from reshard.dcp.writing import write_state
from reshard.environment import attempt_token
from reshard.errors import CheckpointUnsound, StorageError
from reshard.formats import manifest as manifests
from reshard.storage.commit import Stage
from reshard.storage.durable import write_atomic
from reshard.storage.visibility import VISIBILITY_TIMEOUT_S
from reshard.train.capture import Captured, capture
from reshard.train.state import TrainState
from reshard.verify.structure import structure_faults


def save_state(
    directory: str | Path,
    state: TrainState,
    *,
    attempt: str | None = None,
    replace: bool = False,
    metrics: Mapping[str, float | None] | None = None,
    visibility_timeout_s: float = VISIBILITY_TIMEOUT_S,
) -> Path:
    """Saves everything in ``state`` as ``<directory>/step-<state.step>`` and returns that folder.

    Every rank must call it, between two steps. The folder appears when all of it is on the disk, or not at all: a
    crash at any moment leaves the steps before as they were. Nothing in ``state`` is changed, its gradients included.

    Args:
        directory: the run's folder, on a file system that all ranks share.
        attempt: who writes; by default from the environment (see :mod:`reshard.environment`).
        replace: put it in place of a committed step of the same number.
        metrics: what the run measured at this step, by name; rank 0's are recorded, for retention to go by.
        visibility_timeout_s: how long what one rank has written may stay unseen by another, on file systems that lag;
            after that they are taken to have disks of their own, and the save is refused.

    Raises:
        ReshardError: on every rank, if any rank failed.
    """
    ranks = all_ranks()
    attempt = ranks.broadcast(attempt or attempt_token())
    captured = capture(state, ranks, attempt, metrics)
    return commit_step(
        Path(directory).expanduser(), captured, ranks, replace=replace, visibility_timeout_s=visibility_timeout_s
    )


def commit_step(
    directory: Path,
    captured: Captured,
    ranks: Ranks,
    *,
    replace: bool = False,
    visibility_timeout_s: float = VISIBILITY_TIMEOUT_S,
) -> Path:
    """Writes what was captured as a step of a run's folder, and commits it. Collective.

    Raises:
        ReshardError: on every rank, if any rank failed. The steps there are as they were.
    """
    stage: Stage | None = None
    try:
        with ranks.together():
            if ranks.rank == 0:
                stage = Stage.open(directory, captured.manifest.step, captured.manifest.attempt)
        folder = ranks.broadcast(stage.path if stage else None)
        assert folder is not None
        written = write_state(captured.local, folder, ranks, visibility_timeout_s=visibility_timeout_s)
        files: dict[str, Any] = {name: mark.to_json() for name, mark in written.items()}
        committed: Path | None = None
        with ranks.together():
            if stage is not None:
                manifest = replace_fields(captured.manifest, files=files)
                write_atomic(stage.path / manifests.FILE_NAME, manifests.to_bytes(manifest))
                _require_sound(stage.path)
                committed = stage.commit(replace=replace)
                stage = None
        path = ranks.broadcast(committed)
        assert path is not None
        return path
    finally:
        if stage is not None:
            # It may fail for the very reason that the save did, which is the one to tell; the next claim sweeps it.
            with contextlib.suppress(StorageError):
                stage.discard()


def _require_sound(folder: Path) -> None:
    # What was just written is read back: a file system that another node does not share shows here.
    if faults := structure_faults(folder):
        raise CheckpointUnsound(
            "the step was written and is not whole, so it was not committed",
            path=folder,
            hint="see whether the disk is full or not shared between the ranks",
            details=faults,
        )
