"""Which files belong together: told by their names, complete or refused, whatever the order of the folder."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from legacy import sharded, write_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import reshard
from reshard.errors import CheckpointNotFound, CheckpointUnsound, ReshardError, UsageError
from reshard.formats.rescue.rank_sets import rank_of, rank_sets, require_complete
from reshard.verify.check.run import check

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "kind", "rank"),
    [
        ("model_world_size_8_rank_3.pt", "model_world_size_8_rank_*.pt", 3),
        ("shard_rank2_of_4.pt", "shard_rank*_of_4.pt", 2),
        ("checkpoint_last-shard12.pt", "checkpoint_last-shard*.pt", 12),
        ("model_final.rank_15.pth", "model_final.rank_*.pth", 15),
        ("Rank-007", "Rank-*", 7),
        ("rank_1_step_5.pt", "rank_*_step_5.pt", 1),
    ],
)
def test_a_name_with_a_rank(name: str, kind: str, rank: int) -> None:
    assert rank_of(name) == (kind, rank)


@pytest.mark.parametrize(
    "name", ["model.pt", "franken5.pt", "rank_.pt", "rank_1a.pt", "pytorch_model-00001-of-00002.bin", "ranks_2x.pt"]
)
def test_a_name_without_one(name: str) -> None:
    assert rank_of(name) is None


def write(folder: Path, names: Sequence[str]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    empty = {"state": {}, "param_groups": []}
    for name in names:
        torch.save(empty if name.startswith("optim") else {"w": torch.ones(1)}, folder / name)
    return [folder / name for name in names]


def verl(world: int, ranks: Sequence[int] | None = None) -> list[str]:
    return [
        f"{kind}_world_size_{world}_rank_{rank}.pt"
        for kind in ("model", "optim")
        for rank in (range(world) if ranks is None else ranks)
    ]


def test_sets_are_by_kind_and_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    names = verl(12)
    random.Random(0).shuffle(names)
    sets = rank_sets(write(tmp_path, names))
    assert [(found.kind, found.ranks) for found in sets] == [
        ("model_world_size_12_rank_*.pt", 12),
        ("optim_world_size_12_rank_*.pt", 12),
    ]
    assert all(list(found.files) == list(range(12)) for found in sets)
    assert require_complete(sets, tmp_path) == 12


def test_logs_and_other_files_with_ranks_are_passed_over(tmp_path: Path) -> None:
    paths = write(tmp_path, verl(2))
    for name in ("stdout_rank_0.log", "rank_7.txt", "trace_rank1.json", ".model_world_size_2_rank_5.pt", "rank_9"):
        (tmp_path / name).write_text("" if name.endswith("log") else "text")
        paths.append(tmp_path / name)
    assert [found.kind[:5] for found in rank_sets(paths)] == ["model", "optim"]
    # Told by its name, a damaged file is not passed over.
    (tmp_path / "optim_world_size_2_rank_1.pt").write_text("text")
    with pytest.raises(CheckpointUnsound, match=r"optim_world_size_2_rank_1\.pt: not a file of torch\.save"):
        reshard.open_checkpoint(tmp_path)


def refused(folder: Path, path: Path | None = None) -> ReshardError:
    """Why it cannot be opened; no tensor was there to be read."""
    with pytest.raises(ReshardError) as raised:
        reshard.open_checkpoint(path or folder)
    return raised.value


def test_missing_and_empty_ranks_are_listed_together(tmp_path: Path) -> None:
    write(tmp_path, verl(4, [0, 2]))
    (tmp_path / "model_world_size_4_rank_2.pt").write_bytes(b"")
    error = refused(tmp_path)
    assert isinstance(error, CheckpointUnsound)
    message = str(error)
    assert "world size 4: model_world_size_4_rank_*.pt: missing ranks 1,3 of 4" in message
    assert "model_world_size_4_rank_*.pt: rank 2 is empty (0 bytes)" in message
    assert "optim_world_size_4_rank_*.pt: missing ranks 1,3 of 4" in message
    assert "name the folders of the other nodes" in message
    faults = check(tmp_path).faults
    assert any("missing ranks 1,3" in fault.what for fault in faults)
    assert any("rank 2 is empty" in str(fault) for fault in faults)


def test_a_stray_file_of_another_world_asks_which(tmp_path: Path) -> None:
    write(tmp_path, verl(4))
    write(tmp_path, ["model_world_size_2_rank_0.pt"])
    error = refused(tmp_path)
    assert isinstance(error, UsageError)
    assert "several world sizes" in str(error) and "found 2, 4" in str(error)
    with reshard.open_checkpoint(tmp_path / "model_world_size_4_rank_3.pt") as checkpoint:
        assert checkpoint.manifest is not None and checkpoint.manifest.world.ranks == 4
    stray = refused(tmp_path, tmp_path / "model_world_size_2_rank_0.pt")
    assert "model_world_size_2_rank_*.pt: missing ranks 1 of 2" in str(stray)


def test_naming_a_file_chooses_its_world(tmp_path: Path) -> None:
    for world in (2, 3):
        weight = torch.full((6,), float(world))

        def content(mesh: DeviceMesh, rank: int, weight: torch.Tensor = weight) -> Mapping[str, object]:
            return {"model_world_size_{world}_rank_{rank}.pt": {"w": sharded(weight, mesh, [Shard(0)])}}

        write_ranks(tmp_path, world, content)
    for world in (2, 3):
        with reshard.open_checkpoint(tmp_path / f"model_world_size_{world}_rank_1.pt") as checkpoint:
            assert checkpoint.read("model.w").tolist() == [world] * 6


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    write(tmp_path, verl(2))
    (tmp_path / "optim_world_size_2_rank_1.pt").write_bytes(LFS_POINTER)
    assert re.search(r"rank 1 is a Git LFS pointer.*git lfs pull", str(refused(tmp_path)))
    for name in verl(2):
        (tmp_path / name).write_bytes(LFS_POINTER)
    assert re.search(r"model_world_size_2_rank_0\.pt: a Git LFS pointer.*git lfs pull", str(refused(tmp_path)))


def test_ranks_beyond_the_world(tmp_path: Path) -> None:
    write(tmp_path, [*verl(2), "model_world_size_2_rank_5.pt"])
    assert "model_world_size_2_rank_*.pt: ranks 5, where there are 2" in str(refused(tmp_path))


def test_without_a_world_in_the_names_all_kinds_have_the_ranks_of_the_largest(tmp_path: Path) -> None:
    write(tmp_path, ["a_rank_0.pt", "a_rank_1.pt", "b_rank_0.pt"])
    assert "b_rank_*.pt: missing ranks 1 of 2" in str(refused(tmp_path))


def test_many_missing_ranks_are_not_all_listed(tmp_path: Path) -> None:
    write(tmp_path, ["model_world_size_512_rank_0.pt"])
    assert "missing ranks 1,2,3,4,5,6,7,8 and 503 more of 512" in str(refused(tmp_path))


@pytest.mark.parametrize("name", ["model_rank_99999999999.pt", "model_world_size_99999999999_rank_0.pt"])
def test_a_number_that_is_no_rank(tmp_path: Path, name: str) -> None:
    write(tmp_path, [name])
    assert "more ranks than any job has" in str(refused(tmp_path))


def rows(weight: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return sharded(weight, mesh, [Shard(0)])


@pytest.mark.parametrize("world", [12, pytest.param(110, marks=pytest.mark.slow)])
def test_ranks_are_numbers_whatever_the_order_of_the_folder(tmp_path: Path, world: int) -> None:
    weight = torch.arange(3.0 * world).reshape(-1, 1)

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, object]:
        state = {0: {"step": torch.tensor(5.0), "exp_avg": rows(-weight, mesh)}}
        return {
            "model_rank_{rank}.pt": {"w": rows(weight, mesh), "rank_buffer": torch.tensor(7)},
            "optim_rank_{rank}.pt": {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]},
        }

    write_ranks(tmp_path / "made", world, content)
    names = [path.name for path in (tmp_path / "made").iterdir()]
    random.Random(1).shuffle(names)
    (tmp_path / "x").mkdir()
    for name in names:
        (tmp_path / "made" / name).rename(tmp_path / "x" / name)
    with reshard.open_checkpoint(tmp_path / "x") as checkpoint:
        assert torch.equal(checkpoint.read("model.w"), weight)
        assert torch.equal(checkpoint.read("optim.state.w.exp_avg"), -weight)
        assert checkpoint.manifest is not None and checkpoint.manifest.world.ranks == world


def over_nodes(folder: Path) -> tuple[Path, Path]:
    """Each node has the files of its own ranks."""

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, object]:
        return {"model_world_size_{world}_rank_{rank}.pt": {"w": rows(torch.arange(9.0), mesh)}}

    write_ranks(folder / "node0", 4, content)
    (folder / "node1").mkdir()
    for rank in (2, 3):
        name = f"model_world_size_4_rank_{rank}.pt"
        (folder / "node0" / name).rename(folder / "node1" / name)
    return folder / "node0", folder / "node1"


def test_files_on_the_disks_of_several_nodes(tmp_path: Path) -> None:
    first, second = over_nodes(tmp_path)
    for one, other in ((first, second), (second, first)):
        with reshard.open_checkpoint(one, [other]) as checkpoint:
            assert checkpoint.read("model.w").tolist() == list(range(9))
    reshard.convert([first, second], tmp_path / "made", to="torch", only="model")
    assert torch.load(tmp_path / "made" / "pytorch_model.bin")["w"].tolist() == list(range(9))
    assert check(first, [second], deep=True).faults == []
    assert "missing ranks 2,3 of 4" in str(refused(first))


def test_one_rank_in_two_folders(tmp_path: Path) -> None:
    first, second = over_nodes(tmp_path)
    name = "model_world_size_4_rank_2.pt"
    (first / name).write_bytes((second / name).read_bytes())
    with pytest.raises(UsageError, match="two files of one rank") as raised:
        reshard.open_checkpoint(first, [second])
    assert str(first / name) in str(raised.value) and str(second / name) in str(raised.value)
    # Logs may be on every node.
    (first / name).unlink()
    for folder in (first, second):
        (folder / "log_rank_0.txt").write_text("text")
    reshard.open_checkpoint(first, [second]).close()


def test_a_folder_of_logs_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "stdout_rank_0.log").write_text("text")
    assert isinstance(refused(tmp_path), CheckpointNotFound)
