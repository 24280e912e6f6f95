"""Weights alone, for inference or another tool. They are not a checkpoint and never named like one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from reshard.dcp.ranks import all_ranks
from reshard.errors import UsageError
from reshard.index.names import canonical_names
from reshard.storage.durable import rename_durably, storage_errors
from reshard.train import fsdp1


def export_weights(
    directory: str | Path, model: torch.nn.Module, *, format: Literal["torch", "safetensors"] = "torch"
) -> Path:
    """Writes the whole model as ``<directory>/weights.pt`` or ``weights.safetensors``, under bare names.

    Collective; rank 0 gathers the tensors in its CPU memory and writes. A run cannot be resumed from the result.

    Raises:
        UsageError: safetensors is asked for and not installed, or the model keeps extra state that is no tensor.
        StorageError: the file system refused.
    """
    if format not in ("torch", "safetensors"):
        raise UsageError("unknown format", key="format", expected="torch or safetensors", found=format)
    ranks = all_ranks()
    with ranks.together():
        if format == "safetensors" and importlib.util.find_spec("safetensors") is None:
            raise UsageError("safetensors is not installed", key="format", hint="pip install 'reshard[hf]'")
    if fsdp1.is_fsdp1(model):
        state = fsdp1.full_state(model)
    else:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    path = Path(directory) / ("weights.pt" if format == "torch" else "weights.safetensors")
    with ranks.together():
        if ranks.rank == 0:
            names = canonical_names(state)
            _write(path, {names[key]: value for key, value in state.items()}, format)
    return path


def _write(path: Path, tensors: dict[str, Any], format: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with storage_errors("write", part):
            path.parent.mkdir(parents=True, exist_ok=True)
            if format == "torch":
                torch.save(tensors, part)
            else:
                _write_safetensors(part, tensors)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        rename_durably(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                "the module's extra state is no tensor, which safetensors cannot hold",
                key=name,
                found=type(value).__name__,
                hint="export with format='torch'",
            )
    # Tied weights share memory, which the format cannot express: each name gets its own copy.
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path)
