"""What `offline` and `convert` have in common on the command line: options, the plan and the summary in words."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_warning
from reshard.cli.units import bytes_text, plural, some
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.geometry.mesh import Mesh
    from reshard.rewrite.prepare import Prepared
    from reshard.rewrite.run import Summary

_HEAD_START_S = 5.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """What both verbs take."""
    parser.add_argument("--only", choices=["model"], help="leave out all but the model's tensors")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp64"], help="cast the weights, and nothing else")
    parser.add_argument(
        "--drop", action="append", default=[], metavar="PREFIX", help="leave out keys that begin so (repeatable)"
    )
    parser.add_argument(
        "--memory", type=_size, default="256M", metavar="SIZE", help="for buffers, in each process (default: 256M)"
    )
    parser.add_argument("--force", action="store_true", help="replace DST")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and what it will cost; write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def warn_of_losses(prepared: Prepared) -> None:
    """Says what is not carried over, or not as it might be thought."""
    for note in prepared.checkpoint.notes:
        print_warning(note)
    if names := prepared.selection.of_one_rank:
        print_warning(
            f"kept as they are, for they belong to single ranks: {some(names)} (--drop PREFIX leaves them out)"
        )
    if prepared.left_behind:
        print_warning(f"left behind, for they are no part of it: {some(prepared.left_behind)}")
    if prepared.checkpoint.values:
        print_warning(f"not tensors, and left out: {some(sorted(prepared.checkpoint.values))}")


@contextlib.contextmanager
def first_rank_first(rank: int) -> Iterator[None]:
    """Lets rank 0 tell what most likely all ranks meet, and the launcher end the others, before they tell it too."""
    try:
        yield
    except ReshardError:
        if rank:
            time.sleep(_HEAD_START_S)
        raise


def mesh_of(args: argparse.Namespace) -> Mesh | None:
    """The ranks that the command line asks for."""
    from reshard.geometry.mesh import Mesh

    if args.mesh is not None:
        return Mesh.parse(args.mesh)
    return None if args.world_size is None else Mesh(args.world_size)


def plan_fields(prepared: Prepared) -> dict[str, object]:
    """For ``--json``."""
    output = prepared.files.output
    return {
        "source": str(prepared.checkpoint.path),
        "ranks": prepared.mesh.ranks,
        "mesh": prepared.mesh.axes,
        "tensors": len(prepared.selection.tensors),
        "objects": len(prepared.selection.objects),
        "objects_of_one_rank": prepared.selection.of_one_rank,
        "dropped": prepared.selection.dropped,
        "files_beside": [path.name for path in prepared.beside],
        "left_behind": prepared.left_behind,
        "files": dict(zip(output.names, output.length_bytes.tolist(), strict=True)),
        "pieces": len(prepared.job.plan.source),
        "bytes_to_read": prepared.source_bytes,
        "bytes_to_write": prepared.written_bytes,
        "threads": prepared.budget.threads,
        "buffer_bytes": prepared.budget.threads * prepared.budget.block_bytes,
    }


def describe_plan(prepared: Prepared, destination: Path) -> str:
    """For ``--dry-run``."""
    output, index = prepared.files.output, prepared.checkpoint.index
    axes = ", ".join(f"{axis} {size}" for axis, size in prepared.mesh.axes.items())
    longest = output.length_bytes.tolist()
    lines = [
        f"{prepared.checkpoint.path} -> {destination}",
        f"  {plural(len(prepared.selection.tensors), 'tensor')} in {plural(len(index.file), 'chunk')}, "
        f"{plural(len(index.files), 'file')} -> {plural(len(output.box), 'record')} in "
        f"{plural(len(output.names), 'file')} for {plural(prepared.mesh.ranks, 'rank')} ({axes})",
        f"  {plural(len(prepared.job.plan.source), 'piece')}; reads {bytes_text(prepared.source_bytes)}, writes "
        f"{bytes_text(prepared.written_bytes)}; files of {bytes_text(min(longest))} to {bytes_text(max(longest))}",
        f"  {plural(prepared.budget.threads, 'thread')} with {bytes_text(prepared.budget.block_bytes)} each",
    ]
    if prepared.selection.dropped:
        lines.append(f"  dropped: {some(prepared.selection.dropped)}")
    if prepared.selection.of_one_rank:
        lines.append(f"  kept as they are, for they belong to single ranks: {some(prepared.selection.of_one_rank)}")
    lines.append("nothing was written (--dry-run)")
    return "\n".join(lines)


def summary_fields(summary: Summary) -> dict[str, object]:
    """For ``--json``."""
    return {
        "destination": str(summary.destination),
        "bytes_written": summary.written_bytes,
        "bytes_read": summary.read_bytes,
        "bytes_continued": summary.continued_bytes,
        "seconds": summary.seconds,
        "peak_memory_bytes": summary.peak_bytes,
        "processes": summary.ranks,
    }


def describe_summary(summary: Summary) -> str:
    """The last line."""
    rate = summary.total_bytes - summary.continued_bytes
    line = (
        f"wrote {summary.destination}: {bytes_text(summary.total_bytes)} in {summary.seconds:.1f} s "
        f"({rate / max(summary.seconds, 1e-9) / 1e9:.2f} GB/s)"
    )
    which = "" if summary.ranks == 1 else f"; rank 0 of {summary.ranks}"
    line += f"{which}: read {bytes_text(summary.read_bytes)}, wrote {bytes_text(summary.written_bytes)}"
    if summary.continued_bytes:
        line += f", {bytes_text(summary.continued_bytes)} were there from a run before"
    return f"{line}; peak memory {bytes_text(summary.peak_bytes)}"


def count(text: str) -> int:
    """An argument that counts something."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 512M or 2G, not {text!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
