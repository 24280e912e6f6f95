"""What the benchmarks have in common: options, folders to work in, sections in turn, what is printed at the end."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contest import Bench, say
from processes import HERE, ContenderFailed
from record import Column, Goal, Record, medians, table, verdicts

Section = Callable[[Bench], None]


def options(description: str | None, sections: Mapping[str, Section], gigabytes: float) -> argparse.ArgumentParser:
    """The options of every benchmark.

    Args:
        gigabytes: default size of the large checkpoint.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gigabytes", type=float, default=gigabytes, help=f"of the large checkpoint (default: {gigabytes:g})"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk; needs several times that"
    )
    parser.add_argument("--tmpfs", type=Path, help="a folder on tmpfs, such as /dev/shm, to measure there as well")
    parser.add_argument("--only", action="append", choices=list(sections), help="a section (repeatable; default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="of every measurement (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the lines (default: stdout)")
    return parser


def measure(args: argparse.Namespace, sections: Mapping[str, Section], goals: Sequence[Goal], **bench: Any) -> Record:
    """Runs the sections that are asked for, and holds what they found against the goals.

    Args:
        bench: further fields of the `Bench`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with args.json.open("w") if args.json else nullcontext(sys.stdout) as out, _folders(args) as places:
        record = Record(out)
        record.add(**_about(args, places))
        given = Bench(record, places, args.gigabytes, args.repeat, **bench)
        for name in args.only or sections:
            try:
                sections[name](given)
            except ContenderFailed as failure:
                record.add(section=name, case="", where="", contender="preparation", failed=str(failure))
        for goal in goals:
            for line in list(goal.found(record.lines)):
                record.add(**line)
    return record


def report(record: Record, columns: Sequence[Column]) -> int:
    """Prints the tables; gives the exit status: 0 whether goals are met or not, 1 if something was not measured."""
    print(f"\n{sentence(record.lines[0])}\n\n{table(list(medians(record.lines, columns)))}\n")
    print(table(list(verdicts(record.lines))))
    for line in record.lines:
        if "left_out" in line:
            print(f"\nleft out of {line['case']}: {line['contender']}: {line['left_out']}")
    return 1 if any("failed" in line for line in record.lines) else 0


def run_main(main: Callable[[], int]) -> None:
    """Ends the process with the status that ``main`` gives."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; everything that was written is removed")
        sys.exit(130)


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
        "file_systems": {where: file_system(folder) for where, folder in places.items()},
        "page_cache": "warm",
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "commit": commit,
    }


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    at = {Path(point): kind for point, kind in mounts}
    return next(at[parent] for parent in (folder, *folder.parents) if parent in at)


def sentence(about: dict[str, Any]) -> str:
    systems = ", ".join(f"{where} {kind}" for where, kind in about["file_systems"].items())
    return (
        f"{about['gigabytes']:g} GB, medians of {about['repeats']}, page cache warm; {systems}; "
        f"{about['cores']} cores, load {about['load_before']:.1f} before; torch {about['torch']}, "
        f"Python {about['python']}; reshard {about['commit']}, {about['date']}"
    )
