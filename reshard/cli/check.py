"""`reshard check`: is a checkpoint whole, consistent and, with --deep, undamaged?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text
from reshard.cli.units import bytes_text, plural

if TYPE_CHECKING:
    from reshard.verify.check.report import Report

# More would scroll the first ones away; --json has them all.
_MOST_FAULTS_SHOWN = 50


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `check`."""
    parser = verbs.add_parser(
        "check",
        help="is a checkpoint whole and consistent, and with --deep undamaged",
        description="Check that every tensor is stored exactly once, that files and archives are whole and of one "
        "save, that commit and manifest agree. Exit 0 if it is sound, 1 if not.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint of any format, or a run folder")
    parser.add_argument(
        "--deep", action="store_true", help="read every byte: checksums, NaN and infinities, replicas that differ"
    )
    parser.add_argument(
        "--in",
        dest="also",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="a further folder with files of the checkpoint, as nodes with disks of their own leave them (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.cli.progress import byte_progress
    from reshard.verify.check.run import check

    report = check(
        args.checkpoint, args.also, deep=args.deep, progress=lambda total_bytes: byte_progress(total_bytes, "checking")
    )
    if args.json:
        print_json(report.to_json())
    else:
        print_text(_describe(report))
    return 0 if report.is_sound else 1


def _describe(report: Report) -> str:
    lines = [str(fault) for fault in report.faults[:_MOST_FAULTS_SHOWN]]
    if (more := len(report.faults) - _MOST_FAULTS_SHOWN) > 0:
        lines.append(f"... and {more} more; --json lists them all")
    lines += [f"note: {note}" for note in report.notes]
    count = len(report.faults)
    verdict = "sound" if report.is_sound else f"unsound: {plural(count, 'fault')} in {report.path}"
    return "\n".join([*lines, verdict if report.format is None else f"{verdict}: {_counts(report)}"])


def _counts(report: Report) -> str:
    chunks = f"{plural(report.chunks, 'chunk')} in {plural(report.files, 'file')}"
    counts = f"{plural(report.tensors, 'tensor')}, {chunks}, {bytes_text(report.stored_bytes)}"
    if report.verified_records:
        counts += f", checksums of {plural(report.verified_records, 'record')} verified"
    return counts
