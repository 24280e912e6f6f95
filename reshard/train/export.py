"""Weights alone, for inference or another tool. They are not a checkpoint and never named like one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from reshard.errors import UsageError
from reshard.storage.durable import rename_durably, storage_errors
from reshard.train.names import canonical_names
from reshard.train.ranks import all_ranks


def export_weights(
    directory: str | Path, model: torch.nn.Module, *, format: Literal["torch", "safetensors"] = "torch"
) -> Path:
    """Writes the whole model as ``<directory>/weights.pt`` or ``weights.safetensors``, under bare names.

    Collective; rank 0 gathers the tensors in its CPU memory and writes. A run cannot be resumed from the result.

    Raises:
        UsageError: safetensors is asked for and not installed.
        StorageError: the file system refused.
    """
    if format not in ("torch", "safetensors"):
        raise UsageError("unknown format", key="format", expected="torch or safetensors", found=format)
    ranks = all_ranks()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    path = Path(directory) / ("weights.pt" if format == "torch" else "weights.safetensors")
    with ranks.together():
        if ranks.rank == 0:
            names = canonical_names(state)
            _write(path, {names[key]: value for key, value in state.items()}, format)
    return path


def _write(path: Path, tensors: dict[str, Any], format: str) -> None:
    part = path.with_name(f".{path.name}.part")
    with storage_errors("write", part):
        path.parent.mkdir(parents=True, exist_ok=True)
        if format == "torch":
            torch.save(tensors, part)
        else:
            try:
                from safetensors.torch import save_file
            except ImportError as fault:
                raise UsageError("safetensors is not installed", hint="pip install 'reshard[hf]'") from fault
            # Tied weights share memory, which the format cannot express: each name gets its own copy.
            save_file({name: value.clone().contiguous() for name, value in tensors.items()}, part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
    rename_durably(part, path)
