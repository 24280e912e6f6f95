"""The files of one DeepSpeed save, by their names: a tag folder within a run folder.

::

    <run>/latest                                            the newest tag, as text
    <run>/<tag>/                                            global_step<n>, or as the user called it
        mp_rank_00_model_states.pt                          stages 0, 1, 2: the model, written by rank 0
        zero_pp_rank_<r>_mp_rank_00_model_states.pt         stage 3: one a data-parallel rank, instead
        [bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt  stages 1, 2, 3: one a data-parallel rank

``mp_rank`` counts model-parallel ranks; with pipeline stages, weights lie in ``layer_<l>-model_<m>-model_states.pt``.
Experts have ``layer_<l>_expert_<e>_mp_rank_00_model_states.pt`` and ``expp_rank_<r>_mp_rank_00_optim_states.pt``. Both
are refused: what of a weight each of them has is not in the files. DeepSpeed writes over what a tag holds already, and
so files of an earlier save with more ranks may be left in it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.unpickle import missing_data
from reshard.storage.durable import storage_errors

_ZERO = r"(?P<prefix>(?:bf16_|fp16_)?zero)_pp_rank_(?P<rank>\d+)_"
_OPTIMIZER = re.compile(_ZERO + r"mp_rank_(?P<mp>\d+(?:_\d+)?)_optim_states\.pt")
_MODEL = re.compile(rf"(?:{_ZERO})?mp_rank_(?P<mp>\d+(?:_\d+)?)_model_states\.pt")
_EXPERT = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")

LATEST = "latest"
_MOST_TAG_BYTES = 4096
_HEAD_BYTES = 100
_SHOWN = 8
JOIN_FIRST = "join them with the tool that cut them, and convert what it writes"


@dataclass
class ZeroFiles:
    """Of one save; by data-parallel rank.

    Attributes:
        model: of all ranks in stage 3, otherwise empty.
        whole_model: of all other stages.
    """

    folder: Path
    optimizer: dict[int, Path] = field(default_factory=dict)
    model: dict[int, Path] = field(default_factory=dict)
    whole_model: Path | None = None

    def require_ranks(self, ranks: int, recorded_in: Path, is_stage_3: bool) -> None:
        """Passes where there are the files of this many ranks and no others.

        Raises:
            CheckpointUnsound: some are missing or too many; all are listed, with the times at which they were written.
        """
        kinds = [("*_optim_states.pt", self.optimizer)]
        if is_stage_3:
            kinds.append(("zero_*_model_states.pt", self.model))
        faults = []
        for kind, files in kinds:
            if missing := [rank for rank in range(ranks) if rank not in files]:
                faults.append(f"{kind}: none of ranks {listed(missing)}")
            if extra := [files[rank].name for rank in files if rank >= ranks]:
                faults.append(f"{kind}: {listed(extra)} of more ranks than there were")
        unused = [self.whole_model] if is_stage_3 and self.whole_model is not None else []
        if not is_stage_3:
            unused += self.model.values()
        faults += [f"{path.name}: a file of another stage" for path in unused]
        if not faults:
            return
        counts = [f"{len(files)} {kind}" for kind, files in kinds]
        raise CheckpointUnsound(
            "files that are not those of one save",
            path=self.folder,
            expected=f"those of {ranks} ranks, as {recorded_in.name} records",
            found=f"{' and '.join(counts)}: {faults[0]}",
            hint="copy what is missing from the other nodes; move away what an earlier save left",
            details=[*faults[1:], *map(_with_time, self.paths)],
        )

    @property
    def paths(self) -> list[Path]:
        """Of all: the optimizer's by rank, then the model's."""
        whole = [] if self.whole_model is None else [self.whole_model]
        return [*self.optimizer.values(), *self.model.values(), *whole]

    def require_readable(self) -> None:
        """Passes where every file has something in it, and ranks follow one another from 0 on.

        Raises:
            CheckpointUnsound: all that are missing, empty or Git LFS pointers are listed.
        """
        faults = []
        for kind, files in (("*_optim_states.pt", self.optimizer), ("zero_*_model_states.pt", self.model)):
            if files and (missing := [rank for rank in range(max(files)) if rank not in files]):
                faults.append(f"{kind}: none of ranks {listed(missing)}")
        faults += without_content(self.paths)
        if self.whole_model is None and not self.model:
            faults.append("*_model_states.pt: none")
        if not faults:
            return
        ranks = 1 + max([*self.optimizer, *self.model], default=0)
        raise CheckpointUnsound(
            "files are missing or without content",
            path=self.folder,
            expected=f"those of ranks 0 to {ranks - 1}",
            found=faults[0],
            hint="copy them here, from all nodes",
            details=faults[1:],
        )


def without_content(paths: Iterable[Path]) -> list[str]:
    """Which files are empty or Git LFS pointers."""
    faults = []
    for path in paths:
        with storage_errors("read", path), path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if (reason := missing_data(head)) is not None:
            faults.append(f"{path.name}: {reason}")
    return faults


def is_deepspeed(names: Sequence[str]) -> bool:
    """Whether files of these names are those of a tag folder."""
    return any(_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name) for name in names)


def zero_files(folder: Path) -> ZeroFiles:
    """The files of a tag folder.

    Raises:
        CheckpointUnsound: there are none, or those of several saves, or some are missing or without content.
        UsageError: they are those of a model-parallel run, or of a mixture of experts.
    """
    with storage_errors("list the folder", folder):
        names = sorted(path.name for path in folder.iterdir())
    _require_data_parallel(folder, names)
    found = ZeroFiles(folder)
    prefixes: dict[str, list[str]] = {}
    for name in names:
        if match := _OPTIMIZER.fullmatch(name):
            prefixes.setdefault(match["prefix"], []).append(name)
            found.optimizer[int(match["rank"])] = folder / name
        elif match := _MODEL.fullmatch(name):
            if match["rank"] is None:
                found.whole_model = folder / name
            else:
                found.model[int(match["rank"])] = folder / name
    if len(prefixes) > 1:
        raise CheckpointUnsound(
            "files of several saves",
            path=folder,
            expected="*_optim_states.pt of one precision",
            found=" and ".join(f"{len(files)} {prefix}_*" for prefix, files in sorted(prefixes.items())),
            hint="move the older ones away",
            details=[_with_time(folder / name) for files in prefixes.values() for name in files],
        )
    found.optimizer, found.model = dict(sorted(found.optimizer.items())), dict(sorted(found.model.items()))
    found.require_readable()
    return found


def model_files(folder: Path) -> list[Path]:
    """The files of model states, by rank, of a folder where they are all that the ranks wrote.

    Raises:
        CheckpointUnsound: there are none.
        UsageError: they are those of a model-parallel run, or of a mixture of experts.
    """
    found = zero_files(folder)
    return list(found.model.values()) or [path for path in (found.whole_model,) if path is not None]


def _require_data_parallel(folder: Path, names: Iterable[str]) -> None:
    def has_model_parallel_rank(name: str) -> bool:
        match = _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)
        return match is not None and any(int(number) for number in match["mp"].split("_"))

    refused: list[tuple[str, Callable[[str], object]]] = [
        ("experts of a mixture, which are not read", _EXPERT.fullmatch),
        ("weights cut into pipeline stages, which are not read", _PIPELINE.fullmatch),
        ("weights cut over model-parallel ranks, which are not read", has_model_parallel_rank),
    ]
    names = list(names)
    for what, is_refused in refused:
        if found := [name for name in names if is_refused(name)]:
            raise UsageError(what, path=folder, found=listed(found), hint=JOIN_FIRST)


def tag_folder(folder: Path) -> Path | None:
    """The tag folder of a run folder that is meant: what ``latest`` names, or the only one.

    Returns:
        None where there is none, or several and no ``latest``.

    Raises:
        CheckpointUnsound: ``latest`` names one that is not there.
    """
    with storage_errors("list the folder", folder):
        tags = sorted((path for path in folder.iterdir() if path.is_dir() and _is_tag(path)), key=_by_number)
    latest = folder / LATEST
    if not latest.is_file():
        return tags[0] if len(tags) == 1 else None
    with storage_errors("read", latest), latest.open("rb") as file:
        tag = file.read(_MOST_TAG_BYTES).decode("utf-8", "replace").strip()
    named = folder / tag
    is_below = bool(tag) and not Path(tag).is_absolute() and ".." not in Path(tag).parts
    if is_below and named.is_dir() and _is_tag(named):
        return named
    raise CheckpointUnsound(
        "names a checkpoint that is not there",
        path=latest,
        expected=f"{tag!r} with *_model_states.pt in it",
        found=listed([path.name for path in tags]) or "no such folder",
        hint="name one of the folders, or copy the one that is missing",
    )


def _is_tag(folder: Path) -> bool:
    with storage_errors("list the folder", folder):
        return is_deepspeed([path.name for path in folder.iterdir()])


def _by_number(folder: Path) -> list[tuple[bool, int, str]]:
    """Numbers in a name count as numbers: global_step9 comes before global_step10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", folder.name)]


def _with_time(path: Path) -> str:
    with storage_errors("look at", path):
        written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    return f"{path.name}: written {written.isoformat(timespec='seconds')}"


def listed(values: Sequence[object]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
