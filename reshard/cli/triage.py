"""`reshard triage`: which piece of the state a resume lost, by what the loss did after it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text
from reshard.cli.traces import add_column_option, check_picture, parse_columns
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.verify.triage.diagnosis import Diagnosis
    from reshard.verify.triage.shape import Shape


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `triage`."""
    parser = verbs.add_parser(
        "triage",
        help="what a resume lost, by what the loss did after it",
        description="Say which shape the loss has after a resume, which piece of the state that points to, and what to "
        "do. Reads our own traces and those of other trainers, as compare-traces does. Exit 1 if the loss is off or "
        "something was lost.",
        epilog="Deviations are from a robust trend of the loss before the resume, or from a reference; standard "
        "deviations are those of the mean that deviates.",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="trace of the run, from before the resume on")
    parser.add_argument(
        "--resume-step", type=int, required=True, metavar="S", help="the last step before the resume: the checkpoint's"
    )
    parser.add_argument("--reference", type=Path, metavar="REF", help="trace of a run that lost nothing")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="CKPT", help="what the run resumed from, or the folder of all its steps"
    )
    add_column_option(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the loss and where it should be (.png, .pdf, .svg)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the plot")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.verify.describe.describe import describe
    from reshard.verify.traces.reading import read_attempt_before, read_runs
    from reshard.verify.triage.diagnosis import diagnose

    check_picture(args.plot, force=args.force)
    if args.resume_step < 0:
        raise UsageError("not a step", key="--resume-step", expected="at least 0", found=args.resume_step)
    paths = [args.trace] if args.reference is None else [args.trace, args.reference]
    rows, *others = read_runs(paths, parse_columns(args.columns))
    if others and not others[0]:
        raise UsageError(
            "a trace without a step", path=args.reference, hint="name the trace of a run that lost nothing"
        )
    with ExitStack() as stack:
        description = None
        if args.checkpoint is not None:
            description = describe(_checkpoint(args.checkpoint.expanduser(), args.resume_step))
            stack.enter_context(description.checkpoint)
        diagnosis = diagnose(
            rows,
            args.resume_step,
            reference=others[0] if others else (),
            checkpoint=description,
            attempt_before=read_attempt_before(args.trace, args.resume_step),
        )
    if args.json:
        print_json(diagnosis.to_json())
    else:
        print_text("\n".join(_tell(diagnosis)))
    if args.plot is not None:
        from reshard.verify.triage.plot import plot_diagnosis

        plot_diagnosis(rows, diagnosis, args.plot)
    return 1 if diagnosis.is_alarming else 0


def _checkpoint(path: Path, resume_step: int) -> Path:
    """Of the folder of a run the step that was resumed from; anything else is meant as it is."""
    from reshard.storage.steps import committed_steps, step_path

    if not path.is_dir() or not (steps := [entry.step for entry in committed_steps(path)]):
        return path
    if resume_step not in steps:
        raise UsageError(
            "the run has not this step any more",
            path=path,
            expected=f"step {resume_step}, from which it resumed",
            found=", ".join(map(str, steps)),
            hint="name one of its steps, for the step to go on from, or leave out --checkpoint",
        )
    return step_path(path, resume_step)


def _tell(found: Diagnosis) -> Iterator[str]:
    yield f"{found.shape.name}: {_shape(found.shape, found.resume_step)}"
    for finding in found.findings:
        yield ""
        yield f"{finding.confidence}: {finding.piece}"
        yield from (f"  {text}" for text in finding.evidence)
    yield from _list("in order", found.in_order)
    yield from _list("to know", [*found.notes, *_silent(found.silent)])
    yield from _list("to do", found.advice)


def _shape(shape: Shape, resume_step: int) -> str:
    last_step = resume_step + shape.seen_steps
    if shape.onset is None:
        return f"up to step {last_step} the loss goes on as expected; {_deviation(shape)}"
    returned = f"not back by step {last_step}" if shape.back is None else f"back at step {shape.back}"
    return f"the loss is off from step {shape.onset} on; {_deviation(shape)}; {returned}"


def _deviation(shape: Shape) -> str:
    if not math.isfinite(shape.peak):
        return f"no number at step {shape.peak_step}"
    sigmas = f"{abs(shape.peak_sigmas):.3g} standard deviations"
    return f"largest mean deviation of 4 neighbours {shape.peak:+.3g} at step {shape.peak_step} ({sigmas})"


def _silent(columns: list[str]) -> list[str]:
    return [f"the trace has no {' and no '.join(columns)}: with them it would say more"] if columns else []


def _list(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)
