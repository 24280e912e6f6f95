"""What fairscale's FSDP saves, rank by rank, through fairseq and metaseq.

One file a rank, ``checkpoint_last-shard0.pt`` or ``checkpoint_1_500-model_part-0-shard10.pt``::

    {"model": {"[<unit>.]flat_param_0": tensor of one dim,      this rank's part of a flat parameter, padding included
               "<fqn>": tensor of one dim,                      flatten_parameters=False: of a parameter by itself
               "<fqn>": tensor},                                buffers, whole; in 16 bits where the model was
     "last_optimizer_state": {"state", "param_groups"},         raw: an id is a flat parameter, padding included
     "optimizer_history": [{"num_updates", "lr_scheduler_state", ...}],
     "shard_metadata" (metaseq) or "fsdp_metadata" (fairseq):   see `reshard.formats.rescue.fairscale_metadata`

Ranks are cut as in `reshard.formats.rescue.flat.units`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.fairscale_metadata import FLAT_NAME, flat_parameters, metadata_of
from reshard.formats.rescue.flat.optimizer import add_by_unit, read_entries
from reshard.formats.rescue.flat.units import HOW_TO_GIVE_A_LAYOUT, Flat, Parts, add_part
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import RankFile, open_rank_files
from reshard.formats.rescue.rank_sets import RankSet, require_complete
from reshard.formats.rescue.rank_state import Part, is_optimizer, is_tensor
from reshard.formats.torch_archive import Stored
from reshard.index.names import canonical_names

NAME = "fairscale"


def is_fairscale(root: Any) -> bool:
    """Whether a rank's file is one of these, by what was saved in it."""
    if not isinstance(root, dict) or not isinstance(root.get("model"), dict):
        return False
    return metadata_of(root) is not None or any(
        isinstance(key, str) and FLAT_NAME.search(key) and is_tensor(value) for key, value in root["model"].items()
    )


def open_fairscale(folder: Path, sets: Sequence[RankSet], hints: Hints) -> Checkpoint:
    """Opens the files of all ranks: reads what describes the tensors, and none of them.

    Raises:
        CheckpointUnsound: files are missing, damaged, or contradict each other.
        UsageError: names or shapes are not in the files and were not given.
    """
    if len(sets) != 1:
        raise UsageError(
            "several parts of a model, or several checkpoints",
            path=folder,
            found=", ".join(found.kind for found in sets),
            hint="tensor-parallel parts are not merged here: name a folder with the files of one",
        )
    ranks = require_complete(sets, folder)
    assembly = Assembly(folder, [sets[0].files[rank] for rank in range(ranks)])
    try:
        return _assembled(assembly, open_rank_files(assembly.files, range(ranks)), hints)
    finally:
        assembly.files.close()


def _assembled(assembly: Assembly, sources: Sequence[RankFile], hints: Hints) -> Checkpoint:
    for source in sources:
        if not is_fairscale(source.root):
            raise CheckpointUnsound("not a file of fairscale, as others here are", path=source.path)
    if hints.units is None and hints.model is None and metadata_of(sources[0].root) is None:
        assembly.notes.append("what lies in the flat parameters is not in the files; " + HOW_TO_GIVE_A_LAYOUT)
    parts = Parts(len(sources), tuple(range(len(sources))))
    flats = flat_parameters(sources, hints, assembly.folder)
    _add_model(assembly, sources, flats, parts)
    saved, groups = ["model"], []
    optimizers = {
        rank: Part(source.root["last_optimizer_state"], source)
        for rank, source in enumerate(sources)
        if is_optimizer(source.root.get("last_optimizer_state"))
    }
    if optimizers and hints.optimizer != "left out":
        groups = add_by_unit(assembly, read_entries(optimizers, len(sources)), flats, parts, hints)
        saved.append("optimizer")
    root = sources[0].root
    history = root.get("optimizer_history")
    last = history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}
    scheduler = last.get("lr_scheduler_state")
    updates = last.get("num_updates")
    manifest = training_state.manifest_of(
        assembly,
        step=updates if isinstance(updates, int) else 0,
        ranks=len(sources),
        parts=saved,
        lr=[group.get("lr") for group in groups],
        schedulers={"scheduler": scheduler} if scheduler else None,
        extra={"extra_state": root["extra_state"]} if root.get("extra_state") else None,
    )
    return assembly.build(NAME, manifest)


def _add_model(assembly: Assembly, sources: Sequence[RankFile], flats: Sequence[Flat], parts: Parts) -> None:
    by_key = {flat.key: flat for flat in flats}
    for rank, source in enumerate(sources):
        model = source.root["model"]
        names = canonical_names(model)
        if missing := by_key.keys() - set(names.values()):
            raise CheckpointUnsound("parts of flat parameters are missing", path=source.path, found=sorted(missing))
        for spelled, value in model.items():
            name = names[spelled]
            if name not in by_key:
                if is_tensor(value):
                    assembly.add_tensor(training_state.model_key(name), value, source)
                continue
            flat, length = by_key[name], parts.numel(by_key[name].numel)
            if not isinstance(value, Stored) or value.shape != (length,):
                raise CheckpointUnsound(
                    "not this rank's part of the flat parameter", path=source.path, key=name,
                    expected=f"{length} of {flat.numel} elements", found=getattr(value, "shape", value),
                )  # fmt: skip
            add_part(assembly, flat, training_state.model_key, parts.range(flat.numel, rank), value, source)
    for flat in flats:
        for name, of in flat.shared:
            assembly.add_alias(training_state.model_key(name), training_state.model_key(of))
