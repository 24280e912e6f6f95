"""`reshard slurm wrap`: a command inside a SLURM job, made to survive preemption."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_message
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.environment import SlurmPlace

_SIGNALS = ("TERM", "USR1", "USR2", "INT")


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action `wrap`."""
    parser = actions.add_parser(
        "wrap",
        help="run a command inside a SLURM job so that it survives preemption",
        description="The last line of a batch script: exec reshard slurm wrap --run DIR -- CMD. Runs CMD, has it save "
        "and stop when the job is preempted or its time is up, requeues the job, and says what happened in "
        "DIR/events.jsonl. Put before the command of an srun task too (srun ... reshard slurm wrap -- CMD), it keeps "
        "SLURM's signals from torchrun.",
        epilog="Exit codes: 0 the run is done; 1 it failed and is not requeued; 2 usage or environment; 75 it goes on "
        "in another attempt; 76 another attempt has taken over; 77 its user cancelled it. In a task: the command's.",
    )
    parser.add_argument(
        "--run", dest="folder", type=Path, metavar="DIR",
        help="the run's folder, which all nodes share: state, events, DONE (default: runs/<job name>)",
    )  # fmt: skip
    parser.add_argument(
        "--max-failures", type=int, default=3, metavar="N",
        help="crashes in a row without a newer checkpoint that end the run (default: 3; 1: requeue after none)",
    )  # fmt: skip
    parser.add_argument(
        "--fall-back", action="store_true",
        help="after so many, set the newest step aside and go on from the one before",
    )  # fmt: skip
    parser.add_argument(
        "--poll-s", type=float, default=30.0, metavar="S", help="how often to ask SLURM about the job (default: 30)"
    )
    parser.add_argument(
        "--ranks", action="store_true",
        help="in a task: it is one rank, so give it RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE",
    )  # fmt: skip
    parser.add_argument(
        "--forward", choices=_SIGNALS, help="in a task: what to send the processes that train when SLURM sends a signal"
    )
    parser.add_argument("command", nargs="+", metavar="CMD", help="the command, after --")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import signal

    from reshard.cluster.policy import Limits
    from reshard.cluster.task import shield
    from reshard.cluster.wrap import Terms, wrap
    from reshard.environment import Orders, SlurmPlace
    from reshard.processes import slurm_step

    place = SlurmPlace.given(slurm_step())
    if place is None:
        raise UsageError(
            "not in a SLURM job", key="SLURM_JOB_ID", hint="put it into a batch script; reshard slurm submit makes one"
        )
    outer = Orders.given().attempt_folder
    if outer is not None:
        forward = None if args.forward is None else signal.Signals[f"SIG{args.forward}"]
        return shield(args.command, Path(outer), place, with_ranks=args.ranks, forward=forward)
    if place.in_task:
        raise UsageError(
            "a task without a wrapped batch script",
            hint="begin the line in the batch script so: exec reshard slurm wrap --run DIR -- srun ...",
        )
    if args.max_failures < 1 or not args.poll_s > 0:
        raise UsageError("not above 0", key="--max-failures, --poll-s", found=f"{args.max_failures}, {args.poll_s:g}")
    if args.folder is not None and not args.folder.name:
        raise UsageError("not a folder for a run", key="--run", found=str(args.folder), hint="name one of its own")
    run = args.folder or Path("runs", _default_name(place))
    terms = Terms(run.absolute(), args.command, Limits(args.max_failures, args.fall_back), args.poll_s)
    return wrap(terms, place, _tell)


def _default_name(place: SlurmPlace) -> str:
    """The job's; of a task of a job array, its own."""
    task = place.address.partition("_")[2]
    return f"{place.job_name}-{task}" if task else place.job_name


def _tell(text: str) -> None:
    # A log without room must not end a run that has.
    with contextlib.suppress(OSError):
        print_message(f"{time.strftime('%Y-%m-%d %H:%M:%S')} reshard: {text}")
