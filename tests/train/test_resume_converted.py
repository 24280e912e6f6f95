"""A run that only its own four ranks could go on with, converted, and gone on with under FSDP2 on three."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import reshard
from reshard import TrainState
from reshard.errors import ReshardError

SAVED_AT, STEPS = 3, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.mix = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


def build() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 5), Block(), Block(), nn.Linear(5, 1))


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.97), weight_decay=0.2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> list[float]:
    """Every rank sees the same batch, so that the mean over ranks is what one process gets."""
    losses = []
    for step in range(first, last):
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.prod(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def save_flat(folder: str, use_orig_params: bool) -> list[float]:
    policy = ModuleWrapPolicy({Block})
    model = FSDP(build(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer, scheduler = optimizer_of(model)
    losses = train(model, optimizer, scheduler, 0, SAVED_AT)
    reshard.describe_flat(model, f"{folder}/layout.json" if dist.get_rank() == 0 else None)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
        }
    torch.save(state, f"{folder}/shard_rank{dist.get_rank()}_of_{dist.get_world_size()}.pt")
    return losses + train(model, optimizer, scheduler, SAVED_AT, STEPS)


def go_on(folder: str) -> list[float]:
    model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer, scheduler = optimizer_of(model)
    state = TrainState(model, optimizer, scheduler)
    with pytest.raises(ReshardError, match="rng"):
        reshard.load_state(folder, state)
    report = reshard.load_state(folder, state, allow_missing=["rng"])
    assert report.step == SAVED_AT == state.step
    return train(model, optimizer, scheduler, SAVED_AT, STEPS)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_the_losses_go_on(tmp_path: Path, use_orig_params: bool) -> None:
    legacy = tmp_path / "legacy"
    legacy.mkdir()
    losses = run_ranks(4, save_flat, str(legacy), use_orig_params)
    reference = train(model := build(), *optimizer_of(model), 0, STEPS)
    torch.testing.assert_close(losses, [reference] * 4, rtol=1e-5, atol=1e-6)

    # The optimizer numbers what it was given: flat parameters, or the parameters themselves.
    order = tmp_path / "order.json"
    names = [name for name, _ in build().named_parameters()]
    order.write_text(json.dumps(names if use_orig_params else ["_flat_param", "1._flat_param", "2._flat_param"]))
    made = tmp_path / f"step-{SAVED_AT}"
    reshard.convert(legacy, made, world_size=2, layout=legacy / "layout.json", param_order=order)
    for resumed in run_ranks(3, go_on, str(made)):
        torch.testing.assert_close(resumed, reference[SAVED_AT:], rtol=1e-5, atol=1e-6)


def save_sharded(folder: str) -> None:
    """DTensors of each rank, with the names of the parameters: all that a resume needs."""
    model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer, scheduler = optimizer_of(model)
    train(model, optimizer, scheduler, 0, SAVED_AT)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.save(model_state, f"{folder}/model_world_size_{ranks}_rank_{rank}.pt")
    torch.save(optimizer_state, f"{folder}/optim_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"lr_scheduler": scheduler.state_dict()}, f"{folder}/extra_state_world_size_{ranks}_rank_{rank}.pt")


def test_files_of_ranks_are_loaded_without_a_step_in_between(tmp_path: Path) -> None:
    legacy = tmp_path / "global_step_3" / "actor"
    legacy.mkdir(parents=True)
    run_ranks(4, save_sharded, str(legacy))
    reference = train(model := build(), *optimizer_of(model), 0, STEPS)
    for resumed in run_ranks(3, go_on, str(tmp_path)):
        torch.testing.assert_close(resumed, reference[SAVED_AT:], rtol=1e-5, atol=1e-6)
    (legacy / "model_world_size_4_rank_2.pt").unlink()
    for text in run_ranks(2, refused, str(tmp_path)):
        assert "missing ranks 2 of 4" in text


def test_integers_that_could_mean_several_parameters_are_refused(tmp_path: Path) -> None:
    run_ranks(2, save_flat, str(tmp_path), True)
    for text in run_ranks(2, refused, str(tmp_path)):
        assert "--layout" in text or "--param-order" in text


def refused(folder: str) -> str:
    model = build()
    fully_shard(model)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    with pytest.raises(ReshardError) as caught:
        reshard.load_state(folder, TrainState(model, *optimizer_of(model)), allow_missing=["rng"])
    assert all(
        torch.equal(parameter.full_tensor(), tensor)
        for parameter, tensor in zip(model.parameters(), before, strict=True)
    )
    return str(caught.value)
