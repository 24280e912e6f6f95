"""Files of single ranks, as verl and plain FSDP2 scripts save them, and torch's own way to make one checkpoint of them.

rank_files.py write SHAPES.json RANKS FOLDER     DTensor shards of model and optimizer, a file a rank and part
rank_files.py merge SRC DST                      loads every rank's files, joins the shards, `dcp.save`
rank_files.py compare A B                        fails unless A holds the tensors of B and no others but counters of
                                                 steps; folders of DCP, safetensors or DeepSpeed's universal format

Prints one JSON object: `inside_s` is the time without the start of the interpreter and imports.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from known_state import empty_tensor
from memory import peak_bytes
from stock import on_ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

_STATE = re.compile(r"optim\.state\.(.+)\.(\w+)")


def write(shapes_file: str, ranks: str, folder: str) -> None:
    """Writes a checkpoint of random numbers."""
    Path(folder).mkdir()
    on_ranks(_write_rank, int(ranks), json.loads(Path(shapes_file).read_text()), folder)


def _write_rank(rank: int, ranks: int, meeting: str, shapes: dict[str, list[int]], folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))  # verl's merger wants the name
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for key, shape in shapes.items():
        tensor = empty_tensor(shape, torch.float32, mesh)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.fill_(1000.0)
        local.uniform_(-1, 1) if local.dim() else None
        if (match := _STATE.fullmatch(key)) is not None:
            state.setdefault(match[1], {})[match[2]] = tensor
        else:
            model[key.removeprefix("model.")] = tensor
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(state)}]
    torch.save(model, f"{folder}/model_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"state": state, "param_groups": groups}, f"{folder}/optim_world_size_{ranks}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def merge(source: str, destination: str) -> dict[str, Any]:
    """All shards in memory, joined tensor by tensor."""
    started = time.perf_counter()
    ranks = len(list(Path(source).glob("model_*.pt")))
    models, optimizers = (
        [torch.load(f"{source}/{kind}_world_size_{ranks}_rank_{rank}.pt", weights_only=False) for rank in range(ranks)]
        for kind in ("model", "optim")
    )
    state: dict[str, Any] = {
        "model": {name: _joined([model.pop(name) for model in models]) for name in list(models[0])}
    }
    entries = {
        name: {slot: _joined([each["state"][name].pop(slot) for each in optimizers]) for slot in list(slots)}
        for name, slots in optimizers[0]["state"].items()
    }
    state["optim"] = {"state": entries, "param_groups": optimizers[0]["param_groups"]}
    save(state, checkpoint_id=destination, no_dist=True)
    return {"inside_s": time.perf_counter() - started, "peak_bytes": peak_bytes()}


def _joined(parts: list[Any]) -> torch.Tensor:
    if not isinstance(parts[0], DTensor):
        return parts[0]  # type: ignore[no-any-return]
    return torch.cat([part.to_local() for part in parts])


def compare(first: str, second: str) -> dict[str, Any]:
    """By stock torch and safetensors alone."""
    a, b = (_loaded(Path(folder)) for folder in (first, second))
    others = [key for key in a.keys() ^ b.keys() if key in b or not key.endswith(".step")]
    if others:
        raise SystemExit(f"other keys: {sorted(others)[:4]}")
    differing = [key for key in b if not torch.equal(a[key], b[key])]
    if differing:
        raise SystemExit(f"other values: {differing[:4]}")
    return {"tensors": len(b)}


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "zero").is_dir():
        return _loaded_universal(folder / "zero")
    if files := list(folder.glob("*.safetensors")):
        from safetensors.torch import load_file

        return {key: tensor for file in files for key, tensor in load_file(file).items()}
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def _loaded_universal(zero: Path) -> dict[str, torch.Tensor]:
    """A folder a parameter, a file a tensor."""
    tensors = {}
    for path in zero.glob("*/*.pt"):
        name, slot = path.parent.name, path.stem
        if slot != "step":
            content = torch.load(path, weights_only=True)
            key = f"model.{name}" if slot == "fp32" else f"optim.state.{name}.{slot}"
            tensors[key] = content["param"] if isinstance(content, dict) else content
    return tensors


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    print(json.dumps({"write": write, "merge": merge, "compare": compare}[what](*arguments) or {}))
