"""The training script under its launcher, with the options that the quickstart does not use."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from reshard.verify.traces.trace import TraceRow, read_trace

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ["scripts/train_fsdp.py", "--config", "scripts/configs/tiny.yaml"]
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    # What these tests show on the CPU must not depend on a GPU that happens to be there.
    "CUDA_VISIBLE_DEVICES": "",
}


def launch(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "scripts/launch.sh", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == status, output
    return output


def train(folder: Path, ranks: int, steps: int, *changes: str) -> tuple[list[TraceRow], str]:
    places = [f"checkpoint.folder={folder / 'checkpoints'}", f"trace={folder / 'trace.jsonl'}", "interval=4"]
    output = finish(launch("--ranks", str(ranks), *SCRIPT, f"steps={steps}", *places, *changes))
    return read_trace(folder / "trace.jsonl"), output


def losses(rows: list[TraceRow]) -> list[float]:
    return [row.loss for row in rows]


@pytest.mark.slow
def test_fp16_with_a_scaler_on_two_replicas_goes_on_bit_for_bit(tmp_path: Path) -> None:
    changes = ["precision=fp16", "replicate=2", "exact=false", "micro_batch=auto", "max_micro_batch=3", "workers=0"]
    straight, output = train(tmp_path / "straight", 2, 6, *changes)
    assert "micro-batch 3 chosen" in output
    train(tmp_path / "broken", 2, 4, *changes)
    resumed, output = train(tmp_path / "broken", 2, 6, *changes)
    assert "resumed at step 4 (full state restored; 2 ranks, accumulation 2, global batch 12)" in output
    assert losses(resumed) == losses(straight)
    assert [row.scale for row in resumed] == [row.scale for row in straight]
    assert straight[0].scale == 65536.0


@pytest.mark.slow
def test_token_files_with_recomputed_activations(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, size=20_000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    data = f"data={{kind: tokens, path: {tmp_path / 'tokens.bin'}, length: 32, workers: 1}}"
    rows, output = train(tmp_path / "run", 2, 4, "precision=bf16", "checkpoint_activations=true", data)
    assert "bf16, global batch 12 = 12 slots of 1 on 2 ranks, accumulation 6" in output
    # Of random tokens nothing can be learned but that there are 256.
    assert len(rows) == 4 and all(5.0 < loss < 6.5 for loss in losses(rows))


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    straight, _ = train(tmp_path / "straight", 1, 6, "compile=true", "exact=false")
    train(tmp_path / "broken", 1, 4, "compile=true", "exact=false")
    resumed, _ = train(tmp_path / "broken", 1, 6, "compile=true", "exact=false")
    assert losses(resumed) == losses(straight)


@pytest.mark.slow
def test_two_nodes_by_hand(tmp_path: Path) -> None:
    """Two launchers with a rank each find one another, as two machines would."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    places = [f"checkpoint.folder={tmp_path / 'checkpoints'}", f"trace={tmp_path / 'trace.jsonl'}"]
    nodes = [
        launch(
            *("--nodes", "2", "--node-rank", str(rank), "--head", f"localhost:{port}", "--ranks", "1"),
            *(*SCRIPT, "steps=2", *places),
        )
        for rank in range(2)
    ]
    outputs = [finish(node) for node in nodes]
    assert any("on 2 ranks, accumulation 6" in output for output in outputs)
    assert [row.ranks for row in read_trace(tmp_path / "trace.jsonl")] == [2, 2]


def test_a_wrong_batch_is_one_line_and_a_failure(tmp_path: Path) -> None:
    places = [f"checkpoint.folder={tmp_path / 'checkpoints'}", f"trace={tmp_path / 'trace.jsonl'}"]
    output = finish(launch("--ranks", "2", *SCRIPT, "micro_batch=5", *places), status=1)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "12" in lines[0] and "5" in lines[0]
    assert not (tmp_path / "trace.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "none", "x.py"], "no such script"),
        (["--ranks", "none", "scripts/train_fsdp.py"], "expected a number above 0, found none"),
        (["--rank", "2", "scripts/train_fsdp.py"], "unknown option --rank"),
        (["--nodes", "x", "scripts/train_fsdp.py"], "--nodes: expected a number above 0, found x"),
        (["--nodes", "2", "scripts/train_fsdp.py"], "needs --head HOST"),
        ([], "Starts a training script under torchrun"),
    ],
)
def test_the_launcher_says_what_is_wrong(arguments: list[str], told: str) -> None:
    assert told in finish(launch(*arguments), status=2)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_saves_once_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """As SLURM does it: the task gets the signal, torchrun's ranks are sessions of their own and do not."""
    places = [f"checkpoint.folder={tmp_path / 'checkpoints'}", f"trace={tmp_path / 'trace.jsonl'}", "interval=1000"]
    job = launch("--ranks", "2", *SCRIPT, "steps=1000", *places)
    while not (tmp_path / "trace.jsonl").exists() or len(read_trace(tmp_path / "trace.jsonl")) < 3:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    job.send_signal(number)
    output, _ = job.communicate(timeout=120)
    # torchrun answers a SIGTERM with 1 whatever its ranks say.
    assert job.returncode == (1 if number == signal.SIGTERM else 0), output
    stopped = json.loads((tmp_path / "checkpoints" / "STOPPED").read_text())
    assert stopped["reason"] == number.name
    rows = read_trace(tmp_path / "trace.jsonl")
    assert stopped["step"] == rows[-1].step
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == [f"step-{rows[-1].step}"]
