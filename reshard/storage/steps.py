"""The step folders of a run directory: their names, their listing, their deletion.

    run/
      step-40/                  a committed step; exactly `step-` and a decimal number without leading zeros
      step-80/
      .staging-step-120-<a>/    being written by attempt a
      .replaced-step-80-<a>/    set aside by attempt a until the new step-80 is in place, or on its way to the trash
      .trash-step-20-<token>/   being deleted
      abandoned-step-160-<token>/   a step past the one to which the run was set back; kept, for the user to delete
      ATTEMPT                   which attempt owns the run (see `reshard.storage.commit`)
      PINNED-step-40            step 40 is never removed (see `reshard.storage.retention`)

A step exists when a folder has its name: folders get that name whole and lose it whole, by one rename each. So a
listing needs no marker files, and whoever lists while others commit and prune sees complete steps only (a step that
was listed may be gone when it is opened).
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import StorageError, UsageError
from reshard.storage.durable import remove_tree, rename_durably, storage_errors, temporary_target

STAGING = ".staging-"
REPLACED = ".replaced-"
TRASH = ".trash-"
ABANDONED = "abandoned-"

_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class StepFolder:
    """A committed step and where it lies."""

    step: int
    path: Path


def step_path(run_dir: str | os.PathLike[str], step: int) -> Path:
    """Where the committed step `step` lies or would lie.

    Raises:
        UsageError: the step is negative.
    """
    if step < 0:
        raise UsageError(
            "a step must not be negative", path=run_dir, found=step, hint="count steps from 0 in the training loop"
        )
    return Path(run_dir, f"step-{step}")


def step_number(name: str) -> int | None:
    """The number in the name of a step folder; None where the name is not exactly that."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def committed_steps(run_dir: str | os.PathLike[str]) -> list[StepFolder]:
    """The committed steps, ascending by number; none where `run_dir` does not exist.

    A symbolic link to a folder counts as the folder: steps may be kept on another file system.

    Raises:
        StorageError: the directory cannot be listed.
    """
    steps = [StepFolder(step, path) for path, step in _entries(run_dir) if step is not None]
    return sorted(steps, key=lambda folder: folder.step)


def uncommitted(run_dir: str | os.PathLike[str]) -> list[Path]:
    """What a crash left, and what could be mistaken for a step (`step-40.tmp`, `step-040`, a file `step-40`), by name.

    Some of it may belong to an attempt that is alive.

    Raises:
        StorageError: the directory cannot be listed.
    """
    return sorted(path for path, step in _entries(run_dir) if step is None and _looks_unfinished(path.name))


def _looks_unfinished(name: str) -> bool:
    return name.startswith((STAGING, REPLACED, TRASH, "step-")) or temporary_target(name) is not None


def _entries(run_dir: str | os.PathLike[str]) -> list[tuple[Path, int | None]]:
    """Every entry, with its number where it is a committed step."""
    entries: list[tuple[Path, int | None]] = []
    with storage_errors("list the run directory", run_dir):
        try:
            with os.scandir(run_dir) as listing:
                for entry in listing:
                    step = step_number(entry.name)
                    entries.append((Path(entry.path), step if step is not None and entry.is_dir() else None))
        except FileNotFoundError:
            return []
    return entries


def move_to_trash(path: Path) -> None:
    """Delete a step, or what was to be one or was one, in such a way that a crash halfway leaves nothing like a step.

    One that has disappeared meanwhile is fine: another process got there first. Of a symbolic link only the link goes.

    Raises:
        StorageError: the file system refused. The entry has its name and is whole, or it has a `.trash-` name.
    """
    name = path.name.removeprefix(STAGING).removeprefix(REPLACED)
    trash = path.with_name(f"{TRASH}{name}-{secrets.token_hex(4)}")
    try:
        # Durably: a power cut must not bring back the old name once files below it are gone.
        rename_durably(path, trash)
    except StorageError:
        if os.path.lexists(path) or os.path.lexists(trash):
            raise
        return
    remove_tree(trash)
