"""What a live FSDP1 model saves rank by rank, read back without it, against the same run without FSDP."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue.fsdp_ranks import open_ranks
from reshard.formats.rescue.hints import Hints, read_layout
from reshard.formats.rescue.rank_sets import rank_sets
from reshard.train import describe_flat as describing
from reshard.train.describe_flat import describe_flat
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Odd sizes, a parameter of one element, a buffer; a head that is tied or a layer of its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.emb = nn.Embedding(7, 3)
        self.first = Block(3)
        self.second = Block(3)
        self.head = nn.Linear(3, 7, bias=not tied)
        if tied:
            self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.tensor(16777217))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.emb(tokens) * self.scale)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(12).reshape(2, 6) % 7
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def reference(tied: bool) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint of the run should have, by our keys."""
    model = Model(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            expected[f"optim.state.{name}.{slot}"] = value
    return expected


def save(folder: str, tied: bool, use_orig_params: bool, kind: str) -> list[list[str]]:
    """Runs on every rank; the names of what the optimizer was given."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {}
    if kind == "verl-hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
        options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    elif kind == "verl":
        options = {"device_mesh": init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))}
    model = FullyShardedDataParallel(
        Model(tied),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        **options,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    if kind.startswith("verl"):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
        torch.save(model.state_dict(), f"{folder}/model_world_size_{world}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), f"{folder}/optim_world_size_{world}_rank_{rank}.pt")
    else:
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{folder}/state_rank{rank}_of_{world}.pt")
    layout = describe_flat(model, f"{folder}/layout.json")
    assert layout == json.loads(json.dumps(layout))
    dist.barrier()
    return [[name for name, _ in model.named_parameters()]]


def opened(folder: Path, order: list[list[str]]) -> Checkpoint:
    hints = Hints(units=read_layout(folder / "layout.json"), param_order=tuple(map(tuple, order)), optimizer="named")
    return open_ranks(folder, rank_sets(folder.glob("*.pt")), hints)


def differing(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> list[str]:
    faults = [f"{key}: missing" for key in expected.keys() - set(checkpoint.index.names)]
    for key in checkpoint.index.names:
        if key not in expected:
            faults.append(f"{key}: extra")
        elif checkpoint.index.shapes[checkpoint.index.number[key]] != tuple(expected[key].shape):
            faults.append(f"{key}: another shape")
        elif checkpoint.read_array(key).tobytes() != expected[key].detach().numpy().tobytes():
            faults.append(f"{key}: other elements")
    return faults + [str(fault) for fault in checkpoint.index.tiling_faults()]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("kind", "world", "tied"),
    [("local", 4, True), ("local", 2, False), ("verl", 4, False), ("verl-hsdp", 4, False)],
)
def test_reads_what_fsdp1_saves(tmp_path: Path, kind: str, world: int, tied: bool, use_orig_params: bool) -> None:
    order = run_ranks(world, save, str(tmp_path), tied, use_orig_params, kind)[0]
    checkpoint = opened(tmp_path, order)
    assert differing(checkpoint, reference(tied)) == []
    assert checkpoint.manifest is not None and checkpoint.manifest.step == 2


def test_only_a_model_under_fsdp1_can_be_described() -> None:
    with pytest.raises(ValueError, match="not a model under FullyShardedDataParallel"):
        describe_flat(Model(tied=False))


def test_the_description_needs_nothing_of_ours() -> None:
    tree = ast.parse(Path(describing.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in imported if name} <= {
        "__future__",
        "json",
        "os",
        "pathlib",
        "torch",
        "typing",
    }
    ast.parse(Path(describing.__file__).read_text(), feature_version=(3, 8))
