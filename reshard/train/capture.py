"""Taking a run's state apart for a checkpoint: what goes into its tensors, and what into its manifest."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor

import reshard
from reshard.dcp.flat import FlatState
from reshard.dcp.local_state import LocalState
from reshard.dcp.ranks import Ranks
from reshard.environment import ranks_per_node
from reshard.errors import UsageError
from reshard.formats import manifest as manifests
from reshard.formats import tagged
from reshard.formats.manifest import Manifest, World
from reshard.train import optimizer_state
from reshard.train.learning_rate import lr_of
from reshard.train.model_state import model_tensors
from reshard.train.optimizer_state import OptimizerState
from reshard.train.rng import capture_rng
from reshard.train.slot_sums import exact_reduction
from reshard.train.state import DATA, SCALER, SCHEDULER, TrainState, extra_part

# Larger tensors of extra objects are not compared between ranks: that would cost more than it finds.
COMPARED_ELEMENTS = 4096


@dataclass(frozen=True)
class Captured:
    """A run's state at a step.

    Attributes:
        local: this rank's tensors, in the run's own memory.
        manifest: all that is not a tensor; without the marks of files that are still to be written.
    """

    local: LocalState
    manifest: Manifest


def capture(
    state: TrainState, ranks: Ranks, attempt: str, metrics: Mapping[str, float | None] | None = None
) -> Captured:
    """Takes a state apart. Collective; reads the state and changes nothing in it.

    Raises:
        UsageError: something in it cannot be stored, or a metric is not a number.
        ReshardError: on every rank, if any failed.
    """
    with ranks.together():
        state.validate()
        measured = manifests.as_metrics(metrics)
    collected = _collect(state, ranks)
    local: LocalState | None = None
    with ranks.together():
        local = LocalState.of(FlatState.of(collected.tensors))
    assert local is not None
    return Captured(local, _manifest(state, collected, ranks, attempt, measured))


def small_state(state: TrainState) -> str:
    """Text that changes with whatever is not a tensor: what a run may change after a step was saved, without a step."""
    parts: dict[str, Any] = {f"{SCHEDULER}.{name}": scheduler for name, scheduler in state.schedulers.items()}
    parts |= {extra_part(name): value for name, value in state.extra.items()}
    if state.scaler is not None:
        parts[SCALER] = state.scaler
    if state.shares_data_position:
        parts[DATA] = state.data
    kept = {
        name: tagged.encode(part.state_dict(), where=name, external=lambda leaf, path: path)
        for name, part in parts.items()
    }
    rates = [repr(group.get("lr")) for optimizer in state.optimizers.values() for group in optimizer.param_groups]
    return json.dumps([kept, rates])


@dataclass
class _Collected:
    """A run's state, split in what ``dcp.save`` takes and what the manifest takes."""

    tensors: dict[str, Any]
    optimizer: OptimizerState
    data: Any = None
    schedulers: dict[str, tagged.Json] = field(default_factory=dict)
    scaler: tagged.Json = None
    extra: dict[str, tagged.Json] = field(default_factory=dict)


def _collect(state: TrainState, ranks: Ranks) -> _Collected:
    optimizer = optimizer_state.capture(state.model, state.optimizers)
    tensors: dict[str, Any] = {"model": model_tensors(state.model)}
    if state.optimizers:
        tensors["optim"] = optimizer.nested()
        _warn_without_state(state, optimizer, ranks)
    collected = _Collected(tensors, optimizer)
    tensors["rng"] = {f"rank_{ranks.rank}": capture_rng()}

    def encode(value: Any, where: str) -> tagged.Json:
        return tagged.encode(value, where=where, external=lambda leaf, path: _set_aside(tensors, leaf, path))

    with ranks.together():
        collected.schedulers = {
            name: encode(scheduler.state_dict(), f"{SCHEDULER}.{name}") for name, scheduler in state.schedulers.items()
        }
        if state.scaler is not None:
            collected.scaler = encode(state.scaler.state_dict(), SCALER)
        collected.extra = {name: encode(value.state_dict(), extra_part(name)) for name, value in state.extra.items()}
        digests = {name: _digest(value, tensors) for name, value in collected.extra.items()}
        if state.data is not None:
            where = DATA if state.shares_data_position else f"{DATA}.rank_{ranks.rank}"
            collected.data = encode(state.data.state_dict(), where)
    everybodys = ranks.gather(digests)
    for name in digests:
        if len({theirs.get(name) for theirs in everybodys}) > 1:
            ranks.warn(f"{extra_part(name)} differs between ranks; rank 0's is saved, and every rank will get it")
    return collected


def _digest(value: tagged.Json, tensors: Mapping[str, Any]) -> str:
    """Of an extra object's state, without sharded and large tensors, for ranks to compare."""
    digest = hashlib.sha256(json.dumps(value).encode())
    for key in tagged.stored_keys(value):
        tensor = tensors[key]
        if not isinstance(tensor, DTensor) and tensor.numel() <= COMPARED_ELEMENTS:
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _set_aside(tensors: dict[str, Any], leaf: Any, path: str) -> str | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    if leaf.is_meta or leaf.layout != torch.strided:
        raise UsageError(
            "a tensor that cannot be saved",
            key=path,
            expected="a dense tensor with memory",
            found="one on the meta device" if leaf.is_meta else leaf.layout,
            hint="make it dense, or leave it out of the state",
        )
    # Keys with dots make one path of two: ``{"a": {"b": x}, "a.b": y}``.
    key = next(key for key in _numbered(path) if key not in tensors)
    tensors[key] = leaf.detach()
    return key


def _numbered(path: str) -> Iterator[str]:
    yield path
    yield from (f"{path}#{number}" for number in itertools.count(2))


def _manifest(
    state: TrainState, collected: _Collected, ranks: Ranks, attempt: str, metrics: dict[str, float | None]
) -> Manifest:
    data = None
    if state.data is not None:
        if state.shares_data_position:
            data = {"shared": collected.data}
        else:
            workers = getattr(state.data, "num_workers", None)
            data = {"ranks": ranks.gather(collected.data), "workers": workers}
    return Manifest(
        step=state.step,
        attempt=attempt,
        world=world_of(state.model, ranks.size),
        parts={part: "saved" if has else "none" for part, has in state.parts.items()},
        lr=[lr_of(group) for group in collected.optimizer.groups],
        batch=state.plan.state_dict() if state.plan is not None else None,
        data=data,
        schedulers=collected.schedulers,
        scaler=collected.scaler,
        rng={"ranks": ranks.size},
        extra=collected.extra,
        optimizers=_describe(state.optimizers, collected.optimizer),
        versions=versions(),
        metrics=metrics or None,
        exact=None if (reduction := exact_reduction(state.model)) is None else reduction.described,
        saved_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def versions() -> dict[str, str]:
    """Of the packages that a run's numbers may depend on."""
    return {
        "reshard": reshard.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def world_of(model: torch.nn.Module, ranks: int) -> World:
    """The ranks, the machines and the mesh that a model is spread over."""
    mesh: dict[str, int] = {}
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if meshes:
        # With tensor parallelism some parameters lie on a part of the mesh only.
        device_mesh = max(meshes, key=lambda mesh: mesh.ndim)
        names = device_mesh.mesh_dim_names or [f"axis_{i}" for i in range(device_mesh.ndim)]
        mesh = dict(zip(names, device_mesh.shape, strict=True))
    per_node = ranks_per_node(ranks)
    return World(
        ranks=ranks,
        nodes=-(-ranks // per_node),
        gpus_per_node=per_node if torch.cuda.is_available() else 0,
        mesh=mesh,
    )


def _describe(optimizers: Mapping[str, torch.optim.Optimizer], collected: OptimizerState) -> dict[str, tagged.Json]:
    described: dict[str, tagged.Json] = {}
    for name, optimizer in optimizers.items():
        own = [fqn for number in collected.owners[name] for fqn in collected.groups[number]["params"]]
        described[name] = {
            "class": type(optimizer).__name__,
            "groups": list(collected.owners[name]),
            "parameters": len(own),
            "with_state": sum(fqn in collected.state for fqn in own),
            "empty": collected.empty_entries(name),
        }
    return described


def _warn_without_state(state: TrainState, optimizer: OptimizerState, ranks: Ranks) -> None:
    if optimizer.state or all(group.get("momentum", 1) == 0 for group in optimizer.groups):
        return
    if state.step > 0 or any(parameter.grad is not None for parameter in state.model.parameters()):
        ranks.warn(
            f"0 of {len(optimizer.parameters)} parameters have optimizer state at step {state.step}: "
            "was optimizer.step() ever called?"
        )
