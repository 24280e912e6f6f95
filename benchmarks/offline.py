"""How fast and how small the offline half of reshard is, beside cp and stock torch, in one run:

    python benchmarks/offline.py --tmpfs /dev/shm

Prints one JSON line per measurement and per ratio, then a table. Contenders take turns; every number is a median over
the repeats, every ratio the median of the ratios within a repeat, for machines are noisy. `seconds` is what the user
waits for a process, from its start to its end; `inside_s` leaves out interpreter and imports. What was read is in the
page cache, what was written is flushed before a process ends. With less than 2 GB the counts of the other sections
shrink in proportion: for a trial.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import moving
import planning
import reading
from contest import Bench, say
from processes import HERE, ContenderFailed
from record import Record, medians, table, verdicts

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "reshard": moving.measure_reshard,
    "memory": moving.measure_memory,
    "small": moving.measure_small,
    "index": planning.measure_index,
    "plan": planning.measure_plan,
    "check": reading.measure_check,
}
GOALS = [*moving.GOALS, *planning.GOALS, *reading.GOALS]


def main() -> int:
    """Measures; exit 0 whether goals are met or not, 1 if something could not be measured."""
    args = _parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with args.json.open("w") if args.json else nullcontext(sys.stdout) as out, _folders(args) as places:
        record = Record(out)
        record.add(**_about(args, places))
        bench = Bench(record, places, args.gigabytes, args.repeat, not args.no_torch)
        for name in args.only or SECTIONS:
            try:
                SECTIONS[name](bench)
            except ContenderFailed as failure:
                record.add(section=name, case="", where="", contender="preparation", failed=str(failure))
        for goal in GOALS:
            for line in list(goal.found(record.lines)):
                record.add(**line)
    print(f"\n{_sentence(record.lines[0])}\n\n{table(list(medians(record.lines)))}\n")
    print(table(list(verdicts(record.lines))))
    return 1 if any("failed" in line for line in record.lines) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the large checkpoint (default: 2)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk; needs 4 times that"
    )
    parser.add_argument("--tmpfs", type=Path, help="a folder on tmpfs, such as /dev/shm, to measure there as well")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="a section (repeatable; default: all)")
    parser.add_argument("--no-torch", action="store_true", help="leave out stock torch, which takes most of the time")
    parser.add_argument("--repeat", type=int, default=3, help="of every measurement (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the lines (default: stdout)")
    return parser.parse_args()


@contextmanager
def _folders(args: argparse.Namespace) -> Iterator[dict[str, Path]]:
    """A folder to work in at each place, removed whatever happens."""
    places: dict[str, Path] = {}
    try:
        for where, parent in (("disk", args.folder), ("tmpfs", args.tmpfs)):
            if parent is not None:
                places[where] = Path(tempfile.mkdtemp(prefix="reshard-benchmark-", dir=parent.resolve()))
        yield places
    finally:
        for folder in places.values():
            shutil.rmtree(folder, ignore_errors=True)


def _about(args: argparse.Namespace, places: dict[str, Path]) -> dict[str, Any]:
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "section": "about",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gigabytes": args.gigabytes,
        "repeats": args.repeat,
        "file_systems": {where: _file_system(folder) for where, folder in places.items()},
        "page_cache": "warm",
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "commit": commit,
    }


def _file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    at = {Path(point): kind for point, kind in mounts}
    return next(at[parent] for parent in (folder, *folder.parents) if parent in at)


def _sentence(about: dict[str, Any]) -> str:
    systems = ", ".join(f"{where} {kind}" for where, kind in about["file_systems"].items())
    return (
        f"{about['gigabytes']:g} GB, medians of {about['repeats']}, page cache warm; {systems}; "
        f"{about['cores']} cores, load {about['load_before']:.1f} before; torch {about['torch']}, "
        f"Python {about['python']}; reshard {about['commit']}, {about['date']}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; everything that was written is removed")
        sys.exit(130)
