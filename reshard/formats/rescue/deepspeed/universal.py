"""A universal checkpoint of DeepSpeed (``ds_to_universal.py``): a file for each part of a parameter's state, whole.

::

    zero/<fqn>/fp32.pt              {"param": tensor, ...}, or the tensor, from stage 3 flat and without its shape
    zero/<fqn>/exp_avg.pt           likewise, and exp_avg_sq.pt; none of a parameter that never had a gradient
    zero/<fqn>/step.pt              a number or a tensor; not from stage 3
    zero/optimizer_state.pt         param_groups, whose params are numbers of flat groups; from stage 3 also
                                    optimizer_state_dict, with the step of each flat group
    [zero_pp_rank_<r>_]mp_rank_<m>_model_states.pt      copied: `reshard.formats.rescue.deepspeed.states`

Newer releases also write ``fp32.pt`` of what is not trained, cast to float32; that comes from the module, as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.deepspeed.files import model_files
from reshard.formats.rescue.deepspeed.model import (
    add_options,
    add_shared,
    add_step,
    add_untrained,
    is_stored,
    manifest,
    names_of,
    note_unknown,
    steps_done,
)
from reshard.formats.rescue.deepspeed.states import ModelStates, Shape, common_states, model_states
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import RankFile, open_rank_files
from reshard.formats.torch_archive import Stored
from reshard.storage.durable import storage_errors

NAME = "deepspeed-universal"
_ZERO, _MASTER, _STEP = "zero", "fp32", "step"
_OPTIMIZER = "optimizer_state.pt"


def is_universal(folder: Path) -> bool:
    """Whether a folder holds a universal checkpoint."""
    return (folder / _ZERO).is_dir()


def open_universal(folder: Path, hints: Hints) -> Checkpoint:
    """Opens a universal checkpoint: reads what describes the tensors, and none of them.

    Raises:
        CheckpointUnsound: files are missing, damaged, or contradict each other.
    """
    of_model = model_files(folder)
    with storage_errors("list the folder", folder / _ZERO):
        folders = sorted(path for path in (folder / _ZERO).iterdir() if (path / f"{_MASTER}.pt").is_file())
        of_parameters = [file for path in folders for file in sorted(path.glob("*.pt"))]
    optimizer = [path for path in (folder / _ZERO / _OPTIMIZER,) if path.is_file()]
    paths = [*of_model, *optimizer, *of_parameters]
    assembly = Assembly(folder, paths)
    try:
        opened = open_rank_files(assembly.files, range(len(paths)))
        note_unknown(assembly, opened)
        models = [model_states(source) for source in opened[: len(of_model)]]
        files: dict[str, dict[str, RankFile]] = {}
        for source in opened[len(of_model) + len(optimizer) :]:
            files.setdefault(source.path.parent.name, {})[source.path.stem] = source
        return _Universal(assembly, models, files, opened[len(of_model)] if optimizer else None).checkpoint(hints)
    finally:
        assembly.files.close()


class _Universal:
    def __init__(
        self,
        assembly: Assembly,
        models: Sequence[ModelStates],
        files: Mapping[str, Mapping[str, RankFile]],
        optimizer: RankFile | None,
    ) -> None:
        self._assembly = assembly
        self._models = models
        self._files = files
        self._optimizer = optimizer
        # Of stage 3, files of all ranks are there, and each lists the same shapes.
        self._groups = models[0].shapes or []
        self._shapes = {name: shape for group in self._groups for name, shape in group.items()}
        self._names = names_of(models[0])

    def checkpoint(self, hints: Hints) -> Checkpoint:
        model = self._models[0]
        self._require_all()
        wants_stored = hints.weights == "stored"
        if wants_stored and not is_stored(model, self._shapes):
            self._assembly.notes.append("the weights are the fp32 masters: the files have no other copy of all of them")
            wants_stored = False
        optimizer = self._optimizer
        options, steps = ([], {}) if optimizer is None else common_states(optimizer, len(self._groups))
        for number, group in enumerate(self._groups):
            for name in group:
                self._add_parameter(name, steps.get(number), wants_stored)
        add_untrained(self._assembly, self._models, self._names, self._shapes)
        add_shared(self._assembly, model, self._names)
        lr: list[Any] = []
        if optimizer is not None:
            of_groups = [[self._names[n] for flat in group["params"] for n in self._groups[flat]] for group in options]
            lr = add_options(self._assembly, optimizer, options, of_groups)
        ranks = model.rest.get("dp_world_size")
        content = manifest(self._assembly, model, ranks=ranks if isinstance(ranks, int) else 1,
                           parts=["model", "optimizer"], lr=lr)  # fmt: skip
        return self._assembly.build(NAME, content, content.versions.get("deepspeed"))

    def _require_all(self) -> None:
        if missing := [name for name in self._shapes if name not in self._files]:
            raise CheckpointUnsound(
                "parameters without files",
                path=self._assembly.folder / _ZERO,
                key=missing[0],
                expected=f"{_MASTER}.pt of {len(self._shapes)} parameters",
                found=f"of {len(self._shapes) - len(missing)}",
                details=missing[1:],
            )

    def _add_parameter(self, name: str, step: Any, wants_stored: bool) -> None:
        model, short = self._models[0], self._names[name]
        files = self._files[name]
        has_moments = False
        for slot, source in files.items():
            if slot == _STEP:
                continue
            key = training_state.model_key(short) if slot == _MASTER else training_state.state_key(short, slot)
            if slot == _MASTER and wants_stored:
                self._assembly.add_tensor(key, model.module[name], model.source)
            else:
                self._add_tensor(key, self._shapes[name], source)
            has_moments |= slot != _MASTER
        if not has_moments:
            return
        if _STEP in files:
            step, source = files[_STEP].root, files[_STEP]
        elif step is not None and self._optimizer is not None:
            source = self._optimizer
        else:
            step, source = steps_done(model), model.source
        add_step(self._assembly, short, step, source)

    def _add_tensor(self, key: str, shape: Shape, source: RankFile) -> None:
        root = source.root
        tensor = root.get("param") if isinstance(root, dict) else root
        if isinstance(root, dict) and root.get("vocab_tensor") and isinstance(tensor, Stored):
            # The rows that pad a vocabulary are cut off here, and the model's file still counts them.
            shape = tensor.shape
        if not isinstance(tensor, Stored) or math.prod(tensor.shape) != math.prod(shape):
            found = tensor.shape if isinstance(tensor, Stored) else f"a {type(tensor).__name__}"
            raise CheckpointUnsound("elements that do not add up", path=source.path, key=key,
                                    expected=f"a tensor of {shape}", found=found)  # fmt: skip
        if tensor.shape == shape:
            self._assembly.add_tensor(key, tensor, source)
        else:
            self._assembly.add_range(key, shape, 0, tensor, source)
