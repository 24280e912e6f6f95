"""`reshard prune`: retention by hand, and what else takes space in a run folder."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text, print_warning
from reshard.cli.units import bytes_text, plural, table

if TYPE_CHECKING:
    from reshard.storage.retention import Best, Plan

_BEST = re.compile(r"(.+):([1-9][0-9]*)(?::(min|max))?")


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `prune`."""
    parser = verbs.add_parser(
        "prune",
        help="remove the steps of a run that nothing asks to keep, and say why the others stay",
        description="Remove the steps of a run that nothing asks to keep, and say why the others stay. The newest "
        "sound step, pinned steps and the step that a run was set back to always stay; where no step is sound all do. "
        "A run may be alive meanwhile. What takes space and is no step is listed and left alone.",
    )
    parser.add_argument("run_dir", metavar="DIR", type=Path, help="the run's folder, which holds its step-<n> folders")
    parser.add_argument("--keep", metavar="K", type=_count, required=True, help="keep the newest K steps")
    parser.add_argument("--keep-every", metavar="N", type=_count, help="keep the steps that are multiples of N")
    parser.add_argument(
        "--keep-best", metavar="METRIC:K", type=_best,
        help="keep the K steps with the smallest recorded value of a metric; METRIC:K:max for the largest",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed; remove nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.formats import manifest
    from reshard.storage import retention
    from reshard.storage.steps import committed_steps, step_path
    from reshard.verify.structure import structure_faults

    run_dir = args.run_dir.expanduser()
    _require_run(run_dir)
    # Checkpoints of stock torch have no manifest; but a step that lost the one it had is not one to resume from.
    has_manifests = any(manifest.exists(folder.path) for folder in committed_steps(run_dir))
    plan = retention.plan_retention(
        run_dir,
        retention.Retention(args.keep, args.keep_every, args.keep_best),
        lambda folder: not structure_faults(folder) and (manifest.exists(folder) or not has_manifests),
        value_of=manifest.metric,
    )
    if args.keep_best is not None and not plan.values:
        print_warning(f"no step has a value of {args.keep_best.metric!r} recorded: --keep-best keeps none")
    lengths = {step: _length_bytes(step_path(run_dir, step)) for step in plan.going}
    removed = plan.going if args.dry_run else retention.remove(plan)
    others = _others(run_dir)
    if args.json:
        print_json(_fields(args, plan, removed, lengths, others))
    else:
        print_text("\n".join(_describe(args, plan, removed, lengths, others)))
    return 0


def _require_run(run_dir: Path) -> None:
    from reshard.errors import CheckpointNotFound
    from reshard.storage.commit import ATTEMPT_FILE
    from reshard.storage.steps import committed_steps, step_number

    if run_dir.is_dir() and (committed_steps(run_dir) or (run_dir / ATTEMPT_FILE).exists()):
        return
    hint = "name the folder that holds the step-<n> folders"
    if step_number(run_dir.resolve().name) is not None:
        hint = f"name the run that this step is of: {run_dir.resolve().parent}"
    found = "no such folder"
    if os.path.lexists(run_dir):
        found = "a folder without any" if run_dir.is_dir() else "not a folder"
    raise CheckpointNotFound("not a run folder", path=run_dir, expected="step-<n> folders", found=found, hint=hint)


def _others(run_dir: Path) -> list[tuple[str, int, str]]:
    """What takes space and is no step: name, bytes, and why it is there and who deletes it."""
    from reshard.storage.durable import storage_errors
    from reshard.storage.steps import ABANDONED, REPLACED, STAGING, TRASH, uncommitted

    def why(name: str) -> str:
        if name.startswith(ABANDONED):
            return "left behind when the run was set back; yours to delete"
        if name.startswith((STAGING, REPLACED, TRASH)):
            return "in use by a run, or left by a crash; the next start of the run sees to it"
        return "never committed; yours to delete"

    with storage_errors("list the run directory", run_dir):
        abandoned = [path for path in run_dir.iterdir() if path.name.startswith(ABANDONED)]
    return [(path.name, _length_bytes(path), why(path.name)) for path in sorted([*abandoned, *uncommitted(run_dir)])]


def _length_bytes(path: Path) -> int:
    """Bytes of the files below a folder, or of a file; of a link none, as it is all that would go."""
    if path.is_symlink():
        return 0
    files = [path, *(Path(parent, name) for parent, _, names in os.walk(path) for name in names)]
    return sum(map(_file_bytes, files))


def _file_bytes(path: Path) -> int:
    try:
        return 0 if path.is_dir() else path.lstat().st_size
    except OSError:
        # A run that is alive may take it away at any moment.
        return 0


def _fields(
    args: argparse.Namespace,
    plan: Plan,
    removed: list[int],
    lengths: dict[int, int],
    others: list[tuple[str, int, str]],
) -> dict[str, object]:
    return {
        "path": str(plan.run_dir),
        "dry_run": args.dry_run,
        "removed": [{"step": step, "bytes": lengths[step]} for step in removed],
        "removed_bytes": sum(lengths[step] for step in removed),
        "kept": [{"step": step, "reasons": list(found)} for step, found in plan.reasons.items() if found],
        "not_removed": [step for step in plan.going if step not in removed],
        "pinned_and_absent": _absent(plan),
        "others": [{"name": name, "bytes": length_bytes, "what": what} for name, length_bytes, what in others],
    }


def _describe(
    args: argparse.Namespace,
    plan: Plan,
    removed: list[int],
    lengths: dict[int, int],
    others: list[tuple[str, int, str]],
) -> list[str]:
    freed = f" ({bytes_text(sum(lengths[step] for step in removed))})" if removed else ""
    verb = "to remove" if args.dry_run else "removed"
    lines = [f"{plan.run_dir}: {plural(len(plan.reasons), 'step')}, {len(removed)} {verb}{freed}"]
    rows = []
    for step, found in plan.reasons.items():
        if found:
            rows.append([f"step-{step}", "stays", "", ", ".join(found)])
        elif step in removed:
            rows.append([f"step-{step}", verb, bytes_text(lengths[step]), ""])
        else:
            rows.append([f"step-{step}", "left alone", "", "pinned or removed by another process meanwhile"])
    lines += table(rows, right=(2,))
    lines += [f"pinned, and not there: step-{step}" for step in _absent(plan)]
    if others:
        lines.append("no steps, and left alone")
        lines += table([[name, bytes_text(length_bytes), what] for name, length_bytes, what in others], right=(1,))
    if args.dry_run:
        lines.append("nothing was removed (--dry-run)")
    return lines


def _absent(plan: Plan) -> list[int]:
    return sorted(plan.pinned - plan.reasons.keys())


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)


def _best(text: str) -> Best:
    from reshard.storage.retention import Best

    match = _BEST.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be METRIC:K or METRIC:K:max, not {text!r}")
    return Best(match[1], int(match[2]), match[3] or "min")
