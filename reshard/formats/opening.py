"""Which format a path holds, by evidence in the files, and the opened checkpoint.

A folder is, in this order: a DCP checkpoint, where it has its metadata, manifest or data files; a run, where it has
committed steps; a folder of safetensors files that belong together; the one file in it that is a checkpoint; a folder
in which only unconsolidated shards lie. A file of a DCP checkpoint, an index and a shard stand for their folder. Any
other file is what its first bytes say, whatever it is called.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reshard.errors import CheckpointNotFound, CheckpointUnsound, UsageError
from reshard.formats import dcp_metadata, dcp_ranks, manifest, safetensors_file, safetensors_header, torch_file
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import open_dcp
from reshard.formats.unpickle import missing_data
from reshard.index.kinds import is_of_one_rank
from reshard.storage.durable import storage_errors
from reshard.storage.steps import committed_steps, uncommitted

_KNOWN = (
    "known are: a DCP folder (.metadata), a folder of step-<n> folders, a safetensors file or folder of them, "
    "a file of torch.save"
)
_SHOWN = 8


class _Found(NamedTuple):
    """A place, and the format that it is in."""

    format: str
    path: Path


def open_checkpoint(path: str | os.PathLike[str], also: Sequence[str | os.PathLike[str]] = ()) -> Checkpoint:
    """Opens a checkpoint; reads what describes it, no tensor.

    Args:
        path: a DCP folder, a run folder (its newest committed step), a safetensors file, a Hugging Face folder, a file
            of ``torch.save``, a folder with one such file, or a file of a DCP folder.
        also: further folders with files of the same DCP checkpoint.

    Raises:
        CheckpointNotFound: nothing there, or nothing that is known.
        CheckpointUnsound: it is damaged.
        UsageError: several checkpoints that it could mean.
        StorageError: the file system failed to read it.
    """
    found = _identify(Path(path).expanduser())
    others = [Path(other).expanduser() for other in also]
    if found.format == _DCP:
        return open_dcp(found.path, others)
    if others:
        hint = "name only the checkpoint"
        raise UsageError("only a DCP checkpoint lies in several folders", path=found.path, found=also[0], hint=hint)
    if found.format == torch_file.NAME:
        return torch_file.open_torch_file(found.path)
    if found.path.is_dir():
        return safetensors_file.open_folder(found.path)
    if found.path.name.endswith(safetensors_file.INDEX_SUFFIX):
        return safetensors_file.open_folder(found.path.parent, found.path)
    return safetensors_file.open_file(found.path)


_DCP = "dcp"
_PER_RANK = "per-rank files of other frameworks are not read yet: load them on the ranks that wrote them, and dcp.save"


def _identify(path: Path) -> _Found:
    mode = _mode(path)
    if mode is None:
        what = "a link to nothing" if path.is_symlink() else "no such file or folder"
        raise CheckpointNotFound(what, path=path, hint="check the path")
    if stat.S_ISDIR(mode):
        return _identify_folder(path)
    if _is_of_dcp(path.name):
        return _Found(_DCP, path.parent)
    if safetensors_file.is_shard(path.name):
        return _Found(safetensors_file.NAME, path.parent)
    if path.name.endswith(safetensors_file.INDEX_SUFFIX):
        return _Found(safetensors_file.NAME, path)
    if not stat.S_ISREG(mode):
        raise CheckpointNotFound("neither a file nor a folder", path=path, hint=_KNOWN)
    head = _head(path)
    if (format := _format(path.name, head)) is not None:
        if format == torch_file.NAME and is_of_one_rank(path.name):
            raise CheckpointNotFound("one rank's part of a checkpoint, not a whole one", path=path, hint=_PER_RANK)
        return _Found(format, path)
    if (reason := missing_data(head)) is not None:
        raise CheckpointUnsound(reason, path=path)
    raise CheckpointNotFound(
        "no checkpoint of a known format", path=path, found=f"a file that begins with {head[:8]!r}", hint=_KNOWN
    )


def _identify_folder(folder: Path, is_step: bool = False) -> _Found:
    with storage_errors("list the folder", folder):
        names = sorted(entry.name for entry in folder.iterdir())
    if any(map(_is_of_dcp, names)):
        return _Found(_DCP, folder)
    if not is_step and (steps := committed_steps(folder)):
        return _identify_folder(steps[-1].path, is_step=True)
    shards = folder / safetensors_file.SHARDED_FOLDER
    is_consolidated = any(name.endswith(safetensors_file.INDEX_SUFFIX) for name in names)
    # The index is what torch writes last: without it, the whole copy of the shards is not finished.
    if not is_consolidated and shards.name in names and _holds_shards(shards):
        return _Found(safetensors_file.NAME, shards)
    if safetensors_file.is_model_folder(names):
        return _Found(safetensors_file.NAME, folder)
    return _only_file(folder, names)


def _only_file(folder: Path, names: Sequence[str]) -> _Found:
    """The one file that is a checkpoint; several safetensors files and no other are one together."""
    files = [folder / name for name in names if stat.S_ISREG(_mode(folder / name) or 0)]
    found = [_Found(format, file) for file in files if (format := _format(file.name, _head(file))) is not None]
    if len(found) == 1:
        return found[0]
    if found and {candidate.format for candidate in found} == {safetensors_file.NAME}:
        return _Found(safetensors_file.NAME, folder)
    if found and all(is_of_one_rank(candidate.path.name) for candidate in found):
        parts = _listed([candidate.path.name for candidate in found])
        raise CheckpointNotFound("the parts of single ranks", path=folder, found=parts, hint=_PER_RANK)
    if found:
        candidates = [f"{candidate.path.name} ({candidate.format})" for candidate in found]
        raise UsageError("several checkpoints", path=folder, found=_listed(candidates), hint="name one of them")
    if unfinished := uncommitted(folder):
        raise CheckpointNotFound(
            "no committed checkpoint, only unfinished ones",
            path=folder,
            found=_listed([path.name for path in unfinished]),
            hint="no save has finished here: name another folder, or start from scratch",
        )
    inside = [name for name in names if _is_dcp_folder(folder / name)]
    hint = f"name one of the checkpoints in it: {_listed(inside)}" if inside else _KNOWN
    what = "no checkpoint of a known format" if names else "an empty folder"
    raise CheckpointNotFound(what, path=folder, found=_listed(names) if names else None, hint=hint)


def _is_of_dcp(name: str) -> bool:
    return (
        name in (dcp_metadata.FILE_NAME, manifest.FILE_NAME)
        or name.endswith(".distcp")
        or dcp_ranks.is_rank_metadata(name)
    )


def _is_dcp_folder(path: Path) -> bool:
    return _mode(path / dcp_metadata.FILE_NAME) is not None


def _holds_shards(folder: Path) -> bool:
    with storage_errors("list the folder", folder):
        return folder.is_dir() and any(safetensors_file.is_shard(entry.name) for entry in folder.iterdir())


def _format(name: str, head: bytes) -> str | None:
    """What a file is by its first bytes; a name only adds what such a file should have been."""
    if torch_file.looks_like_archive(head) or torch_file.looks_old(head):
        return torch_file.NAME
    if safetensors_header.looks_like_header(head) or name.endswith(safetensors_file.SUFFIX):
        return safetensors_file.NAME
    return None


def _head(path: Path) -> bytes:
    with storage_errors("read", path), path.open("rb") as file:
        return file.read(torch_file.HEAD_BYTES)


def _mode(path: Path) -> int | None:
    """The mode of what a path leads to; None where it leads to nothing."""
    with storage_errors("look at", path):
        try:
            return path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            # A zero byte or half a surrogate pair is in no name.
            return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
