"""Do the files of a checkpoint belong to one save?

A file of another save with the same layout and sizes passes every test of structure. What tells it apart: fingerprints
in the manifest, where there are any, and the step counters of the optimizer. These may differ honestly, since a
parameter that was frozen for a while counts fewer steps; but then some file holds both. Where all counters of a file
disagree with all those of the files that hold the usual one, the file is of another save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp_metadata import FILE_NAME as METADATA
from reshard.formats.fingerprint import fingerprints, recorded
from reshard.formats.manifest import FILE_NAME as MANIFEST
from reshard.formats.manifest import Manifest
from reshard.index.dtypes import values
from reshard.index.kinds import COUNTERS, MODEL_ROOTS, kind_of, optimizer_place
from reshard.storage.durable import temporary_target
from reshard.storage.steps import REPLACED, STAGING, TRASH, step_number
from reshard.verify.check.report import Fault, rank_of

# The weight and bias of a layer that was frozen may happen to be alone in a file.
_FEWEST_COUNTERS = 3
# Clocks of nodes differ a little, and .metadata is written when the last rank is done.
_CLEARLY_LATER_S = 60.0


def commit_faults(path: Path) -> Iterator[Fault]:
    """A name that no committed checkpoint has. Of a link, what it points to is asked as well."""
    names = {path.name, path.resolve().name}
    for name in sorted(names):
        if name.startswith((STAGING, TRASH, REPLACED)) or name.endswith(".tmp") or temporary_target(name) is not None:
            yield Fault.at(
                path, "not committed: a save, or a removal, was not finished", found=name, hint="use a committed step"
            )


def path_faults(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Keys whose recorded path in the nested state is of another key; stock torch could not put them back.

    Stock's planner makes the key of the path. Where most keys are not made so, another planner had its own way.
    """
    paths = checkpoint.paths
    keys = [*checkpoint.index.names, *checkpoint.index.objects]
    wrong = [key for key in keys if key not in paths or ".".join(map(str, paths[key])) != key]
    if not paths or len(wrong) > len(keys) // 2:
        return
    for key in wrong:
        yield Fault.at(
            checkpoint.path / checkpoint.metadata_files[0],
            "the path recorded for this key is not its own",
            key=key,
            expected=key,
            found=".".join(map(str, paths[key])) if key in paths else "none",
        )


def manifest_faults(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Where the manifest contradicts the folder's name, or the tensors that are there."""
    manifest = checkpoint.manifest
    if manifest is None:
        return
    path = checkpoint.path / MANIFEST
    named = step_number(checkpoint.path.resolve().name)
    if named is not None and named != manifest.step:
        yield Fault.at(
            path, "not the step of the folder's name", key="step", expected=f"{named}", found=f"{manifest.step}"
        )
    keys = (*checkpoint.keys, *checkpoint.index.objects, *checkpoint.values)
    roots = {key.partition(".")[0] for key in keys}
    has_optimizer = any(optimizer_place(key) is not None for key in keys)
    found = {"model": not roots.isdisjoint(MODEL_ROOTS), "optimizer": has_optimizer, "rng": "rng" in roots}
    for part, is_there in found.items():
        if part in manifest.parts and is_there != (manifest.parts[part] == "saved"):
            yield Fault.at(
                path,
                "promises what is not there" if not is_there else "there, against what it says",
                key=f"parts.{part}",
                expected=f"{manifest.parts[part]}",
                found=f"{'some' if is_there else 'none'} of it in the checkpoint",
            )
    yield from _rng_faults(checkpoint, manifest, path)


def _rng_faults(checkpoint: Checkpoint, manifest: Manifest, path: Path) -> Iterator[Fault]:
    ranks = manifest.rng.get("ranks") if isinstance(manifest.rng, dict) else None
    if type(ranks) is not int or manifest.parts.get("rng") != "saved":
        return
    found = {key.split(".")[1] for key in checkpoint.keys if key.startswith("rng.rank_") and key.count(".") >= 2}
    numbers = {name.removeprefix("rank_") for name in found}
    missing = [rank for rank in range(ranks) if str(rank) not in numbers]
    if missing or len(numbers) > ranks:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield Fault.at(
            path,
            "not the random states that it promises",
            key="rng.ranks",
            expected=f"those of {ranks} ranks",
            found=f"those of {len(numbers)}" + (f"; none of rank {shown}" if missing else ""),
        )


def fingerprint_faults(checkpoint: Checkpoint, readable: Sequence[int]) -> Iterator[Fault]:
    """Files whose content is not that of the save that wrote the manifest.

    Args:
        readable: files, by number, in which all is located and whole.
    """
    expected = None if checkpoint.manifest is None else recorded(checkpoint.manifest)
    if expected is None:
        return
    manifest = checkpoint.path / MANIFEST
    for name in sorted(expected.keys() - set(checkpoint.index.files)):
        yield Fault.at(manifest, "names a file that .metadata does not", key="files", found=name)
    found = fingerprints(checkpoint, readable)
    paths = dict(zip(checkpoint.index.files, checkpoint.files.paths, strict=True))
    for name in checkpoint.index.files:
        if name not in expected:
            yield Fault.at(
                paths[name], "not among the files of this save", expected=f"an entry in {manifest}", found="none"
            )
        elif name in found and found[name] != expected[name]:
            yield Fault.at(
                paths[name],
                "of another save, or damaged: not the content that the manifest records",
                expected=str(expected[name]),
                found=str(found[name]),
            )


class Counters:
    """The step counters of the optimizer, by the file that they lie in."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._by_file: dict[int, Counter[float]] = {}
        index = checkpoint.index
        for number, (name, shape) in enumerate(zip(index.names, index.shapes, strict=True)):
            first, last = int(index.first[number]), int(index.first[number + 1])
            if shape or not name.endswith(".step") or kind_of(name, shape) != COUNTERS:
                continue
            if last != first + 1 or checkpoint.payloads.start_bytes[first] < 0:
                continue
            try:
                (value,) = values(checkpoint.read_array(name).reshape(1), index.dtypes[number]).tolist()
            except ReshardError:
                # The file is at fault, and reported as such.
                continue
            self._by_file.setdefault(int(index.file[first]), Counter())[value] += 1

    def usual(self) -> float | None:
        """What most of them say; of two that are equally many, the larger. None where there are none."""
        total = sum(self._by_file.values(), Counter())
        return max(total, key=lambda value: (total[value], value), default=None)

    def faults(self) -> Iterator[Fault]:
        """Files all of whose counters disagree with all those of the others."""
        usual = self.usual()
        # What a file holds beside the usual value is of this save as well.
        known = {value for counts in self._by_file.values() if usual in counts for value in counts}
        for file, counts in sorted(self._by_file.items()):
            if known.isdisjoint(counts) and counts.total() >= _FEWEST_COUNTERS:
                yield Fault.at(
                    self._checkpoint.files.paths[file],
                    "of another save: its step counters disagree with those of all other files",
                    key="optimizer step",
                    expected=f"{usual:g}",
                    found=_shown(counts),
                )

    def notes(self) -> Iterator[str]:
        """That counters differ, from each other or from the manifest's step, as they may."""
        total = sum(self._by_file.values(), Counter())
        if len(total) > 1:
            yield f"the optimizer's step counters differ: {_shown(total)}; parameters not always trained have fewer"
        usual, manifest = self.usual(), self._checkpoint.manifest
        if manifest is not None and usual is not None and manifest.step not in total:
            yield f"the optimizer counted {usual:g} steps, the manifest says {manifest.step} (a scaler skips some)"


def _shown(counts: Counter[float]) -> str:
    shown = ", ".join(f"{value:g} ({count} times)" for value, count in counts.most_common(4))
    return shown + (", ..." if len(counts) > 4 else "")


def late_files_note(checkpoint: Checkpoint) -> Iterator[str]:
    """That some files, though not all, were changed after ``.metadata``, which is written last. A copy changes all."""
    try:
        written_s = (checkpoint.path / METADATA).stat().st_mtime
        times_s = [(path, path.stat().st_mtime) for path in checkpoint.files.paths if path.exists()]
    except OSError:
        return
    late = [path for path, time_s in times_s if time_s > written_s + _CLEARLY_LATER_S]
    if late and len(late) < len(times_s):
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        yield f"{late[0]}{more}: changed more than {_CLEARLY_LATER_S:g} s after .metadata, which is written last"


def absent_hint(checkpoint: Checkpoint, missing: Sequence[int]) -> str | None:
    """What the missing files have in common: all those of some ranks, and none of others."""
    absent = {rank_of(checkpoint.index.files[file]) for file in missing}
    gone = set(missing)
    present = {rank_of(name) for file, name in enumerate(checkpoint.index.files) if file not in gone}
    if not absent or not present or None in absent | present or absent & present:
        return None
    return (
        f"the files of rank {_ranges(absent)} are absent and those of rank {_ranges(present)} are here: where nodes "
        "write to disks of their own, name the folders of the others with --in"
    )


def _ranges(ranks: set[int | None]) -> str:
    """Ranks in short: 0-3, 8."""
    numbers = np.array(sorted(rank for rank in ranks if rank is not None))
    groups = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
