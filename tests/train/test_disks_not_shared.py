"""Ranks that do not see each other's files: real mounts, of which one rank has another than the other."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from reshard import ReshardError, TrainState, load_state, save_state
from reshard.errors import StorageError
from reshard.storage.visibility import wait_until_seen

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def own_disk(path: str) -> bool:
    """Gives this process alone a disk of its own at a path; whether the system lets it."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS) != 0:
        return False
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "none", path]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
    return True


def save_apart(path: str, has_folder: bool) -> Any:
    state = TrainState(nn.Linear(3, 2), step=4)
    if dist.get_rank() == 1:
        if not own_disk(path):
            return None
        if has_folder:
            # As where every node was given the same folders.
            Path(path, "run", ".staging-step-4-a").mkdir(parents=True)
    dist.barrier()
    try:
        save_state(f"{path}/run", state, attempt="a", visibility_timeout_s=0.5)
    except ReshardError as error:
        return str(error), sorted(Path(path, "run").iterdir()) if dist.get_rank() == 0 else None
    return "saved", None


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_disk_of_each_ranks_own_is_refused_with_the_reason(tmp_path: Path, has_folder: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a disk of its own needs root")
    outcomes = run_ranks(2, save_apart, str(tmp_path), has_folder)
    if None in outcomes:
        pytest.skip("this system does not let a process mount a disk of its own")
    for error, _ in outcomes:
        assert "not seen from here" in error and "share" in error and "0.5 s" in error
        assert ("rank 1" in error.splitlines()[0]) == (not has_folder)
    assert outcomes[0][1] == []


def save_and_load(path: str) -> float:
    state = TrainState(nn.Linear(3, 2), step=4)
    with torch.no_grad():
        state.model.weight.fill_(7.0)
    folder = save_state(path, state)
    state.model.weight.data.zero_()
    load_state(folder, state)
    return float(state.model.weight.mean())


def test_a_shared_disk_is_not_refused(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load, str(tmp_path)) == [7.0, 7.0]


def test_files_that_show_late_are_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "late"

    def appear() -> None:
        time.sleep(0.1)
        folder.mkdir()
        (folder / "a").write_bytes(b"1")
        time.sleep(0.1)
        (folder / "a").write_bytes(b"12")

    thread = threading.Thread(target=appear)
    thread.start()
    wait_until_seen(folder, {"a": 2}, timeout_s=20)
    assert (folder / "a").read_bytes() == b"12"
    thread.join()


@pytest.mark.parametrize("length", [1, 3])
def test_a_file_of_another_length_is_named(tmp_path: Path, length: int) -> None:
    (tmp_path / "a").write_bytes(b"12")
    with pytest.raises(StorageError, match="not seen from here") as refusal:
        wait_until_seen(tmp_path, {"a": length}, timeout_s=0)
    assert str(tmp_path / "a") in str(refusal.value)
