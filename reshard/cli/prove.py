"""`reshard prove`: does a run that is killed and resumed have the numbers of one that is not?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.cli.output import print_json, print_message, print_text
from reshard.cli.units import plural
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.verify.prove.legs import Leg
    from reshard.verify.prove.proof import Proof
    from reshard.verify.prove.run import LegResult
    from reshard.verify.traces.compare import Comparison

_SIGNALS = ("KILL", "TERM", "USR1")
_ROWS_AROUND = 2


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `prove`."""
    parser = verbs.add_parser(
        "prove",
        help="train without a break, and again with kills and resumes on other world sizes, and compare every step",
        description="Run a training command without a break, and again with real kills of its workers and resumes at "
        "other world sizes, and compare every step: loss, learning rate, samples. Exit 0 if the two agree, 1 if not.",
        epilog="{ranks} in the command stands for the world size. The command must honour RESHARD_CHECKPOINTS (the "
        "folder to save in and resume from), RESHARD_TRACE (the file that gets a JSON line a step, with step and loss "
        "at least), RESHARD_STEPS (steps to train in all) and, where --interval is given, RESHARD_INTERVAL (steps "
        "between saves). reshard's Checkpointer and TraceWriter do. All ranks must run on this machine.",
    )
    parser.add_argument("--ranks", required=True, metavar="4:3:1", help="world size of each start")
    parser.add_argument("--kill-at", required=True, metavar="40,70", help="steps after which each but the last dies")
    parser.add_argument("--steps", required=True, type=int, metavar="N", help="steps of the whole run")
    parser.add_argument("--signal", choices=_SIGNALS, default="KILL", help="what the workers get (default: KILL)")
    parser.add_argument(
        "--epsilon", type=float, metavar="E",
        help="largest loss difference that agrees, of a run that is not exact (default: 0.001); of one that is, 0",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=int, metavar="N", help="steps between saves (default: what the command does by itself)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("proof"), metavar="DIR",
        help="for both runs' checkpoints, traces and logs, and for loss.png (default: proof)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite an earlier proof in the folder")
    parser.add_argument(
        "--reference", type=Path, metavar="DIR", help="the folder of a run without a break, of an earlier proof"
    )
    parser.add_argument(
        "--patience-s", type=float, default=1800.0, metavar="S",
        help="how long a start may go without a step before it is given up (default: 1800)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("command", nargs="+", metavar="CMD", help="the training command, after --")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import signal

    from reshard.cluster.signals import interrupted_by
    from reshard.storage.durable import storage_errors
    from reshard.verify.prove.legs import plan_legs
    from reshard.verify.prove.proof import Told, clear, prove, require_reference
    from reshard.verify.prove.run import Demand

    legs = plan_legs(args.ranks, args.kill_at, args.steps, args.command)
    _require_positive("--interval", args.interval)
    _require_positive("--patience-s", args.patience_s)
    if args.epsilon is not None and not 0 <= args.epsilon < float("inf"):
        raise UsageError("not a distance", key="--epsilon", expected="a number of 0 or more", found=args.epsilon)
    with storage_errors("find the folder", args.folder):
        folder = args.folder.absolute()
        reference = None if args.reference is None else args.reference.absolute()
    if reference is not None:
        require_reference(reference, folder)
    clear(folder, force=args.force)
    demand = Demand(
        args.command, args.steps, args.interval, signal.Signals[f"SIG{args.signal}"], patience_s=args.patience_s
    )
    bars = _Bars(args.steps, args.signal)
    told = Told(bars.on_start, bars.on_end)
    with interrupted_by(signal.SIGTERM, signal.SIGHUP):
        proof = prove(demand, legs, folder, reference=reference, epsilon=args.epsilon, told=told)
    plot = _plot(proof, folder)
    if args.json:
        drawn = plot if isinstance(plot, Path) else None
        print_json({**proof.to_json(), "folder": str(folder), "plot": None if drawn is None else str(drawn)})
    else:
        print_text("\n".join(_report(proof, args, plot)))
    return 0 if proof.holds else 1


def _require_positive(option: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise UsageError("not above 0", key=option, expected="a number above 0", found=value)


class _Bars:
    """What is said on stderr while the runs go on: a bar where a person watches, and a line at the end of each."""

    def __init__(self, steps: int, signal_name: str) -> None:
        self._steps = steps
        self._signal = signal_name
        self._bar: Any = None

    def on_start(self, name: str, leg: Leg) -> Callable[[int], None]:
        from tqdm import tqdm

        watched = sys.stderr is not None and sys.stderr.isatty()
        label = f"{name}, {plural(leg.ranks, 'rank')}"
        self._bar = tqdm(total=self._steps, desc=label, unit="step", leave=False, disable=not watched)
        return self._advance

    def _advance(self, step: int) -> None:
        self._bar.n = step
        self._bar.refresh()

    def on_end(self, name: str, result: LegResult) -> None:
        self._bar.close()
        print_message(f"{name}: {_leg(result, self._signal)}")


def _leg(result: LegResult, signal_name: str) -> str:
    """One start, in words."""
    parts = [plural(result.ranks, "rank")]
    if result.resumed_at:
        parts.append(result.restored or f"resumed at step {result.resumed_at}")
    if result.killed_at is not None:
        parts.append(f"SIG{signal_name} after step {result.killed_at}")
    elif not result.faults:
        parts.append(f"to the end, step {result.last}")
    return ", ".join(parts) + "".join(f"; FAILED: {fault}" for fault in result.faults)


def _plot(proof: Proof, folder: Path) -> Path | str:
    """The picture, or why there is none."""
    from reshard.verify.prove.proof import PICTURE
    from reshard.verify.traces.plot import plot_traces

    if proof.comparison is None:
        return "there is nothing to compare"
    try:
        plot_traces(proof.comparison, folder / PICTURE)
    except UsageError as error:
        return str(error)
    return folder / PICTURE


def _report(proof: Proof, args: argparse.Namespace, plot: Path | str) -> list[str]:
    from reshard.verify.traces.compare import format_table

    lines = [_leg(leg, args.signal) for leg in proof.legs]
    if proof.comparison is not None:
        lines += ["", format_table(proof.comparison, _telling_steps(proof, proof.comparison))]
    if proof.state is not None:
        equal = (
            f"the same bits in all {plural(proof.compared_tensors, 'tensor')} of step {args.steps}, and the same state"
        )
        lines.append(equal if not proof.state else f"the states of step {args.steps} differ: {_some(proof.state)}")
    lines += [f"{fault}" for fault in proof.faults]
    lines += [f"{plural(leg.ranks, 'rank')}: {fault}" for leg in proof.legs for fault in leg.faults]
    lines.append(f"both curves: {_shown(plot)}" if isinstance(plot, Path) else f"no picture: {plot}")
    lines.append(_verdict(proof, args.epsilon))
    return lines


def _telling_steps(proof: Proof, comparison: Comparison) -> set[int]:
    """The first and the last, those around each resume, and those around the first that differs."""
    steps = [row.step for row in comparison.rows]
    if not steps:
        return set()
    centres = [steps[0] - 1, steps[-1], *(leg.resumed_at for leg in proof.legs if leg.resumed_at is not None)]
    if comparison.first_differing_step is not None:
        centres.append(comparison.first_differing_step)
    return {step for centre in centres for step in range(centre, centre + _ROWS_AROUND)}


def _verdict(proof: Proof, epsilon: float | None) -> str:
    if proof.holds and proof.is_exact:
        ignored = " (--epsilon is for runs that are not exact)" if epsilon else ""
        if proof.uncompared:
            return (
                f"proved for every loss, which has the same bits{ignored}; "
                f"the states at the end were NOT compared: {proof.uncompared}"
            )
        return f"proved: killed and resumed, it is the same run, bit for bit{ignored}"
    if proof.holds and proof.comparison is not None:
        return f"proved: killed and resumed, no loss differs by more than {proof.comparison.epsilon:g}"
    return "NOT proved"


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
