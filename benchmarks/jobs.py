"""A torchrun job in which contenders take turns, as the launcher sees it: what it is told, and what comes of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contest import Bench, remove, say
from processes import PATIENCE_S, ContenderFailed, run, script, torchrun
from record import Line
from shapes import Shapes, state_bytes

STOCK, RAW, COPY = "stock", "raw I/O", "memory copy"
_AGAINST = {"to_stock": (STOCK,), "to_raw": (RAW, COPY)}


@dataclass(frozen=True)
class Job:
    """What all contenders do.

    Attributes:
        action: ``write`` saves once, into a folder for each format, and measures nothing.
        cases: names of what one turn does: of its first save, its second and so on; one for the other actions.
        mesh: ranks along each axis; state is sharded along the last, replicated along the others.
        contenders: names of libraries.
        folder: with the checkpoints that are read, or in which they are written.
        repeats: turns that count; one more, before them, does not: imports, connections, first allocations.
        new_layout: each turn has tensors of other names, of which nobody has a plan yet.
        results: file that gets a line for each measurement.
    """

    action: Literal["write", "load", "save", "async"]
    cases: list[str]
    shapes: Shapes
    mesh: list[int]
    contenders: list[str]
    folder: str
    repeats: int = 0
    new_layout: bool = False
    results: str = ""

    @property
    def ranks(self) -> int:
        """How many there are."""
        count = 1
        for size in self.mesh:
            count *= size
        return count

    @classmethod
    def read(cls, path: str) -> Job:
        """From a file that the launcher wrote."""
        return cls(**json.loads(Path(path).read_text()))


def run_job(job: Job, patience_s: float = PATIENCE_S) -> list[Line]:
    """Runs a job to its end; what was measured, in the order of the turns.

    Raises:
        ContenderFailed: it did not come to its end; the exception has the lines as ``measured``.
    """
    base = Path(job.folder)
    results, specification = base.with_suffix(".results"), base.with_suffix(".job")
    specification.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(job, results=str(results)))))
    results.touch()
    try:
        run(torchrun(job.ranks, script("turns.py", specification)), patience_s)
    except ContenderFailed as failure:
        failure.measured = _lines(results)  # type: ignore[attr-defined]
        raise
    else:
        return _lines(results)
    finally:
        results.unlink(), specification.unlink()


def _lines(results: Path) -> list[Line]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def measure_job(bench: Bench, section: str, where: str, job: Job) -> None:
    """Runs a job, and adds what was measured to the record, with what follows from it."""
    say(f"{section} {' and '.join(job.cases)} on {where}: {', '.join(job.contenders)}")
    place = {"section": section, "where": where}
    failed = None
    try:
        lines = run_job(job)
    except ContenderFailed as failure:
        failed, lines = failure, failure.measured  # type: ignore[attr-defined]
    finally:
        if job.action != "load":
            remove(Path(job.folder))
    moved = state_bytes(job.shapes)
    for line in lines:
        if "repeat" in line:
            line |= _rates(line, moved) | _ratios(line, lines)
        bench.record.add(**place, **line)
    if failed is not None:
        bench.record.add(**place, case=job.cases[0], contender="the job", failed=str(failed))


def _rates(line: Line, moved: int) -> Line:
    fields: Line = {
        "bytes": moved,
        "gb_per_s": moved / line["seconds"] / 1e9,
        "cpu_s_per_gb": line["cpu_s"] / moved * 1e9,
    }
    # What is right, and was not read, was mapped.
    if line.get("bytes_read", 0) >= moved:
        fields["read_ratio"] = line["bytes_read"] / moved
    return fields


def _ratios(line: Line, lines: list[Line]) -> Line:
    """How many times as fast as stock torch, and as plain I/O, in the same turn."""
    fields = {}
    for field, contenders in _AGAINST.items():
        for other in lines:
            is_same = all(other.get(name) == line[name] for name in ("case", "repeat"))
            if is_same and other["contender"] in contenders and "seconds" in other:
                fields[field] = other["seconds"] / line["seconds"]
    return fields
