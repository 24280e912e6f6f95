"""Stock torch's side: writes the source checkpoints, and does with `torch.distributed.checkpoint` what reshard does.

stock.py write SHAPES.json RANKS FOLDER     `dcp.save` of DTensor shards, on gloo ranks forked from one process
stock.py load-save SRC DST                  `dcp.load` and `dcp.save` of the same state; under torchrun
stock.py through-one-file SRC DST           `dcp_to_torch_save` and `torch_save_to_dcp`
stock.py unpickle FOLDER                    `pickle.load` of the `.metadata`

Prints one JSON object: `inside_s` is the time without the start of the interpreter and imports.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from known_state import empty_tensor
from memory import peak_bytes
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes


def write(shapes_file: str, ranks: str, folder: str) -> None:
    """Writes a checkpoint of random numbers; the steps as stock optimizers keep them, and a few objects."""
    on_ranks(_write_rank, int(ranks), json.loads(Path(shapes_file).read_text()), folder)


def on_ranks(work: Callable[..., None], ranks: int, *given: object) -> None:
    """Runs ``work(rank, ranks, where they meet, *given)`` on gloo ranks forked from this process."""
    with tempfile.TemporaryDirectory() as meeting:
        start_processes(work, (ranks, f"file://{meeting}/ranks", *given), ranks, start_method="fork")  # type: ignore[no-untyped-call]


def _write_rank(rank: int, ranks: int, meeting: str, shapes: dict[str, list[int]], folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {name: empty_tensor(shape, torch.float32, mesh) for name, shape in shapes.items()}
    for tensor in state.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.fill_(1000.0)
        local.uniform_(-1, 1) if local.dim() else None
    state |= {f"optim.param_groups.0.{name}": value for name, value in {"lr": 1e-3, "betas": (0.9, 0.95)}.items()}
    save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def load_save(source: str, destination: str) -> dict[str, Any]:
    """What a job of other ranks does to have the checkpoint in its own shards."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = _empty_state(FileSystemReader(source).read_metadata(), mesh)
    dist.barrier()
    started = time.perf_counter()
    load(state, checkpoint_id=source)
    dist.barrier()
    loaded = time.perf_counter()
    save(state, checkpoint_id=destination)
    dist.barrier()
    saved = time.perf_counter()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes())
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    times = {"inside_s": saved - started, "load_s": loaded - started, "save_s": saved - loaded}
    return {**times, "peak_bytes_of_all_ranks": sum(peaks)} if is_first else {}


def _empty_state(metadata: Metadata, mesh: DeviceMesh) -> dict[str, Any]:
    return {
        name: empty_tensor(entry.size, entry.properties.dtype, mesh)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def through_one_file(source: str, destination: str) -> dict[str, Any]:
    """What torch ships to convert checkpoints: all of it through memory and one file. It knows no number of ranks."""
    between = Path(f"{destination}.pt")
    started = time.perf_counter()
    try:
        dcp_to_torch_save(source, between)
        middle = time.perf_counter()
        torch_save_to_dcp(between, destination)
        done = time.perf_counter()
    finally:
        between.unlink(missing_ok=True)
    files = len(list(Path(destination).glob("*.distcp")))
    return {"inside_s": done - started, "to_file_s": middle - started, "to_dcp_s": done - middle, "files": files}


def unpickle(folder: str) -> dict[str, Any]:
    """What stock torch does first of all."""
    before = peak_bytes()
    started = time.perf_counter()
    with (Path(folder) / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    inside = time.perf_counter() - started
    return {"inside_s": inside, "peak_above_bytes": peak_bytes() - before, "chunks": len(metadata.storage_data)}


COMMANDS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "write": write,
    "load-save": load_save,
    "through-one-file": through_one_file,
    "unpickle": unpickle,
}

if __name__ == "__main__":
    result = COMMANDS[sys.argv[1]](*sys.argv[2:])
    if result:
        print(json.dumps(result), flush=True)
