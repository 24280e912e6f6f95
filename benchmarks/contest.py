"""Contenders in turn, under the same conditions: destination free, source in the page cache, nothing left to flush."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import ContenderFailed, Finished, run, script
from record import Record
from shapes import Shapes

DESTINATION = "destination"


@dataclass(frozen=True)
class Contender:
    """A command, with the fields that its lines get beside what it reports.

    Attributes:
        moved_bytes: what its GB/s count, in `inside_s` where that is reported; 0 for no such number.
    """

    command: Sequence[object]
    fields: Mapping[str, Any] = field(default_factory=dict)
    moved_bytes: int = 0


@dataclass(frozen=True)
class Bench:
    """What all sections share.

    Attributes:
        places: name -> folder to work in: ``disk``, and perhaps ``tmpfs``.
        gigabytes: of the large checkpoint.
        repeats: of every measurement.
        with_torch: whether stock torch takes part where it is slow.
    """

    record: Record
    places: Mapping[str, Path]
    gigabytes: float
    repeats: int
    with_torch: bool = True

    def scaled(self, count: int) -> int:
        """A number that is meant for 2 GB, less in proportion for a trial with less."""
        return max(1, round(count * min(1.0, self.gigabytes / 2)))

    def contest(
        self, section: str, case: str, where: str, contenders: Mapping[str, Contender], warm: Sequence[Path] = ()
    ) -> None:
        """Runs all contenders, as often as there are repeats, each time another one first.

        Args:
            warm: folders that are read before each.
        """
        work = self.places[where]
        for repeat in range(self.repeats):
            names = list(contenders)
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                say(f"{section} {case} on {where}: {name} ({repeat + 1} of {self.repeats})")
                remove(work / DESTINATION)
                for folder in warm:
                    read_all(folder)
                os.sync()
                line = {"section": section, "case": case, "where": where, "contender": name}
                contender = contenders[name]
                try:
                    finished = run(contender.command)
                except ContenderFailed as failure:
                    self.record.add(**line, failed=str(failure))
                else:
                    self.record.add(**line, repeat=repeat, **_fields(contender, finished))
            remove(work / DESTINATION)

    @contextmanager
    def checkpoint(self, where: str, name: str, shapes: Shapes, ranks: int) -> Iterator[Path]:
        """A checkpoint written by stock torch on some ranks; removed afterwards."""
        folder = self.places[where] / name
        specification = folder.with_suffix(".json")
        say(f"writing {name} on {where}")
        specification.write_text(json.dumps(shapes))
        try:
            run(script("stock.py", "write", specification, ranks, folder))
            yield folder
        finally:
            remove(folder)
            specification.unlink(missing_ok=True)


def _fields(contender: Contender, finished: Finished) -> dict[str, Any]:
    fields = {name: value for name, value in finished.report.items() if isinstance(value, (int, float))}
    if "seconds" in fields:
        fields["reported_s"] = fields.pop("seconds")
    fields |= {"seconds": finished.seconds, "cpu_s": finished.cpu_s, "peak_bytes": finished.peak_bytes}
    if contender.moved_bytes:
        fields["gb_per_s"] = contender.moved_bytes / fields.get("inside_s", finished.seconds) / 1e9
    # Held against a bound on what is used beside the interpreter.
    if "interpreter_bytes" in contender.fields:
        fields["peak_above_bytes"] = fields["peak_bytes"] - contender.fields["interpreter_bytes"]
    return {**fields, **contender.fields}


def folder_bytes(folder: Path) -> int:
    """Of all files, those in folders of it as well."""
    return sum(path.stat().st_size for path in files_of(folder))


def files_of(folder: Path) -> list[Path]:
    """All of them, in their order; none where there is no folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_all(folder: Path) -> None:
    """Brings a folder's files into the page cache."""
    buffer = bytearray(1 << 20)
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def remove(folder: Path) -> None:
    """Removes a folder, and what a contender that was cut short left beside it."""
    for path in [folder, *folder.parent.glob(f".*{folder.name}*"), *folder.parent.glob(f"{folder.name}.*")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def say(text: str) -> None:
    """Talk, beside the data."""
    print(text, file=sys.stderr, flush=True)
