"""The contenders: how each library saves a flat state dict to a folder, and fills one from a folder. All ranks call."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from known_state import State, local
from session import file_system
from shapes import ELEMENT_BYTES

from reshard import dcp

Waiting = Callable[[], object]


@dataclass(frozen=True)
class Library:
    """A contender.

    Attributes:
        save, load: given a state, as `adapt` left it, and a folder that is there for `load` and not for `save`.
        start_saving: returns as soon as the state may change again; what it returns waits for the end.
        adapt: brings a state into the classes that the library knows, sharing its memory; not counted.
        format: contenders with the same one read the same folder.
        is_durable: what it saved is on the disk when ``save`` returns; else ``fsync`` of the files counts as well.
        is_raw: the bytes go nowhere; not held against what they should be.
    """

    save: Callable[[Any, Path], object] | None = None
    load: Callable[[Any, Path], object] | None = None
    start_saving: Callable[[Any, Path], Waiting] | None = None
    adapt: Callable[[State], Any] = lambda state: state
    format: str = "dcp"
    is_durable: bool = True
    is_raw: bool = False


def _start_ours(state: State, folder: Path) -> Waiting:
    return dcp.async_save(state, checkpoint_id=folder).result


@cache
def _group_apart() -> dist.ProcessGroup:
    """Stock's thread talks over the group that it is given: over the default one it would meet our barriers."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _start_stock(state: State, folder: Path) -> Waiting:
    saving: Any = stock.async_save(state, checkpoint_id=folder, process_group=_group_apart())
    return saving.result  # type: ignore[no-any-return]


def _save_with(**options: Any) -> Callable[[State, Path], None]:
    def save(state: State, folder: Path) -> None:
        stock.save(state, storage_writer=stock.FileSystemWriter(folder, **options))

    return save


def _save_with_cached_plan(state: State, folder: Path) -> None:
    stock.save(state, checkpoint_id=folder, planner=stock.DefaultSavePlanner(enable_plan_caching=True))


def local_tensors(state: State) -> dict[str, torch.Tensor]:
    """What libraries get that know of no ranks."""
    return {name: local(tensor) for name, tensor in state.items()}


def _torch_save(state: State, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(local_tensors(state), folder / f"{dist.get_rank()}.pt")


def _torch_load(state: State, folder: Path) -> None:
    copy_into(state, torch.load(folder / f"{dist.get_rank()}.pt", map_location="cpu"))


def _safetensors_save(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(local_tensors(state), folder / f"{dist.get_rank()}.safetensors")


def _safetensors_load(state: State, folder: Path) -> None:
    from safetensors.torch import load_file

    copy_into(state, load_file(folder / f"{dist.get_rank()}.safetensors"))


def copy_into(state: State, loaded: Mapping[str, torch.Tensor]) -> None:
    """What a run does with tensors that were not loaded into its own."""
    for name, tensor in state.items():
        local(tensor).copy_(local(loaded[name]))


def _raw_write(state: State, folder: Path) -> None:
    """As many bytes by one `dd`: past the page cache and durably, or, on tmpfs, plainly."""
    total_bytes = sum(tensor.numel() for tensor in state.values()) * ELEMENT_BYTES
    if dist.get_rank():
        return
    folder.mkdir(parents=True)
    options = ["bs=1M"] if file_system(folder.resolve()) == "tmpfs" else ["bs=8M", "oflag=direct", "conv=fsync"]
    block_bytes = int(options[0].removeprefix("bs=").removesuffix("M")) << 20
    count = -(-total_bytes // block_bytes)
    command = ["dd", "if=/dev/zero", f"of={folder / 'raw'}", f"count={count}", *options]
    subprocess.run(command, check=True, capture_output=True)


def _raw_read(state: State, folder: Path) -> None:
    """The files of a checkpoint, by one `cat`."""
    if dist.get_rank() == 0:
        subprocess.run(["sh", "-c", 'cat "$0"/* > /dev/null', os.fspath(folder)], check=True)


class _Copies:
    """A copy of a state in memory that is there already: what no save in the background can do without."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def __call__(self, state: State, folder: Path) -> Waiting:
        pinned = torch.cuda.is_available()
        for name, tensor in state.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(local(tensor), device="cpu", pin_memory=pinned)
            self._copies[name].copy_(local(tensor), non_blocking=True)
        return lambda: None


LIBRARIES: dict[str, Library] = {
    "ours": Library(
        lambda state, folder: dcp.save(state, checkpoint_id=folder),
        lambda state, folder: dcp.load(state, checkpoint_id=folder),
        _start_ours,
    ),
    "stock": Library(
        lambda state, folder: stock.save(state, checkpoint_id=folder),
        lambda state, folder: stock.load(state, checkpoint_id=folder),
        _start_stock,
    ),
    "stock, 4 threads": Library(_save_with(thread_count=4)),
    "stock, cached plan": Library(_save_with_cached_plan),
    "RangeReader": Library(load=lambda state, folder: stock.load(state, storage_reader=dcp.RangeReader(folder))),
    "RangeWriter": Library(lambda state, folder: stock.save(state, storage_writer=dcp.RangeWriter(folder))),
    "torch.save": Library(_torch_save, _torch_load, format="torch.save", is_durable=False),
    "safetensors": Library(_safetensors_save, _safetensors_load, format="safetensors", is_durable=False),
    "raw I/O": Library(_raw_write, _raw_read, is_raw=True),
    "memory copy": Library(start_saving=_Copies(), is_raw=True),
}
