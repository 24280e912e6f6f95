"""The plan: which stored chunks each wanted box is made of. A pure function of an index and a layout.

A *layout* says which boxes each rank owns; like the index, it is columns. The plan lists, for each wanted box, the
chunks that share elements with it, in the order of the box; the shared box itself is their intersection and is not
stored. So a plan costs 8 bytes a piece, and planning is linear in chunks, wanted boxes and pieces: the pairs are found
by position along dim 0, all tensors in one row space, and then cut down to those that meet in every dim.

The proof that every element of every wanted box comes from exactly one place: the chunks of each tensor tile it exactly
(`reshard.geometry.tiling`), and the pieces of each box have as many elements as the box.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointUnsound, UsageError
from reshard.geometry.mesh import Mesh, shard_rows
from reshard.geometry.tiling import inexact_tensors, tiling_fault
from reshard.index.index import Index, Int

_PAIRS_AT_ONCE = 1 << 21
_FAULTS_NAMED = 20


@dataclass(frozen=True, eq=False)
class Layout:
    """Wanted boxes, as columns, sorted by tensor and then by offsets.

    Attributes:
        tensor: number of the tensor in the index.
        offsets, sizes: (boxes, dims), padded as in the index.
        rank: who owns the box. A box that several ranks own is listed once, for the one that writes it.
    """

    tensor: Int
    offsets: Int
    sizes: Int
    rank: Int

    @property
    def elements(self) -> Int:
        """Elements of each box."""
        elements: Int = self.sizes.prod(axis=1)
        return elements


@dataclass(frozen=True, eq=False)
class Plan:
    """Pieces, sorted by wanted box and then by place in it.

    Attributes:
        source: (pieces,) chunk row of the index.
        wanted: (pieces,) row of the layout.
        first: (boxes + 1,) the pieces of box b are first[b] to first[b + 1].
    """

    source: NDArray[np.int32]
    wanted: NDArray[np.int32]
    first: Int


def sharded_layout(index: Index, tensors: Int, whole: NDArray[np.bool_], mesh: Mesh, item_bytes: Int) -> Layout:
    """FSDP2's own layout: dim 0 of each tensor in the parts of ``torch.chunk``; each part written by one rank.

    Of the ranks that hold a part, or of all for a tensor that is not cut, the one with the least to write takes it.

    Args:
        tensors: numbers of the tensors to lay out.
        whole: which of them are not sharded in the model (buffers, step counters), so that they are not cut.
        mesh: the ranks.
        item_bytes: of each of these tensors' elements, to balance bytes.
    """
    shapes = index.padded_shapes[tensors]
    shards = np.where(whole, 1, mesh.shard)
    order = []
    for count in np.unique(shards):
        chosen = np.flatnonzero(shards == count)
        position, shard, first_row, rows = shard_rows(shapes[chosen, 0], int(count))
        order.append(np.column_stack([chosen[position], shard, first_row, rows]))
    parts = np.concatenate(order) if order else np.zeros((0, 4), dtype=np.int64)
    parts = np.concatenate([parts, _without_rows(shapes)])
    # Stable, and of each tensor the parts are in order already.
    parts = parts[np.argsort(parts[:, 0], kind="stable")]
    position, shard = parts[:, 0], parts[:, 1]
    sizes = shapes[position].copy()
    offsets = np.zeros_like(sizes)
    offsets[:, 0], sizes[:, 0] = parts[:, 2], parts[:, 3]
    length_bytes = sizes.prod(axis=1) * item_bytes[position]
    rank = _balanced(shard, whole[position], length_bytes, mesh)
    return Layout(tensors[position], offsets, sizes, rank)


def make_plan(index: Index, layout: Layout) -> Plan:
    """Plans a layout, and proves it.

    Raises:
        CheckpointUnsound: the chunks of a wanted tensor leave a hole, overlap or stick out; each is named.
        UsageError: a wanted box leaves its tensor.
    """
    _prove_tiling(index, np.unique(layout.tensor))
    found = [np.column_stack(pairs) for pairs in _pieces(index, layout)]
    pairs = np.concatenate(found) if found else np.zeros((0, 2), dtype=np.int32)
    source, wanted = pairs[:, 0], pairs[:, 1]
    counts = np.bincount(wanted, minlength=len(layout.tensor))
    plan = Plan(source, wanted, np.concatenate([[0], np.cumsum(counts)]))
    _prove_coverage(index, layout, plan)
    return plan


def piece_boxes(index: Index, layout: Layout, plan: Plan, pieces: slice | Int) -> tuple[Int, Int]:
    """Global offsets and sizes of some pieces: what chunk and wanted box share."""
    source, wanted = plan.source[pieces], plan.wanted[pieces]
    low = np.maximum(index.offsets[source], layout.offsets[wanted])
    high = np.minimum(index.offsets[source] + index.sizes[source], layout.offsets[wanted] + layout.sizes[wanted])
    return low, high - low


def _without_rows(shapes: Int) -> Int:
    """Parts for tensors without elements: one, so that the tensor is there at all."""
    empty = np.flatnonzero(shapes[:, 0] == 0)
    return np.column_stack([empty, np.zeros((len(empty), 3), dtype=np.int64)])


def _balanced(shard: Int, whole: NDArray[np.bool_], length_bytes: Int, mesh: Mesh) -> Int:
    """The rank that writes each part: its shard's, in the replica, or for a whole tensor the rank, with the least."""
    load = np.zeros((mesh.replicate, mesh.shard), dtype=np.int64)
    rank: Int = shard.copy()
    sharded = np.flatnonzero(~whole)
    if mesh.replicate == 1:
        load[0] = np.bincount(shard[sharded], length_bytes[sharded], minlength=mesh.shard).astype(np.int64)
    else:
        # All shards at once, each its largest part first, then its second largest, and so on.
        sharded = sharded[np.lexsort((-length_bytes[sharded], shard[sharded]))]
        first = np.searchsorted(shard[sharded], np.arange(mesh.shard + 1))
        counts = np.diff(first)
        for turn in range(int(counts.max(initial=0))):
            shards = np.flatnonzero(counts > turn)
            parts = sharded[first[shards] + turn]
            replica = np.argmin(load[:, shards], axis=0)
            rank[parts] = replica * mesh.shard + shards
            load[replica, shards] += length_bytes[parts]
    large = np.flatnonzero(whole)
    least = list(zip(load.ravel().tolist(), range(mesh.ranks), strict=True))
    heapq.heapify(least)
    for part in large[np.argsort(-length_bytes[large], kind="stable")].tolist():
        bytes_so_far, rank[part] = least[0]
        # A tiny tensor costs its archive; without that all counters would gather on one rank.
        heapq.heapreplace(least, (bytes_so_far + int(length_bytes[part]) + 1024, least[0][1]))
    return rank


def _prove_tiling(index: Index, tensors: Int) -> None:
    first = index.first
    sizes = first[tensors + 1] - first[tensors]
    counts = np.concatenate([[0], np.cumsum(sizes)])
    rows: Int | slice = slice(None)
    if len(tensors) != len(index.names):
        rows = np.repeat(first[tensors] - counts[:-1], sizes) + np.arange(counts[-1])
    inexact = inexact_tensors(index.padded_shapes[tensors], counts, index.offsets[rows], index.sizes[rows])
    if not len(inexact):
        return
    details = []
    for number in tensors[inexact[:_FAULTS_NAMED]].tolist():
        boxes = [index.box(row) for row in range(int(first[number]), int(first[number + 1]))]
        details.append(f"{index.names[number]}: {tiling_fault(index.shapes[number], boxes)}")
    more = len(inexact) - len(details)
    raise CheckpointUnsound(
        details[0].partition(": ")[2],
        path=index.folder,
        key=index.names[int(tensors[inexact[0]])],
        hint="part of the ranks did not take part in the save, or files are mixed: use another step",
        details=[*details[1:], *([f"and {more} more"] if more else [])],
    )


def _pieces(index: Index, layout: Layout) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Pairs of chunk and wanted box that share elements, sorted by wanted box and place in it."""
    # A tensor without elements may have any number of rows, and nothing is looked up in them.
    rows = np.where((index.padded_shapes > 0).all(axis=1), index.padded_shapes[:, 0], 0)
    base = np.concatenate([[0], np.cumsum(rows + 1)])
    # Only the tensors that are wanted are proven to be sound: a chunk that sticks out of another reaches into these.
    is_wanted = np.zeros(len(index.names), dtype=bool)
    is_wanted[layout.tensor] = True
    stored = np.flatnonzero((index.sizes > 0).all(axis=1) & is_wanted[index.owner])
    start = base[index.owner[stored]] + index.offsets[stored, 0]
    if not (start[1:] > start[:-1]).all():
        order = np.lexsort((*index.offsets[stored, :0:-1].T, start))
        stored, start = stored[order], start[order]
    # Ends are in order as well in every grid. Where they are not, this only lets in candidates that fall out below.
    end = np.maximum.accumulate(start + index.sizes[stored, 0]) if len(stored) else start
    wanted_start = base[layout.tensor] + layout.offsets[:, 0]
    low = np.searchsorted(end, wanted_start, side="right")
    high = np.searchsorted(start, wanted_start + layout.sizes[:, 0], side="left")
    counts = np.where((layout.sizes > 0).all(axis=1), np.maximum(0, high - low), 0)
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, side="right")))
        wanted = np.repeat(np.arange(begin, stop), counts[begin:stop])
        inside = np.arange(len(wanted)) - np.repeat(ends[begin:stop] - counts[begin:stop] - done, counts[begin:stop])
        source = stored[low[wanted] + inside]
        shared_low = np.maximum(index.offsets[source], layout.offsets[wanted])
        shared_high = np.minimum(
            index.offsets[source] + index.sizes[source], layout.offsets[wanted] + layout.sizes[wanted]
        )
        meets = (shared_high > shared_low).all(axis=1)
        yield source[meets].astype(np.int32), wanted[meets].astype(np.int32)
        begin = stop


def _prove_coverage(index: Index, layout: Layout, plan: Plan) -> None:
    elements = np.zeros(len(plan.source) + 1, dtype=np.int64)
    for begin in range(0, len(plan.source), _PAIRS_AT_ONCE):
        _, sizes = piece_boxes(index, layout, plan, slice(begin, begin + _PAIRS_AT_ONCE))
        elements[begin + 1 : begin + 1 + len(sizes)] = sizes.prod(axis=1)
    np.cumsum(elements, out=elements)
    found = elements[plan.first[1:]] - elements[plan.first[:-1]]
    wrong = np.flatnonzero(found != layout.elements)
    if len(wrong):
        row = int(wrong[0])
        raise UsageError(
            "a wanted box is not a part of its tensor",
            key=index.names[int(layout.tensor[row])],
            expected=f"{int(layout.elements[row])} elements",
            found=f"{int(found[row])} of them stored",
        )
