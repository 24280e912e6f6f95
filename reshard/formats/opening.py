"""Opens a checkpoint of any format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.errors import UsageError
from reshard.formats import dcp, safetensors_file, torch_file
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.identify import identify
from reshard.formats.rescue import accelerate, bytecheckpoint, megatron, per_rank
from reshard.formats.rescue.deepspeed import zero as deepspeed
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.per_rank import PerRank
from reshard.storage.durable import storage_errors


def open_checkpoint(
    path: str | os.PathLike[str], also: Sequence[str | os.PathLike[str]] = (), hints: Hints | None = None
) -> Checkpoint:
    """Opens a checkpoint; reads what describes it, no tensor.

    Args:
        path: a DCP folder, a run folder (its newest committed step), a safetensors file, a Hugging Face folder, a file
            of ``torch.save``, a folder with the files of all ranks, one of these files, or a folder with one of these.
        also: further folders with files of the same checkpoint, of DCP or of single ranks.
        hints: what the files of single ranks may lack.

    Raises:
        CheckpointNotFound: nothing there, or nothing that is known.
        CheckpointUnsound: it is damaged.
        UsageError: several checkpoints that it could mean, or something is missing that a hint could give.
        StorageError: the file system failed to read it.
    """
    found = identify(Path(path).expanduser())
    others = [Path(other).expanduser() for other in also]
    if found.format == dcp.NAME:
        return dcp.open_dcp(found.path, others)
    if found.format == per_rank.NAME:
        paths = [file for folder in (found.path, *others) for file in _files(folder)]
        return PerRank(found.path, tuple(paths), found.chosen).open(hints or Hints())
    if found.format == accelerate.NAME:
        return accelerate.open_accelerate(found.path, hints or Hints())
    if found.format == bytecheckpoint.NAME:
        return bytecheckpoint.open_bytecheckpoint(found.path, hints or Hints())
    if found.format == deepspeed.NAME:
        return deepspeed.open_deepspeed(found.path, hints or Hints())
    if found.format == megatron.NAME:
        return megatron.open_megatron(found.path)
    if others:
        hint = "name only the checkpoint"
        raise UsageError("lies in one place, not in several folders", path=found.path, found=also[0], hint=hint)
    if found.format == torch_file.NAME:
        return torch_file.open_torch_file(found.path)
    if found.path.is_dir():
        return safetensors_file.open_folder(found.path)
    if found.path.name.endswith(safetensors_file.INDEX_SUFFIX):
        return safetensors_file.open_folder(found.path.parent, found.path)
    return safetensors_file.open_file(found.path)


def _files(folder: Path) -> Iterator[Path]:
    with storage_errors("list the folder", folder):
        yield from sorted(entry for entry in folder.iterdir() if entry.is_file())
