"""Which optimizers treat each element of a parameter alone, so that it does not matter to them how it is sharded."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from reshard.dcp.ranks import all_ranks
from reshard.errors import UsageError

_ELEMENTWISE = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD",
}  # fmt: skip
_MIXING = {"Adafactor", "LBFGS", "Muon"}

_TRIAL_SHAPE, _TRIAL_STEPS = (64, 48), 3


def refuse_mixing(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose numbers follow the sharding; one that is not torch's own is tried out.

    Raises:
        UsageError: it mixes elements, or it is a fused one on the CPU, which differ by where a tensor is cut.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")}
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("fused") and any(parameter.device.type == "cpu" for parameter in group["params"]):
            raise UsageError(
                "the fused CPU optimizers' bits follow the split of a tensor",
                key=name,
                hint="use fused=False in exact mode",
            )
    if type(optimizer).__module__.startswith("torch.optim") and name in _ELEMENTWISE:
        return
    if kinds & _MIXING or _follows_split(optimizer):
        raise UsageError(
            "this optimizer mixes the elements of a parameter, in an order that follows the sharding",
            key=name,
            hint=f"exact mode works with element-wise ones: {', '.join(sorted(_ELEMENTWISE))}",
        )
    all_ranks().warn(f"exact mode: {name} is taken to be element-wise; if it is not, bits follow the world size")


def _follows_split(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a trial on a small parameter, whole and in halves, ends with different bits; False without a trial."""
    try:
        device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            whole, halves = (_trained(optimizer, pieces, device) for pieces in (1, 2))
        return not torch.equal(whole, halves)
    except Exception:
        # Its constructor may want what is in none of its groups, and its step what is not here.
        return False


def _trained(optimizer: torch.optim.Optimizer, pieces: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    start, *gradients = (torch.randn(_TRIAL_SHAPE, generator=generator).to(device) for _ in range(1 + _TRIAL_STEPS))
    parameters = [torch.nn.Parameter(piece.clone()) for piece in start.chunk(pieces)]
    trial = _like(optimizer, parameters)
    for gradient in gradients:
        for parameter, piece in zip(parameters, gradient.chunk(pieces), strict=True):
            parameter.grad = piece.clone()
        trial.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def _like(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Another of its class, with the options of its first group."""
    make: Any = type(optimizer)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    taken = inspect.signature(make).parameters
    made: torch.optim.Optimizer = make(parameters, **{name: options[name] for name in options if name in taken})
    # Options that its constructor does not take may still be read by its step.
    for group in made.param_groups:
        group.update(options)
    return made
