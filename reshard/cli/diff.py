"""`reshard diff`: what differs between two checkpoints of any format and sharding."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text
from reshard.cli.units import bytes_text, plural, table

if TYPE_CHECKING:
    from reshard.verify.diff.elements import Tally
    from reshard.verify.diff.objects import Difference
    from reshard.verify.diff.run import Diff, TensorDifference

_MOST_LINES = 30


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `diff`."""
    parser = verbs.add_parser(
        "diff",
        help="compare two checkpoints of any format and sharding, tensor by tensor",
        description="Compare two checkpoints tensor by tensor, whatever their formats and shardings. "
        "Exit 0 if they are equal, 1 if they differ.",
        epilog="Equal means the same bits (any NaN equals any NaN); with a tolerance, |a-b| <= atol + rtol*|b|. World, "
        "batch plan and versions are not compared. Bare names of weights, as in safetensors files, are compared with "
        "model.<name> of a training state.",
    )
    parser.add_argument("a", metavar="A", type=Path, help="a checkpoint, or a run folder for its newest step")
    parser.add_argument("b", metavar="B", type=Path, help="another")
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="largest |a-b| that is equal (default: 0)")
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help="the same in parts of |b| (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.cli.progress import byte_progress
    from reshard.formats.opening import open_checkpoint
    from reshard.verify.diff.pairing import pair
    from reshard.verify.diff.run import diff

    with open_checkpoint(args.a) as a, open_checkpoint(args.b) as b:
        pairs = pair(a, b)
        with byte_progress(pairs.compared_bytes, "comparing") as on_bytes:
            found = diff(a, b, pairs=pairs, atol=args.atol, rtol=args.rtol, on_bytes=on_bytes)
        if args.json:
            sides = {"a": str(a.path), "a_format": a.format, "b": str(b.path), "b_format": b.format}
            print_json({**sides, **found.to_json()})
        else:
            print_text("\n".join(_describe(found)))
    return 0 if found.is_empty else 1


def _describe(found: Diff) -> list[str]:
    lines: list[str] = []
    _section(lines, "tensors only in A", _keys(found.only_a))
    _section(lines, "tensors only in B", _keys(found.only_b))
    _section(lines, "other shape", [(key, f"A {_shape(a)}", f"B {_shape(b)}") for key, a, b in found.shapes])
    _section(lines, "other dtype", [(d.key, f"A {d.a_dtype}", f"B {d.b_dtype}", _values(d)) for d in found.dtypes])
    _section(lines, "different", [_tensor_row(d) for d in found.different])
    _section(lines, "equal within the tolerance", [_tensor_row(d) for d in found.within])
    _section(lines, "objects only in A", _keys(found.only_objects_a))
    _section(lines, "objects only in B", _keys(found.only_objects_b))
    _section(
        lines, "objects that differ", [_value_row(d, key) for key, places in found.objects.items() for d in places]
    )
    _section(lines, "manifest", [_value_row(d) for d in found.manifest])
    if found.prefixed:
        lines.append(f"note: the weights of {found.prefixed.upper()} were compared under model.<name>")
    lines += [f"note: {note}" for note in found.notes]
    lines.append(_summary(found))
    return lines


def _section(lines: list[str], title: str, rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    lines.append(f"{title}: {len(rows)}")
    lines += table(rows[:_MOST_LINES])
    if len(rows) > _MOST_LINES:
        lines.append(f"  ... and {len(rows) - _MOST_LINES} more; --json lists all")
    lines.append("")


def _keys(keys: Sequence[str]) -> list[list[str]]:
    return [[key] for key in keys]


def _tensor_row(found: TensorDifference) -> list[str]:
    assert found.tally is not None
    return [found.key, f"{found.a_dtype} {_shape(found.shape)}", *_tally_cells(found.tally, found.where)]


def _tally_cells(tally: Tally, where: tuple[int, ...] | None) -> list[str]:
    if tally.max_abs is None:
        size = ["", ""]
    elif tally.max_abs == 0:
        size = ["only bits differ, by 0", ""]
    else:
        size = [f"max |a-b| {_number(tally.max_abs)}", f"max rel {_number(tally.max_rel or 0.0)}"]
    nans = [f"{count} NaN only in {side}" for side, count in (("A", tally.nan_a), ("B", tally.nan_b)) if count]
    place = f"at {_shape(where)}" if where else ""
    return [f"{tally.outside or tally.unequal} of {tally.elements}", *size, place, ", ".join(nans)]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _values(found: TensorDifference) -> str:
    if found.tally is None:
        return "not compared"
    if not found.tally.unequal:
        return "equal in value"
    prefix = "" if found.tally.outside else "equal within the tolerance: "
    return prefix + "  ".join(cell for cell in _tally_cells(found.tally, found.where) if cell)


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _value_row(found: Difference, key: str = "") -> list[str]:
    separator = "." if key and found.where and not found.where.startswith("[") else ""
    sides = (f"{side} {'-' if value is None else value}" for side, value in (("A", found.a), ("B", found.b)))
    return [f"{key}{separator}{found.where}", *sides]


def _summary(found: Diff) -> str:
    objects = found.same_objects + found.different_objects
    if found.is_empty:
        size = f"{plural(found.tensors, 'tensor')} ({bytes_text(found.same_bytes)})"
        if found.within:
            size = f"{plural(found.tensors, 'tensor')}, {len(found.within)} of them within the tolerance only"
        return f"equal: {size}, {plural(objects, 'object')}"
    parts = [f"{found.different_tensors} of {plural(found.tensors, 'tensor')}"]
    if objects:
        parts.append(f"{found.different_objects} of {plural(objects, 'object')}")
    if found.manifest:
        parts.append(f"{plural(len(found.manifest), 'field')} of the manifest")
    return "different: " + ", ".join(parts)
