"""`reshard slurm`: a run as a SLURM job: its batch script, its submission, and what runs inside."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli import wrap
from reshard.cli.output import print_json, print_message, print_text, print_warning

if TYPE_CHECKING:
    from reshard.cluster.submission import Submission


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `slurm` and its actions."""
    parser = verbs.add_parser(
        "slurm",
        help="run as a SLURM job that survives preemption, its time limit and lost nodes",
        description="Run as a SLURM job that survives preemption, its time limit and lost nodes.",
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    wrap.register(actions)
    _register_render(actions)
    _register_submit(actions)


def _register_render(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "render",
        help="print the batch script of a run",
        description="Print the batch script of a run; nothing is asked of SLURM.",
    )
    _add_config(parser)
    parser.set_defaults(run=_render)


def _register_submit(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "submit",
        help="check a run's settings against the cluster, and submit it",
        description="Check a run's settings against the cluster, write its batch script into the run's folder and "
        "submit it from there.",
    )
    _add_config(parser)
    parser.add_argument(
        "--chain", type=_count, metavar="N",
        help="where jobs may not be requeued: submit N jobs, each to go on when the one before has ended; those that "
        "are left when the run is done end at once",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check, and print the script; submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_submit)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the run's settings, as in slurm/run.yaml"
    )


def _render(args: argparse.Namespace) -> int:
    from reshard.cluster.render import LOG_FOLDER, render
    from reshard.cluster.run_config import read_run_config
    from reshard.cluster.submission import warn_time_s

    config = read_run_config(args.config)
    print_text(render(config, warn_s=warn_time_s(config)).removesuffix("\n"))
    logs = Path(config.run, LOG_FOLDER)
    if not logs.is_dir():
        print_message(f"before sbatch: mkdir -p {shlex.quote(str(logs))} (reshard slurm submit makes it)")
    return 0


def _submit(args: argparse.Namespace) -> int:
    from reshard.cluster import submission
    from reshard.cluster.run_config import read_run_config

    prepared = submission.prepare(read_run_config(args.config), chain=args.chain)
    for warning in prepared.warnings:
        print_warning(warning)
    jobs = [] if args.dry_run else submission.submit(prepared)
    if args.json:
        print_json(_fields(prepared, jobs, dry_run=args.dry_run))
    elif args.dry_run:
        print_text(prepared.script.removesuffix("\n"))
        print_message(_describe_plan(prepared))
    else:
        print_text(_describe(prepared, jobs))
    return 0


def _fields(prepared: Submission, jobs: list[str], *, dry_run: bool) -> dict[str, object]:
    return {
        "name": prepared.config.name,
        "run": prepared.config.run,
        "script": str(prepared.path),
        "warn_s": prepared.warn_s,
        "chain": prepared.chain,
        "jobs": jobs,
        "dry_run": dry_run,
        "warnings": list(prepared.warnings),
    }


def _describe_plan(prepared: Submission) -> str:
    previous = [None, *("JOB" for _ in range(prepared.jobs - 1))]
    commands = [shlex.join(prepared.command(job)) for job in previous]
    return "\n".join(["nothing was submitted (--dry-run); it would be, after writing the script:", *commands])


def _describe(prepared: Submission, jobs: list[str]) -> str:
    run = prepared.config.run
    what = f"submitted {'job' if len(jobs) == 1 else 'jobs'} {' '.join(jobs)}"
    return f"{what} ({prepared.config.name}): told {prepared.warn_s} s before the time limit; see {run}/events.jsonl"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)
