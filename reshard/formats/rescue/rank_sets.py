"""Files of single ranks that belong together, by what their names record: rank, and perhaps the number of ranks.

A name with a rank in it (``model_world_size_4_rank_2.pt``, ``shard_rank2_of_4.pt``, ``checkpoint_last-shard2.pt``) is
one of a set: the files whose names differ in that number only. Ranks are what the numbers say, in whatever order a
folder lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.torch_file import HEAD_BYTES, looks_like_archive, looks_old
from reshard.formats.unpickle import missing_data
from reshard.geometry.mesh import MOST_RANKS
from reshard.storage.durable import storage_errors

_RANK = re.compile(r"(?P<word>rank|shard)(?P<separator>[_\-.]?)(?P<number>\d+)(?=$|[_\-.])", re.IGNORECASE)
_WORLD = re.compile(r"(?:world_size_|(?<=_)of_|(?<=-)of-)(\d+)(?=$|[_\-.])", re.IGNORECASE)
_SHOWN = 8


@dataclass(frozen=True)
class RankSet:
    """The files of one kind.

    Attributes:
        kind: their name with ``*`` for the rank.
        ranks: how many there should be, where the names say so.
        files: by rank.
    """

    kind: str
    ranks: int | None
    files: dict[int, Path]


def rank_of(name: str) -> tuple[str, int] | None:
    """What a name has in common with those of other ranks, and the rank; None where it names none."""
    matches = list(_RANK.finditer(name))
    if not matches:
        return None
    match = matches[-1]
    return f"{name[: match.start('number')]}*{name[match.end('number') :]}", int(match["number"])


def rank_sets(paths: Iterable[Path]) -> list[RankSet]:
    """The sets among some files, by kind; files whose names have no rank, and those of other tools, are left out.

    Raises:
        UsageError: two files, in several folders, are of one kind and rank.
        StorageError: the file system failed to read one.
    """
    named = {path: found for path in paths if not path.name.startswith(".") and (found := rank_of(path.name))}
    saved = {path for path in named if _is_saved(path)}
    endings = {path.suffix for path in saved}
    kinds: dict[str, dict[int, Path]] = {}
    for path, (kind, rank) in named.items():
        # A damaged one is told by its name, not taken for the file of another tool.
        if path not in saved and path.suffix not in endings:
            continue
        files = kinds.setdefault(kind, {})
        if rank in files:
            raise UsageError(
                "two files of one rank",
                path=path,
                rank=rank,
                found=files[rank],
                hint="name the folders of one checkpoint",
            )
        files[rank] = path
    sets = []
    for kind, files in sorted(kinds.items()):
        world = _WORLD.search(kind)
        sets.append(RankSet(kind, int(world[1]) if world else None, dict(sorted(files.items()))))
    return sets


def require_complete(sets: Sequence[RankSet], folder: Path) -> int:
    """The number of ranks; passes where every set has a file with something in it of each.

    Raises:
        UsageError: there are sets of several worlds, or of one that no job has.
        CheckpointUnsound: ranks are missing or their files empty; all are listed.
    """
    worlds = {found.ranks for found in sets if found.ranks is not None}
    if len(worlds) > 1:
        raise UsageError(
            "checkpoints of several world sizes in one folder",
            path=folder,
            found=", ".join(str(world) for world in sorted(worlds)),
            hint="name one of the files of the one that you want",
        )
    ranks = worlds.pop() if worlds else 1 + max(max(found.files) for found in sets)
    if ranks > MOST_RANKS:
        raise UsageError("more ranks than any job has", path=folder, expected=f"at most {MOST_RANKS}", found=ranks)
    faults = []
    for found in sets:
        if missing := [rank for rank in range(ranks) if rank not in found.files]:
            faults.append(f"{found.kind}: missing ranks {_listed(missing)} of {ranks}")
        if foreign := [rank for rank in found.files if rank >= ranks]:
            faults.append(f"{found.kind}: ranks {_listed(foreign)}, where there are {ranks}")
        for rank, path in found.files.items():
            if (fault := _fault(path)) is not None:
                faults.append(f"{found.kind}: rank {rank} is {fault}")
    if faults:
        raise CheckpointUnsound(
            f"world size {ranks}: {faults[0]}",
            path=folder,
            hint="copy them here, or name the folders of the other nodes as well",
            details=faults[1:],
        )
    return ranks


def _is_saved(path: Path) -> bool:
    head = _head(path)
    # What a Git LFS pointer stands for is not known: better to ask for it than to leave it out.
    return looks_like_archive(head) or looks_old(head) or (head != b"" and missing_data(head) is not None)


def _fault(path: Path) -> str | None:
    return missing_data(_head(path))


def _head(path: Path) -> bytes:
    with storage_errors("read", path), path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return ",".join(map(str, ranks[:_SHOWN])) + more
