"""Checkpoints that other tools wrote, with the tensors that they should give: all of them, or those in tests/data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from reshard.formats.rescue.hints import Hints, read_layout

_HERE = Path(__file__).parent
SELECTED = _HERE / "data" / "peers"
ALL = _HERE.parent.parent / "shared" / "peers"
FOLDER = ALL if ALL.is_dir() else SELECTED
CASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
# Their optimizers hold no state of the run that was to be saved, or they hold the model alone.
STACKED = {"mcore_torchdist_stacked_w2": ["blocks"]}


def folder(case: str) -> Path:
    return FOLDER / case / "ckpt"


def record(case: str) -> dict[str, Any]:
    """What the tool says of it: versions, hyperparameters, order of the optimizer's ids."""
    content: dict[str, Any] = json.loads((FOLDER / case / "case.json").read_text())
    return content


def order(case: str) -> list[list[str]] | None:
    """Names in the order of the optimizer's ids, by group."""
    found = record(case).get("optim_param_order") or record(case).get("optim_param_order_per_group")
    if not found:
        return None
    return found if isinstance(found[0], list) else [found]


def hints(case: str) -> Hints:
    """What the files do not hold."""
    layout = FOLDER / case / "flat_layout.json"
    names = order(case)
    return Hints(
        units=read_layout(layout) if layout.exists() else None,
        param_order=None if names is None else tuple(map(tuple, names)),
    )


def hint_files(case: str, at: Path) -> dict[str, Path]:
    """The same as files, for the options of ``convert``."""
    files = {}
    if (names := order(case)) is not None:
        files["param_order"] = at / "order.json"
        files["param_order"].write_text(json.dumps(names))
    if (layout := FOLDER / case / "flat_layout.json").exists():
        files["layout"] = layout
    return files


def expected(case: str) -> dict[str, torch.Tensor]:
    """The whole tensors, by the keys of a run of ours."""
    tensors = load_file(FOLDER / case / "expected.safetensors")
    return {
        f"optim.state.{key.removeprefix('optim.')}" if key.startswith("optim.") else key: tensor
        for key, tensor in tensors.items()
    }
