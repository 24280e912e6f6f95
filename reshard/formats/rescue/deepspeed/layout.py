"""Where the elements of parameters lie in ZeRO's flat partitions.

A flat group is its parameters one after the other, each in row-major order. Stages 1 and 2 pad it behind the last one
to a multiple of twice the number of ranks and cut it into as many equal partitions; parameters end where they end::

    W = 2, shapes (3, 2) and (5,): 11 elements, padded to 12
    rank 0    a a a a a a
    rank 1    b b b b b .

Stage 3 cuts each parameter into W equal parts, the last ones padded; a rank's partition has its part of every one::

    W = 4, shapes (3, 2) and (5,): parts of 2
    rank 0    a a b b
    rank 1    a a b b
    rank 2    a a b .
    rank 3    . . . .

Masters and moments lie alike, but stages 1 and 2 cut the padding off the masters' end, and not off the moments'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard.errors import CheckpointUnsound
from reshard.formats.rescue.deepspeed.states import Fragment, OptimizerStates, Shape
from reshard.formats.torch_archive import Stored

_ALIGNED_TO = 2
_STEP = "step"


class Piece(NamedTuple):
    """Elements of a parameter, next to each other in a rank's partition.

    Attributes:
        group: number of the flat group.
        begin: the first one's number in the parameter.
        first: and in the partition.
    """

    name: str
    group: int
    rank: int
    begin: int
    first: int
    numel: int


def pieces_of(shapes: Sequence[Mapping[str, Shape]], states: Sequence[OptimizerStates], folder: Path) -> list[Piece]:
    """What every rank has of every parameter.

    Args:
        shapes: of each flat group, in order.
        states: of all ranks, in order.
        folder: what errors name.

    Raises:
        CheckpointUnsound: numbers of elements do not add up.
    """
    for state in states:
        if len(state.masters) != len(shapes):
            raise CheckpointUnsound(
                "a number of flat groups that is not the model's",
                path=state.source.path,
                expected=f"{len(shapes)}, as param_shapes has",
                found=len(state.masters),
                hint="files of different checkpoints are mixed",
            )
    pieces = []
    for group, shapes_of_group in enumerate(shapes):
        if states[0].is_stage_3:
            _require_parts(group, shapes_of_group, states)
            pieces += parts(group, shapes_of_group, len(states))
        else:
            _require_partitions(group, shapes_of_group, states, folder)
            fragments = [_fragments(group, shapes_of_group, rank, states) for rank in range(len(states))]
            pieces += _slices(group, shapes_of_group, fragments, states)
    return pieces


def part_numel(shape: Shape, ranks: int) -> int:
    """Elements of a rank's part of a parameter in stage 3, padding among them."""
    return -(-math.prod(shape) // ranks)


def parts(group: int, shapes: Mapping[str, Shape], ranks: int) -> list[Piece]:
    """The parts of a flat group's parameters in stage 3."""
    pieces = []
    first = 0
    for name, shape in shapes.items():
        numel, part = math.prod(shape), part_numel(shape, ranks)
        for rank in range(ranks):
            begin = min(rank * part, numel)
            pieces.append(Piece(name, group, rank, begin, first, min(part, numel - begin)))
        first += part
    return pieces


def flat_states(state: OptimizerStates, group: int) -> dict[str, Stored]:
    """Moments of a flat group, by name; what is a single number is none."""
    values = state.states.get(group, {})
    return {str(n): value for n, value in values.items() if n != _STEP and isinstance(value, Stored) and value.shape}


def _kinds(state: OptimizerStates, group: int) -> dict[str, int]:
    """Elements of all that is flat in a flat group of a rank."""
    moments = {name: math.prod(value.shape) for name, value in flat_states(state, group).items()}
    return {"masters": state.masters[group].shape[0], **moments}


def _require_parts(group: int, shapes: Mapping[str, Shape], states: Sequence[OptimizerStates]) -> None:
    expected = sum(part_numel(shape, len(states)) for shape in shapes.values())
    for rank, state in enumerate(states):
        for kind, found in _kinds(state, group).items():
            if found != expected:
                raise _unsound(kind, group, f"{expected} on a rank of {len(states)}", found, state.source.path, rank)


def _require_partitions(
    group: int, shapes: Mapping[str, Shape], states: Sequence[OptimizerStates], folder: Path
) -> None:
    needed = sum(map(math.prod, shapes.values())) + states[0].paddings[group]
    unit = _ALIGNED_TO * len(states)
    most = -(-needed // unit) * unit
    totals: dict[str, int] = {}
    for state in states:
        for kind, found in _kinds(state, group).items():
            totals[kind] = totals.get(kind, 0) + found
    for kind, found in totals.items():
        if not needed <= found <= most:
            raise _unsound(kind, group, f"{needed}, padded to {most} at most", found, folder)


def _unsound(
    kind: str, group: int, expected: object, found: object, path: Path, rank: int | None = None
) -> CheckpointUnsound:
    hint = None
    if found == 0 and kind == "masters":
        hint = (
            "DeepSpeed leaves out what it offloads to NVMe: its own save_16bit_model or universal checkpoints have it"
        )
    return CheckpointUnsound(
        "elements that do not add up",
        path=path,
        key=f"{kind} of flat group {group}",
        rank=rank,
        expected=expected,
        found=found,
        hint=hint,
    )


def _fragments(
    group: int, shapes: Mapping[str, Shape], rank: int, states: Sequence[OptimizerStates]
) -> dict[str, Fragment]:
    """What a rank has, and where, as it records; where it does not, all partitions are as long as the longest."""
    recorded = states[rank].fragments
    if recorded is not None:
        return recorded[group]
    length = max(max(_kinds(state, group).values()) for state in states)
    found = {}
    start = -rank * length
    for name, shape in shapes.items():
        numel = math.prod(shape)
        low, high = max(start, 0), min(start + numel, length)
        if low < high:
            found[name] = Fragment(low, high - low)
        start += numel
    return found


def _slices(
    group: int,
    shapes: Mapping[str, Shape],
    fragments: Sequence[Mapping[str, Fragment]],
    states: Sequence[OptimizerStates],
) -> list[Piece]:
    pieces = []
    found = dict.fromkeys(shapes, 0)
    for rank, places in enumerate(fragments):
        path = states[rank].source.path
        end = 0
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            if name not in shapes:
                raise CheckpointUnsound(
                    "part of a parameter that the model's file does not list",
                    path=path,
                    key=name,
                    rank=rank,
                    hint="files of different checkpoints are mixed",
                )
            if place.start < end:
                raise CheckpointUnsound("two parameters in one place", path=path, key=name, rank=rank,
                                        expected=f"from element {end} on", found=place.start)  # fmt: skip
            pieces.append(Piece(name, group, rank, found[name], place.start, place.numel))
            found[name] += place.numel
            end = place.start + place.numel
    for name, shape in shapes.items():
        if not math.prod(shape):
            pieces.append(Piece(name, group, 0, 0, 0, 0))
        if found[name] != math.prod(shape):
            raise CheckpointUnsound(
                "elements that do not add up",
                path=states[0].source.path.parent,
                key=name,
                expected=f"{math.prod(shape)} of {shape}",
                found=f"{found[name]} in all ranks' partitions",
                hint="files of different checkpoints are mixed",
            )
    return pieces
