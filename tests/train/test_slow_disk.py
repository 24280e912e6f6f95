"""A file system that stalls for one rank, longer than the process group's own timeout."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from reshard import Checkpointer, TrainState, dcp, load_state

TIMEOUT_S = 1.0
STALL_S = 2.5


def stalling(call: Any) -> Any:
    def wait_first(*args: Any) -> Any:
        time.sleep(STALL_S)
        return call(*args)

    return wait_first


def impatient(folder: Path) -> int:
    """Puts a process group in place that gives up after a second."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    rendezvous = f"file://{folder}/impatient"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )
    return rank


def save_and_load(folder: str, is_async: bool) -> Any:
    rank = impatient(Path(folder))
    model = nn.Linear(64, 64)
    fully_shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    state = TrainState(model)
    checkpointer = Checkpointer(f"{folder}/run", state, interval=1, async_save=is_async)
    if rank == 1:
        os.pwrite, os.preadv = stalling(os.pwrite), stalling(os.preadv)
    checkpointer.step()
    checkpointer.wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    load_state(f"{folder}/run", state)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/plain")
    return {float(parameter.to_local().mean()) for parameter in model.parameters()}


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_other_ranks_wait_for_a_slow_disk(tmp_path: Path, is_async: bool) -> None:
    assert run_ranks(2, save_and_load, str(tmp_path), is_async) == [{3.0}, {3.0}]
