"""`reshard compare-traces`: does a resumed run have the losses of the run that was never interrupted?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from reshard.cli.output import print_json, print_text
from reshard.errors import UsageError

PICTURES = (".png", ".pdf", ".svg")


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `compare-traces`."""
    parser = verbs.add_parser(
        "compare-traces",
        help="compare the loss traces of two runs step by step",
        description="Compare two loss traces step by step: our own, or those of other trainers as JSON lines, CSV "
        "(exports of Weights & Biases included), trainer_state.json of Hugging Face, or TensorBoard event files. "
        "Exit 0 if they agree, 1 if they differ.",
    )
    parser.add_argument("reference", metavar="REF", type=Path, help="trace of the uninterrupted run")
    parser.add_argument(
        "resumed", metavar="RESUMED", type=Path,
        help="trace of the resumed run, all attempts in one file; or a folder of event files, one an attempt",
    )  # fmt: skip
    add_column_option(parser)
    parser.add_argument(
        "--epsilon",
        type=float,
        default=0.0,
        metavar="E",
        help="largest loss difference that agrees (default: 0, the same bits)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both curves (.png, .pdf, .svg)")
    parser.add_argument("--force", action="store_true", help="overwrite the plot")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def add_column_option(parser: argparse.ArgumentParser) -> None:
    """Add `--column`, for verbs that read traces of other trainers."""
    parser.add_argument(
        "--column", action="append", default=[], dest="columns", metavar="FIELD=NAME",
        help="which column of a trainer's own trace holds a field, such as loss=train/loss; taken wherever a trace has "
        "that column (repeatable)",
    )  # fmt: skip


def check_picture(path: Path | None, *, force: bool) -> None:
    """Refuse a picture that cannot be drawn, before anything is read.

    Raises:
        UsageError: it is there already, its folder is not, or its name does not end as a picture's.
    """
    if path is None:
        return
    if path.exists() and not force:
        raise UsageError("exists already", path=path, hint="overwrite it with --force")
    if path.suffix.lower() not in PICTURES:
        raise UsageError("cannot draw this kind of file", path=path, hint="end the name in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise UsageError("no such folder", path=path.parent, hint="make it first")


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """From field to column.

    Raises:
        UsageError: not of the form FIELD=NAME, or a field that is given twice.
    """
    columns: dict[str, str] = {}
    for pair in pairs:
        field, _, name = pair.partition("=")
        if not field or not name:
            raise UsageError("not a column", key="--column", expected="FIELD=NAME", found=pair)
        if field in columns:
            raise UsageError(f"{field} is given twice", key="--column", hint="name one column for it")
        columns[field] = name
    return columns


def _run(args: argparse.Namespace) -> int:
    from reshard.verify.traces.compare import compare_traces, format_table
    from reshard.verify.traces.reading import read_runs

    check_picture(args.plot, force=args.force)
    reference, resumed = read_runs([args.reference, args.resumed], parse_columns(args.columns))
    comparison = compare_traces(reference, resumed, epsilon=args.epsilon)
    if args.json:
        print_json(comparison.to_json())
    else:
        print_text(format_table(comparison))
    if args.plot is not None:
        from reshard.verify.traces.plot import plot_traces

        plot_traces(comparison, args.plot)
    return 0 if comparison.agrees else 1
