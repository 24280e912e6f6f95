"""Stacked layers as numbered ones: ``blocks.<name>`` with a leading axis of layers becomes ``blocks.<i>.<name>``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint, all_known
from reshard.geometry.box import row_major_strides
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.index import RAW, IndexBuilder, Payloads
from reshard.index.kinds import nested_path

_ROOTS = ("model.", "optim.state.")


def unstacked(checkpoint: Checkpoint, stacks: Sequence[str]) -> Checkpoint:
    """The same checkpoint with the layers of some stacks apart, in model and optimizer. Finds where all elements lie.

    An entry without dims, such as a step counter, is each layer's.

    Args:
        checkpoint: with the keys of a run of ours.
        stacks: names of modules.

    Raises:
        UsageError: nothing lies below a name, or what does has not the same number of layers.
    """
    index = checkpoint.index
    layers = {stack: _layers(checkpoint, stack) for stack in stacks}
    checkpoint.locate(np.arange(len(index.file)))
    found = checkpoint.payloads
    builder = IndexBuilder(index.folder, RAW)
    for file in index.files:
        builder.file(file)
    rows: list[tuple[int, int]] = []
    strides: dict[int, tuple[int, ...]] = {}
    paths = {}
    for number, (name, dtype, shape) in enumerate(zip(index.names, index.dtypes, index.shapes, strict=True)):
        chunks = range(int(index.first[number]), int(index.first[number + 1]))
        stack = next((stack for stack in stacks if _below(name, stack) is not None), None)
        for layer, new in _names(name, stack, layers):
            builder.tensor(new, dtype, shape if layer is None or not shape else shape[1:])
            for row in chunks:
                box = index.box(row)
                steps = found.strides.get(row, row_major_strides(box.sizes))
                start = int(found.start_bytes[row])
                if layer is not None and shape:
                    if not box.offsets[0] <= layer < box.ends[0]:
                        continue
                    start += (layer - box.offsets[0]) * steps[0] * ITEM_BYTES[dtype]
                    box, steps = box._replace(offsets=box.offsets[1:], sizes=box.sizes[1:]), steps[1:]
                place = (int(index.file[row]), start, _span_bytes(box.sizes, steps, dtype))
                made = builder.chunk(*box, place)
                rows.append((row, start))
                if row in found.strides:
                    strides[made] = steps
            paths[new] = checkpoint.paths.get(name, (name,)) if new == name else nested_path(new)
    builder.objects.update(index.objects)
    return replace(
        checkpoint,
        index=builder.build(),
        payloads=_payloads(found, rows, strides),
        locate=all_known,
        paths={**{key: path for key, path in checkpoint.paths.items() if key in index.objects}, **paths},
    )


def _names(name: str, stack: str | None, layers: dict[str, int]) -> Iterator[tuple[int | None, str]]:
    """The layers of a tensor, with the name of each; None and its own name where it is not stacked."""
    if stack is None:
        yield None, name
        return
    below = _below(name, stack)
    assert below is not None
    root, rest = below
    for layer in range(layers[stack]):
        yield layer, f"{root}{stack}.{layer}.{rest}"


def _below(name: str, stack: str) -> tuple[str, str] | None:
    """What stands before and behind the name of a stack in a key."""
    for root in _ROOTS:
        if name.startswith(f"{root}{stack}."):
            return root, name.removeprefix(f"{root}{stack}.")
    return None


def _layers(checkpoint: Checkpoint, stack: str) -> int:
    index = checkpoint.index
    counts = {
        shape[0]: name for name, shape in zip(index.names, index.shapes, strict=True) if shape and _below(name, stack)
    }
    if len(counts) != 1:
        found = ", ".join(f"{count} in {name}" for count, name in counts.items())
        raise UsageError(
            "not a stack of layers",
            path=checkpoint.path,
            key=f"--unstack {stack}",
            expected="tensors below it that all have the same leading size",
            found=found or "no tensor",
        )
    return next(iter(counts))


def _span_bytes(sizes: Sequence[int], strides: Sequence[int], dtype: str) -> int:
    if not math.prod(sizes):
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))) * ITEM_BYTES[dtype]


def _payloads(found: Payloads, rows: Sequence[tuple[int, int]], strides: dict[int, tuple[int, ...]]) -> Payloads:
    source = np.array([row for row, _ in rows], dtype=np.int64)
    return Payloads(
        start_bytes=np.array([start for _, start in rows], dtype=np.int64),
        crc=found.crc[source],
        record_start_bytes=found.record_start_bytes[source],
        record_bytes=found.record_bytes[source],
        strides=strides,
    )
