"""`reshard convert`: a checkpoint of any tool as one that loads anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text
from reshard.cli.progress import byte_progress
from reshard.cli.rewriting import (
    add_common_options,
    count,
    describe_plan,
    describe_summary,
    first_rank_first,
    mesh_of,
    plan_fields,
    summary_fields,
    warn_of_losses,
)

if TYPE_CHECKING:
    from reshard.rewrite.convert import Conversion


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `convert`."""
    parser = verbs.add_parser(
        "convert",
        help="rescue a checkpoint: any tool's files, as one that loads on any number of ranks",
        description="Convert a checkpoint: the files that single ranks wrote with FSDP1, FSDP2, verl, DeepSpeed or "
        "fairscale, or any other that inspect describes. Model, optimizer, scheduler and random states are kept where "
        "the source holds them; files are never loaded whole, and nothing that a pickle says is run. Under torchrun "
        "the processes share the work. A run that was cut short goes on where it stopped.",
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SRC", type=Path,
        help="the checkpoint; further folders with files of it, from the disks of other nodes",
    )  # fmt: skip
    parser.add_argument("destination", metavar="DST", type=Path, help="what to make; appears when all is written")
    parser.add_argument(
        "--from", dest="source_format", default="auto", metavar="FORMAT",
        help="refuse any other format than this one, as inspect calls it (default: auto)",
    )  # fmt: skip
    parser.add_argument("--to", default="dcp", choices=["dcp", "safetensors", "torch"], help="(default: dcp)")
    world = parser.add_mutually_exclusive_group()
    world.add_argument("--world-size", type=count, metavar="M", help="ranks to shard for (default: a file per 5 GB)")
    world.add_argument("--mesh", metavar="AXES", help="for HSDP: dp_replicate=R,dp_shard=S")
    parser.add_argument(
        "--rename", action="append", default=[], metavar="REGEX=>REPL",
        help="map names of parameters, in model and optimizer (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--unstack", action="append", default=[], metavar="NAME",
        help="make numbered layers of a module's tensors with a leading axis of layers (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", default="masters", choices=["masters", "stored"],
        help="where the source has fp32 masters beside 16-bit weights, which become the model's (default: masters)",
    )  # fmt: skip
    parser.add_argument(
        "--tied", default="copy", choices=["copy", "alias"],
        help="write a tied weight under each of its names, or once and record the others (default: copy)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", type=Path, metavar="FILE", help="FSDP1 flat: units, names and shapes (reshard.describe_flat)"
    )
    parser.add_argument(
        "--param-order", type=Path, metavar="FILE", help="JSON: names in the order of the optimizer's integer ids"
    )
    parser.add_argument(
        "--model", metavar="PACKAGE.MODULE:FACTORY",
        help="code that builds the model without memory for it, where the files lack names or shapes",
    )  # fmt: skip
    parser.add_argument("--hf-config", type=Path, metavar="DIR", help="likewise, the config.json of a model")
    parser.add_argument(
        "--wrap", action="append", default=[], metavar="CLASS",
        help="with a model: class of the modules that FSDP1 wrapped, where the files do not name them (repeatable)",
    )  # fmt: skip
    add_common_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.environment import launched_as, ranks_per_node
    from reshard.formats.rescue.hints import Hints
    from reshard.rewrite.convert import prepare_conversion
    from reshard.rewrite.model_hints import read_model
    from reshard.rewrite.run import check_destination, run

    destination = args.destination.expanduser()
    rank, ranks, _ = launched_as()
    with first_rank_first(rank):
        model = read_model(args.model, args.hf_config, args.wrap)
        hints = Hints.read(args.layout, args.param_order, args.weights, model)
        processes = 1 if ranks == 1 else ranks_per_node(ranks)
        wanted = _wanted(args, destination)
        prepared = prepare_conversion(args.sources, wanted, hints, memory_bytes=args.memory, processes=processes)
        check_destination(prepared, destination, force=args.force)
    checkpoint = prepared.checkpoint
    fields = {"from": checkpoint.format, "to": args.to, **plan_fields(prepared), "notes": list(checkpoint.notes)}
    if args.dry_run:
        with checkpoint:
            if rank == 0:
                print_json(fields) if args.json else print_text(describe_plan(prepared, destination))
        return 0
    if rank == 0:
        warn_of_losses(prepared)
    shown_bytes = prepared.files.output.total_bytes // ranks
    with byte_progress(shown_bytes if rank == 0 else 0, "write") as advance:
        summary = run(prepared, destination, force=args.force, progress=advance if rank == 0 else None)
    if rank == 0:
        if args.json:
            print_json({**fields, **summary_fields(summary)})
        else:
            print_text(f"{checkpoint.format}: {_held(checkpoint.manifest)}\n{describe_summary(summary)}")
    return 0


def _wanted(args: argparse.Namespace, destination: Path) -> Conversion:
    from reshard.rewrite.convert import Conversion, parse_renaming
    from reshard.rewrite.run import FILE_SUFFIXES

    return Conversion(
        source_format=args.source_format,
        to=args.to,
        mesh=mesh_of(args),
        only=args.only,
        dtype=args.dtype,
        drop=tuple(args.drop),
        renamings=tuple(map(parse_renaming, args.rename)),
        unstack=tuple(args.unstack),
        tied=args.tied,
        is_file=args.to != "dcp" and destination.suffix in FILE_SUFFIXES,
    )


def _held(manifest: object) -> str:
    parts = getattr(manifest, "parts", None)
    if not parts:
        return "tensors"
    step = getattr(manifest, "step", 0)
    return f"{', '.join(part for part in parts if part != 'step')} of step {step}"
