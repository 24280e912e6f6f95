"""What a checkpoint holds, said from what describes it and from the sizes of its files: no tensor is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from reshard.formats import dcp_metadata
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.file_lengths import FileFault, file_faults
from reshard.formats.opening import open_checkpoint
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import Index
from reshard.index.kinds import KINDS, WEIGHTS, kinds_of
from reshard.storage.durable import storage_errors
from reshard.storage.steps import committed_steps, step_number, uncommitted
from reshard.verify.check.report import rank_of
from reshard.verify.describe.checklist import (
    OptimizerState,
    Part,
    checklist,
    optimizer_state,
    per_rank_objects,
    random_states,
)
from reshard.verify.structure import files_beside

_SUFFIXES = {"dcp": (".distcp",), "safetensors": (".safetensors",)}


@dataclass(frozen=True)
class KindTotal:
    """All tensors of one kind; ``dtypes`` is bytes by dtype, the most first."""

    kind: str
    tensors: int
    elements: int
    length_bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True)
class RunFolder:
    """A folder of steps: those that it has, and what was passed over on the way to the newest, with the reason."""

    path: Path
    steps: list[int]
    passed_over: list[tuple[str, str]]


@dataclass(frozen=True)
class Description:
    """What `reshard inspect` tells.

    Attributes:
        step: from the manifest, else from the folder's name.
        saved_at: ISO 8601; of the manifest, else the time of the file that was written last.
        ranks: who wrote it; ``ranks_from`` says how that is known: ``manifest`` or ``file names``.
        parameters: elements of the weights.
        payload_bytes: of all tensors, each element once.
        repeated_bytes: of further copies of the same elements.
        disk_bytes: of the files that it refers to, as far as they are there.
        absent, present: files that it refers to.
        broken: files that are missing, or shorter than they must be.
        unreferenced: (name, bytes) of data files that are no part of it.
        faults: why it is unsound, a line each; empty where it is not, as far as this can see.
    """

    checkpoint: Checkpoint
    run: RunFolder | None
    step: int | None
    saved_at: str | None
    ranks: int | None
    ranks_from: str | None
    kinds: list[KindTotal]
    parameters: int
    payload_bytes: int
    repeated_bytes: int
    disk_bytes: int
    optimizer: OptimizerState
    parts: list[Part]
    per_rank_objects: list[str]
    present: list[str]
    broken: list[FileFault]
    unreferenced: list[tuple[str, int]]
    faults: list[str]

    @property
    def absent(self) -> list[str]:
        """Names of the files that are not there."""
        return [self.checkpoint.index.files[fault.file] for fault in self.broken if fault.found_bytes is None]

    def to_json(self) -> dict[str, object]:
        """All of it, as plain JSON."""
        checkpoint, manifest = self.checkpoint, self.checkpoint.manifest
        world = dataclasses.asdict(manifest.world) if manifest else {}
        return {
            "sound": not self.faults,
            "path": str(checkpoint.path),
            "run": None if self.run is None else {**dataclasses.asdict(self.run), "path": str(self.run.path)},
            "format": checkpoint.format,
            "version": checkpoint.version,
            "has_manifest": manifest is not None,
            "versions": manifest.versions if manifest else None,
            "attempt": manifest.attempt if manifest else None,
            "step": self.step,
            "saved_at": self.saved_at,
            "world": {"ranks": self.ranks, "from": self.ranks_from, **world},
            "tensors": len(checkpoint.index.names),
            "chunks": len(checkpoint.index.file),
            "objects": len(checkpoint.index.objects) + len(checkpoint.values),
            "parameters": self.parameters,
            "payload_bytes": self.payload_bytes,
            "bytes_per_parameter": self.per_parameter(self.payload_bytes),
            "repeated_bytes": self.repeated_bytes,
            "disk_bytes": self.disk_bytes,
            "kinds": {
                total.kind: {
                    "tensors": total.tensors,
                    "elements": total.elements,
                    "bytes": total.length_bytes,
                    "bytes_per_parameter": self.per_parameter(total.length_bytes),
                    "bytes_by_dtype": total.dtypes,
                }
                for total in self.kinds
            },
            "parts": {part.name: {"status": part.status, "detail": part.detail} for part in self.parts},
            "optimizer": {
                "with_state": len(self.optimizer.by_parameter),
                "without_state": self.optimizer.without,
                "gaps": [{"parameter": name, "has": has, "lacks": lacks} for name, has, lacks in self.optimizer.gaps],
            },
            "per_rank_objects": self.per_rank_objects,
            "present_files": self.present,
            "absent_files": self.absent,
            "unreferenced_files": dict(self.unreferenced),
            "faults": self.faults,
        }

    def per_parameter(self, length_bytes: int) -> float | None:
        """Bytes by element of the weights; None where there are no weights."""
        return length_bytes / self.parameters if self.parameters else None


def describe(path: Path, also: Sequence[Path] = ()) -> Description:
    """Describes a checkpoint, or the newest step of a run.

    Args:
        path: as `open_checkpoint` takes it.
        also: further folders with files of the same checkpoint.

    Raises:
        CheckpointNotFound: nothing there, or nothing that is known.
        CheckpointUnsound: what describes it is missing or damaged.
        StorageError: the file system refused.
    """
    run, place = _newest(path)
    checkpoint = open_checkpoint(place, also)
    index, manifest = checkpoint.index, checkpoint.manifest
    kinds = _kinds(index)
    broken = list(file_faults(index, checkpoint.files.paths, checkpoint.files.in_memory))
    absent = {fault.file for fault in broken if fault.found_bytes is None}
    state = optimizer_state(checkpoint)
    ranks, ranks_from = _ranks(checkpoint)
    return Description(
        checkpoint=checkpoint,
        run=run,
        step=manifest.step if manifest else step_number(checkpoint.path.resolve().name),
        saved_at=manifest.saved_at if manifest else _file_time(checkpoint),
        ranks=ranks,
        ranks_from=ranks_from,
        kinds=kinds,
        parameters=sum(total.elements for total in kinds if total.kind == WEIGHTS),
        payload_bytes=sum(total.length_bytes for total in kinds),
        repeated_bytes=_repeated_bytes(index),
        disk_bytes=_disk_bytes(checkpoint, absent),
        optimizer=state,
        parts=checklist(checkpoint, state),
        per_rank_objects=per_rank_objects(checkpoint),
        present=[name for number, name in enumerate(index.files) if number not in absent],
        broken=broken,
        unreferenced=_unreferenced(checkpoint),
        faults=[*_manifest_faults(checkpoint), *map(str, broken), *_faults(checkpoint, state)],
    )


def _manifest_faults(checkpoint: Checkpoint) -> list[str]:
    return [] if checkpoint.manifest_fault is None else str(checkpoint.manifest_fault).splitlines()


def _newest(path: Path) -> tuple[RunFolder | None, Path]:
    """The newest step of a run that has what describes it; the path itself where it is no run."""
    path = path.expanduser()
    if not path.is_dir() or (path / dcp_metadata.FILE_NAME).exists() or not (steps := committed_steps(path)):
        return None, path
    passed_over = [(entry.name, "not committed") for entry in uncommitted(path)]
    chosen = steps[-1]
    for candidate in reversed(steps):
        if any(candidate.path.glob(f"*{dcp_metadata.FILE_NAME}")):
            chosen = candidate
            break
        passed_over.append((candidate.path.name, f"no {dcp_metadata.FILE_NAME}: the save was not finished"))
    return RunFolder(path, [folder.step for folder in steps], sorted(passed_over)), chosen.path


def _kinds(index: Index) -> list[KindTotal]:
    tensors = dict.fromkeys(KINDS, 0)
    elements = dict.fromkeys(KINDS, 0)
    dtypes: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    found = kinds_of(index.names, index.shapes)
    for kind, shape, dtype in zip(found, index.shapes, index.dtypes, strict=True):
        count = math.prod(shape)
        tensors[kind] += 1
        elements[kind] += count
        # Packed and quantised elements, which no reader takes, count as a byte.
        dtypes[kind][dtype] = dtypes[kind].get(dtype, 0) + count * ITEM_BYTES.get(dtype, 1)
    return [
        KindTotal(
            kind,
            tensors[kind],
            elements[kind],
            sum(dtypes[kind].values()),
            dict(sorted(dtypes[kind].items(), key=lambda entry: -entry[1])),
        )
        for kind in KINDS
        if tensors[kind]
    ]


def _ranks(checkpoint: Checkpoint) -> tuple[int | None, str | None]:
    if checkpoint.manifest is not None:
        return checkpoint.manifest.world.ranks, "manifest"
    ranks = [rank for name in checkpoint.index.files if (rank := rank_of(name)) is not None]
    return (max(ranks) + 1, "file names") if ranks else (None, None)


def _file_time(checkpoint: Checkpoint) -> str | None:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    paths = [path for name in checkpoint.metadata_files if (path := folder / name).exists()] or [checkpoint.path]
    with storage_errors("look at", paths[0]):
        newest_s = max(path.stat().st_mtime for path in paths)
    return datetime.fromtimestamp(newest_s, timezone.utc).isoformat(timespec="seconds")


def _repeated_bytes(index: Index) -> int:
    _, row, _, _ = index.replicas.T
    return int(index.length_bytes[row].sum())


def _disk_bytes(checkpoint: Checkpoint, absent: set[int]) -> int:
    total = 0
    for number, path in enumerate(checkpoint.files.paths):
        if number not in absent and number not in checkpoint.files.in_memory:
            with storage_errors("look at", path):
                total += path.stat().st_size if path.exists() else 0
    return total


def _unreferenced(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    suffixes = _SUFFIXES.get(checkpoint.format, ())
    return files_beside(checkpoint.path, checkpoint.index.files, suffixes) if checkpoint.path.is_dir() else []


def _faults(checkpoint: Checkpoint, state: OptimizerState) -> Iterator[str]:
    for key, fault in checkpoint.index.tiling_faults():
        yield f"{checkpoint.path}: {key}: {fault}"
    for parameter, has, lacks in state.gaps:
        yield (
            f"{checkpoint.path}: {parameter}: part of its optimizer state is missing: has {', '.join(has)}, "
            f"lacks {', '.join(lacks)}, which other parameters have"
        )
    manifest = checkpoint.manifest
    if manifest is None or not isinstance(manifest.rng, dict):
        return
    expected, found = manifest.rng.get("ranks"), len(random_states(checkpoint))
    if type(expected) is int and found < expected:
        yield f"{checkpoint.path}: rng: random states of {expected} ranks were saved, those of {found} are here"
