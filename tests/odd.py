"""A model in which nothing divides evenly, wrapped in every way, and its state gathered by torch's own means."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

SHAPES = {
    "embed.weight": (10, 3),
    "head.weight": (10, 3),
    "rows.five": (5, 3),
    "rows.three": (3,),
    "rows.one_row": (1, 7),
    "rows.six": (6, 2),
    "rows.single": (1,),
    "idle.unused": (2, 2),
    "ice.frozen": (4, 2),
}


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("five", "three", "one_row", "six", "single"):
            self.register_parameter(name, nn.Parameter(torch.randn(SHAPES[f"rows.{name}"])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.five.T @ self.five + self.three) * self.single
        return x + self.one_row.sum() * 0.1 + (self.six**2).sum() * 0.01


class Idle(nn.Module):
    """Its parameter is trainable and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Ice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4, 2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen.sum() * 0.1


class Meter(nn.Module):
    """Has no parameter and keeps extra state, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.peak = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.peak = torch.maximum(self.peak, x.detach().abs().max())
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "peak": self.peak, "history": {"recipe": "delayed", "window": [1, 2]}}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.peak = state["calls"], state["peak"]
        assert state["history"] == {"recipe": "delayed", "window": [1, 2]}


class Odd(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 3)
        self.rows, self.idle, self.ice, self.meter = Rows(), Idle(), Ice(), Meter()
        self.head = nn.Linear(3, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("whole", torch.randint(0, 99, (3,)))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("cache", torch.randn(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.whole += 1
            self.mask.logical_not_()
            self.phase *= 1j
            self.scalar *= 0.5
        x = self.meter(self.embed(tokens))
        return self.head(self.ice(self.idle(self.rows(x))))


UNITS = ("rows", "idle", "ice", "meter")
WRAPS = ("fsdp2", "fsdp1", "fsdp1-flat", "plain")


def wrapped(model: nn.Module, how: str, mesh: DeviceMesh | None = None) -> nn.Module:
    if how == "plain":
        return model
    if how == "fsdp2":
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for name in UNITS:
            fully_shard(model.get_submodule(name), mesh=mesh)
        return fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": how == "fsdp1"}
    # On one rank FSDP1 drops the parameters of a unit that gets no gradient, so there the unused one is in the root.
    units = [name for name in UNITS if name != "idle" or how == "fsdp1-flat" or dist.get_world_size() > 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in units:
            setattr(model, name, FullyShardedDataParallel(model.get_submodule(name), **options))
        return FullyShardedDataParallel(model, **options)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=3e-2, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Every rank sees the same batch: over 2 or 4 ranks the mean of the gradients is then exactly the gradient."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(0, 10, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 10).backward()
        optimizer.step()


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def whole_model(model: nn.Module) -> dict[str, Any]:
    """Name -> full tensor (or object), by stock torch. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        # get_model_state_dict trips over extra state in a wrapped module.
        with state_type(model, StateDictType.FULL_STATE_DICT):
            return {clean(name): copied(value) for name, value in model.state_dict().items()}
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: copied(value) for name, value in state.items()}


@contextlib.contextmanager
def state_type(model: nn.Module, kind: StateDictType) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, kind):
            yield


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``<fqn>.<entry>`` -> full tensor, by stock torch. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        state = _fsdp1_state(model, optimizer)
    else:
        names = {parameter: name for name, parameter in model.named_parameters()}
        state = {names[parameter]: entries for parameter, entries in optimizer.state.items() if entries}
    return {f"{fqn}.{name}": gathered(value) for fqn, entries in state.items() for name, value in entries.items()}


def _fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    packed = optimizer.state_dict()
    if not any(name.endswith("_flat_param") for name, _ in model.named_parameters()):
        # With use_orig_params, torch wants an entry for every parameter of a unit, or none.
        ids = [number for group in packed["param_groups"] for number in group["params"]]
        packed["state"].update({number: {} for number in ids if number not in packed["state"]})
    # The full form is wrong on CPU with use_orig_params (its views share a buffer); the sharded form is right.
    with state_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer, packed)["state"]
    return {name: entries for name, entries in state.items() if entries}


def gathered(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, out)
        box = [out]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    return value.full_tensor().clone() if isinstance(value, DTensor) else copied(value)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of it: ``model.<fqn>`` and ``optim.<fqn>.<entry>``. Collective."""
    return {
        **{f"model.{name}": value for name, value in whole_model(model).items()},
        **{f"optim.{name}": value for name, value in whole_optimizer(model, optimizer).items()},
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same names, and for each the same dtype, shape and bits."""
    assert sorted(found) == sorted(expected)
    wrong = [name for name, value in expected.items() if not same(found[name], value)]
    assert not wrong, {name: (found[name], expected[name]) for name in wrong}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    return type(a) is type(b) and bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
