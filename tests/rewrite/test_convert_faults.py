"""A conversion of ranks' files that is killed, or whose disk fills up, at calls to the storage from first to last."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import rewriting
import torch
from faults import REFUSED, Faults, die, in_child, no_space
from legacy import sharded, write_ranks
from rewriting import any_bits, assert_same, stock_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import reshard

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = {"a": any_bits((40, 33), torch.float32, 1), "b": any_bits((7, 5), torch.bfloat16, 2)}
STEPS = 12


def contents(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
    model = {name: sharded(tensor, mesh, [Shard(0)]) for name, tensor in WEIGHTS.items()}
    return {"model_world_size_{world}_rank_{rank}.pt": model}


@pytest.mark.parametrize("strike", [die, no_space])
def test_a_conversion_that_was_cut_short_is_absent_or_complete_and_goes_on(
    tmp_path: Path, strike: Callable[[], None]
) -> None:
    source = write_ranks(tmp_path / "ranks", 3, contents)
    before = rewriting.file_bytes(source)
    work = tmp_path / "work"
    work.mkdir()
    made = work / "made"
    reshard.convert(source, tmp_path / "sound", world_size=2)
    sound = rewriting.file_bytes(tmp_path / "sound")

    def convert(at: int, count: Path | None = None) -> None:
        faults = Faults(work)
        with faults.armed(at, strike):
            reshard.convert(source, made, world_size=2)
        if count is not None:
            count.write_text(str(faults.count))

    counted = tmp_path / "count"
    assert in_child(lambda: convert(0, counted)) == 0
    calls = int(counted.read_text())
    assert calls > 3 * STEPS
    for at in sorted({1, calls, *range(1, calls, calls // STEPS)}):
        shutil.rmtree(made, ignore_errors=True)
        status = in_child(lambda at=at: convert(at))  # type: ignore[misc]
        if strike is die:
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        else:
            # What is only tidied up may fail.
            assert os.waitstatus_to_exitcode(status) in (0, REFUSED)
        if made.exists():
            assert rewriting.file_bytes(made) == sound
        else:
            reshard.convert(source, made, world_size=2)
            assert rewriting.file_bytes(made) == sound
        assert rewriting.file_bytes(source) == before
    assert_same(stock_tensors(made), {f"model.{name}": tensor for name, tensor in WEIGHTS.items()})
