"""Opens a checkpoint and plans its rewrite for other ranks, down to the last byte; writes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.engine.run import Budget
from reshard.engine.spans import Job
from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats import dcp_metadata, safetensors_file, torch_file
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import NAME as DCP
from reshard.formats.dcp_metadata_writer import metadata_bytes
from reshard.formats.dcp_output import lay_out_dcp
from reshard.formats.file_lengths import file_faults
from reshard.formats.manifest import Manifest
from reshard.formats.opening import open_checkpoint
from reshard.formats.output import Files
from reshard.geometry.mesh import Mesh
from reshard.index.dtypes import ITEM_BYTES
from reshard.plan import make_plan, sharded_layout
from reshard.rewrite.manifest_for import manifest_for
from reshard.rewrite.selection import Selection, select, stored_whole
from reshard.storage.durable import storage_errors, temporary_target

DEFAULT_MEMORY_BYTES = 256 << 20
# Formats that keep the names that were saved.
_OWN_NAMES = (DCP, safetensors_file.NAME, torch_file.NAME)


@dataclass(frozen=True)
class Prepared:
    """A rewrite that is planned down to the last byte, with nothing written yet.

    Attributes:
        checkpoint: the source.
        mesh: the ranks to write for.
        selection: what is carried over.
        job: the copies.
        files: what will be there.
        manifest: the rewritten manifest, or None where the source has none or the format has no place for it.
        described: name -> content of the files that are written last, such as ``.metadata``.
        beside: other files in the source's folder, which are carried over.
        left_behind: what lies there and is not.
        budget: threads and blocks.
        started_s: the monotonic clock when it was opened.
        only_file: the name of the one file that is to be the destination, where that is not a folder.
    """

    checkpoint: Checkpoint
    mesh: Mesh
    selection: Selection
    job: Job
    files: Files
    manifest: Manifest | None
    described: dict[str, bytes]
    beside: list[Path]
    left_behind: list[str]
    budget: Budget
    started_s: float
    only_file: str | None = None

    @property
    def written_bytes(self) -> int:
        """What will be written."""
        return (
            self.files.output.total_bytes
            + sum(map(len, self.described.values()))
            + sum(path.stat().st_size for path in self.beside)
        )

    @property
    def source_bytes(self) -> int:
        """What has to be read: the elements of all pieces, and the objects."""
        index = self.checkpoint.index
        widths = np.array([ITEM_BYTES.get(dtype, 1) for dtype in index.dtypes], dtype=np.int64)
        elements = int((self.job.layout.elements * widths[self.job.layout.tensor]).sum())
        return elements + sum(place.length_bytes for place in self.selection.objects.values())


def prepare(
    source: str | os.PathLike[str],
    mesh: Mesh,
    *,
    only: str | None = None,
    dtype: str | None = None,
    drop: Iterable[str] = (),
    also: Sequence[str | os.PathLike[str]] = (),
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    processes: int = 1,
) -> Prepared:
    """Opens and plans; writes nothing. Close ``checkpoint`` of the result, if it is not given to `run`.

    Raises:
        ReshardError: the source is not there or unsound, or the options do not fit it.
    """
    started_s = time.monotonic()
    drop = list(drop)
    checkpoint = open_checkpoint(source, also)
    try:
        if checkpoint.format not in _OWN_NAMES:
            raise UsageError(
                "files of single ranks, or of another tool",
                path=checkpoint.path,
                found=checkpoint.format,
                hint="`reshard convert` gives its tensors the names that a run has",
            )
        beside, left_behind = _beside(checkpoint, only, drop)
        selection = select(checkpoint, only, dtype, drop, [*(path.name for path in beside), *left_behind])
        budget = Budget.of(memory_bytes, processes)
        return plan_dcp(checkpoint, selection, mesh, only, beside, left_behind, budget, started_s)
    except BaseException:
        checkpoint.close()
        raise


def plan_dcp(
    checkpoint: Checkpoint,
    selection: Selection,
    mesh: Mesh,
    only: str | None,
    beside: list[Path],
    left_behind: list[str],
    budget: Budget,
    started_s: float,
) -> Prepared:
    """Plans a DCP checkpoint for the ranks of a mesh.

    Raises:
        ReshardError: the source is unsound.
    """
    index, tensors = checkpoint.index, selection.tensors
    widths = np.array([ITEM_BYTES[selection.dtypes[number]] for number in tensors.tolist()], dtype=np.int64)
    layout = sharded_layout(index, tensors, stored_whole(checkpoint, tensors), mesh, widths)
    plan = make_plan(index, layout)
    files = lay_out_dcp(index, layout, selection.dtypes, selection.objects)
    require_files(checkpoint)
    found = checkpoint.require_manifest()
    keys = {*files.index.names, *files.objects}
    return Prepared(
        checkpoint=checkpoint,
        mesh=mesh,
        selection=selection,
        job=Job(checkpoint, layout, plan, files.output),
        files=files,
        manifest=None if found is None else manifest_for(found, mesh, keys, only),
        described={dcp_metadata.FILE_NAME: metadata_bytes(files.index, files.objects, checkpoint.paths)},
        beside=beside,
        left_behind=left_behind,
        budget=budget,
        started_s=started_s,
    )


def _beside(checkpoint: Checkpoint, only: str | None, drop: Iterable[str]) -> tuple[list[Path], list[str]]:
    """Files that other tools keep in a DCP folder (a ``meta.pt``, a tokenizer), and what is there and left behind."""
    if checkpoint.format != DCP or not checkpoint.path.is_dir():
        return [], []
    known = {*checkpoint.index.files, *checkpoint.metadata_files}
    carried, left = [], []
    with storage_errors("list the folder", checkpoint.path):
        for path in sorted(checkpoint.path.iterdir()):
            if path.name in known or path.suffix == ".distcp" or temporary_target(path.name) is not None:
                continue
            if only is None and path.is_file() and not path.name.startswith(tuple(drop)):
                carried.append(path)
            else:
                left.append(path.name)
    return carried, left


def require_files(checkpoint: Checkpoint) -> None:
    """Passes where every file of the source is there and as long as the index says.

    Raises:
        CheckpointUnsound: some are not; each is named.
    """
    faults = list(map(str, file_faults(checkpoint.index, checkpoint.files.paths, checkpoint.files.in_memory)))
    if faults:
        hint = "copy it anew; files of other nodes that stayed on their disks: name the folders with --in"
        raise CheckpointUnsound(faults[0], hint=hint, details=faults[1:])
