"""Rows by placements, against torch.chunk and the DTensors that torch itself makes, FSDP2 over TP among them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from legacy import fake_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.geometry.placements import Cut, rows_after


def chunked(rows: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """As torch.chunk, with the parts that it leaves out."""
    pieces = list(rows.chunk(parts)) if len(rows) else []
    return pieces + [rows[:0]] * (parts - len(pieces))


def rows_of(length: int, cuts: list[Cut]) -> list[int]:
    found = rows_after(length, cuts)
    assert found is not None
    return list(range(found[0], sum(found)))


@given(st.integers(0, 50), st.lists(st.integers(1, 6), max_size=3))
def test_plain_cuts_are_chunks_of_chunks(length: int, axes: list[int]) -> None:
    for parts in itertools.product(*map(range, axes)):
        expected = torch.arange(length)
        for axis, part in zip(axes, parts, strict=True):
            expected = chunked(expected, axis)[part]
        assert rows_of(length, [Cut(*cut) for cut in zip(axes, parts, strict=True)]) == expected.tolist()


@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_strided_cuts_come_after_those_behind_them(length: int, dp: int, ep: int, tp: int) -> None:
    for place in itertools.product(range(dp), range(ep), range(tp)):
        expected = torch.arange(length)
        for axis, part in ((tp, place[2]), (ep, place[1]), (dp, place[0])):
            expected = chunked(expected, axis)[part]
        cuts = [Cut(dp, place[0], ep * tp), Cut(ep, place[1], tp), Cut(tp, place[2])]
        assert rows_of(length, cuts) == expected.tolist()


def test_parts_without_rows_lie_at_the_end() -> None:
    assert [rows_after(6, [Cut(4, part)]) for part in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 0)]
    assert rows_after(3, [Cut(2, 1, 2), Cut(2, 1)]) == (3, 0)
    assert rows_after(0, [Cut(3, 0)]) == (0, 0)
    assert rows_after(5, []) == (0, 5)


def test_stripes_that_no_axis_made_do_not_follow_one_another() -> None:
    assert rows_after(8, [Cut(2, 0, 2)]) is None
    assert rows_after(8, [Cut(2, 0, 2), Cut(4, 1)]) is None
    assert rows_after(8, [Cut(2, 0), Cut(2, 1, 2)]) is None
    assert rows_after(8, [Cut(1, 0, 2)]) == (0, 8)


def test_a_dim_beyond_memory_costs_nothing() -> None:
    assert rows_after(1 << 50, [Cut(4, 3), Cut(2, 1)]) == (7 << 47, 1 << 47)


def cuts_of(tensor: DTensor, mesh: DeviceMesh, dim: int) -> list[Cut]:
    # The mesh of the tensor may be an equal one of another rank: torch keeps them beyond a process group.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return [
        Cut(mesh.size(axis), coordinate[axis], getattr(placement, "split_factor", 1))
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
    ]


def of_ranks(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    for rank in range(torch.Size(shape).numel()):
        with fake_rank(rank, torch.Size(shape).numel()):
            yield init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


@pytest.mark.parametrize("length", [1, 3, 6, 7, 8])
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ],
)
def test_what_torch_distributes(length: int, shape: tuple[int, ...], placements: list[Any]) -> None:
    for mesh in of_ranks(shape):
        tensor = distribute_tensor(torch.arange(length), mesh, placements, src_data_rank=None)
        assert rows_of(length, cuts_of(tensor, mesh, 0)) == tensor.to_local().tolist()


# Of 7 rows on 3 x 2, the third rank of the first half has none, although each half has three parts.
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("length", [3, 5, 6, 7, 8, 13])
def test_what_fsdp_makes_of_tensor_parallel_rows(length: int, dp: int, tp: int) -> None:
    whole = torch.arange(float(length))[:, None]
    seen: list[float] = []
    for mesh in of_ranks((dp, tp)):
        module = torch.nn.Linear(1, length, bias=False)
        place = mesh["tp"].get_coordinate()[0]
        local = chunked(whole, tp)[place]
        parallel = DTensor.from_local(
            local, mesh["tp"], [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        module.weight = torch.nn.Parameter(parallel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fully_shard(module, mesh=mesh["dp"])
        tensor = module.weight
        assert isinstance(tensor, DTensor) and isinstance(tensor.placements[0], _StridedShard)
        held = tensor.to_local().flatten().tolist()
        assert rows_of(length, cuts_of(tensor, mesh, 0)) == held
        seen += held
    assert sorted(seen) == list(range(length))
