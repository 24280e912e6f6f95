"""Which step a run goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reshard.errors import CheckpointNotFound, CheckpointUnsound
from reshard.formats import manifest
from reshard.storage.steps import committed_steps, step_path, uncommitted
from reshard.verify.structure import structure_faults


def faults_of(folder: Path) -> list[str]:
    """What speaks against resuming from a step of a run's own."""
    faults = structure_faults(folder)
    if not manifest.exists(folder):
        faults.append(f"{folder / manifest.FILE_NAME}: missing, so most of the run's state is")
    return faults


def newest_sound(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest step of a run's folder with nothing to say against it; None where there are no steps.

    Args:
        run_dir: the folder.
        warn: told of what is passed over.

    Raises:
        CheckpointUnsound: there are steps, and none of them is whole.
        StorageError: they cannot be read.
    """
    for leftover in uncommitted(run_dir):
        warn(f"passed over {leftover.name}: it was never committed")
    reasons = []
    for folder in reversed(committed_steps(run_dir)):
        faults = faults_of(folder.path)
        if not faults:
            return folder.path
        reasons.append(f"{folder.path.name}: {faults[0]}")
        warn(f"passed over {reasons[-1]}")
    if reasons:
        raise CheckpointUnsound(
            "no step there is whole",
            path=run_dir,
            hint="restore one from a copy, name a step to load what it has, or start in an empty folder",
            details=reasons,
        )
    return None


def named_step(run_dir: Path, step: int | str | Path, warn: Callable[[str], None]) -> Path:
    """The step that somebody asked for: a number, a path, or a run's folder, of which the newest sound one is taken.

    Args:
        run_dir: where a number counts.
        step: what was asked for.
        warn: told of a newer step of this run that is not taken, and of what is passed over.

    Raises:
        CheckpointNotFound: it is not there.
        CheckpointUnsound: it is damaged.
        StorageError: it cannot be read.
    """
    if isinstance(step, str) and step.isdigit():
        step = int(step)
    folder = step_path(run_dir, step) if isinstance(step, int) else Path(step).expanduser().absolute()
    if not folder.is_dir():
        there = [entry.step for entry in committed_steps(folder.parent)]
        raise CheckpointNotFound(
            "the step to resume from is not there",
            path=folder,
            hint=f"there are steps {there}" if there else "nothing is committed beside it either",
        )
    if newest := newest_sound(folder, warn) if committed_steps(folder) else None:
        folder = newest
    elif faults := structure_faults(folder):
        raise CheckpointUnsound(faults[0], path=folder, details=faults[1:], hint="resume from another step")
    own = committed_steps(run_dir)
    if own and own[-1].path.resolve() != folder.resolve():
        warn(f"resuming from {folder}, as asked, and not from {own[-1].path}, the newest of this run")
    return folder
