"""`reshard estimate`: what a training state takes in a checkpoint and in memory, by the conventions in use."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import print_json, print_text
from reshard.cli.units import bytes_text, count_text, plural, some, table
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.verify.estimate.conventions import Convention, Split
    from reshard.verify.estimate.measure import Measured
    from reshard.verify.estimate.model_size import ModelSize

_PARAMETERS = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)", re.IGNORECASE)
# Case tells bytes from bits.
_BANDWIDTH = re.compile(r"(\d{1,12}(?:\.\d{1,12})?) ?([kKMGT]?)(i?)(?:B(?:/s)?)?")
_MOST_RANKS = 10**9


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `estimate`."""
    parser = verbs.add_parser(
        "estimate",
        help="bytes per parameter by convention, in checkpoints and in memory",
        description="Say what a training state takes in a checkpoint and in memory, by each convention: of a number of "
        "parameters, of a model's configuration, or of a checkpoint, whose own bytes stand beside. Reads no tensor.",
        epilog="Units are decimal: GB is 1e9 bytes, B of parameters 1e9.",
    )
    parser.add_argument("--params", metavar="N", help="number of parameters: 70B, 1.5B, 125M")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or a run folder for its newest step"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a config.json of Hugging Face (Llama, Mistral, Mixtral, Qwen2, Qwen3), or a YAML file with a `model` "
        "section, as in scripts/configs",
    )
    parser.add_argument("--world-size", metavar="M", help="ranks, to tell what the largest has")
    parser.add_argument(
        "--bandwidth", metavar="RATE", help="of all ranks together, to tell how long a save takes: 5GB/s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class _Question:
    """What is asked, and what is known."""

    source: str
    size: ModelSize
    measured: Measured | None
    ranks: int | None
    bytes_per_s: float | None

    @property
    def share(self) -> int | None:
        """Parameters of the rank that has the most."""
        return None if self.ranks is None else self.size.largest_share(self.ranks)

    @property
    def stacked_share(self) -> int | None:
        """The same with the experts of a layer in one tensor, where that makes it another."""
        return None if self.ranks is None else self.size.stacked_share(self.ranks)

    @property
    def is_exact(self) -> bool:
        """Whether the share is what that rank has, however the model is built."""
        return self.ranks == 1 or (self.size.has_shapes and self.stacked_share is None)

    def rank_bytes(self, split: Split) -> int | None:
        return None if self.share is None else split.rank_bytes(self.size.parameters, self.share)

    def write_s(self, length_bytes: int) -> float | None:
        return None if self.bytes_per_s is None else length_bytes / self.bytes_per_s


def _run(args: argparse.Namespace) -> int:
    question = _question(args)
    if args.json:
        print_json(_fields(question))
    else:
        print_text("\n".join(_describe(question)))
    return 0


def _question(args: argparse.Namespace) -> _Question:
    given = [name for name in ("params", "checkpoint", "config") if getattr(args, name) is not None]
    if len(given) != 1:
        raise UsageError(
            "what to estimate",
            expected="one of --params, --checkpoint and --config",
            found=" and ".join(f"--{name}" for name in given) or "none",
            hint="such as --params 70B",
        )
    ranks = None if args.world_size is None else _ranks(args.world_size)
    bytes_per_s = None if args.bandwidth is None else _bytes_per_s(args.bandwidth)
    measured = None
    if args.checkpoint is not None:
        from reshard.verify.estimate.measure import measure

        measured = measure(args.checkpoint)
        size = measured.size
    elif args.config is not None:
        from reshard.verify.estimate.config_shapes import read_config

        size = read_config(args.config)
    else:
        from reshard.verify.estimate.model_size import ModelSize

        size = ModelSize(_parameters(args.params))
    return _Question(given[0], size, measured, ranks, bytes_per_s)


def _parameters(text: str) -> int:
    match = _PARAMETERS.fullmatch(text) if text.isascii() else None
    number = Decimal(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ") if match else Decimal(0)
    if number < 1 or number != int(number):
        raise UsageError(
            "not a number of parameters",
            key="--params",
            expected="a whole number above 0",
            found=repr(text),
            hint="write 70B, 1.5B, 125M or 7000000000",
        )
    return int(number)


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 12 or not 0 < int(text) <= _MOST_RANKS:
        raise UsageError(
            "not a number of ranks",
            key="--world-size",
            expected=f"a whole number from 1 to {_MOST_RANKS:,}",
            found=repr(text),
            hint="FSDP shards over the data-parallel ranks of one replica",
        )
    return int(text)


def _bytes_per_s(text: str) -> float:
    match = _BANDWIDTH.fullmatch(text) if text.isascii() else None
    if match is None or not Decimal(match[1]) or (match[3] and not match[2]):
        hint = "that is bits: divide by 8 for bytes" if re.search(r"b", text) else "write 5GB/s, 800MB/s or 2GiB/s"
        raise UsageError(
            "not a bandwidth", key="--bandwidth", expected="bytes a second above 0", found=repr(text), hint=hint
        )
    scale = (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    return float(Decimal(match[1]) * scale)


def _fields(question: _Question) -> dict[str, object]:
    from reshard.verify.estimate.conventions import CONVENTIONS

    size = question.size
    return {
        "source": question.source,
        "parameters": size.parameters,
        "world_size": question.ranks,
        "largest_rank_parameters": question.share,
        "largest_rank_is_exact": None if question.ranks is None else question.is_exact,
        "largest_block_parameters": size.block_parameters,
        "bandwidth_bytes_per_s": question.bytes_per_s,
        "conventions": {convention.name: _convention_fields(question, convention) for convention in CONVENTIONS},
        "measured": None if question.measured is None else _measured_fields(question, question.measured),
    }


def _convention_fields(question: _Question, convention: Convention) -> dict[str, object]:
    parameters, block = question.size.parameters, question.size.block_parameters
    saved_bytes = convention.checkpoint.total_bytes(parameters)

    def fields(split: Split) -> dict[str, object]:
        return {
            **split.parts,
            "whole_on_each_rank": sorted(split.whole),
            "bytes_per_parameter": split.per_parameter,
            "bytes": split.total_bytes(parameters),
            "largest_rank_bytes": question.rank_bytes(split),
        }

    checkpoint = fields(convention.checkpoint)
    # Not a rank's memory: rank 0 alone writes what is not sharded.
    checkpoint["whole_in_rank_0"] = checkpoint.pop("whole_on_each_rank")
    return {
        "title": convention.title,
        "checkpoint": {**checkpoint, "write_s": question.write_s(saved_bytes)},
        "memory": fields(convention.memory),
        "transient_bytes_per_block_parameter": convention.transient,
        "transient_bytes": None if block is None else round(convention.transient * block),
    }


def _measured_fields(question: _Question, measured: Measured) -> dict[str, object]:
    return {
        "path": str(measured.path),
        "bytes_by_kind": {total.kind: total.length_bytes for total in measured.kinds},
        "bytes_per_parameter_by_kind": measured.per_parameter,
        "bytes_per_parameter": measured.total_per_parameter,
        "payload_bytes": measured.payload_bytes,
        "disk_bytes": measured.disk_bytes,
        "write_s": question.write_s(measured.disk_bytes),
        "weights_without_optimizer_state": measured.unmeasured,
        "weights_without_optimizer_state_bytes": measured.unmeasured_bytes,
        "has_optimizer_state": measured.has_optimizer,
        "matches": [convention.name for convention in measured.matches],
    }


def _describe(question: _Question) -> Iterator[str]:
    from reshard.verify.estimate.conventions import CONVENTIONS

    size = question.size
    yield f"{count_text(size.parameters)} parameters ({size.parameters:,})"
    if question.share is not None:
        yield _share_text(question, question.share)
    if question.stacked_share is not None:
        yield (
            f"  {question.stacked_share:,} where the experts of a layer are one tensor, as in transformers 5, of which "
            "FSDP gives a rank whole experts"
        )
    if question.measured is not None:
        yield ""
        yield from _measured(question, question.measured)
    yield ""
    yield "in a checkpoint: bytes per parameter"
    yield from _checkpoints(question, CONVENTIONS)
    yield "  Gradients and copies in the compute dtype are not saved. Of ZeRO 1 and 2, rank 0 writes the weights."
    yield "  fp16 takes what bf16 does."
    yield ""
    yield "in memory while training: bytes per parameter"
    yield from _memory(question, CONVENTIONS)
    yield "  Of ZeRO, every rank holds whole weights in stages 1 and 2, and whole gradients in stage 1."
    yield "  transient: whole weights and gradients of the block that runs, for each of its parameters; the weights of"
    yield "  the next one are fetched meanwhile. Activations and buffers of collectives are not counted anywhere."


def _share_text(question: _Question, share: int) -> str:
    parameters, ranks = question.size.parameters, question.ranks
    text = f"{parameters:,} parameters" if ranks == 1 else f"{share:,} parameters, {100 * share / parameters:.4g} %"
    if ranks == 1:
        return f"one rank has all {text}"
    if not question.size.has_shapes:
        return f"the largest of {ranks} ranks has {text}, and up to one row of each parameter more"
    return f"the largest of {ranks} ranks has {text}; an even share is {100 / (ranks or 1):.4g} %"


def _checkpoints(question: _Question, conventions: tuple[Convention, ...]) -> list[str]:
    heads = ["", "weights", "masters", "moments", "all", "total"]
    heads += ["largest rank"] * (question.ranks is not None) + ["written in"] * (question.bytes_per_s is not None)
    rows = [heads]
    for convention in conventions:
        split = convention.checkpoint
        total_bytes = split.total_bytes(question.size.parameters)
        row = [convention.title, *_cells(split.weights, split.masters, split.moments, split.per_parameter)]
        rows.append([*row, bytes_text(total_bytes), *_optional(question, split), *_time(question, total_bytes)])
    return table(rows, right=range(1, len(heads)))


def _memory(question: _Question, conventions: tuple[Convention, ...]) -> list[str]:
    block = question.size.block_parameters
    heads = ["", "weights", "masters", "moments", "gradients", "all", "total"]
    heads += ["largest rank"] * (question.ranks is not None)
    heads += ["transient"] if block is None else ["transient", f"block of {count_text(block)}"]
    rows = [heads]
    for convention in conventions:
        split = convention.memory
        row = [convention.title, *_cells(*split.parts.values(), split.per_parameter)]
        row += [bytes_text(split.total_bytes(question.size.parameters)), *_optional(question, split)]
        row += _cells(convention.transient)
        rows.append(row if block is None else [*row, bytes_text(round(convention.transient * block))])
    return table(rows, right=range(1, len(heads)))


def _optional(question: _Question, split: Split) -> list[str]:
    count = question.rank_bytes(split)
    return [] if count is None else [bytes_text(count)]


def _time(question: _Question, length_bytes: int) -> list[str]:
    time_s = question.write_s(length_bytes)
    return [] if time_s is None else [_time_text(time_s)]


def _measured(question: _Question, measured: Measured) -> Iterator[str]:
    yield str(measured.path)
    rows = [["", "bytes", "per parameter", "dtypes"]]
    for total in measured.kinds:
        share = measured.per_parameter.get(total.kind)
        rows.append([total.kind, bytes_text(total.length_bytes), "-" if share is None else f"{share:.4g}",
                     ", ".join(total.dtypes)])  # fmt: skip
    rows.append(["total", bytes_text(measured.payload_bytes), f"{measured.total_per_parameter:.4g}", ""])
    yield from table(rows, right=(1, 2))
    time_s = question.write_s(measured.disk_bytes)
    written = "" if time_s is None else f", written in {_time_text(time_s)}"
    yield f"  on disk: {bytes_text(measured.disk_bytes)}{written}"
    if measured.unmeasured:
        yield (
            f"  {bytes_text(measured.unmeasured_bytes)} in {plural(len(measured.unmeasured), 'other weight')} without "
            f"optimizer state (tied, frozen or buffers): {some(measured.unmeasured, 3)}"
        )
    if measured.matches:
        yield f"  as estimated for: {'; '.join(convention.title for convention in measured.matches)}"
    elif not measured.has_optimizer:
        yield "  no optimizer state: weights alone"
    else:
        yield "  like none of the estimates"


def _cells(*counts: float) -> list[str]:
    return [f"{count:.4g}" if count else "-" for count in counts]


def _time_text(time_s: float) -> str:
    if time_s < 120:
        return f"{time_s:.3g} s"
    return f"{time_s / 60:.3g} min" if time_s < 7200 else f"{time_s / 3600:.4g} h"
