"""The CUDA path, on one GPU: random states, pinned copies, NCCL, the fp16 scaler, through the real training script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from reshard.train.rng import capture_rng, reseed, restore_rng
from reshard.verify.traces.trace import read_trace

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent.parent


def train(folder: Path, steps: int, *changes: str) -> list[float]:
    command = ["bash", "scripts/launch.sh", "--ranks", "1", "scripts/train_fsdp.py"]
    command += ["--config", "scripts/configs/tiny.yaml", f"steps={steps}", "total_steps=20", "interval=10"]
    command += [f"checkpoint.folder={folder / 'checkpoints'}", f"trace={folder / 'trace.jsonl'}", *changes]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return [row.loss for row in read_trace(folder / "trace.jsonl")]


@pytest.mark.parametrize(
    "changes",
    [["precision=fp32"], ["precision=bf16"], ["precision=fp16", "exact=false"], ["checkpoint_activations=true"]],
    ids=lambda changes: changes[0],
)
def test_a_resumed_run_has_the_same_losses(tmp_path: Path, changes: list[str]) -> None:
    straight = train(tmp_path / "straight", 20, *changes)
    train(tmp_path / "broken", 10, *changes)
    assert train(tmp_path / "broken", 20, *changes) == straight


def test_cuda_random_states_go_on_exactly() -> None:
    torch.randn(3, device="cuda")
    states = capture_rng()
    expected = torch.randn(5, device="cuda")
    restore_rng(states)
    assert torch.equal(torch.randn(5, device="cuda"), expected)
    reseed(states, step=1, rank=0, world=2)
    assert not torch.equal(torch.randn(5, device="cuda"), expected)
