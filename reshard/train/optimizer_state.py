"""Optimizers by name: what they hold per parameter, and their groups, under the model's FQNs instead of integers.

The nested form is the one that torch's ``get_optimizer_state_dict`` gives, so that a checkpoint can be read without
us; but that function steps an optimizer that has no state yet, which this module never does. Several optimizers are
merged into one such dictionary, as torch merges them: their parameters are disjoint, their groups follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.errors import StateMismatch
from reshard.formats.tagged import Json
from reshard.index.names import canonical_names
from reshard.train import fsdp1
from reshard.train.model_state import parameter_names, state_names

PARAMS = "params"
# What the optimizer was told at its construction, wrapper prefixes and all: not a hyperparameter.
PARAM_NAMES = "param_names"


@dataclass
class OptimizerState:
    """The state of one or several optimizers over one model.

    Attributes:
        state: FQN -> entry name -> value; entries may nest further. A parameter without state is absent.
        groups: one dictionary a group: every hyperparameter, and under ``params`` the FQNs.
        owners: optimizer name -> the indices of its groups.
    """

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    owners: dict[str, list[int]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        return [fqn for group in self.groups for fqn in group[PARAMS]]

    def empty_entries(self, owner: str) -> list[Json]:
        """Paths of the empty dictionaries in one optimizer's state, which DCP does not keep; the FQN comes first."""
        own = [fqn for number in self.owners[owner] for fqn in self.groups[number][PARAMS]]
        return [[fqn, *path] for fqn in own for path in _empty_within(self.state.get(fqn, {}))]

    def nested(self) -> dict[str, Any]:
        """As ``dcp.save`` should flatten it: ``state.<fqn>.<name>`` and ``param_groups.<group>.<name>``."""
        return {"state": self.state, "param_groups": self.groups}


def _empty_within(entries: Mapping[Any, Any]) -> Iterator[list[str | int]]:
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from ([name, *path] for path in _empty_within(value))
            if not value:
                yield [name]


def capture(model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> OptimizerState:
    """Reads the optimizers; changes nothing. Collective for FSDP1.

    Raises:
        StateMismatch: an optimizer holds a parameter that the model does not have, or two hold the same one.
    """
    merged = OptimizerState()
    names = None if fsdp1.is_fsdp1(model) or not optimizers else parameter_names(model)
    like = state_names(model) if names is None and optimizers else []
    for name, optimizer in optimizers.items():
        if names is None:
            own = _canonical(fsdp1.optimizer_state(model, optimizer), like)
        else:
            own = _named(optimizer, names)
        if both := merged.state.keys() & own.state.keys() | set(merged.parameters) & set(own.parameters):
            raise StateMismatch(
                "two optimizers hold the same parameter", key=min(both), hint="give each parameter to one optimizer"
            )
        merged.owners[name] = [len(merged.groups) + i for i in range(len(own.groups))]
        merged.state.update(own.state)
        merged.groups.extend(own.groups)
    return merged


def restore(model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], saved: OptimizerState) -> None:
    """Puts state and hyperparameters into the optimizers, at the precision they have. Collective for FSDP1.

    FSDP1's own loading casts moments to the dtype of the flat parameter.

    ``saved.groups`` are in the order of the live groups, optimizer after optimizer; parameters that ``saved.state``
    does not name are left without state.
    """
    start = 0
    names = None if fsdp1.is_fsdp1(model) else parameter_names(model)
    for optimizer in optimizers.values():
        groups = saved.groups[start : start + len(optimizer.param_groups)]
        start += len(groups)
        if names is None:
            _restore_fsdp1(model, optimizer, saved.state, groups)
        else:
            _restore_named(optimizer, names, saved.state)
        for live, stored in zip(optimizer.param_groups, groups, strict=True):
            _set_hyperparameters(live, stored)


def _named(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> OptimizerState:
    packed = optimizer.state_dict()
    if own := sorted(map(str, packed.keys() - {"state", "param_groups"})):
        raise StateMismatch(
            f"{type(optimizer).__name__}.state_dict() holds more than the state of parameters, and a checkpoint by "
            "name has no place for it",
            key=", ".join(own),
            hint="give it to TrainState(extra=...) as an object with state_dict and load_state_dict",
        )
    fqns = _fqns(optimizer, names)
    ids = [number for group in packed["param_groups"] for number in group[PARAMS]]
    by_id = dict(zip(ids, (fqn for group in fqns for fqn in group), strict=True))
    if foreign := [key for key in packed["state"] if key not in by_id]:
        raise StateMismatch(
            "the optimizer keeps state under a key that is no parameter",
            key=repr(foreign[0]),
            hint="pass it to TrainState(extra=...) as an object with state_dict and load_state_dict",
        )
    return OptimizerState(
        {by_id[number]: dict(entries) for number, entries in packed["state"].items() if entries},
        [{**group, PARAMS: names} for group, names in zip(packed["param_groups"], fqns, strict=True)],
    )


def _fqns(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> list[list[str]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group[PARAMS]):
            if parameter not in names:
                raise StateMismatch(
                    f"parameter {place} of group {number} of {type(optimizer).__name__} is not one of the model's",
                    expected="a parameter from model.parameters()",
                    found=f"shape {tuple(parameter.shape)}",
                    hint="build the optimizer after fully_shard, from the model given to TrainState",
                )
    return [[names[parameter] for parameter in group[PARAMS]] for group in optimizer.param_groups]


def _canonical(state: dict[str, Any], like: Iterable[str]) -> OptimizerState:
    names = canonical_names([fqn for group in state["param_groups"] for fqn in group[PARAMS]], like=like)
    return OptimizerState(
        {names[fqn]: dict(entries) for fqn, entries in state["state"].items() if entries},
        [{**group, PARAMS: [names[fqn] for fqn in group[PARAMS]]} for group in state["param_groups"]],
    )


def _restore_fsdp1(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    live = fsdp1.optimizer_state(model, optimizer)["param_groups"]
    names = canonical_names([fqn for group in live for fqn in group[PARAMS]], like=state_names(model))
    fsdp1.load_optimizer_state(
        model,
        optimizer,
        {
            "state": {raw: state[fqn] for raw, fqn in names.items() if fqn in state},
            "param_groups": [{**own, **stored, PARAMS: own[PARAMS]} for own, stored in zip(live, groups, strict=True)],
        },
    )


def _restore_named(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    state: Mapping[str, dict[str, Any]],
) -> None:
    # Optimizer.load_state_dict would round moments to the parameter's dtype.
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group[PARAMS]:
            optimizer.state.pop(parameter, None)
            if entries := state.get(names[parameter]):
                optimizer.state[parameter] = {
                    name: value.to(parameter.device) if name == "step" and on_device else value
                    for name, value in entries.items()
                }


def _set_hyperparameters(live: dict[str, Any], stored: Mapping[str, Any]) -> None:
    for name, value in stored.items():
        if name in (PARAMS, PARAM_NAMES):
            continue
        held = live.get(name)
        if isinstance(held, torch.Tensor):
            # A captured or compiled step holds on to the tensor itself.
            held.copy_(torch.as_tensor(value))
        elif isinstance(held, (int, float)) and isinstance(value, torch.Tensor):
            live[name] = value.item()
        else:
            live[name] = tuple(value) if isinstance(held, tuple) and isinstance(value, list) else value
