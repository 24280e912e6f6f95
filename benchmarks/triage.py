"""Does triage tell real faults from each other, and from none? A confusion table over a bed of real runs:

    python benchmarks/triage.py --seed 0 --seed 1 --seed 2

Every run of `bad_resumes.py` is triaged by its trace and its checkpoint, once against its own past and once against the
clean run. A miss is another class than the run's, or another piece first where a column or the checkpoint shows one; an
alarm on a run that nothing shows is a false alarm. Exit 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bad_resumes import CASES, RESUME_STEP, Case

from reshard.verify.describe.describe import describe
from reshard.verify.traces.reading import read_run
from reshard.verify.triage.diagnosis import Diagnosis, diagnose
from reshard.verify.triage.finding import POSSIBLE
from reshard.verify.triage.shape import CONTINUOUS, LOW, MID_RUN, PERSISTENT, SPIKE

CLASSES = (CONTINUOUS, SPIKE, PERSISTENT, LOW, MID_RUN)
PROCESSES = 2


@dataclass(frozen=True)
class Verdict:
    """What triage said of one run. `by` is what the loss was held against: ``past`` or ``reference``."""

    case: Case
    seed: int
    by: str
    found: Diagnosis

    @property
    def piece(self) -> str | None:
        """The piece named first, unless it is one of several that are possible."""
        sure = [each.piece for each in self.found.findings if each.confidence != POSSIBLE]
        return sure[0] if sure else None

    @property
    def fault(self) -> str | None:
        """What is wrong with it; None where it is right."""
        found, case = self.found, self.case
        if case.piece is None and case.shapes == (CONTINUOUS,):
            return "false alarm" if found.is_alarming else None
        if found.shape.name not in case.shapes:
            return f"class {found.shape.name}, not {' or '.join(case.shapes)}"
        if case.piece not in (None, self.piece):
            return f"piece {self.piece}, not {case.piece}"
        return None

    def to_json(self) -> dict[str, object]:
        """One line of the record."""
        place = {"case": self.case.name, "seed": self.seed, "by": self.by, "fault": self.fault}
        return {**place, **self.found.to_json()}


def train(folder: Path, seeds: Sequence[int]) -> None:
    """Trains all runs, some processes at a time: each makes bases of its own, which are equal to the bit."""
    jobs = [(seed, part) for seed in seeds for part in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        for ended in pool.map(lambda job: _train_part(folder, *job), jobs):
            if ended.returncode:
                raise SystemExit(
                    f"error: {' '.join(map(str, ended.args))}: exit {ended.returncode}\n{ended.stderr[-4000:]}"
                )


def _train_part(folder: Path, seed: int, part: int) -> subprocess.CompletedProcess[str]:
    place = folder / f"seed-{seed}" / f"part-{part}"
    command = [sys.executable, str(Path(__file__).with_name("bad_resumes.py")), str(place), "--seed", str(seed)]
    for case in CASES[part::PROCESSES]:
        command += ["--only", case.name]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def judge(folder: Path, seeds: Sequence[int]) -> Iterator[Verdict]:
    """Triages every run, twice."""
    for seed in seeds:
        places = {case.name: next(folder.glob(f"seed-{seed}/part-*/{case.name}")) for case in CASES}
        for case in CASES:
            rows = read_run(places[case.name] / "trace.jsonl")
            clean = read_run(places[f"none, {case.data}"] / "trace.jsonl")
            description = describe(places[case.name] / "checkpoints" / f"step-{RESUME_STEP}")
            with description.checkpoint:
                for by, reference in (("past", ()), ("reference", clean)):
                    found = diagnose(rows, RESUME_STEP, reference=reference, checkpoint=description)
                    yield Verdict(case, seed, by, found)


def confusion(verdicts: Sequence[Verdict]) -> list[str]:
    """A line a case: how often it was given each class, and which piece was named first."""
    lines = [f"{'case':24}" + "".join(f"{name.split()[0]:>13}" for name in CLASSES) + "  piece named first"]
    for case in CASES:
        of_case = [verdict for verdict in verdicts if verdict.case is case]
        counts = Counter(verdict.found.shape.name for verdict in of_case)
        pieces = Counter(verdict.piece or "-" for verdict in of_case)
        cells = "".join(f"{_cell(counts[name], name in case.shapes):>13}" for name in CLASSES)
        named = ", ".join(f"{piece} {count}" for piece, count in pieces.most_common())
        lines.append(f"{case.name:24}{cells}  {named}{'' if case.piece else ' (nothing shows it)'}")
    return lines


def _cell(count: int, is_right: bool) -> str:
    return (str(count) if count else ".") + ("" if is_right or not count else "!")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", action="append", type=int, dest="seeds", help="a seed (repeatable; default: 0)")
    parser.add_argument("--folder", type=Path, help="keep the runs here; those that are there already are judged again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a line for every verdict")
    arguments = parser.parse_args()
    seeds = arguments.seeds or [0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        train(folder, [seed for seed in seeds if not (folder / f"seed-{seed}").exists()])
        verdicts = list(judge(folder, seeds))
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(verdict.to_json()) + "\n" for verdict in verdicts))
    print("\n".join(confusion(verdicts)))
    wrong = [verdict for verdict in verdicts if verdict.fault]
    for verdict in wrong:
        print(f"wrong: {verdict.case.name}, seed {verdict.seed}, by {verdict.by}: {verdict.fault}")
    print(f"{len(verdicts)} verdicts, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
