"""Thousands of damaged checkpoints: every one is read, or refused in words; none crashes, hangs or fills the memory."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard.cli.main import main
from reshard.formats import manifest
from reshard.formats.manifest import Manifest, World
from reshard.formats.opening import open_checkpoint
from reshard.verify.check.run import check

SECONDS_EACH = 20
MEMORY_BYTES = 3 << 30
TARGETS = {".metadata": 1500, "__0_0.distcp": 1500, "reshard.json": 1000}


def make(folder: Path) -> Path:
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4).t(), "b": torch.ones(5, dtype=torch.bfloat16)},
        "optim": {"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "empty": torch.zeros(0, 2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    batch = {"global_batch": 8, "micro_batch": 2, "ranks": 2, "accumulation": 2}
    world = World(2, 1, 2, {"dp_shard": 2})
    parts = {"model": "saved", "optimizer": "saved", "rng": "none", "step": "saved"}
    content = Manifest(
        3,
        "1",
        world,
        parts,
        [0.1],
        batch,
        {"shared": {"epoch": 1}},
        {"s": {"last_epoch": 3}},
        None,
        None,
        {},
        {},
        {},
        "",
    )
    (folder / manifest.FILE_NAME).write_bytes(manifest.to_bytes(content))
    return folder


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Flipped, overwritten, repeated or missing bytes; numbers are drawn towards those at the edges."""
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(data))
        kind = chance.randrange(6)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif kind == 2:
            length = chance.choice([2, 4, 8])
            data[at : at + length] = chance.choice([b"\xff", b"\0", b"\x7f"]) * length
        elif kind == 3:
            del data[at : at + chance.choice([1, 4, 100])]
        elif kind == 4:
            start = chance.randrange(len(data))
            data[at:at] = data[start : start + chance.choice([1, 16, 200])]
        else:
            del data[at:]
        if not data:
            return b""
    return bytes(data)


def fuzz(folder: Path, name: str, count: int) -> None:
    """Runs in a process of its own, with little memory; whatever is not refused in words ends it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    chance = random.Random(name)
    path = folder / name
    content = path.read_bytes()
    unsound = 0
    for _ in range(count):
        path.write_bytes(damaged(content, chance))
        signal.alarm(SECONDS_EACH)
        unsound += not check(folder, deep=True).is_sound
        if chance.randrange(25) == 0:
            assert main(["inspect", "--tree", str(folder)]) in (0, 1)
            assert main(["offline", str(folder), str(folder.with_name("out")), "--world-size", "2", "--force"]) in (
                0,
                1,
                2,
            )
        signal.alarm(0)
    print(f"unsound {unsound}", file=sys.stderr)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, count // 5) for name, count in TARGETS.items()),
        *(pytest.param(name, count, marks=pytest.mark.slow) for name, count in TARGETS.items()),
    ],
)
def test_damage_is_refused_in_words(tmp_path: Path, name: str, count: int) -> None:
    folder = make(tmp_path / "checkpoint")
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read("model.w"), torch.arange(12.0).reshape(3, 4).t())
    assert check(folder, deep=True).is_sound
    backup = shutil.copytree(folder, tmp_path / "backup")
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, __file__, folder, name, str(count)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "a bug in reshard" not in result.stderr
    assert int(result.stderr.rpartition("unsound ")[2]) > count // 4
    assert time.monotonic() - started < 300
    for path in backup.iterdir():
        if path.name != name:
            assert path.read_bytes() == (folder / path.name).read_bytes()


if __name__ == "__main__":
    fuzz(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
