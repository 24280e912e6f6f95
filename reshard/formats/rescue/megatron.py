"""A checkpoint of Megatron-Core's ``torch_dist`` format: DCP with keys of its own, and the rest in ``common.pt``.

::

    metadata.json     {"sharded_backend": "torch_dist", "common_backend": "torch", ...}
    .metadata         DCP. Keys are not nested: the model's names stand at the root, an optimizer's state is
                      ``optimizer.state.<name>.<fqn>``. Homogeneous layers are stacked: one tensor ``blocks.<fqn>`` with
                      a leading axis of layers. Objects ``<key>/shard_<r>_<n>`` are one of several parts
    common.pt         what is not sharded, a file of torch.save: "optimizer": {"param_groups": [...] without "params",
                      "common_step" or "step" in the groups}, "opt_param_scheduler": {...}, "iteration": int, "args"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import open_dcp
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.merged import merged
from reshard.formats.rescue.rank_file import open_rank_file
from reshard.index.kinds import nested_path

NAME = "megatron"
COMMON = "common.pt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")


def is_megatron(names: Sequence[str]) -> bool:
    """Whether a folder with these files holds such a checkpoint."""
    return COMMON in names and "metadata.json" in names and ".metadata" in names


def open_megatron(folder: Path) -> Checkpoint:
    """Opens the folder of an iteration. Keys become those of a run of ours; stacked layers stay stacked.

    Raises:
        CheckpointUnsound: files are missing or damaged.
    """
    tensors = _with_our_keys(open_dcp(folder))
    assembly = Assembly(folder, [folder / COMMON])
    source = open_rank_file(assembly.files, 0)
    assembly.files.close()
    common = source.root if isinstance(source.root, dict) else {}
    optimizer = common["optimizer"] if isinstance(common.get("optimizer"), dict) else {}
    groups = [group for group in optimizer.get("param_groups") or () if isinstance(group, dict)]
    names = dict.fromkeys(
        key.removeprefix("optim.state.").rpartition(".")[0]
        for key in tensors.index.names
        if key.startswith("optim.state.")
    )
    step = _step(common, optimizer, groups)
    for name in names if step is not None else ():
        key = training_state.state_key(name, "step")
        if key not in tensors.index.number:
            training_state.add_number(assembly, key, float(step or 0))
    # Which parameters are in which group, the files do not say.
    training_state.add_groups(assembly, groups, [group.get("params") or [] for group in groups])
    scheduler = common.get("opt_param_scheduler") or common.get("lr_scheduler")
    manifest = training_state.manifest_of(
        assembly,
        step=int(common.get("iteration") or step or 0),
        ranks=max(1, len({name.split("_")[2] for name in tensors.index.files if name.startswith("__")})),
        parts=["model", *(["optimizer"] if names else [])],
        lr=[group.get("lr") for group in groups],
        schedulers={"scheduler": scheduler} if scheduler else {},
    )
    if any(key.startswith("model.") for key in names):
        assembly.notes.append("stacked layers stay one tensor; --unstack makes numbered layers of them")
    return replace(merged(folder, NAME, [tensors, assembly.build(NAME)], manifest), metadata_files=_OWN_FILES)


_OWN_FILES = (".metadata", "metadata.json", COMMON)


def _step(common: dict[str, Any], optimizer: dict[str, Any], groups: Sequence[dict[str, Any]]) -> float | None:
    places = [optimizer.get("common_step"), *(group.get("step") for group in groups), common.get("iteration")]
    return next((step for step in places if isinstance(step, (int, float)) and not isinstance(step, bool)), None)


def _with_our_keys(checkpoint: Checkpoint) -> Checkpoint:
    def key(name: str) -> str:
        if (match := _STATE.fullmatch(name)) is not None:
            return training_state.state_key(match[2], match[1])
        return name if name.startswith(("optimizer.", "rng_state")) else training_state.model_key(name)

    index = checkpoint.index
    names = [key(name) for name in index.names]
    # Parts of objects, one a rank, which nothing here puts together.
    return replace(
        checkpoint, index=replace(index, names=names, objects={}), paths={name: nested_path(name) for name in names}
    )
