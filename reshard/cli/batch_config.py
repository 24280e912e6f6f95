"""`reshard batch-config`: a configuration's batch settings for another number of ranks, changed in place if wanted."""

from __future__ import annotations

import argparse
import os
import stat
from contextlib import suppress
from pathlib import Path

from reshard.batch.plan import BatchPlan
from reshard.batch.refit import Figures, Refit, refit
from reshard.batch.scalars import ConfigText
from reshard.batch.settings_found import OURS, find_settings
from reshard.cli.batch import ASSUMPTION, count
from reshard.cli.output import print_json, print_message, print_text, print_warning
from reshard.cli.units import plural
from reshard.errors import StorageError, UsageError
from reshard.storage.durable import storage_errors, write_atomic

_MOST_BYTES = 1_000_000
_ROLES = ("micro", "accumulation", "global")


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `batch-config`."""
    parser = verbs.add_parser(
        "batch-config",
        help="the same for a configuration file, rewritten in place",
        description="Refit the batch settings of a YAML or JSON file to another number of ranks: those of reshard's "
        "training script, of Hugging Face TrainingArguments, of Accelerate, of DeepSpeed, or those that --keys names.",
        epilog=ASSUMPTION,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the file")
    parser.add_argument(
        "--world-size",
        type=count,
        required=True,
        metavar="M",
        help="data-parallel ranks from now on (with tensor or pipeline parallelism, GPUs divided by those)",
    )
    parser.add_argument(
        "--old-world-size",
        type=count,
        metavar="N",
        help="data-parallel ranks that the file was written for, if the global batch is not in it",
    )
    parser.add_argument(
        "--global-batch",
        type=count,
        metavar="B",
        help="train on with another global batch, which is another training (default: the same)",
    )
    parser.add_argument(
        "--keys",
        type=_keys,
        metavar="micro=PATH,...",
        help="where micro, accumulation and global are in a file of another kind: dotted paths, list indices included",
    )
    parser.add_argument("--write", action="store_true", help="change the file; all but the numbers stays as it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # Through a link, the file that it names is rewritten and the link stays.
    path = Path(os.path.realpath(args.config))
    try:
        data = _read(path)
        config = _parse(data, args.config)
        plan = refit(find_settings(config, args.keys), args.world_size, args.old_world_size, args.global_batch)
        if args.write and plan.obstacles:
            raise plan.obstacles[0]
        is_written = args.write and bool(plan.changes)
        if is_written:
            _write(path, data, config, plan, args)
    except UsageError as error:
        error.path = error.path or str(args.config)
        raise
    if args.json:
        print_json(_fields(args.config, plan, is_written))
    else:
        print_text(_describe(plan))
    for obstacle in plan.obstacles:
        obstacle.path = str(args.config)
        print_warning(obstacle)
    if plan.new.is_costly:
        print_warning(
            f"a world size of {plan.new.ranks} wastes {100 * plan.new.idle_share:.3g} % of every step's compute"
        )
    if is_written:
        # Without it, the same command given twice would change the batch.
        is_alone = not {"global", "ranks"} & plan.settings.written.keys()
        reminder = (
            f"; it is for {plan.new.ranks} ranks now, the --old-world-size of the next change" if is_alone else ""
        )
        print_message(f"{args.config}: written{reminder}")
    elif args.write:
        print_message(f"{args.config}: nothing to change")
    return 0


def _read(path: Path) -> bytes:
    with storage_errors("read", path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise UsageError(
                "not a configuration",
                expected=f"a file of up to {_MOST_BYTES} bytes",
                found=f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no file",
                hint="name the YAML or JSON file that has the batch settings",
            )
        return path.read_bytes()


def _parse(data: bytes, path: Path) -> ConfigText:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8 text", found=f"byte {error.start}", hint="save it as UTF-8") from error
    return ConfigText(text, path.name)


def _write(path: Path, data: bytes, config: ConfigText, plan: Refit, args: argparse.Namespace) -> None:
    new = config.replaced({change.setting.scalar: change.new for change in plan.changes})
    _require_fit(new, plan, args)
    status = path.stat()
    # A folder that one may write in lets one replace files that one may not write to; and root may write to any.
    if not status.st_mode & 0o222 or not os.access(path, os.W_OK, effective_ids=True):
        raise UsageError("write-protected", hint="chmod u+w it first, as its owner")
    if _read(path) != data:
        raise UsageError("changed by someone else meanwhile", hint="run this again")
    # So that the new file is at no time open to more people than the old one.
    umask = os.umask(0o777 & ~status.st_mode)
    try:
        write_atomic(path, new.text.encode("utf-8"))
    finally:
        os.umask(umask)
    with storage_errors("restore the owner and mode of", path):
        with suppress(PermissionError):
            os.chown(path, status.st_uid, status.st_gid)
        path.chmod(stat.S_IMODE(status.st_mode))
    _require_fit(_parse(_read(path), args.config), plan, args)


def _require_fit(config: ConfigText, plan: Refit, args: argparse.Namespace) -> None:
    """Passes where the file, read anew, has the plan's numbers."""
    again = find_settings(config, args.keys)
    wanted = {change.found.key: change.new for change in plan.changes}
    found = {setting.found.key: setting.number for setting in again.written.values()}
    before = {setting.found.key: setting.number for setting in plan.settings.written.values()}
    if found != {**before, **wanted}:
        raise StorageError("does not read as planned", path=args.config, expected={**before, **wanted}, found=found)


def _describe(plan: Refit) -> str:
    is_ours = plan.settings.framework == OURS
    unit = "micro-batches" if plan.settings.counts_micro_batches else None
    lines = [
        f"batch settings of {plan.settings.framework}",
        f"old: {_sum_text(plan.old, unit)}",
        f"new: {_sum_text(_figures(plan.new), unit, plan.new.idle_slots)}",
        *(f"  line {change.found.line}: {change.found.key}: {change.old} -> {change.new}" for change in plan.changes),
    ]
    if not plan.changes and not plan.obstacles:
        lines.append("  nothing to change" + (": what is not written follows" if is_ours else ""))
    return "\n".join([*lines, *(plan.new.advice() if is_ours else ()), *plan.notes, ASSUMPTION])


def _sum_text(figures: Figures, unit: str | None, idle_slots: int = 0) -> str:
    micro = unit is None and figures.micro_batch and f"micro-batch {figures.micro_batch}"
    accumulation = figures.accumulation and f"accumulation {figures.accumulation}"
    ranks = figures.ranks and plural(figures.ranks, "rank")
    total = figures.global_batch and f"global batch {figures.global_batch}{f' {unit}' if unit else ''}"
    if idle_slots:
        return f"{micro} x ({accumulation} x {ranks} - {idle_slots} idle) = {total}"
    factors = [factor for factor in (micro, accumulation, ranks) if factor]
    is_whole = accumulation and ranks and total
    return " x ".join(factors) + f" = {total}" if is_whole else ", ".join([*factors, *([total] if total else [])])


def _figures(plan: BatchPlan) -> Figures:
    return Figures(plan.micro_batch, plan.accumulation, plan.ranks, plan.global_batch)


def _fields(path: Path, plan: Refit, is_written: bool) -> dict[str, object]:
    return {
        "path": str(path),
        "framework": plan.settings.framework,
        "unit": "micro-batches" if plan.settings.counts_micro_batches else "samples",
        "old": _figure_fields(plan.old),
        "new": {**_figure_fields(_figures(plan.new)), "idle_slots": plan.new.idle_slots},
        "changes": [
            {"key": change.found.key, "line": change.found.line, "old": change.old, "new": change.new}
            for change in plan.changes
        ],
        "obstacles": [str(obstacle) for obstacle in plan.obstacles],
        "notes": list(plan.notes),
        "written": is_written,
    }


def _figure_fields(figures: Figures) -> dict[str, object]:
    return {
        "micro_batch": figures.micro_batch,
        "accumulation": figures.accumulation,
        "world_size": figures.ranks,
        "global_batch": figures.global_batch,
    }


def _keys(text: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for part in text.split(","):
        role, equals, path = part.strip().partition("=")
        if not equals or not path or role not in _ROLES or role in keys:
            raise argparse.ArgumentTypeError(
                f"must be micro=PATH, accumulation=PATH, global=PATH, or some of them, not {text!r}"
            )
        keys[role] = path
    return keys
