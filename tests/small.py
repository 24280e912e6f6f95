"""A whole run in one process without a process group: every kind of state there is, in a few kilobytes."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import reshard
from reshard import BatchPlan, ElasticSampler, SlotStreams, TrainState

FEATURES = 4
SAMPLES = 40


class Average:
    """An exponential moving average of a model, fed back into it now and then, so that it matters."""

    def __init__(self, model: nn.Module, decay: float = 0.5) -> None:
        self.model = model
        self.decay = decay
        self.updates = 0
        self.weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        for name, parameter in self.model.named_parameters():
            self.weights[name].lerp_(parameter, 1 - self.decay)
            if self.updates % 3 == 0:
                parameter.copy_(self.weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, tensor in self.weights.items():
            tensor.copy_(state["weights"][name])


@dataclass
class Small:
    """A run; ``parts`` replaces or drops what is given to TrainState."""

    parts: dict[str, Any] = field(default_factory=dict)
    streams: bool = True
    lr: float = 0.05
    global_batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        random.seed(self.seed), np.random.seed(self.seed), torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 1))
        self.model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=self.lr
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=16)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.plan = BatchPlan(self.global_batch, 2, 1)
        self.sampler = ElasticSampler(SAMPLES, self.plan, seed=5)
        self.slots = SlotStreams(9) if self.streams else None
        self.average = Average(self.model)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()
        given = {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data": self.sampler,
            "plan": self.plan,
            "extra": {"ema": self.average, **({"streams": self.slots} if self.slots else {})},
        } | self.parts
        self.state = TrainState(self.model, **given)

    def train(self, steps: int) -> list[tuple[float, float, float]]:
        """Trains to ``steps`` in all: (loss, lr, scale) of each step."""
        rows = []
        while self.state.step < steps:
            for batches in self.sampler.steps(list(self.sampler)):
                rows.append(self._step(batches))
                if self.state.step >= steps:
                    break
        return rows

    def _step(self, batches: list[list[int]]) -> tuple[float, float, float]:
        self.optimizer.zero_grad()
        # Where streams do not follow slots, all three generators of the process have a part in the loss.
        self.noise = 1.0 if self.slots else random.random() + float(np.random.rand())
        result = reshard.accumulate(
            self.model, batches, self._loss, self.plan, sampler=self.sampler, streams=self.slots, scaler=self.scaler
        )
        row = (result.loss, self.optimizer.param_groups[0]["lr"], self.scaler.get_scale())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update()
        self.state.step += 1
        return row

    def _loss(self, indices: list[int]) -> torch.Tensor:
        self.model.seen += 1
        return nn.functional.mse_loss(self.model(self.x[indices]), self.noise * self.y[indices])


def fingerprint(run: Small) -> dict[str, Any]:
    """Everything that a load could touch, bit for bit, by means of torch and Python alone."""
    return {
        "model": {name: _bytes(t) for name, t in run.model.state_dict().items()},
        "optimizer": _plain(run.optimizer.state_dict()),
        "scheduler": _plain(run.scheduler.state_dict()),
        "scaler": run.scaler.state_dict(),
        "sampler": run.sampler.state_dict(),
        "streams": run.slots and run.slots.state_dict(),
        "ema": _plain(run.average.state_dict()),
        "step": run.state.step,
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": _bytes(torch.get_rng_state()),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _bytes(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return copy.deepcopy(value)


def _bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def edit_manifest(folder: Path, **fields: Any) -> None:
    """Changes fields of ``reshard.json``; a callable gets the field and returns the new one, None removes it."""
    path = folder / "reshard.json"
    manifest = json.loads(path.read_text())
    for name, value in fields.items():
        value = value(manifest[name]) if callable(value) else value
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    path.write_text(json.dumps(manifest))
