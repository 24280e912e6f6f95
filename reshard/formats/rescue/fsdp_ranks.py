"""What ranks saved each for itself with ``torch.save``: verl, FSDP2, FSDP1's SHARDED_STATE_DICT, and others.

Each rank's files hold its boxes of every tensor, as DTensors or ShardedTensors, which say where they belong
(`reshard.formats.rescue.sharded_classes`); a plain tensor (a buffer, a step counter) is the same on every rank. Ranks
of an HSDP mesh repeat each other. Which files hold which part of the state, `reshard.formats.rescue.rank_state` tells::

    verl         model_world_size_<W>_rank_<r>.pt    {fqn: DTensor}
                 optim_world_size_<W>_rank_<r>.pt    {"state": {id: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups"}
                 extra_state_world_size_<W>_rank_<r>.pt   {"lr_scheduler": ..., "rng": {"cpu", "numpy", "random"}}
                 fsdp_config.json                    {"FSDP_version": 1 | 2, "world_size": W}
    others       one file a rank with {"model", "optimizer", ...}, or one a part

The ids of an optimizer count the parameters in the order of its groups; their names are nowhere in the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.ema import add_ema
from reshard.formats.rescue.flat import model as flat_model
from reshard.formats.rescue.flat import ranks as flat_ranks
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.optimizer_names import names_by_id
from reshard.formats.rescue.rank_file import RankFile, open_rank_files
from reshard.formats.rescue.rank_sets import RankSet, require_complete
from reshard.formats.rescue.rank_state import EMA, RankState, is_tensor, rank_state
from reshard.formats.rescue.sharded_classes import Held
from reshard.index.names import canonical_names

NAME = "fsdp-ranks"
_STEP_KEYS = ("step", "global_step", "iteration")
_RNG_KEYS = ("rng", "rng_state", "random_states")
_EXPECTED = "torch.distributed."
_STEP_IN_NAME = re.compile(r"(?:global_?step|step|iter)[_-]?(\d+)", re.IGNORECASE)


def open_ranks(folder: Path, sets: Sequence[RankSet], hints: Hints) -> Checkpoint:
    """Opens the files of all ranks: reads what describes the tensors, and none of them.

    Raises:
        CheckpointUnsound: files are missing, damaged, or contradict each other.
        UsageError: the names of the optimizer's entries cannot be told.
    """
    ranks = require_complete(sets, folder)
    assembly = Assembly(folder, [found.files[rank] for rank in range(ranks) for found in sets])
    try:
        opened = open_rank_files(assembly.files, range(ranks * len(sets)))
        states = [rank_state(rank, opened[rank * len(sets) : (rank + 1) * len(sets)]) for rank in range(ranks)]
        return _assembled(assembly, states, opened, hints)
    finally:
        assembly.files.close()


def _assembled(assembly: Assembly, states: Sequence[RankState], opened: Sequence[RankFile], hints: Hints) -> Checkpoint:
    if unknown := sorted({name for source in opened for name in source.unknown if not name.startswith(_EXPECTED)}):
        assembly.notes.append(f"classes that are not needed were not loaded: {', '.join(unknown)}")
    flat = flat_model.read_flat_model(assembly, states, hints) if flat_model.is_flat(states) else None
    names = _model(assembly, states) if flat is None else flat_model.add_flat_model(assembly, states, flat)
    parts = ["model"] if names else []
    groups: list[dict[str, Any]] | None = None
    if hints.optimizer == "left out":
        pass
    elif flat_ranks.has_raw_optimizer(states):
        groups = flat_ranks.add_raw_optimizer(assembly, states, flat, names, hints)
    else:
        groups = _optimizer(assembly, states, names, hints)
    if groups is not None:
        parts.append("optimizer")
    schedulers = _schedulers(states[0])
    rng_ranks = _rng(assembly, states)
    averages = {} if flat is not None else add_ema(assembly, states, list(_parameters(states[0], names)))
    known = {"scheduler", *_RNG_KEYS, *_STEP_KEYS, *((EMA,) if flat is None else ())}
    if left_out := sorted({key for state in states for key in state.rest} - known):
        assembly.notes.append(f"left out, for nothing here knows what it is: {', '.join(left_out)}")
    manifest = training_state.manifest_of(
        assembly,
        step=_step(assembly, states),
        ranks=len(states),
        parts=parts,
        lr=[group.get("lr") for group in groups or ()],
        schedulers=schedulers,
        rng_ranks=rng_ranks,
        encoded_extra=averages,
    )
    return assembly.build(NAME, manifest)


def _model(assembly: Assembly, states: Sequence[RankState]) -> dict[str, str]:
    """Adds the model; its names as the files spell them, and without wrappers."""
    spelled = {name: None for state in states if state.model for name in state.model.content}
    names = canonical_names(spelled)
    for state in states:
        if state.model is None:
            continue
        for name, value in state.model.content.items():
            if is_tensor(value):
                assembly.add_tensor(training_state.model_key(names[name]), value, state.model.source)
    return names


def _optimizer(
    assembly: Assembly, states: Sequence[RankState], names: Mapping[str, str], hints: Hints
) -> list[dict[str, Any]] | None:
    """Adds the optimizer; its groups, or None where the files have none."""
    holders = [state for state in states if state.optimizer is not None]
    if not holders:
        return None
    if missing := [state.rank for state in states if state.optimizer is None]:
        fault = CheckpointUnsound(
            "an optimizer that not every rank saved", path=assembly.folder, found=f"none of ranks {missing}",
            hint="rank 0's part alone is no optimizer: leave it out with --only model",
        )  # fmt: skip
        if hints.optimizer == "named":
            raise fault
        assembly.notes.append(str(fault))
        return None
    assert holders[0].optimizer is not None
    groups = list(holders[0].optimizer.content["param_groups"])
    by_id = _names(assembly, holders, groups, names, hints)
    for state in holders:
        assert state.optimizer is not None
        for entry, slots in state.optimizer.content["state"].items():
            for slot, value in slots.items():
                training_state.add_state(
                    assembly, by_id.get(entry, str(entry)), str(slot), value, state.optimizer.source
                )
    training_state.add_groups(
        assembly, groups, [[by_id.get(entry, str(entry)) for entry in group["params"]] for group in groups]
    )
    return groups


def _names(
    assembly: Assembly,
    holders: Sequence[RankState],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    hints: Hints,
) -> dict[Any, str]:
    """The parameter of each entry of the optimizer."""
    entries = {entry for state in holders if state.optimizer for entry in state.optimizer.content["state"]}
    entries |= {entry for group in groups for entry in group["params"]}
    if all(isinstance(entry, str) for entry in entries):
        return dict(canonical_names(sorted(entries), like=names or None))
    shapes: dict[int, tuple[int, ...]] = {}
    for state in holders:
        assert state.optimizer is not None
        for entry, slots in state.optimizer.content["state"].items():
            for slot, value in slots.items():
                if slot != "step" and is_tensor(value) and (value.shape or isinstance(value, Held)):
                    shapes.setdefault(entry, value.shape)
    first = holders[0]
    assert first.optimizer is not None
    parameters = _parameters(first, names)
    return dict(
        names_by_id(
            [group["params"] for group in groups],
            shapes,
            parameters,
            hints.param_order,
            first.optimizer.source.path,
            model_orders=hints.orders,
            is_strict=hints.optimizer == "named",
        )
    )


def _parameters(state: RankState, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of what can be a parameter: where anything is sharded, what is not is a buffer."""
    model = state.model.content if state.model else {}
    sharded = {names[name]: value.shape for name, value in model.items() if isinstance(value, Held)}
    return sharded or {names[name]: value.shape for name, value in model.items() if is_tensor(value)}


def _schedulers(state: RankState) -> dict[str, Any]:
    found = state.rest.get("scheduler")
    return {"scheduler": found[0]} if found is not None and found[0] else {}


def _rng(assembly: Assembly, states: Sequence[RankState]) -> int:
    """Adds the random states; of how many ranks there are any."""
    count = 0
    for state in states:
        for key in _RNG_KEYS:
            if key in state.rest and isinstance(state.rest[key][0], dict):
                content, source = state.rest[key]
                training_state.add_rng(assembly, state.rank, content, source)
                count += 1
                break
    return count


def _step(assembly: Assembly, states: Sequence[RankState]) -> int:
    """The step: as the optimizer counts, the files say, or the folder's name."""
    optimizer = states[0].optimizer
    if optimizer is not None:
        for slots in optimizer.content["state"].values():
            value = slots.get("step")
            if isinstance(value, (int, float)):
                return int(value)
            if value is not None and is_tensor(value) and not isinstance(value, Held):
                return int(training_state.number_of(value, optimizer.source, assembly, "step"))
    for key in _STEP_KEYS:
        if key in states[0].rest and type(step := states[0].rest[key][0]) is int and step >= 0:
            return step
    for folder in (assembly.folder, *assembly.folder.parents[:2]):
        if (match := _STEP_IN_NAME.fullmatch(folder.name)) is not None:
            return int(match[1])
    return 0
