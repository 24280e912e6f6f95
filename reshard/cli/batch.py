"""`reshard batch`: how a number of ranks runs a global batch, what it idles and what would idle nothing."""

from __future__ import annotations

import argparse

from reshard.batch.plan import BatchPlan
from reshard.cli.output import print_json, print_text, print_warning
from reshard.errors import UsageError

ASSUMPTION = (
    "The gradients are those of any other world size if the loss is a mean over the whole global batch; with padding, "
    "divide by the tokens of the global batch, not by those of each micro-batch."
)


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `batch`."""
    parser = verbs.add_parser(
        "batch",
        help="gradient accumulation that keeps the global batch exact on any number of ranks",
        description="Plan one global batch on a number of ranks: the gradient accumulation, and what idles.",
        epilog=ASSUMPTION,
    )
    parser.add_argument("--global-batch", type=count, required=True, metavar="B", help="samples per optimizer step")
    parser.add_argument(
        "--micro-batch",
        type=_count_or_auto,
        required=True,
        metavar="N|auto",
        help="samples per rank and micro-step; auto: the one that idles least, the largest of equals",
    )
    parser.add_argument(
        "--world-size",
        type=count,
        required=True,
        metavar="M",
        help="data-parallel ranks (with tensor or pipeline parallelism, GPUs divided by those)",
    )
    parser.add_argument(
        "--max-micro-batch",
        type=count,
        metavar="N",
        help="what fits in memory, for --micro-batch auto (default: no limit)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    if args.json:
        print_json(_fields(plan))
    else:
        print_text(_describe(plan))
    if plan.is_costly:
        print_warning(f"a world size of {plan.ranks} wastes {100 * plan.idle_share:.3g} % of every step's compute")
    return 0


def _plan(args: argparse.Namespace) -> BatchPlan:
    if args.micro_batch is None:
        limit = args.global_batch if args.max_micro_batch is None else args.max_micro_batch
        return BatchPlan.choose(args.global_batch, args.world_size, limit)
    if args.max_micro_batch is not None:
        raise UsageError("only --micro-batch auto has a maximum", key="--max-micro-batch", hint="leave one of them out")
    return BatchPlan(args.global_batch, args.micro_batch, args.world_size)


def _fields(plan: BatchPlan) -> dict[str, object]:
    return {
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "world_size": plan.ranks,
        "slots": plan.slots,
        "accumulation": plan.accumulation,
        "idle_slots": plan.idle_slots,
        "idle_share": plan.idle_share,
        "free_world_sizes": plan.free_ranks(),
        "free_micro_batches": plan.free_micro_batches(),
    }


def _describe(plan: BatchPlan) -> str:
    lines = [
        f"global batch {plan.global_batch} = {plan.slots} slots of micro-batch {plan.micro_batch}",
        f"on {plan.ranks} ranks: gradient accumulation {plan.accumulation}, idle slots {plan.idle_slots}",
        *plan.advice(),
        ASSUMPTION,
    ]
    return "\n".join(lines)


def count(text: str) -> int:
    """A whole number above zero, as an option's value."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)


def _count_or_auto(text: str) -> int | None:
    """The number, or None for `auto`."""
    return None if text == "auto" else count(text)
