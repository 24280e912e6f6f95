"""A small run to experiment on: a model, data and a training loop with everything a real one has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import reshard
from reshard import BatchPlan, ElasticSampler, SlotStreams, TrainState

SAMPLES = 40
FEATURES = 6


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Odd sizes on purpose: 5 rows, 7 rows, 1 row do not divide by the usual world sizes."""

    def __init__(self, dropout: float = 0.1, width: int = 5) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(2)])
        self.out = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, length: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = torch.sin(self.x.sum(dim=1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def wrap_fsdp2(model: nn.Module, mesh_shape: tuple[int, ...] | None = None, bf16: bool = False) -> nn.Module:
    world = dist.get_world_size()
    names = ("dp_replicate", "dp_shard") if mesh_shape and len(mesh_shape) == 2 else ("dp",)
    mesh = init_device_mesh("cpu", mesh_shape or (world,), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def wrap_fsdp1(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


@dataclass
class Setup:
    """How a run is built; every field is picklable."""

    wrap: str = "fsdp2"
    exact: bool = False
    bf16: bool = False
    dropout: float = 0.1
    optimizer: str = "adamw"
    clip_norm: float | None = 0.5
    global_batch: int = 12
    micro_batch: int = 1
    last: str = "wrap"
    streams: bool = True
    samples: int = SAMPLES
    lr: float = 3e-2
    total_steps: int = 20
    skip: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    setup: Setup
    model: nn.Module
    state: TrainState
    plan: BatchPlan
    sampler: ElasticSampler
    streams: SlotStreams | None
    loader: Any

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizer

    def train(
        self,
        steps: int,
        on_step: Callable[[Run, float], Any] | None = None,
        done: Callable[[], bool] | None = None,
    ) -> list[tuple[int, float, float]]:
        """Trains up to ``steps`` optimizer steps in all; returns (step, loss, lr) of each."""
        rows = []
        while self.state.step < steps:
            for micro_batches in self.sampler.steps(self.loader):
                lr = self.optimizer.param_groups[0]["lr"]
                result = self.one_step(micro_batches)
                rows.append((self.state.step + 1, result.loss, lr))
                if done is None:
                    self.state.step += 1
                elif done():
                    return rows
                if on_step is not None:
                    on_step(self, result.loss)
                if self.state.step >= steps:
                    break
        return rows

    def one_step(self, micro_batches: list[Any]) -> reshard.StepResult:
        self.optimizer.zero_grad()
        result = reshard.accumulate(
            self.model, micro_batches, self.loss, self.plan, sampler=self.sampler, streams=self.streams
        )
        if self.setup.clip_norm is not None:
            reshard.clip_grad_norm_(self.model, self.setup.clip_norm)
        self.optimizer.step()
        self.state.scheduler.step()
        return result

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x).float(), y)


def build(setup: Setup) -> Run:
    torch.manual_seed(0)
    model = Net(setup.dropout)
    world = dist.get_world_size()
    if setup.wrap == "fsdp2":
        model = wrap_fsdp2(model, bf16=setup.bf16)
    elif setup.wrap == "hsdp":
        model = wrap_fsdp2(model, (2, world // 2), bf16=setup.bf16)
    elif setup.wrap.startswith("fsdp1"):
        model = wrap_fsdp1(model, use_orig_params=setup.wrap == "fsdp1")
    if setup.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=setup.lr, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr, momentum=0.9)
    if setup.exact:
        reshard.exact(model, [optimizer])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setup.total_steps)
    plan = BatchPlan(setup.global_batch, setup.micro_batch, world)
    sampler = ElasticSampler(setup.samples, plan, dist.get_rank(), seed=3, last=setup.last)
    streams = SlotStreams(11) if setup.streams else None
    loader = torch.utils.data.DataLoader(Points(setup.samples), batch_sampler=sampler)
    parts = {
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,
        "plan": plan,
        "extra": {"streams": streams} if streams else {},
    }
    parts |= setup.extra
    for name in setup.skip:
        parts[name] = {} if name == "extra" else None
    state = TrainState(model, **parts)
    if "scheduler" in setup.skip:
        state.scheduler = None
    return Run(setup, model, state, plan, sampler, streams, loader)


def digest(run: Run) -> dict[str, str]:
    """SHA-256 of every full tensor of model and optimizer; collective."""
    tensors = full_tensors(run)
    return {name: hashlib.sha256(repr((t.dtype, t.shape)).encode() + raw(t)).hexdigest() for name, t in tensors.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def full_tensors(run: Run) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer, unsharded, by name; by torch's own means, not ours. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    tensors = {f"model.{k}": v.clone() for k, v in get_model_state_dict(run.model, options=options).items()}
    if isinstance(run.model, FullyShardedDataParallel):
        for fqn, entries in _fsdp1_optimizer(run).items():
            tensors.update({f"optim.{fqn}.{name}": value for name, value in entries.items()})
        return tensors
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    for parameter, entries in run.optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                full = value.full_tensor() if isinstance(value, DTensor) else value
                tensors[f"optim.{names[parameter]}.{name}"] = full.clone()
    return tensors


def _fsdp1_optimizer(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    import warnings

    from torch.distributed.fsdp import StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The full form is wrong on CPU with use_orig_params; the sharded form is right.
        with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)["state"]
    return {
        fqn: {name: gathered(value) for name, value in entries.items() if isinstance(value, torch.Tensor)}
        for fqn, entries in state.items()
    }


def gathered(value: Any) -> torch.Tensor:
    if hasattr(value, "local_shards"):
        out = torch.empty(value.size()) if dist.get_rank() == 0 else None
        value.gather(0, out)
        box = [out]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone()


def straight(setup: Setup, steps: int) -> Any:
    """Trains without a break: (rows, digest)."""
    run = build(setup)
    rows = run.train(steps)
    return rows, digest(run)


def until(setup: Setup, folder: str | Path, steps: int) -> Any:
    """Trains to ``steps`` and saves."""
    run = build(setup)
    rows = run.train(steps)
    reshard.save_state(folder, run.state)
    return rows, digest(run)


def resumed(setup: Setup, folder: str | Path, steps: int, options: dict[str, Any] | None = None) -> Any:
    """Resumes from the newest step and trains on: (rows, digest at the end, digest at the resume, report)."""
    run = build(setup)
    report = reshard.load_state(folder, run.state, **(options or {}))
    before = digest(run)
    rows = run.train(steps)
    return rows, digest(run), before, report
