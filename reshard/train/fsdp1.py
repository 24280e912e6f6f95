"""FSDP1 (``FullyShardedDataParallel``): its state as sharded tensors by name, through its public API.

All functions are collective over the model's process group.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import (
    FlatParameter,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from reshard.errors import StateMismatch


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


def full_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's whole state dict in the CPU memory of rank 0; on other ranks nothing of it.

    Torch's ``get_model_state_dict`` cannot take a wrapped module with extra state.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # On the CPU an offloaded tensor would be no copy, but a view of memory that is freed with the gathered module.
        offload = any(parameter.device.type != "cpu" for parameter in model.parameters())
        config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state: dict[str, Any] = model.state_dict()
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {fqn: {...}}, "param_groups": [...]}`` in sharded tensors; works on an optimizer without state.

    Raises:
        StateMismatch: the optimizer has only some of the trainable parameters of an FSDP1 unit.
    """
    packed = optimizer.state_dict()
    for group, ids in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, number in zip(group["params"], ids["params"], strict=True):
            if parameter.requires_grad and not isinstance(parameter, FlatParameter):
                # Torch wants state for all trainable parameters of a unit or none; one without a gradient has none.
                packed["state"].setdefault(number, {})
    try:
        with sharded_state(model):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer, packed)
    except RuntimeError as fault:
        named = re.match(r"(\S+) is not in the optimizer state", str(fault))
        if named is None:
            raise
        raise StateMismatch(
            "FSDP1 keeps optimizer state by unit, and this optimizer lacks a trainable parameter of one",
            key=named[1],
            hint="give all parameters of a unit to one optimizer, wrap them apart, or use FSDP2 (fully_shard)",
        ) from fault


def load_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of :func:`optimizer_state`."""
    with sharded_state(model):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(flat)
