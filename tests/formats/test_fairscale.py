"""Shards of fairscale made by hand, as fairseq and metaseq name them and fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue.fairscale import is_fairscale, open_fairscale
from reshard.formats.rescue.flat.layout import FlatUnit
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import open_rank_file
from reshard.formats.rescue.rank_sets import rank_sets
from reshard.storage.byte_ranges import SourceFiles

# 25 elements: 13 and 12, and one of padding, over two ranks.
SHAPES = {"emb": (5, 3), "bias": (7,), "last": (3, 1)}
BEGINS = {"emb": (0, 15), "bias": (15, 22), "last": (22, 25)}


def part(values: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's part; what is past the end is no number."""
    length = -(-len(values) // world)
    padding = torch.full((length * world - len(values),), float("nan"))
    return torch.cat([values, padding])[rank * length :][:length].clone()


def unit_metadata(path: str, shapes: Mapping[str, tuple[int, ...]], padding: int, **others: Any) -> dict[str, Any]:
    content = {
        "names": list(shapes),
        "shapes": [torch.Size(shape) for shape in shapes.values()],
        "numels": [int(np.prod(shape)) for shape in shapes.values()],
        "padding": padding,
    }
    return {"fsdp_path": path, "params": {"flat_param_0": content}, "shared_param_info": [], **others}


def shard(rank: int, world: int, **unit: Any) -> dict[str, Any]:
    """One rank's file: a root unit of 25 elements, buffers, moments."""
    length = -(-25 // world)
    padding = length - max(0, min(25 - rank * length, length))
    state = {
        "step": torch.tensor(9.0),
        "exp_avg": part(torch.arange(100.0, 125.0), rank, world),
        "exp_avg_sq": part(torch.arange(200.0, 225.0), rank, world),
    }
    return {
        "cfg": None,
        "model": {
            "flat_param_0": part(torch.arange(25.0), rank, world),
            "seen": torch.tensor(16777217),
            "half": torch.tensor([1.5], dtype=torch.float16),
        },
        "optimizer_history": [{"num_updates": 9, "lr_scheduler_state": {"best": None}}],
        "last_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0]}]},
        "extra_state": {"train_iterator": {"epoch": 2}},
        "shard_metadata": {
            "param_metadata": [{**unit_metadata("", SHAPES, padding), **unit}],
            "buffer_names": ["seen", "half", "scratch"],
        },
    }


def write(folder: Path, shards: Sequence[Any], pattern: str = "checkpoint_last-shard{}.pt") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(shards):
        torch.save(content, folder / pattern.format(rank))
    return folder


def opened(folder: Path, hints: Hints | None = None) -> Checkpoint:
    checkpoint = open_fairscale(folder, rank_sets(folder.iterdir()), hints or Hints())
    assert list(checkpoint.index.tiling_faults()) == []
    return checkpoint


def values(checkpoint: Checkpoint, key: str) -> list[float]:
    return np.frombuffer(checkpoint.read_array(key).tobytes(), np.float32).tolist()


# Eleven shards and more: 10 comes after 9, not after 1.
@pytest.mark.parametrize("world", [1, 2, 12])
@pytest.mark.parametrize("pattern", ["checkpoint_last-shard{}.pt", "checkpoint_1_500-model_part-0-shard{}.pt"])
def test_shards_are_put_together_without_their_padding(tmp_path: Path, world: int, pattern: str) -> None:
    checkpoint = opened(write(tmp_path / "x", [shard(rank, world) for rank in range(world)], pattern))
    for name, (begin, end) in BEGINS.items():
        assert values(checkpoint, f"model.{name}") == list(range(begin, end))
        assert values(checkpoint, f"optim.state.{name}.exp_avg") == list(range(100 + begin, 100 + end))
        assert values(checkpoint, f"optim.state.{name}.exp_avg_sq") == list(range(200 + begin, 200 + end))
        assert values(checkpoint, f"optim.state.{name}.step") == [9.0]
        assert checkpoint.index.shapes[checkpoint.index.number[f"model.{name}"]] == SHAPES[name]
    dtypes = {name: checkpoint.index.dtypes[checkpoint.index.number[f"model.{name}"]] for name in ("seen", "half")}
    assert dtypes == {"seen": "int64", "half": "float16"}
    assert not any("scratch" in key for key in checkpoint.index.names)
    assert checkpoint.manifest is not None
    assert (checkpoint.manifest.step, checkpoint.manifest.lr, checkpoint.manifest.world.ranks) == (9, [0.5], world)
    assert set(checkpoint.manifest.parts) == {"model", "optimizer", "scheduler", "extra.extra_state", "step"}


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    shards = [shard(rank, 2, shared_param_info=[("emb", "head")]) for rank in range(2)]
    checkpoint = opened(write(tmp_path / "x", shards))
    assert values(checkpoint, "model.head") == values(checkpoint, "model.emb") == list(range(15))
    assert "optim.state.head.exp_avg" not in checkpoint.index.names


def test_parameters_by_themselves_each_have_their_padding(tmp_path: Path) -> None:
    """flatten_parameters=False: the second rank of a parameter of one element has padding alone."""
    shards = []
    for rank in range(2):
        params = {}
        for name, shape in {"w": (3, 3), "one": (1,)}.items():
            content = unit_metadata("", {name: shape}, padding=rank)["params"]["flat_param_0"]
            params[name] = content
        model = {"block.w": part(torch.arange(9.0), rank, 2), "block.one": part(torch.ones(1), rank, 2)}
        metadata = {"param_metadata": [{"fsdp_path": "block", "params": params}], "buffer_names": []}
        shards.append({"model": model, "fsdp_metadata": metadata, "last_optimizer_state": None})
    checkpoint = opened(write(tmp_path / "x", shards))
    assert values(checkpoint, "model.block.w") == list(range(9))
    assert values(checkpoint, "model.block.one") == [1.0]
    assert checkpoint.manifest is not None and set(checkpoint.manifest.parts) == {"model", "step"}


@pytest.mark.parametrize("rows", [2, 4])
def test_shapes_of_another_sum_are_refused_with_both_numbers(tmp_path: Path, rows: int) -> None:
    shards = [shard(rank, 2) for rank in range(2)]
    for content in shards:
        flat = content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]
        flat["shapes"][-1], flat["numels"][-1] = torch.Size((rows, 1)), rows
    with pytest.raises(CheckpointUnsound, match=rf"flat_param_0: 25 elements in .*, {22 + rows} in the shapes"):
        opened(write(tmp_path / "x", shards))


def test_numels_that_are_not_those_of_the_shapes_are_refused(tmp_path: Path) -> None:
    shards = [shard(rank, 2) for rank in range(2)]
    shards[1]["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["numels"][0] = 16
    with pytest.raises(CheckpointUnsound, match=r"shard1.pt: rank 1: metadata .* 16 elements of \(5, 3\) in emb"):
        opened(write(tmp_path / "x", shards))


def test_the_last_shards_are_missed_though_no_name_tells_their_number(tmp_path: Path) -> None:
    shards = [shard(rank, 4) for rank in range(3)]
    with pytest.raises(CheckpointUnsound, match=r"21 elements in .*, 25 in the shapes; are there files of all ranks"):
        opened(write(tmp_path / "x", shards))


def test_shards_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    other = shard(1, 2)
    other["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["names"][0] = "other"
    with pytest.raises(CheckpointUnsound, match="flat_param_0: rank 1: the ranks disagree"):
        opened(write(tmp_path / "x", [shard(0, 2), other]))


def test_an_optimizer_of_rank_0_alone_says_what_it_covers(tmp_path: Path) -> None:
    shards = [shard(rank, 2) for rank in range(2)]
    shards[1]["last_optimizer_state"] = None
    with pytest.raises(CheckpointUnsound, match="covers 13 of 25 elements, 1 of 2 ranks missing"):
        opened(write(tmp_path / "x", shards))


def without_metadata(folder: Path) -> Path:
    shards = [shard(rank, 2) for rank in range(2)]
    for content in shards:
        del content["shard_metadata"]
    return write(folder, shards)


def test_without_metadata_it_says_what_it_needs(tmp_path: Path) -> None:
    folder = without_metadata(tmp_path / "x")
    with pytest.raises(UsageError, match=r"need shard_metadata, .* found flat_param_0; .*--layout"):
        opened(folder, Hints(optimizer="named"))
    checkpoint = opened(folder)
    assert values(checkpoint, "model.flat_param_0")[:25] == list(range(25))
    assert "--layout" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {}, "shard_metadata": {"param_metadata": []}}, True),
        ({"model": {}, "fsdp_metadata": {"param_metadata": []}}, True),
        ({"model": {"decoder.flat_param_0": torch.ones(3)}}, True),
        ({"model": {"_flat_param": torch.ones(3)}}, False),
        ({"model": {"w": torch.ones(3)}, "shard_metadata": None}, False),
        ({"w": torch.ones(3)}, False),
        ([torch.ones(3)], False),
    ],
)
def test_it_is_told_by_its_content(tmp_path: Path, content: Any, expected: bool) -> None:
    torch.save(content, tmp_path / "x-shard0.pt")
    assert is_fairscale(open_rank_file(SourceFiles([tmp_path / "x-shard0.pt"]), 0).root) is expected


def test_a_layout_takes_the_place_of_the_metadata(tmp_path: Path) -> None:
    unit = FlatUnit("", tuple(SHAPES), tuple(SHAPES.values()), (15, 7, 3), (False,) * 3, (("head", "emb"),))
    checkpoint = opened(without_metadata(tmp_path / "x"), Hints(units={"": unit}))
    for name, (begin, end) in BEGINS.items():
        assert values(checkpoint, f"model.{name}") == list(range(begin, end))
        assert values(checkpoint, f"optim.state.{name}.exp_avg") == list(range(100 + begin, 100 + end))
    assert values(checkpoint, "model.head") == list(range(15))
    longer = FlatUnit("", tuple(SHAPES), ((5, 3), (7,), (5, 1)), (15, 7, 5), (False,) * 3)
    with pytest.raises(UsageError, match=r"expected 13 elements a rank, or up to 26 in all, found 27"):
        opened(tmp_path / "x", Hints(units={"": longer}))


def test_what_it_cannot_put_together_is_refused(tmp_path: Path) -> None:
    experts = [shard(rank, 2, no_broadcast_optim_state=True) for rank in range(2)]
    with pytest.raises(UsageError, match="parameters of its own"):
        opened(write(tmp_path / "experts", experts))
    halves = tmp_path / "halves"
    for half in range(2):
        write(halves, [shard(rank, 2) for rank in range(2)], f"checkpoint_3-model_part-{half}-shard{{}}.pt")
    with pytest.raises(UsageError, match=r"tensor-parallel .*|several parts of a model"):
        opened(halves)
    foreign = write(tmp_path / "foreign", [shard(0, 2), {"model": {"w": torch.ones(2)}}])
    with pytest.raises(CheckpointUnsound, match=r"shard1.pt: not a file of fairscale"):
        opened(foreign)
