"""`reshard compare-traces`: does a resumed run have the losses of the run that was never interrupted?"""

from __future__ import annotations

import argparse
from pathlib import Path

from reshard.cli.output import print_json, print_text
from reshard.errors import UsageError


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `compare-traces`."""
    parser = verbs.add_parser(
        "compare-traces",
        help="compare the loss traces of two runs step by step",
        description="Compare two loss traces (JSON lines) step by step. Exit 0 if they agree, 1 if they differ.",
    )
    parser.add_argument("reference", metavar="REF", type=Path, help="trace of the uninterrupted run")
    parser.add_argument(
        "resumed", metavar="RESUMED", type=Path, help="trace of the resumed run, all attempts in one file"
    )
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


def _run(args: argparse.Namespace) -> int:
    from reshard.verify.traces.compare import compare_traces, format_table
    from reshard.verify.traces.trace import read_trace

    if args.plot is not None and args.plot.exists() and not args.force:
        raise UsageError("exists already", path=args.plot, hint="overwrite it with --force")
    comparison = compare_traces(read_trace(args.reference), read_trace(args.resumed), epsilon=args.epsilon)
    if args.json:
        print_json(comparison.to_json())
    else:
        print_text(format_table(comparison))
    if args.plot is not None:
        from reshard.verify.traces.plot import plot_traces

        plot_traces(comparison, args.plot)
    return 0 if comparison.agrees else 1
