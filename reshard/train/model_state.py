"""A model's tensors by FQN, as each rank holds them: DTensors (FSDP2), sharded tensors (FSDP1) or plain ones."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from reshard.dcp.torch_private import ShardedTensor, empty_sharded_like
from reshard.index.names import canonical_names
from reshard.train import fsdp1


def model_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by canonical name; values share memory with the model (FSDP1: views or copies).

    Collective for FSDP1. Objects come along where modules have extra state.
    """
    state = _state_dict(model)
    names = canonical_names(state)
    return {names[key]: value for key, value in state.items()}


def load_model_tensors(model: torch.nn.Module, tensors: dict[str, Any]) -> None:
    """Hands loaded values back through ``load_state_dict``, so that FSDP1 and the modules' own hooks see them.

    Collective for FSDP1. Tensors that are the model's own memory already only copy onto themselves.
    """
    state = _state_dict(model)
    names = canonical_names(state)
    with _sharded_state(model):
        model.load_state_dict({key: tensors.get(names[key], value) for key, value in state.items()})


def state_names(model: torch.nn.Module) -> list[str]:
    """The names in the model's state dict as they are, wrappers included. Collective for FSDP1."""
    return list(_state_dict(model))


def parameter_names(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """The canonical name of each parameter, a tied one's first name. Not for FSDP1, whose parameters are flat."""
    keys = list(_state_dict(model))
    parameters = dict(model.named_parameters())
    names = canonical_names(parameters, like=keys)
    return {parameter: names[name] for name, parameter in parameters.items()}


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """Tied names: each further name of a parameter or buffer, with the first one."""
    state = _state_dict(model)
    everything = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    names = canonical_names(everything, like=state)
    first: dict[int, str] = {}
    further = {}
    for name, tensor in everything.items():
        if id(tensor) in first:
            further[names[name]] = first[id(tensor)]
        else:
            first[id(tensor)] = names[name]
    return further


def reshard_parameters(model: torch.nn.Module) -> None:
    """Puts every FSDP2 module back to its sharded parameters.

    After a forward without backward (an evaluation) the root still holds gathered ones, in the compute dtype and
    unknown to the optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def empty_like_shard(reference: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Room for this rank's part of a stored tensor that is laid out like ``reference``.

    A tensor of another global shape than the reference (a step counter, a factored moment) is whole on every rank;
    scalars live on the CPU, where optimizers keep their counters.
    """
    if shape != reference.shape:
        device = torch.device("cpu") if len(shape) == 0 else _device(reference)
        return torch.empty(shape, dtype=dtype, device=device)
    if isinstance(reference, ShardedTensor):
        return empty_sharded_like(reference, dtype)
    with torch.no_grad():
        return torch.empty_like(reference, dtype=dtype, requires_grad=False)


def local_parts(tensor: Any) -> list[torch.Tensor]:
    """What this rank holds of a tensor of any kind."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _device(tensor: Any) -> torch.device:
    if isinstance(tensor, DTensor):
        return tensor.to_local().device
    return torch.device(tensor.device)


def _sharded_state(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, the model's state dict speaks shards: FSDP1 has to be asked, the others do so anyway."""
    return fsdp1.sharded_state(model) if fsdp1.is_fsdp1(model) else contextlib.nullcontext()


def _state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The model's own state dict, of sharded parameters; those that the model holds now are sharded too."""
    reshard_parameters(model)
    with _sharded_state(model):
        return model.state_dict()
