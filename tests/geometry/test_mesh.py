from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.errors import UsageError
from reshard.geometry.mesh import Mesh, shard_rows


def parts_of(rows: list[int], shards: int) -> list[list[tuple[int, int, int]]]:
    """(shard, first row, rows) of each tensor's parts."""
    parts: list[list[tuple[int, int, int]]] = [[] for _ in rows]
    for tensor, *part in zip(*(column.tolist() for column in shard_rows(np.array(rows), shards)), strict=True):
        parts[tensor].append(tuple(part))
    return parts


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 8, 64])
def test_rows_are_cut_as_torch_chunk_cuts_them(shards: int) -> None:
    rows = list(range(1, 70))
    for count, parts in zip(rows, parts_of(rows, shards), strict=True):
        chunks = torch.chunk(torch.arange(count), shards)
        assert parts == [(shard, int(chunk[0]), len(chunk)) for shard, chunk in enumerate(chunks)]


@pytest.mark.parametrize(
    ("rows", "shards", "sizes"),
    [(5, 4, [2, 2, 1]), (6, 4, [2, 2, 2]), (9, 4, [3, 3, 3]), (10, 4, [3, 3, 3, 1]), (3, 8, [1, 1, 1])],
)
def test_ranks_without_rows_have_no_part(rows: int, shards: int, sizes: list[int]) -> None:
    (parts,) = parts_of([rows], shards)
    assert [count for _, _, count in parts] == sizes


def test_a_tensor_without_rows_has_no_part() -> None:
    assert parts_of([0, 2], 2) == [[], [(0, 0, 1), (1, 1, 1)]]


def test_meshes() -> None:
    assert Mesh.parse("dp_replicate=2,dp_shard=4") == Mesh(4, 2) == Mesh.parse("dp_shard=4, dp_replicate=2")
    assert Mesh(4, 2).ranks == 8 and Mesh(4, 2).axes == {"dp_replicate": 2, "dp_shard": 4}
    assert Mesh.parse("dp_shard=3").axes == {"dp_shard": 3}
    assert Mesh.parse("dp_replicate=3") == Mesh(1, 3)


@pytest.mark.parametrize("text", ["", "dp_shard", "dp_shard=0", "dp_shard=2,dp_shard=2", "tp=2", "dp_shard=²", "4"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--mesh: not a mesh: expected dp_replicate=R,dp_shard=S"):
        Mesh.parse(text)
