"""Flat parameters: what lies where in one of FSDP1 or fairscale, and which part of it each rank holds.

A wrapped module (a unit) has one flat parameter: its parameters in row-major order, one after the other. It is cut into
as many parts of equal length as there are ranks, and zeros fill what the last of them lack; in an HSDP mesh, several
ranks hold the same part::

    unsharded    | a a a a a a | - - | b b b b b | c |          - alignment: what lies there is no parameter's
    part 0       | a a a a a |                                  5 elements, or ceil(14 / 3)
    part 1       | a - - b b |
    part 2       | b b b c 0 |                                  0 padding

Under ``use_orig_params=True`` a parameter begins at a multiple of 16 bytes, and a last entry makes the whole divisible
by the number of ranks; under ``False`` and in fairscale nothing lies between parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.flat.layout import FlatUnit
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import Stored

HOW_TO_GIVE_A_LAYOUT = (
    "give a layout with --layout FILE, which describe_flat writes from the live model, "
    "or the model with --hf-config or --model"
)


class Lying(NamedTuple):
    """A parameter, and the elements of the flat one that are its."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Flat:
    """A flat parameter.

    Attributes:
        key: its name in the model's files.
        parameters: in the order in which they lie.
        numel: elements, without the padding of the last parts.
        shared: (name, of which parameter it is another name).
    """

    key: str
    parameters: tuple[Lying, ...]
    numel: int
    shared: tuple[tuple[str, str], ...] = ()
    is_trainable: bool = True


@dataclass(frozen=True)
class Parts:
    """How flat parameters are cut.

    Attributes:
        count: parts.
        of_rank: the part of each rank.
    """

    count: int
    of_rank: tuple[int, ...]

    def numel(self, flat: int) -> int:
        """Elements of a part of a flat parameter, padding among them."""
        return -(-flat // self.count)

    def range(self, flat: int, rank: int) -> tuple[int, int]:
        """The elements of a flat parameter that a rank holds, without padding."""
        part, numel = self.of_rank[rank], self.numel(flat)
        return min(part * numel, flat), min((part + 1) * numel, flat)

    def overlap(self, flat: Flat, lying: Lying, rank: int) -> int:
        """How many elements of a parameter a rank holds."""
        begin, end = self.range(flat.numel, rank)
        return max(0, min(end, lying.end) - max(begin, lying.begin))


def laid_out(
    unit: FlatUnit, key: str, path: Path, numel: int | None = None, aligned: tuple[int, int] | None = None
) -> Flat:
    """A unit's flat parameter as a layout describes it.

    Args:
        numel: elements that it has; None where no file says.
        aligned: under use_orig_params=True, the bytes of an element and how many parts there are; a layout that has
            only shapes may leave out the gaps, which are then worked out. Anywhere else that would hide wrong shapes.

    Raises:
        UsageError: the layout describes more or fewer elements.
    """
    entries = list(zip(unit.entry_numels, unit.is_padding, strict=True))
    described = sum(unit.entry_numels)
    if numel is not None and described != numel:
        fitting = set() if aligned is None or any(unit.is_padding) else _aligned(unit.entry_numels, numel, *aligned)
        if len(fitting) != 1:
            raise UsageError(
                "a layout that does not fit the flat parameter",
                path=path,
                key=key,
                expected=f"{numel} elements",
                found=f"{described} in the {len(unit.fqns)} shapes of the layout, with its paddings",
                hint="it describes another model, or one that is wrapped otherwise",
            )
        entries = list(fitting.pop())
    parameters, begin, names = [], 0, iter(zip(unit.fqns, unit.shapes, strict=True))
    for count, is_padding in entries:
        if not is_padding:
            name, shape = next(names)
            parameters.append(Lying(name, shape, begin, begin + count))
        begin += count
    return Flat(key, tuple(parameters), begin, unit.shared, unit.is_trainable)


def _aligned(numels: Sequence[int], total: int, item_bytes: int, parts: int) -> set[tuple[tuple[int, bool], ...]]:
    """Entries as ``use_orig_params=True`` may lay them, each with whether it is padding."""
    fitting = set()
    # Alignment counts elements as wide as mixed precision makes them for a forward pass, which no file tells.
    for width in (1, 2, 4, 8):
        entries: list[tuple[int, bool]] = []
        begin = 0
        for count in numels:
            if gap := -begin % (16 // width):
                entries.append((gap, True))
            entries.append((count, False))
            begin += gap + count
        if gap := -begin % parts:
            entries.append((gap, True))
        if width <= item_bytes and begin + gap == total:
            fitting.add(tuple(entries))
    return fitting


def parts_of(held: Sequence[Mapping[str, Held]], path: Path) -> Parts:
    """How a model is cut along its first dim, by what each rank's file holds of its tensors.

    A rank that holds nothing of any is told by its number: HSDP counts ranks along the parts first.

    Raises:
        CheckpointUnsound: a rank holds different parts of different tensors.
    """
    first: dict[str, int] = {}
    for tensors in held:
        for key, value in tensors.items():
            for offsets, part in value.boxes:
                if offsets and offsets[0] == 0:
                    first[key] = part.shape[0]
    known: list[int | None] = []
    for rank, tensors in enumerate(held):
        found = {
            offsets[0] // first[key] if first.get(key) else -1
            for key, value in tensors.items()
            for offsets, _ in value.boxes
            if offsets
        }
        if len(found) > 1 or -1 in found:
            raise CheckpointUnsound("not cut into parts of one length by rank", path=path, rank=rank, found=found)
        known.append(found.pop() if found else None)
    count = max(1, len(held) // (known.count(0) or 1))
    return Parts(count, tuple(rank % count if part is None else part for rank, part in enumerate(known)))


def add_part(
    assembly: Assembly,
    flat: Flat,
    key_of: Callable[[str], str],
    bounds: tuple[int, int],
    stored: Stored,
    source: RankFile,
) -> None:
    """Adds the parameters' elements that lie in [begin, end) of a flat parameter, which ``stored`` begins with.

    Raises:
        CheckpointUnsound: ``stored`` is shorter, or not flat.
    """
    begin, end = bounds
    for lying in flat.parameters:
        first, last = max(begin, lying.begin), min(end, lying.end)
        if first < last or lying.begin == lying.end:
            # One without elements is held by every rank.
            count = max(0, last - first)
            at = first - begin if count else 0
            assembly.add_range(
                key_of(lying.name), lying.shape, first - lying.begin if count else 0, stored, source, at, count
            )
