"""What Hugging Face accelerate saves of an FSDP run: model and optimizer each in a folder of DCP, or in files of ranks.

::

    pytorch_model_fsdp_0/                       DCP (SHARDED_STATE_DICT), keys below "model"
    optimizer_0/                                DCP, keys below "optimizer"; also beside LOCAL_STATE_DICT models
    pytorch_model_fsdp_rank<r>.bin              LOCAL_STATE_DICT; a number before "rank" where there are several models
    pytorch_model_fsdp_0_rank<r>.bin, optimizer_0_rank<r>.bin        DTensors of ranks, since 2026
    scheduler.bin, scheduler_1.bin, ...         states of schedulers; they step once a process, so that their count is
                                                that of steps times ranks
    random_states_<r>.pkl                       "random_state", "numpy_random_seed", "torch_manual_seed", ...
    custom_checkpoint_<i>.pkl                   what was registered

All files are those of torch.save, whatever they are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import open_dcp
from reshard.formats.rescue import fsdp_ranks, training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.merged import merged
from reshard.formats.rescue.rank_file import RankFile, open_rank_file
from reshard.formats.rescue.rank_sets import rank_sets
from reshard.index.kinds import optimizer_place
from reshard.storage.durable import storage_errors

NAME = "accelerate"

_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp(?:_\d+)?")
_OPTIMIZER_FOLDER = re.compile(r"optimizer(?:_\d+)?")
_MODEL_FILE = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank_?\d+\.bin")
_OPTIMIZER_FILE = re.compile(r"optimizer(?:_\d+)?_rank_?\d+\.bin")
_SCHEDULER = re.compile(r"scheduler(?:_\d+)?\.bin")
# Of what follows the optimizer's name in a key: a tensor of the parameter's own shape.
_MOMENT = re.compile(r"state\.(.+)\.(?:exp_avg|momentum_buffer)")
_RANDOM_STATES = re.compile(r"random_states_(\d+)\.pkl")
_RNG_NAMES = {"random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "torch"}


def is_accelerate(names: Sequence[str]) -> bool:
    """Whether a folder with these files and folders is one of a run's saved states."""
    return any(_MODEL_FOLDER.fullmatch(name) or _MODEL_FILE.fullmatch(name) for name in names)


def open_accelerate(folder: Path, hints: Hints) -> Checkpoint:
    """Opens the folder of a state.

    Raises:
        UsageError: it holds several models, or lacks what a hint could give.
        CheckpointUnsound: files are missing or damaged.
    """
    with storage_errors("list the folder", folder):
        paths = sorted(folder.iterdir())
    folders = []
    for pattern in (_MODEL_FOLDER, _OPTIMIZER_FOLDER):
        found = [path for path in paths if pattern.fullmatch(path.name) and path.is_dir()]
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise UsageError("several models", path=folder, found=names, hint="name the folder of one of them")
        folders += [open_dcp(path) for path in found]
    parts = []
    files = [path for path in paths if _MODEL_FILE.fullmatch(path.name) or _OPTIMIZER_FILE.fullmatch(path.name)]
    if files:
        # Flat parameters beside an optimizer by name: its moments have the shapes that the model's files lack.
        known = replace(hints, shapes=dict(shape for part in folders for shape in _shapes(part)))
        parts.append(fsdp_ranks.open_ranks(folder, rank_sets(files), known))
    return _with_small_files(folder, paths, [*parts, *folders])


def _shapes(part: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of the parameters that an optimizer has moments of."""
    for key, shape in zip(part.index.names, part.index.shapes, strict=True):
        place = optimizer_place(key)
        if place is not None and (match := _MOMENT.fullmatch(place[1])) is not None:
            yield match[1], shape


def _with_small_files(folder: Path, paths: Sequence[Path], parts: list[Checkpoint]) -> Checkpoint:
    """Adds schedulers and random states."""
    small = [path for path in paths if _SCHEDULER.fullmatch(path.name) or _RANDOM_STATES.fullmatch(path.name)]
    assembly = Assembly(folder, small)
    schedulers: dict[str, Any] = {}
    ranks = 0
    for number, path in enumerate(small):
        source = open_rank_file(assembly.files, number)
        if (match := _RANDOM_STATES.fullmatch(path.name)) is not None:
            ranks += _add_random_states(assembly, int(match[1]), source)
        else:
            schedulers[path.stem] = source.root
    assembly.files.close()
    parts.append(assembly.build(NAME))
    checkpoint = merged(folder, NAME, [replace(part, manifest=None) for part in parts])
    first = next((part.manifest for part in parts if part.manifest is not None), None)
    notes = list(checkpoint.notes)
    manifest = training_state.manifest_at(
        folder,
        notes,
        step=first.step if first else 0,
        ranks=first.world.ranks if first else max(1, ranks),
        parts=[part for part in ("model", "optimizer") if _has(checkpoint, part)],
        lr=first.lr if first else (),
        schedulers=schedulers,
        rng_ranks=ranks,
    )
    return replace(checkpoint, manifest=manifest, notes=tuple(notes))


def _has(checkpoint: Checkpoint, part: str) -> bool:
    roots = {"model": ("model.",), "optimizer": ("optim.", "optimizer.")}[part]
    return any(name.startswith(roots) for name in checkpoint.index.names)


def _add_random_states(assembly: Assembly, rank: int, source: RankFile) -> int:
    if not isinstance(source.root, dict):
        return 0
    states = {_RNG_NAMES[name]: value for name, value in source.root.items() if name in _RNG_NAMES}
    training_state.add_rng(assembly, rank, states, source)
    return 1 if states else 0
