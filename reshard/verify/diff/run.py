"""What differs between two checkpoints, whatever their formats and shardings.

Tensors are held against each other piece by piece: a piece is a part of one stored chunk, read from both sides, a few
MiB at most. So memory does not grow with the tensors, every byte is read once, and the side with fewer chunks is read
in the order of its files.

Of the manifests, what describes the training is compared, and not what describes the machines and the files: world,
batch plan, versions, attempt, time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.manifest import FILE_NAME, Manifest
from reshard.geometry.box import Box
from reshard.verify.diff.elements import Tally, Tolerance, compare
from reshard.verify.diff.objects import Difference, object_differences, value_differences
from reshard.verify.diff.pairing import Pairs, Side, pair

_COMPARED_FIELDS = (
    "step", "parts", "lr", "data", "schedulers", "scaler", "rng", "extra", "optimizers",
)  # fmt: skip
_FORMATS_WITH_MANIFEST = ("dcp",)

_PIECE_ELEMENTS = 1 << 19
_LOCATED_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class TensorDifference:
    """A tensor on both sides, of one shape, that is not the same on both.

    Attributes:
        tally: of its elements; None where the two types cannot be compared.
        where: index of the largest difference.
        differs: whether it counts as different: it is outside the tolerance, or of another type.
    """

    key: str
    shape: tuple[int, ...]
    a_dtype: str
    b_dtype: str
    tally: Tally | None
    where: tuple[int, ...] | None
    differs: bool


@dataclass
class Diff:
    """How checkpoint B differs from A.

    Attributes:
        prefixed: ``a`` or ``b``, the side whose names were compared under ``model.``, if any.
        only_a, only_b: keys of tensors that the other does not have.
        shapes: (key, shape in A, shape in B).
        dtypes: tensors of different types, by key.
        different: tensors of one type with elements that differ, the largest difference first.
        within: tensors that are equal by the tolerance only, likewise.
        same, same_bytes: tensors that are equal, and their bytes in A.
        only_objects_a, only_objects_b: keys of objects that the other does not have.
        objects: key -> where the object differs.
        same_objects: how many are equal.
        manifest: where the manifests differ.
        notes: what is no difference and worth a line.
    """

    tolerance: Tolerance
    prefixed: str | None = None
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    dtypes: list[TensorDifference] = field(default_factory=list)
    different: list[TensorDifference] = field(default_factory=list)
    within: list[TensorDifference] = field(default_factory=list)
    same: int = 0
    same_bytes: int = 0
    only_objects_a: list[str] = field(default_factory=list)
    only_objects_b: list[str] = field(default_factory=list)
    objects: dict[str, list[Difference]] = field(default_factory=dict)
    same_objects: int = 0
    manifest: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """How many there are, on either side."""
        return self.same + len(self.within) + self.different_tensors

    @property
    def different_tensors(self) -> int:
        """How many of them differ or are on one side only."""
        return len(self.only_a) + len(self.only_b) + len(self.shapes) + len(self.dtypes) + len(self.different)

    @property
    def different_objects(self) -> int:
        """How many objects differ or are on one side only."""
        return len(self.only_objects_a) + len(self.only_objects_b) + len(self.objects)

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.different_tensors or self.different_objects or self.manifest)

    def to_json(self) -> dict[str, object]:
        """All of it, as JSON holds it."""
        fields = dataclasses.asdict(self)
        fields["manifest"] = [entry._asdict() for entry in self.manifest]
        fields["objects"] = {key: [entry._asdict() for entry in found] for key, found in self.objects.items()}
        fields["shapes"] = [{"key": key, "a": list(a), "b": list(b)} for key, a, b in self.shapes]
        return {"equal": self.is_empty, "tensors": self.tensors, **fields}


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    pairs: Pairs | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Diff:
    """Compares two checkpoints.

    Args:
        a, b: opened; both sides' files are read.
        atol, rtol: elements are equal where ``|a - b| <= atol + rtol * |b|``; the same bits by default.
        pairs: what `pair` gave for them, where it is known already.
        on_bytes: told how many bytes of tensors were read, as it goes on; `Pairs.compared_bytes` in all.

    Raises:
        UsageError: a tolerance is negative or not a number.
        CheckpointUnsound: a tensor or an object of either side is missing, damaged or incomplete.
        StorageError: the file system failed to read it.
    """
    for option, value in (("--atol", atol), ("--rtol", rtol)):
        if not 0 <= value < math.inf:
            raise UsageError("not a tolerance", key=option, expected="a number of 0 or more", found=value)
    result = Diff(Tolerance(atol, rtol))
    paired = pairs or pair(a, b)
    result.prefixed = paired.prefixed
    result.only_a, result.only_b = paired.tensors.only_a, paired.tensors.only_b
    result.shapes = sorted((key, one.shape, other.shape) for key, one, other in paired.other_shapes)
    for key, one, other in paired.other_types:
        result.dtypes.append(TensorDifference(key, one.shape, one.dtype, other.dtype, None, None, differs=True))
    _prepare(a, [one.name for _, one, _ in paired.comparable])
    _prepare(b, [other.name for _, _, other in paired.comparable])
    for key, one, other in paired.comparable:
        _add_tensor(result, key, one, other, on_bytes)
    result.dtypes.sort(key=lambda found: found.key)
    result.different.sort(key=_largest_first)
    result.within.sort(key=_largest_first)
    result.only_objects_a, result.only_objects_b = paired.objects.only_a, paired.objects.only_b
    for key, a_key, b_key in paired.objects.common:
        if found := object_differences(a, b, a_key, b_key):
            result.objects[key] = found
        else:
            result.same_objects += 1
    _add_manifests(result, a, b)
    return result


def _prepare(checkpoint: Checkpoint, names: list[str]) -> None:
    """Proves that the chunks of these tensors hold every element once, and finds them in their files, in file order."""
    index = checkpoint.index
    wanted = set(names)
    faults = [f"{key}: {fault}" for key, fault in index.tiling_faults() if key in wanted]
    if faults:
        raise CheckpointUnsound(
            f"{faults[0]}", path=checkpoint.path, hint="`reshard check` says what else is wrong", details=faults[1:]
        )
    chosen = np.zeros(len(index.names), dtype=bool)
    chosen[[index.number[name] for name in names]] = True
    rows = np.flatnonzero(chosen[index.owner])
    rows = rows[np.lexsort((index.start_bytes[rows], index.file[rows]))]
    for start in range(0, len(rows), _LOCATED_AT_ONCE):
        checkpoint.locate(rows[start : start + _LOCATED_AT_ONCE])


def _add_tensor(result: Diff, key: str, a: Side, b: Side, on_bytes: Callable[[int], None] | None) -> None:
    tally = Tally()
    lead = min((a, b), key=lambda side: len(side.rows))
    for box in _pieces(lead):
        elements = _elements(a, box), _elements(b, box)
        found = compare(*elements, a.dtype, b.dtype, result.tolerance)
        tally.add(found, None if found.where is None else _position(found.where, box, a.shape))
        if on_bytes is not None:
            on_bytes(elements[0].nbytes + elements[1].nbytes)
    if a.dtype == b.dtype and not tally.unequal:
        result.same += 1
        result.same_bytes += a.length_bytes
        return
    where = None if tally.where is None else tuple(int(place) for place in np.unravel_index(tally.where, a.shape))
    differs = a.dtype != b.dtype or tally.outside > 0
    found_in = result.dtypes if a.dtype != b.dtype else result.different if differs else result.within
    found_in.append(TensorDifference(key, a.shape, a.dtype, b.dtype, tally, where, differs))


def _elements(side: Side, box: Box) -> NDArray[np.generic]:
    try:
        return side.checkpoint.read_array(side.name, box)
    except CheckpointUnsound as error:
        error.key = error.key or side.name
        raise


def _position(where: int, box: Box, shape: tuple[int, ...]) -> int:
    """A row-major position in a box, as one in the whole tensor."""
    position = 0
    for low, at, size in zip(box.offsets, np.unravel_index(where, box.sizes), shape, strict=True):
        position = position * size + low + int(at)
    return position


def _pieces(side: Side) -> Iterator[Box]:
    """The chunks of a tensor in the order of the files, cut along the dims that vary slowest in memory."""
    index = side.checkpoint.index
    for row in side.rows[np.lexsort((index.start_bytes[side.rows], index.file[side.rows]))].tolist():
        box = index.box(row)
        dims = list(range(len(box.sizes)))
        if (strides := side.checkpoint.payloads.strides.get(row)) is not None:
            dims.sort(key=lambda dim: -strides[dim])
        if box.elements:
            yield from _cut(box, dims)


def _cut(box: Box, dims: list[int]) -> Iterator[Box]:
    if box.elements <= _PIECE_ELEMENTS:
        yield box
        return
    dim, *others = dims
    size = box.sizes[dim]
    step = max(1, _PIECE_ELEMENTS * size // box.elements)
    for start in range(0, size, step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(step, size - start)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), others)


def _largest_first(found: TensorDifference) -> tuple[float, str]:
    tally = found.tally
    # What has no distance, NaN against a number, is further apart than any distance.
    if tally is None or tally.max_abs is None or tally.nan_a or tally.nan_b:
        return -math.inf, found.key
    return -tally.max_abs, found.key


def _add_manifests(result: Diff, a: Checkpoint, b: Checkpoint) -> None:
    for side in (a, b):
        side.require_manifest()
    if a.manifest is not None and b.manifest is not None:
        result.manifest = list(value_differences(_fields(a.manifest), _fields(b.manifest)))
        return
    for one, other, name in ((a, b, "A"), (b, a, "B")):
        if one.manifest is None:
            continue
        if other.format in _FORMATS_WITH_MANIFEST:
            result.manifest = [Difference(FILE_NAME, *(("there", None) if name == "A" else (None, "there")))]
        else:
            result.notes.append(f"only {name} has a manifest; the other's format, {other.format}, has no place for one")


def _fields(manifest: Manifest) -> dict[str, object]:
    return {name: getattr(manifest, name) for name in _COMPARED_FIELDS}
