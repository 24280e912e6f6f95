"""Describes the flat parameters of a live FSDP1 model: names, shapes and paddings, which its LOCAL files do not hold.

This file stands alone (torch 2.0, Python 3.8 or newer): copy it to where the training code runs and call, on every
rank, with the model wrapped as it was when it was saved::

    from describe_flat import describe_flat
    describe_flat(model, "layout.json")

What it writes is what ``--layout`` reads::

    {"units": [{
        "unit": name of the wrapped module, "" for the root
        "fqns": names relative to it, "shapes": of each, in the order in which they lie
        "numels_incl_padding_entries": elements of all that lies there, "is_padding": whether that is a gap
        "shared_params": [{"name", "of"}], names that share a parameter with another
        "requires_grad": false where all is frozen}]}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def describe_flat(model: torch.nn.Module, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The layout of a model's flat parameters.

    Args:
        path: of the JSON file to write; rank 0 writes it.

    Raises:
        ValueError: there is no flat parameter, or one that no layout of this kind describes.
    """
    units: list[dict[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            units += [_unit(_clean(name), handle.flat_param) for handle in _handles(module)]
    if not units:
        raise ValueError("no flat parameter: this is not a model under FullyShardedDataParallel")
    layout = {"units": units}
    if path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        Path(path).write_text(json.dumps(layout, indent=1) + "\n", encoding="utf-8")
    return layout


def _handles(module: Any) -> list[Any]:
    if hasattr(module, "_handle"):
        return [] if module._handle is None else [module._handle]
    # Before torch 2.1.
    return list(module._handles)


def _unit(name: str, flat: Any) -> dict[str, Any]:
    fqns = [_clean(fqn) for fqn in flat._fqns]
    # What is not contiguous lies as it does in memory, which its shape does not tell.
    strange = [fqns[number] for number, plain in enumerate(getattr(flat, "_contiguities", ())) if not plain]
    if strange:
        raise ValueError(f"parameters of unit {name!r} whose elements do not lie in row-major order: {strange}")
    numels = [int(numel) for numel in getattr(flat, "_numels_with_padding", flat._numels)]
    return {
        "unit": name,
        "fqns": fqns,
        "shapes": [list(shape) for shape in flat._shapes],
        "numels_incl_padding_entries": numels,
        "is_padding": [bool(flag) for flag in getattr(flat, "_is_padding_mask", [False] * len(numels))],
        "shared_params": [
            {
                "name": _joined(info.module_name, info.param_name),
                "of": _joined(info.prim_module_name, info.prim_param_name),
            }
            for info in flat._shared_param_infos
        ],
        "requires_grad": bool(flat.requires_grad),
    }


def _joined(module: str, parameter: str) -> str:
    return _clean(f"{module}.{parameter}" if module else parameter)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
