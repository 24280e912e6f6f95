"""FSDP1 (``FullyShardedDataParallel``): its state as sharded tensors by name, through its public API.

All functions are collective over the model's process group.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


def is_fsdp1(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextlib.contextmanager
def sharded_state(model: torch.nn.Module) -> Iterator[None]:
    """Within it, ``model.state_dict()`` and ``load_state_dict`` speak sharded tensors by original name."""
    with (
        warnings.catch_warnings(),
        FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ),
    ):
        # torch deprecates FSDP1's own entry points in favour of wrappers that step a fresh optimizer.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {fqn: {...}}, "param_groups": [...]}`` in sharded tensors; works on an optimizer without state."""
    with sharded_state(model):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of :func:`optimizer_state`."""
    with sharded_state(model):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(flat)
