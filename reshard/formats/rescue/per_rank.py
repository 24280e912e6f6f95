"""Which tool's per-rank files a folder holds, by their names and, where these do not tell, by what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue import fairscale, fsdp_ranks
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import open_rank_file
from reshard.formats.rescue.rank_sets import RankSet, rank_of, rank_sets, require_complete
from reshard.storage.byte_ranges import SourceFiles

NAME = "ranks"


@dataclass(frozen=True)
class PerRank:
    """Files of single ranks.

    Attributes:
        folder: where they are.
        paths: of all that are there, those of other folders among them.
        chosen: the one that was named, if one was: only its world is meant.
    """

    folder: Path
    paths: tuple[Path, ...]
    chosen: Path | None = None

    def open(self, hints: Hints) -> Checkpoint:
        """The checkpoint that they make up.

        Raises:
            ReshardError: as the format's own reader.
        """
        sets = _meant(rank_sets(self.paths), self.chosen)
        require_complete(sets, self.folder)
        is_of_fairscale = [_is_of_fairscale(found) for found in sets]
        if any(is_of_fairscale):
            own = [found for found, is_own in zip(sets, is_of_fairscale, strict=True) if is_own]
            return fairscale.open_fairscale(self.folder, own, hints)
        return fsdp_ranks.open_ranks(self.folder, sets, hints)


def _is_of_fairscale(found: RankSet) -> bool:
    """By what the file of the first rank holds; one that is damaged is for the reader to name, with all others."""
    with SourceFiles([found.files[min(found.files)]]) as files:
        try:
            return fairscale.is_fairscale(open_rank_file(files, 0).root)
        except CheckpointUnsound:
            return False


def _meant(sets: Sequence[RankSet], chosen: Path | None) -> list[RankSet]:
    """The sets of one world: that of the file that was named, or the only one there is."""
    if chosen is None:
        return list(sets)
    found = rank_of(chosen.name)
    if found is None:
        raise UsageError("not a file of a rank", path=chosen, hint="name the folder, or one of the files of its ranks")
    of_chosen = next(candidate for candidate in sets if candidate.kind == found[0])
    return [candidate for candidate in sets if candidate.ranks == of_chosen.ranks]
