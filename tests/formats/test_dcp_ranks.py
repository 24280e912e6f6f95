from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard.errors import CheckpointUnsound, ReshardError, UnsafePickle
from reshard.formats import dcp_metadata
from reshard.formats.opening import open_checkpoint

WORLD = 3


def whole() -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    return {
        "model": {
            "rows": torch.randn(7, 4, generator=chance),
            # Ranks 1 and 2 own no rows of it.
            "one": torch.randn(1, 3, generator=chance),
            "columns": torch.randn(4, 9, generator=chance),
        },
        "step": torch.tensor(5.0),
        "seen": torch.arange(4),
        "lr": 0.1,
    }


def save(folder: str, own: bool) -> None:
    """Saves the state on each rank by itself; ``own`` adds what only one rank has, or each has with other bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = whole()
    for name, tensor in state["model"].items():
        state["model"][name] = distribute_tensor(tensor, mesh, [Shard(1 if name == "columns" else 0)])
    if own:
        rank = dist.get_rank()
        state |= {f"only.{rank}": torch.full((2,), rank), "rank": torch.tensor(rank), "mine": f"rank {rank}"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, use_collectives=False)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    run_ranks(WORLD, save, str(folder), True)
    return folder


@pytest.fixture
def copied(stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock, tmp_path / "copied"))


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    return tensors | {name: state[name] for name in ("step", "seen")}


def test_all_ranks_are_one_checkpoint(stock: Path) -> None:
    assert not (stock / ".metadata").exists()
    with open_checkpoint(stock) as checkpoint:
        assert checkpoint.format == "dcp"
        for name, tensor in flat(whole()).items():
            assert torch.equal(checkpoint.read(name), tensor), name
        assert torch.equal(
            checkpoint.read("model.columns", (slice(1, 3), slice(2, 8))), whole()["model"]["columns"][1:3, 2:8]
        )
        assert checkpoint.read("only.2").tolist() == [2, 2]
        assert len(checkpoint.index.tensor("model.rows").chunks) == WORLD
        assert checkpoint.paths["model.rows"] == ("model", "rows")
        assert checkpoint.index.objects.keys() == {"lr", "mine"}
        assert checkpoint.metadata_files == ("__0.metadata", "__1.metadata", "__2.metadata", "reshard.json")
        assert not list(checkpoint.index.tiling_faults())


def test_the_lowest_rank_counts_and_the_others_are_replicas(stock: Path) -> None:
    with open_checkpoint(stock) as checkpoint:
        assert checkpoint.read("rank").item() == 0
        assert checkpoint.index.objects["mine"].file == "__0_0.distcp"
        index = checkpoint.index
        copies = [
            (index.files[file], start)
            for owner, _, file, start in index.replicas.tolist()
            if index.names[owner] == "seen"
        ]
        assert [file for file, _ in copies] == ["__1_0.distcp", "__2_0.distcp"]
        for rank, (file, start) in enumerate(copies, 1):
            recorded = dcp_metadata.read_file(stock / f"__{rank}.metadata").index.tensor("seen").chunks[0]
            assert (recorded.file, recorded.start_bytes) == (file, start)


def test_every_byte_range_of_the_ranks_is_known(stock: Path) -> None:
    with open_checkpoint(stock) as checkpoint:
        found = checkpoint.index.extents()
    for rank in range(WORLD):
        for file, extents in dcp_metadata.read_file(stock / f"__{rank}.metadata").index.extents().items():
            objects = {"lr", "mine"} if rank else set()
            assert [extent for extent in extents if extent.key not in objects] == found[file]


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_did_not_finish(copied: Path, rank: int) -> None:
    (copied / f"__{rank}.metadata").unlink()
    with pytest.raises(
        CheckpointUnsound, match=rf"__{rank}\.metadata: rank {rank}: missing: expected one for each of the"
    ):
        open_checkpoint(copied)


def test_nothing_is_left_of_a_rank(copied: Path) -> None:
    for path in copied.glob("__2*"):
        path.unlink()
    with pytest.raises(CheckpointUnsound, match=r"copied: model\.rows: the chunks of its 2 ranks .*no chunk") as caught:
        open_checkpoint(copied)
    assert any(detail.startswith("model.columns: ") for detail in caught.value.details)


def test_a_rank_of_another_save(copied: Path, tmp_path: Path) -> None:
    run_ranks(2, save, str(tmp_path / "two"), False)
    for path in (tmp_path / "two").glob("__1*"):
        shutil.copy(path, copied)
    with pytest.raises(
        CheckpointUnsound, match=r"model\.rows: the chunks of its 3 ranks do not hold every element once"
    ):
        open_checkpoint(copied)


def save_other(folder: str, key: str, value: Any) -> None:
    rank = dist.get_rank()
    dcp.save({key: value if rank else torch.zeros(3)}, checkpoint_id=folder, use_collectives=False)


@pytest.mark.parametrize("value", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), "an object"])
def test_ranks_that_disagree(tmp_path: Path, value: Any) -> None:
    run_ranks(2, save_other, str(tmp_path), "w", value)
    with pytest.raises(CheckpointUnsound, match=r"__1\.metadata: w: .*(disagree|another object)"):
        open_checkpoint(tmp_path)


def test_nodes_with_disks_of_their_own(copied: Path, tmp_path: Path) -> None:
    other = tmp_path / "node1"
    other.mkdir()
    for path in copied.glob("__2*"):
        shutil.move(path, other)
    with open_checkpoint(copied, also=[other]) as checkpoint:
        assert torch.equal(checkpoint.read("model.rows"), whole()["model"]["rows"])


def test_the_one_metadata_counts_where_there_is_one(copied: Path) -> None:
    shutil.copy(copied / "__0.metadata", copied / ".metadata")
    (copied / "__1.metadata").write_bytes(b"")
    with open_checkpoint(copied) as checkpoint:
        assert len(checkpoint.index.tensor("model.rows").chunks) == 1


def test_a_rank_that_would_run_code(copied: Path) -> None:
    (copied / "__1.metadata").write_bytes(b"cposix\nsystem\n(X\1\0\0\0xtR.")
    with pytest.raises(UnsafePickle, match=r"__1\.metadata: the pickle names posix\.system"):
        open_checkpoint(copied)


def test_mutated_and_truncated_metadata_raise_only_our_errors(copied: Path) -> None:
    chance = random.Random(0)
    path = copied / "__1.metadata"
    original = path.read_bytes()
    for turn in range(400):
        content = bytearray(original)
        if turn % 4:
            content[chance.randrange(len(content))] = chance.randrange(256)
        else:
            del content[chance.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            open_checkpoint(copied).close()
        except ReshardError as error:
            assert os.fspath(copied) in str(error).splitlines()[0]
