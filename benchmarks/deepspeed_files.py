"""A checkpoint that DeepSpeed itself writes, on the CPU: `torchrun deepspeed_files.py SHAPES.json STAGE FOLDER`.

Needs the package `deepspeed`, and a C++ compiler, with which it builds its collectives at the first start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class _Parameters(torch.nn.Module):
    """Parameters of given names, whose mean is what is trained."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.empty(shape).uniform_(-1, 1)))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([(parameter * scale).float().mean() for parameter in self.parameters()]).sum()


def main(shapes_file: str, stage: str, folder: str) -> None:
    """One step of AdamW, so that moments are there; weights in bf16, masters in fp32."""
    import deepspeed

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _Parameters(json.loads(Path(shapes_file).read_text()))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, dtype=torch.bfloat16)))
    engine.step()
    engine.save_checkpoint(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
