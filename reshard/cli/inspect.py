"""`reshard inspect`: what a checkpoint holds, and whether a run can resume from it."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text
from reshard.cli.units import bytes_text, count_text, plural, some, table

if TYPE_CHECKING:
    from reshard.formats.checkpoint import Checkpoint
    from reshard.index.index import Chunk, Place
    from reshard.verify.describe.describe import Description
    from reshard.verify.describe.tree import Branch

_FORMAT_NAMES = {"dcp": "DCP (torch.distributed.checkpoint)", "safetensors": "safetensors", "torch": "torch.save file"}


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `inspect`."""
    parser = verbs.add_parser(
        "inspect",
        help="what a checkpoint holds, and what of a run's state is missing",
        description="Say what a checkpoint holds: format, step, ranks, bytes by kind and per parameter, and which "
        "parts of a run's state are there. Reads no tensor. Exit 1 if files are missing or cut short.",
        epilog="Units are decimal: GB is 1e9 bytes. Bytes per parameter are per element of the weights.",
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run folder for its newest step"
    )
    parser.add_argument("--tree", action="store_true", help="list every tensor and where each of its chunks lies")
    parser.add_argument(
        "--in", action="append", default=[], type=Path, dest="also", metavar="DIR",
        help="a further folder with files of the checkpoint, as nodes with disks of their own leave them (repeatable)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.verify.describe.describe import describe
    from reshard.verify.describe.tree import tree_json

    description = describe(args.checkpoint, args.also)
    with description.checkpoint as checkpoint:
        if args.json:
            print_json({**description.to_json(), **(tree_json(checkpoint.index) if args.tree else {})})
        else:
            print_text("\n".join(_describe(description)))
            if args.tree:
                for line in _tree(checkpoint):
                    print_text(line)
    return 1 if description.faults else 0


def _describe(found: Description) -> Iterator[str]:
    yield from _run_folder(found)
    yield str(found.checkpoint.path)
    yield from table(list(_facts(found)))
    yield ""
    yield from _kinds(found)
    yield ""
    yield from _needs(found)
    yield from _files(found)
    if found.faults:
        yield ""
        yield f"unsound: {plural(len(found.faults), 'fault')}"
        yield from (f"  {fault}" for fault in found.faults)


def _run_folder(found: Description) -> Iterator[str]:
    run = found.run
    if run is None:
        return
    yield f"{run.path}: {plural(len(run.steps), 'step')}: {_steps(run.steps)}"
    yield from table([["passed over", name, reason] for name, reason in run.passed_over])
    yield ""


def _steps(steps: list[int]) -> str:
    if len(steps) <= 12:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ... {', '.join(map(str, steps[-6:]))}"


def _facts(found: Description) -> Iterator[tuple[str, str]]:
    checkpoint, manifest = found.checkpoint, found.checkpoint.manifest
    name = _FORMAT_NAMES.get(checkpoint.format, checkpoint.format)
    yield "format", name + (f", metadata {checkpoint.version}" if checkpoint.version else "")
    if manifest is not None:
        yield "written by", ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    elif checkpoint.format == "dcp":
        yield "written by", "stock torch or another tool: no reshard.json"
    yield "step", "not recorded" if found.step is None else str(found.step)
    if found.saved_at:
        told = "" if manifest else " (time of the file)"
        yield "saved", found.saved_at.replace("T", " ").replace("+00:00", " UTC") + told
    yield "world", _world(found)
    objects = len(checkpoint.index.objects) + len(checkpoint.values)
    yield "holds", f"{plural(len(checkpoint.index.names), 'tensor')}, {plural(objects, 'object')}"
    scaled = f" ({count_text(found.parameters)})" if found.parameters >= 1_000_000 else ""
    yield "parameters", f"{found.parameters:,}{scaled}"
    payload = bytes_text(found.payload_bytes)
    if found.repeated_bytes:
        payload += f" and {bytes_text(found.repeated_bytes)} of copies"
    yield "on disk", f"{bytes_text(found.disk_bytes)} in {plural(len(found.present), 'file')}; tensors are {payload}"


def _world(found: Description) -> str:
    if found.ranks is None:
        return "not recorded"
    manifest = found.checkpoint.manifest
    if manifest is None:
        return f"{plural(found.ranks, 'rank')}, judged by the names of the files"
    world = manifest.world
    text = f"{plural(world.ranks, 'rank')} on {plural(world.nodes, 'node')}"
    if world.gpus_per_node:
        text += f" of {plural(world.gpus_per_node, 'GPU')}"
    if mesh := ", ".join(f"{axis}={ranks}" for axis, ranks in world.mesh.items()):
        text += f", mesh {mesh}"
    if manifest.exact is not None:
        text += f"; exact mode on {manifest.exact['machine']}, {plural(manifest.exact['threads'], 'CPU thread')}"
    return text


def _kinds(found: Description) -> list[str]:
    def per_parameter(length_bytes: int) -> str:
        share = found.per_parameter(length_bytes)
        return "-" if share is None else f"{share:.2f}"

    rows = [["", "tensors", "elements", "bytes", "per parameter", "dtypes"]]
    for total in found.kinds:
        dtypes = list(total.dtypes)
        if len(dtypes) > 1:
            dtypes = [f"{dtype} {bytes_text(count)}" for dtype, count in total.dtypes.items()]
        sizes = [count_text(total.elements), bytes_text(total.length_bytes), per_parameter(total.length_bytes)]
        rows.append([total.kind, str(total.tensors), *sizes, ", ".join(dtypes)])
    tensors, elements = (sum(getattr(total, name) for total in found.kinds) for name in ("tensors", "elements"))
    whole = found.payload_bytes
    rows.append(["total", str(tensors), count_text(elements), bytes_text(whole), per_parameter(whole), ""])
    return table(rows, right=(1, 2, 3, 4))


def _needs(found: Description) -> Iterator[str]:
    from reshard.verify.describe.checklist import ADAPTER, MISSING, allowed_missing, holds_alone, title

    yield "to resume"
    first, *others = found.parts
    if all(part.status == MISSING for part in others):
        is_adapter = holds_alone(found.checkpoint, found.parts) == ADAPTER
        told = f"{first.detail}, and nothing else" + (f": {ADAPTER}, not a state to resume from" if is_adapter else "")
        yield from table([[title(first), first.status, told]])
    else:
        yield from table([[title(part), part.status, part.detail] for part in found.parts])
        if missing := allowed_missing(found.parts):
            names = ", ".join(repr(name) for name in missing)
            yield f"  a run goes on without what is missing by load_state(..., allow_missing=[{names}])"
    if found.per_rank_objects:
        yield f"  of one rank each, of no use to another number of ranks: {some(found.per_rank_objects)}"


def _files(found: Description) -> Iterator[str]:
    if found.absent:
        total = len(found.absent) + len(found.present)
        yield ""
        yield f"absent: {len(found.absent)} of {plural(total, 'file')}: {some(found.absent)}"
        yield f"  present: {some(found.present) or 'none'}"
        yield "  were they written to disks of other nodes? Copy them here, or name their folders with --in"
    if found.unreferenced:
        names = [name for name, _ in found.unreferenced]
        size = bytes_text(sum(count for _, count in found.unreferenced))
        yield ""
        yield f"unreferenced: {plural(len(names), 'file')}, {size}, of an earlier save or another: {some(names)}"


def _tree(checkpoint: Checkpoint) -> Iterator[str]:
    from reshard.geometry.box import Box
    from reshard.verify.describe.tree import objects, tensors

    branches = tensors(checkpoint.index)
    for module, below in itertools.groupby(branches, key=lambda branch: branch.tensor.name.rpartition(".")[0]):
        inside = list(below)
        yield ""
        yield module or "(root)"
        for line, branch in zip(table(list(map(_branch, inside)), right=(3,)), inside, strict=True):
            yield line
            chunks = [[str(Box(chunk.offsets, chunk.sizes)), *_place(chunk)] for chunk in branch.tensor.chunks]
            yield from table(chunks, indent="    ")
    rows = [[key, *_place(place)] for key, place in objects(checkpoint.index)]
    rows += [[key, "value", repr(value)[:100]] for key, value in checkpoint.values.items()]
    if rows:
        yield ""
        yield "objects"
        yield from table(rows)


def _branch(branch: Branch) -> tuple[str, str, str, str, str]:
    tensor = branch.tensor
    shape = "(" + ", ".join(map(str, tensor.shape)) + ")"
    leaf = tensor.name.rpartition(".")[2]
    return leaf, tensor.dtype, shape, bytes_text(branch.length_bytes), branch.kind


def _place(place: Chunk | Place) -> tuple[str, str]:
    return place.file, f"{place.start_bytes}:{place.start_bytes + place.length_bytes}"
