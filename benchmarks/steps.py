"""What the ranks of `exact.py` do: train two models in turns, and print what a step of each cost as one line of JSON.

torchrun --nproc-per-node=N steps.py '{"layers": 4, ...}'
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import peak_bytes
from meter import metered
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import reshard

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from model import Decoder, ModelConfig, next_token_loss

STEPS = 3
VOCABULARY = 4096


class Contender:
    """A model and its optimizer, trained by the loop of the README."""

    def __init__(self, name: str, work: dict[str, Any], device: torch.device) -> None:
        self.name = name
        self._plan = reshard.BatchPlan(work["global_batch"], work["micro_batch"], dist.get_world_size())
        torch.manual_seed(0)
        shape = ModelConfig(
            vocabulary=VOCABULARY,
            layers=work["layers"],
            width=work["width"],
            heads=8,
            max_length=work["length"],
            dropout=0.0,
        )
        self._model = Decoder(shape).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16 if work["bf16"] else None, torch.float32)
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self.unit_bytes = 4 * max(map(_own_elements, [self._model, *self._model.blocks]))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        if name == "exact":
            reshard.exact(self._model, [self._optimizer])
        generator = torch.Generator().manual_seed(dist.get_rank())
        windows = (self._plan.accumulation, work["micro_batch"], work["length"] + 1)
        self._tokens = torch.randint(VOCABULARY, windows, generator=generator).to(device)

    def train(self) -> None:
        """A turn."""
        torch.use_deterministic_algorithms(self.name == "exact")
        for _ in range(STEPS):
            self._optimizer.zero_grad()
            reshard.accumulate(self._model, list(self._tokens), self._loss, self._plan)
            reshard.clip_grad_norm_(self._model, 1.0)
            self._optimizer.step()

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self._model(tokens[:, :-1]), tokens[:, 1:])


def _own_elements(unit: torch.nn.Module) -> int:
    """Of the parameters that are gathered with this module, not with one inside it."""
    inner = {id(p) for m in unit.modules() if m is not unit and hasattr(m, "unshard") for p in m.parameters()}
    return sum(parameter.numel() for parameter in unit.parameters() if id(parameter) not in inner)


def main() -> None:
    work = json.loads(sys.argv[1])
    ranks = dist.get_world_size()
    device = _device()
    # As many for both: exact mode fixes the number.
    torch.set_num_threads(1)
    contenders = [Contender(name, work, device) for name in work["contenders"]]
    lines = []
    for repeat in range(-1, work["repeats"]):
        turn = max(0, repeat) % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            line = {"contender": contender.name, "repeat": repeat, **_cost(contender.train, device)}
            line["samples_per_s"] = work["global_batch"] / line["seconds"]
            lines.append({**line, "ranks": ranks, "unit_bytes": contender.unit_bytes})
    if dist.get_rank() == 0:
        print(json.dumps({"lines": [line for line in lines if line["repeat"] >= 0]}), flush=True)
    dist.barrier()


def _device() -> torch.device:
    if torch.cuda.is_available() and torch.cuda.device_count() >= dist.get_world_size():
        torch.cuda.set_device(dist.get_rank())
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


def _cost(operation: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Of a step: the slowest rank's time and the mean of the CPU's; the largest of the memory, all that is there."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    used = metered(operation)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_bytes()
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, (used.together_s / STEPS, used.cpu_s / STEPS, peak))
    seconds, cpu_s, peaks = zip(*everybodys, strict=True)
    return {"seconds": max(seconds), "cpu_s": statistics.mean(cpu_s), "peak_bytes": max(peaks)}


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
