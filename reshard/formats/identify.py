"""Which format a path holds, by evidence in the files.

A folder is, in this order: a DCP checkpoint, where it has its metadata, manifest or data files; a run, where it has
committed steps; a folder of safetensors files that belong together; the files of single ranks; the one file in it that
is a checkpoint; a folder in which only unconsolidated shards lie; what a file beside the checkpoints says is the latest
of them; the one checkpoint somewhere below. A file of a DCP checkpoint, an index, a shard and a rank's file stand for
their folder. Any other file is what its first bytes say, whatever it is called.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reshard.errors import CheckpointNotFound, CheckpointUnsound, UsageError
from reshard.formats import dcp, dcp_metadata, dcp_ranks, manifest, safetensors_file, safetensors_header, torch_file
from reshard.formats.rescue import accelerate, bytecheckpoint, megatron, per_rank
from reshard.formats.rescue.deepspeed import zero as deepspeed
from reshard.formats.rescue.rank_sets import rank_of
from reshard.formats.unpickle import missing_data
from reshard.storage.durable import storage_errors
from reshard.storage.steps import committed_steps, uncommitted

_KNOWN = (
    "known are: a DCP folder (.metadata), a folder of step-<n> folders, a safetensors file or folder of them, "
    "a file of torch.save, a folder with the files of all ranks"
)
_SHOWN = 8
_MOST_LEVELS = 4
_MOST_FOLDERS = 1000
# File -> how the folder that it names is called.
_LATEST = {"latest": ("{}",), "latest_checkpointed_iteration.txt": ("global_step_{}", "iter_{:0>7}")}


class Found(NamedTuple):
    """A place, and the format that it is in.

    Attributes:
        path: of the folder or file.
        chosen: of the files of single ranks, the one that was named.
    """

    format: str
    path: Path
    chosen: Path | None = None


def identify(path: Path) -> Found:
    """What a path leads to.

    Raises:
        CheckpointNotFound: nothing there, or nothing that is known.
        CheckpointUnsound: it holds no data.
        UsageError: several checkpoints that it could mean.
        StorageError: the file system failed to read it.
    """
    mode = _mode(path)
    if mode is None:
        what = "a link to nothing" if path.is_symlink() else "no such file or folder"
        raise CheckpointNotFound(what, path=path, hint="check the path")
    if stat.S_ISDIR(mode):
        return _identify_folder(path)
    if _is_of_dcp(path.name):
        return _identify_folder(path.parent)
    if safetensors_file.is_shard(path.name):
        return Found(safetensors_file.NAME, path.parent)
    if path.name.endswith(safetensors_file.INDEX_SUFFIX):
        return Found(safetensors_file.NAME, path)
    if not stat.S_ISREG(mode):
        raise CheckpointNotFound("neither a file nor a folder", path=path, hint=_KNOWN)
    head = _head(path)
    if (format := _format(path.name, head)) is not None:
        if format == torch_file.NAME and rank_of(path.name) is not None:
            with storage_errors("list the folder", path.parent):
                is_deepspeed = deepspeed.is_deepspeed([entry.name for entry in path.parent.iterdir()])
            return Found(deepspeed.NAME, path.parent) if is_deepspeed else Found(per_rank.NAME, path.parent, path)
        return Found(format, path)
    if (reason := missing_data(head)) is not None:
        raise CheckpointUnsound(reason, path=path)
    raise CheckpointNotFound(
        "no checkpoint of a known format", path=path, found=f"a file that begins with {head[:8]!r}", hint=_KNOWN
    )


def _identify_folder(folder: Path, is_step: bool = False, level: int = 0) -> Found:
    with storage_errors("list the folder", folder):
        names = sorted(entry.name for entry in folder.iterdir())
    if megatron.is_megatron(names):
        return Found(megatron.NAME, folder)
    if bytecheckpoint.is_bytecheckpoint(folder, names):
        return Found(bytecheckpoint.NAME, folder)
    if any(map(_is_of_dcp, names)):
        return Found(dcp.NAME, folder)
    if accelerate.is_accelerate(names):
        return Found(accelerate.NAME, folder)
    if deepspeed.is_deepspeed(names):
        return Found(deepspeed.NAME, folder)
    if not is_step and (steps := committed_steps(folder)):
        return _identify_folder(steps[-1].path, is_step=True)
    shards = folder / safetensors_file.SHARDED_FOLDER
    is_consolidated = any(name.endswith(safetensors_file.INDEX_SUFFIX) for name in names)
    # The index is what torch writes last: without it, the whole copy of the shards is not finished.
    if not is_consolidated and shards.name in names and _holds_shards(shards):
        return Found(safetensors_file.NAME, shards)
    if safetensors_file.is_model_folder(names):
        return Found(safetensors_file.NAME, folder)
    files = [folder / name for name in names if stat.S_ISREG(_mode(folder / name) or 0)]
    found = [Found(format, file) for file in files if (format := _format(file.name, _head(file))) is not None]
    if any(candidate.format == torch_file.NAME and rank_of(candidate.path.name) for candidate in found):
        return Found(per_rank.NAME, folder)
    if len(found) == 1:
        return found[0]
    if found and {candidate.format for candidate in found} == {safetensors_file.NAME}:
        return Found(safetensors_file.NAME, folder)
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
    return _below(folder, names, level)


def _below(folder: Path, names: Sequence[str], level: int) -> Found:
    """The latest of the checkpoints in a folder, or the only one."""
    if (named := _named_latest(folder, names)) is not None:
        return _identify_folder(named, level=level + 1)
    inside: list[Found] = []
    folders = [folder / name for name in names if not name.startswith(".") and not name.endswith(".tmp")]
    for inner in folders[:_MOST_FOLDERS] if level < _MOST_LEVELS else ():
        if stat.S_ISDIR(_mode(inner) or 0):
            try:
                inside.append(_identify_folder(inner, level=level + 1))
            except CheckpointNotFound:
                continue
    if len(inside) == 1:
        return inside[0]
    if inside:
        places = [str(found.path.relative_to(folder)) for found in inside]
        raise UsageError("several checkpoints", path=folder, found=_listed(places), hint="name one of them")
    for path in (folder / name for name in names if level == 0):
        if stat.S_ISREG(_mode(path) or 0) and (head := _head(path)) and (reason := missing_data(head)) is not None:
            raise CheckpointUnsound(reason, path=path)
    what = "no checkpoint of a known format" if names else "an empty folder"
    raise CheckpointNotFound(what, path=folder, found=_listed(names) if names else None, hint=_KNOWN)


def _named_latest(folder: Path, names: Sequence[str]) -> Path | None:
    """The folder that a file of a trainer names."""
    for name, patterns in _LATEST.items():
        if name not in names:
            continue
        with storage_errors("read", folder / name):
            tag = (folder / name).read_text(errors="replace").strip()
        named = next((pattern.format(tag) for pattern in patterns if pattern.format(tag) in names), None)
        if named is None:
            raise CheckpointNotFound(
                f"names a checkpoint that is not there: {tag[:80]}",
                path=folder / name,
                found=_listed([other for other in names if other != name]),
                hint="name the folder of another one",
            )
        return folder / named
    return None


def _is_of_dcp(name: str) -> bool:
    return (
        name in (dcp_metadata.FILE_NAME, manifest.FILE_NAME)
        or name.endswith(".distcp")
        or dcp_ranks.is_rank_metadata(name)
    )


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
