"""Commit of a step: written aside, made durable, fenced, renamed; and the claim of a run by an attempt.

One process of an attempt claims the run directory, once, before it lists steps. For each step it opens a stage; all
ranks write into `Stage.path` and flush what they wrote; then the same process commits.

THE COMMIT RULE: a step exists when its stage has been renamed to `step-<n>`, and every byte below is durable before.
At any crash before the rename there is no step; at any crash after it, the step is whole.

The fence. An attempt may outlive its successor's start (a node cut off, a slow preemption). `claim` first names the new
attempt in the file ATTEMPT and then takes every stage away by rename; `commit` checks ATTEMPT after its stage was
opened. So once `claim` has returned, no earlier attempt can commit: its stage is gone or it reads the new name.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointUnsound, Fenced, StorageError, UsageError
from reshard.storage.durable import (
    exchange_durably,
    fsync_tree,
    make_folder,
    read_existing,
    remove_tree,
    rename_durably,
    storage_errors,
    temporary_target,
    write_atomic,
)
from reshard.storage.steps import (
    ABANDONED,
    REPLACED,
    STAGING,
    TRASH,
    committed_steps,
    move_to_trash,
    step_path,
    uncommitted,
)

ATTEMPT_FILE = "ATTEMPT"

# It becomes a part of file names, whose length file systems limit to 255 bytes.
_ATTEMPT = re.compile(r"[A-Za-z0-9._-]{1,128}")
# As `reshard.environment` names the attempts of a SLURM job.
_JOB_AND_RESTARTS = re.compile(r"([0-9]+(?:_[0-9]+)?)\.([0-9]+)(?:\.|$)")
_REPLACED_STEP = re.compile(re.escape(REPLACED) + r"(step-[0-9]+)-.+")


def claim(run_dir: str | os.PathLike[str], attempt: str) -> None:
    """Make `attempt` the owner of the run and clear away what dead attempts left.

    Stages and trash are deleted. A step that was set aside for a replacement that never came gets its name back. After
    the return no other attempt can commit here. A crash at any point leaves every step whole; claim again.

    Raises:
        Fenced: `attempt` is of a SLURM job that was requeued since, and the later attempt owns the run.
        UsageError: `attempt` holds characters other than A-Z a-z 0-9 . _ - or is too long.
        StorageError: the file system refused.
    """
    _check_attempt(attempt)
    run = Path(run_dir)
    make_folder(run)
    _check_not_replaced(run, attempt)
    write_atomic(run / ATTEMPT_FILE, json.dumps({"attempt": attempt}).encode() + b"\n")
    # Stages before replaced steps: an attempt without its stage can no longer fill the name that a step gets back.
    for path in uncommitted(run):
        if path.name.startswith(STAGING):
            # By way of the trash, as the dead attempt may live, past its fence, about to rename the stage into a step.
            move_to_trash(path)
        elif path.name.startswith(TRASH) or (temporary_target(path.name) or "").startswith((ATTEMPT_FILE, STAGING)):
            remove_tree(path)
    _restore_replaced(run)


def _restore_replaced(run: Path) -> None:
    set_aside = [(path, match[1]) for path in uncommitted(run) if (match := _REPLACED_STEP.fullmatch(path.name))]
    with storage_errors("list the replaced steps", run):
        # Where crashes left several of one step, the last one set aside (a rename renews the ctime) is the newest.
        set_aside.sort(key=lambda replaced: replaced[0].lstat().st_ctime_ns, reverse=True)
    for path, step_name in set_aside:
        final = run / step_name
        if os.path.lexists(final):
            move_to_trash(path)
        else:
            rename_durably(path, final)


def holder(run_dir: str | os.PathLike[str]) -> str | None:
    """The attempt that owns the run; None where nobody has claimed it.

    Raises:
        CheckpointUnsound: the file ATTEMPT is not one that `claim` writes.
        StorageError: it cannot be read.
    """
    path = Path(run_dir, ATTEMPT_FILE)
    text = read_existing(path)
    if text is None:
        return None
    try:
        attempt = json.loads(text)["attempt"]
    except (ValueError, KeyError, TypeError):
        attempt = None
    if not isinstance(attempt, str):
        raise CheckpointUnsound(
            "not an attempt file",
            path=path,
            expected='{"attempt": "<token>"}',
            found=repr(text[:80]),
            hint="delete it if no run is using this directory",
        )
    return attempt


def check_fence(run_dir: str | os.PathLike[str], attempt: str) -> None:
    """Pass where `attempt` owns the run, or nobody does.

    Raises:
        Fenced: another attempt has claimed the run.
        CheckpointUnsound, StorageError: as `holder`.
    """
    owner = holder(run_dir)
    if owner is not None and owner != attempt:
        raise Fenced(
            "another attempt has claimed the run",
            path=Path(run_dir, ATTEMPT_FILE),
            expected=attempt,
            found=owner,
            hint="stop this process if that one is alive, as it goes on from the last committed step; "
            "else make a Checkpointer, which claims the run anew",
        )


def commit_file(run_dir: str | os.PathLike[str], name: str, data: bytes, attempt: str) -> None:
    """Write a file of the run, or replace it, by the commit rule: whole, and only if `attempt` owns the run.

    Raises:
        Fenced: another attempt has claimed the run; nothing was written.
        StorageError: the file system refused.
    """
    _check_attempt(attempt)
    run = Path(run_dir)
    staged = run / f"{STAGING}{name}-{attempt}"
    try:
        write_atomic(staged, data)
        check_fence(run, attempt)
        rename_durably(staged, run / name)
    except StorageError:
        # A successor takes stages away, so "not found" here may be but the shadow of a lost run.
        check_fence(run, attempt)
        raise


def abandon_later(run_dir: str | os.PathLike[str], step: int, attempt: str) -> list[Path]:
    """Rename the committed steps past `step`, and return what they are called now.

    For a run that was set back on purpose and trains on: the later steps belong to a history that it has left, and
    the next attempt would take the newest of them for its own. They are kept, as `abandoned-step-<n>-<token>`.

    Raises:
        Fenced: another attempt has claimed the run; nothing was renamed.
        StorageError: the file system refused; some may be renamed.
    """
    later = [folder.path for folder in committed_steps(run_dir) if folder.step > step]
    if later:
        check_fence(run_dir, attempt)
    renamed = [path.with_name(f"{ABANDONED}{path.name}-{secrets.token_hex(4)}") for path in later]
    # The newest first, so that a crash halfway leaves the beginning of the old history, without a gap.
    for path, target in reversed(list(zip(later, renamed, strict=True))):
        rename_durably(path, target)
    return renamed


def _check_attempt(attempt: str) -> None:
    if not _ATTEMPT.fullmatch(attempt):
        raise UsageError(
            "not a usable attempt token",
            key="attempt",
            expected="1 to 128 characters of A-Z a-z 0-9 . _ -",
            found=repr(attempt),
            hint="build it from the job id and the restart count",
        )


def _check_not_replaced(run: Path, attempt: str) -> None:
    """A node that is cut off may start an attempt, or its ranks, after the job was requeued elsewhere."""
    try:
        owner = holder(run)
    except CheckpointUnsound:
        return
    mine, theirs = _JOB_AND_RESTARTS.match(attempt), _JOB_AND_RESTARTS.match(owner or "")
    if mine and theirs and mine[1] == theirs[1] and int(theirs[2]) > int(mine[2]):
        raise Fenced(
            "a later attempt of this job has claimed the run",
            path=run / ATTEMPT_FILE,
            expected=attempt,
            found=owner,
            hint="stop this process: the later attempt goes on from the last committed step",
        )


def _check_vacant(final: Path) -> None:
    if os.path.lexists(final):
        raise StorageError(
            "the step is already there", path=final, hint="choose another step, or allow it to be replaced"
        )


def put_in_place(staged: Path, final: Path, aside: Path) -> None:
    """Rename a durable folder to its final name, in place of what has that name, which is deleted last.

    The two swap names in one step where the system can: then a crash leaves the old folder or the new one. Elsewhere
    the old one is set aside first, and a crash may leave neither of them but the old one as `aside`.

    Raises:
        StorageError: the file system refused. The old folder then has its name, or the new one has it and only the
            clearing away failed.
    """
    if not os.path.lexists(final):
        rename_durably(staged, final)
        return
    if os.path.lexists(aside):
        move_to_trash(aside)
    if exchange_durably(staged, final):
        move_to_trash(staged)
        return
    try:
        rename_durably(final, aside)
        rename_durably(staged, final)
    except StorageError:
        if os.path.lexists(aside) and not os.path.lexists(final):
            with suppress(StorageError):
                rename_durably(aside, final)
        raise
    move_to_trash(aside)


@dataclass(frozen=True)
class Stage:
    """The folder in which one attempt writes one step before it exists.

    `Stage.open` makes the folder and belongs to one process; other ranks may construct `Stage(run_dir, step, attempt)`
    to know its `path`.
    """

    run_dir: Path
    step: int
    attempt: str

    def __post_init__(self) -> None:
        _check_attempt(self.attempt)

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str], step: int, attempt: str) -> Stage:
        """Create the stage, empty: what an earlier try at this step left is deleted, so no stale file mixes in.

        Raises:
            UsageError: the step is negative or the attempt is not a token.
            Fenced: another attempt has claimed the run. `commit` asks again; here it saves writing in vain.
            StorageError: the file system refused.
        """
        stage = cls(Path(run_dir), step, attempt)
        check_fence(run_dir, attempt)
        remove_tree(stage.path)
        make_folder(stage.path)
        return stage

    @property
    def path(self) -> Path:
        return self._hidden(STAGING)

    def _hidden(self, prefix: str) -> Path:
        final = step_path(self.run_dir, self.step)
        return final.with_name(f"{prefix}{final.name}-{self.attempt}")

    def commit(self, replace: bool = False) -> Path:
        """Turn the stage into the step, and return its folder.

        Before the return the step is durable. A crash leaves the step absent or whole. With `replace`, a step that is
        there is set aside first and deleted last; a crash between leaves it set aside, and the next `claim` restores
        it; a reader may for that moment not see the step.

        Raises:
            Fenced: another attempt has claimed the run; nothing was committed.
            StorageError: the step exists and `replace` is not set, or the file system refused. The step is then as it
                was before, or the new one in full where only the clearing away of the old one failed.
        """
        final = step_path(self.run_dir, self.step)
        try:
            if not replace:
                _check_vacant(final)
            fsync_tree(self.path)
            check_fence(self.run_dir, self.attempt)
            put_in_place(self.path, final, self._hidden(REPLACED))
        except StorageError:
            # A successor takes stages away, so "not found" here may be but the shadow of a lost run.
            check_fence(self.run_dir, self.attempt)
            raise
        return final

    def discard(self) -> None:
        """Delete the stage; that it is not there is fine.

        Raises:
            StorageError: the file system refused.
        """
        remove_tree(self.path)
