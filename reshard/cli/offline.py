"""`reshard offline`: a checkpoint rewritten for another number of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

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


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `offline`."""
    parser = verbs.add_parser(
        "offline",
        help="rewrite a checkpoint for another number of ranks, without any of them",
        description="Rewrite a checkpoint for another number of ranks: one file a rank, in the shards that FSDP2 gives "
        "each. Everything is carried over; world and batch plan in the manifest follow, at the same global batch. "
        "Under torchrun the processes share the work. A run that was cut short goes on where it stopped.",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the checkpoint; only read")
    parser.add_argument("destination", metavar="DST", type=Path, help="the folder to make; appears when all is written")
    world = parser.add_mutually_exclusive_group(required=True)
    world.add_argument("--world-size", type=count, metavar="M", help="data-parallel ranks to shard for")
    world.add_argument("--mesh", metavar="AXES", help="for HSDP: dp_replicate=R,dp_shard=S")
    parser.add_argument(
        "--in", dest="also", action="append", default=[], type=Path, metavar="DIR",
        help="a further folder with files of SRC, such as those of another node (repeatable)",
    )  # fmt: skip
    add_common_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from reshard.environment import launched_as, ranks_per_node
    from reshard.rewrite.prepare import prepare
    from reshard.rewrite.run import check_destination, run

    rank, ranks, _ = launched_as()
    with first_rank_first(rank):
        mesh = mesh_of(args)
        assert mesh is not None
        prepared = prepare(
            args.source,
            mesh,
            only=args.only,
            dtype=args.dtype,
            drop=args.drop,
            also=args.also,
            memory_bytes=args.memory,
            processes=1 if ranks == 1 else ranks_per_node(ranks),
        )
        check_destination(prepared, args.destination, force=args.force)
    if args.dry_run:
        with prepared.checkpoint:
            if rank == 0:
                _print(args, plan_fields(prepared), describe_plan(prepared, args.destination))
        return 0
    if rank == 0:
        warn_of_losses(prepared)
    shown_bytes = prepared.files.output.total_bytes // ranks
    with byte_progress(shown_bytes if rank == 0 else 0, "write") as advance:
        summary = run(prepared, args.destination, force=args.force, progress=advance if rank == 0 else None)
    if rank == 0:
        _print(args, {**plan_fields(prepared), **summary_fields(summary)}, describe_summary(summary))
    return 0


def _print(args: argparse.Namespace, fields: dict[str, object], text: str) -> None:
    print_json(fields) if args.json else print_text(text)
