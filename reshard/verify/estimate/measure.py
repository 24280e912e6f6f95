"""What a checkpoint's training state takes, and which convention that is: by its index, no tensor is read.

The measure is the parameters that have optimizer state, for conventions are about these. Other weights (the second name
of a tied one, which stock DCP writes again, frozen ones, buffers) are told apart. Of a checkpoint without any state of
an optimizer, all weights of floating-point types count.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import UsageError
from reshard.index.dtypes import FLOATS, ITEM_BYTES
from reshard.index.index import Index
from reshard.index.kinds import MASTERS, MOMENTS, WEIGHTS, kinds_of, optimizer_place
from reshard.verify.describe.describe import KindTotal, describe
from reshard.verify.estimate.conventions import CONVENTIONS, Convention
from reshard.verify.estimate.model_size import ModelSize, Shape

TOLERANCE = 0.01
_NUMBERED_STATE = re.compile(r"(?:state\.)?(\d{1,9})\.[^.]+")


@dataclass(frozen=True)
class Measured:
    """A checkpoint.

    Attributes:
        size: of the measured parameters.
        kinds: bytes by kind, of everything.
        per_parameter: weights, masters, moments -> bytes for each measured parameter.
        unmeasured: names of other weights.
        unmeasured_bytes: of these.
        payload_bytes: of all tensors.
        disk_bytes: of the files.
        matches: the conventions that this may be.
    """

    path: Path
    size: ModelSize
    kinds: list[KindTotal]
    per_parameter: dict[str, float]
    unmeasured: list[str]
    unmeasured_bytes: int
    payload_bytes: int
    disk_bytes: int
    matches: tuple[Convention, ...]

    @property
    def total_per_parameter(self) -> float:
        """Bytes for each measured parameter."""
        return sum(self.per_parameter.values())

    @property
    def has_optimizer(self) -> bool:
        """Whether there is any state of an optimizer."""
        return bool(self.per_parameter[MASTERS] or self.per_parameter[MOMENTS])


def measure(path: Path) -> Measured:
    """Measures a checkpoint, or the newest step of a run.

    Raises:
        UsageError: it has no weights.
        CheckpointNotFound, CheckpointUnsound, StorageError: as `describe` does.
    """
    found = describe(path)
    with found.checkpoint as checkpoint:
        index = checkpoint.index
        weights = {
            name: number
            for name, number, kind in _numbered(index)
            if kind == WEIGHTS and index.dtypes[number] in FLOATS
        }
        measured = _with_state(index, weights, found.optimizer.by_parameter) or weights
        size = ModelSize.of_tensors({name: index.shapes[number] for name, number in measured.items()})
        if not size.parameters:
            raise UsageError("no weights", path=checkpoint.path, hint="name a checkpoint of a model, or use --params")
        weight_bytes = sum(_bytes_of(index, number) for number in measured.values())
        total = {kind.kind: kind.length_bytes for kind in found.kinds}
        per_parameter = {
            WEIGHTS: weight_bytes / size.parameters,
            MASTERS: total.get(MASTERS, 0) / size.parameters,
            MOMENTS: total.get(MOMENTS, 0) / size.parameters,
        }
        # Momentum of fp32 takes what two moments of bf16 do. Scales of 8-bit moments are within the tolerance.
        moments = sum(kind.elements for kind in found.kinds if kind.kind == MOMENTS)
        has_two_moments = abs(moments / size.parameters - 2) <= 2 * TOLERANCE
        return Measured(
            path=checkpoint.path,
            size=size,
            kinds=found.kinds,
            per_parameter=per_parameter,
            unmeasured=[name for name, _, kind in _numbered(index) if kind == WEIGHTS and name not in measured],
            unmeasured_bytes=total[WEIGHTS] - weight_bytes,
            payload_bytes=found.payload_bytes,
            disk_bytes=found.disk_bytes,
            matches=tuple(_matches(per_parameter, index.files)) if has_two_moments else (),
        )


def _with_state(index: Index, weights: Mapping[str, int], owners: Iterable[str]) -> dict[str, int]:
    """The weights that have optimizer state, by name; where a state has numbers for names, by shape and order.

    `torch.optim.Optimizer.state_dict` numbers the parameters in the order in which the optimizer was given them.
    """
    owners = set(owners)
    if named := {name: number for name, number in weights.items() if name in owners}:
        return named
    wanted = _numbered_shapes(index)
    in_order, left = {}, list(wanted)
    for name, number in weights.items():
        if left and tuple(index.shapes[number]) == left[0]:
            in_order[name] = number
            del left[0]
    if not left:
        return in_order
    # Groups give the parameters another order than the model's.
    missing, by_shape = Counter(wanted), {}
    for name, number in weights.items():
        shape = tuple(index.shapes[number])
        if missing[shape]:
            by_shape[name] = number
            missing[shape] -= 1
    return {} if missing.total() else by_shape


def _numbered_shapes(index: Index) -> list[Shape]:
    """The shape of each parameter whose state is kept under a number, ascending."""
    shapes: dict[tuple[str, int], Shape] = {}
    for name, number, kind in _numbered(index):
        place = optimizer_place(name)
        owner = None if place is None else _NUMBERED_STATE.fullmatch(place[1])
        if place is not None and owner is not None and kind in (MOMENTS, MASTERS):
            shapes.setdefault((name.removesuffix(place[1]), int(owner[1])), tuple(index.shapes[number]))
    return [shapes[at] for at in sorted(shapes)]


def _numbered(index: Index) -> Iterator[tuple[str, int, str]]:
    return zip(index.names, range(len(index.names)), kinds_of(index.names, index.shapes), strict=True)


def _bytes_of(index: Index, number: int) -> int:
    return math.prod(index.shapes[number]) * ITEM_BYTES[index.dtypes[number]]


def _matches(per_parameter: dict[str, float], files: list[str]) -> Iterator[Convention]:
    """The conventions whose every part is as large, within the tolerance of the whole."""
    names = [Path(file).name for file in files]
    is_zero = any(name.endswith("optim_states.pt") for name in names)
    # Stage 3 alone has a file of model states for each rank, which hold no weights.
    is_stage_3 = any(name.startswith("zero_pp_rank") and name.endswith("model_states.pt") for name in names)
    for convention in CONVENTIONS:
        expected = dict(convention.checkpoint.parts)
        if convention.is_zero:
            # Of DeepSpeed's files the masters are read as the weights.
            expected[WEIGHTS], expected[MASTERS] = expected[MASTERS], 0.0
        margin = TOLERANCE * convention.checkpoint.per_parameter
        is_alike = all(abs(count - expected[kind]) <= margin for kind, count in per_parameter.items())
        if is_alike and convention.is_zero == is_zero and (not is_zero or (convention.name == "zero-3") == is_stage_3):
            yield convention
