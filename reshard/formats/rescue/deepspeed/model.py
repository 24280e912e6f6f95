"""What of a DeepSpeed checkpoint lies outside the optimizer's partitions: frozen weights, buffers, ties, counters."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.manifest import Manifest
from reshard.formats.plain_values import Budget, NotPlain, plain
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.deepspeed.files import JOIN_FIRST
from reshard.formats.rescue.deepspeed.layout import part_numel
from reshard.formats.rescue.deepspeed.states import ModelStates, Shape
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.torch_archive import Stored
from reshard.index.names import canonical_names

_MOST_ENTRIES = 1 << 22
_COUNTERS = ("global_samples", "skipped_steps")
# What DeepSpeed itself puts beside the user's client_state; the rest of its keys are read elsewhere.
_NOT_OF_CLIENT = {
    *_COUNTERS, "global_steps", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "dp_world_size", "mp_world_size", "num_experts", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "ds_autoep_layers",
}  # fmt: skip
_RANDOM_STATES = ("rng", "rng_state", "random_states")


def require_data_parallel(states: ModelStates) -> None:
    """Passes where the ranks that saved were data-parallel only.

    Raises:
        UsageError: each has a cut of the weights, and nothing says which.
    """
    degrees = {"mp_world_size": states.rest.get("mp_world_size")}
    dimensions = states.rest.get("checkpoint_parallel_dimensions")
    degrees |= dimensions if isinstance(dimensions, dict) else {}
    for key, degree in degrees.items():
        if isinstance(degree, int) and degree > 1:
            raise UsageError("weights cut over model-parallel ranks, which are not read", path=states.source.path,
                             key=str(key), expected=1, found=degree, hint=JOIN_FIRST)  # fmt: skip


def is_stored(states: ModelStates, shapes: Mapping[str, Shape]) -> bool:
    """Whether the module has all of these weights in full."""
    return all(name in states.module and states.module[name].shape == shape for name, shape in shapes.items())


def names_of(states: ModelStates) -> dict[str, str]:
    """Every name in a file of model states, and the one without wrappers."""
    spelled = {**states.module, **states.frozen_shapes, **states.shared, **dict.fromkeys(states.shared.values())}
    for shapes in states.shapes or ():
        spelled |= shapes
    return canonical_names(spelled)


def add_untrained(
    assembly: Assembly, ranks: Sequence[ModelStates], names: Mapping[str, str], trained: Collection[str]
) -> None:
    """Adds frozen weights and buffers.

    Args:
        ranks: the files of model states: of all ranks in stage 3, otherwise one.
        trained: what is added otherwise.

    Raises:
        CheckpointUnsound: there are placeholders, and what they stand for is nowhere.
    """
    first = ranks[0]
    placeholders = set(first.placeholders)
    elsewhere = {*trained, *first.shared}
    for name, tensor in first.module.items():
        if name not in elsewhere and name not in placeholders:
            assembly.add_tensor(training_state.model_key(names[name]), tensor, first.source)
    lost = [name for name in first.module if name in placeholders - elsewhere and name not in first.frozen_shapes]
    for name, shape in first.frozen_shapes.items():
        if name in elsewhere or (name in first.module and name not in placeholders):
            continue
        if all(name in states.frozen for states in ranks):
            _add_frozen(assembly, training_state.model_key(names[name]), shape, name, ranks)
        else:
            lost.append(name)
    if lost:
        raise CheckpointUnsound(
            "placeholders of shape (0,), and the weights are not among frozen_param_fragments either",
            path=first.source.path,
            key=lost[0],
            found=f"{len(lost)} such weights",
            hint="they were left out when it was saved (exclude_frozen_parameters): take them from the base model",
            details=lost[1:],
        )
    if first.left_out:
        assembly.notes.append(f"left out, for they are no tensors: {', '.join(first.left_out)}")


def _add_frozen(assembly: Assembly, key: str, shape: Shape, name: str, ranks: Sequence[ModelStates]) -> None:
    part = part_numel(shape, len(ranks))
    for rank, states in enumerate(ranks):
        fragment = states.frozen[name]
        if len(ranks) == 1 and fragment.shape == shape:
            assembly.add_tensor(key, fragment, states.source)
            return
        if fragment.shape != (part,):
            raise CheckpointUnsound("elements that do not add up", path=states.source.path, key=name, rank=rank,
                                    expected=f"{(part,)}, a part of {shape}", found=fragment.shape)  # fmt: skip
        begin = min(rank * part, math.prod(shape))
        assembly.add_range(key, shape, begin, fragment, states.source, 0, min(part, math.prod(shape) - begin))


def add_shared(assembly: Assembly, states: ModelStates, names: Mapping[str, str]) -> None:
    """Adds the other names of tied weights.

    Raises:
        CheckpointUnsound: what one is tied to is not there.
    """
    for name, other in states.shared.items():
        key, of = (training_state.model_key(names[part]) for part in (name, other))
        if of not in assembly.keys:
            raise CheckpointUnsound("tied to a weight that is not there", path=states.source.path, key=name,
                                    expected=other, found="none")  # fmt: skip
        if key not in assembly.keys:
            assembly.add_alias(key, of)


def add_step(assembly: Assembly, name: str, step: Any, source: RankFile) -> None:
    """Adds the step of a parameter, in the form in which torch's optimizers keep it."""
    key = training_state.state_key(name, "step")
    if isinstance(step, Stored):
        step = training_state.number_of(step, source, assembly, key)
    if not isinstance(step, (int, float)):
        raise CheckpointUnsound("not a step", path=source.path, key=key, expected="a number",
                                found=f"a {type(step).__name__}")  # fmt: skip
    training_state.add_number(assembly, key, step)


def add_options(
    assembly: Assembly, source: RankFile, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> list[Any]:
    """Adds the hyperparameters of the parameter groups; gives the learning rates."""
    numbers = []
    for group in groups:
        # The step is each parameter's own; a learning rate may be a tensor of one element.
        options = {option: value for option, value in group.items() if option != "step"}
        for option, value in options.items():
            if isinstance(value, Stored) and math.prod(value.shape) == 1:
                options[option] = training_state.number_of(value, source, assembly, str(option))
        numbers.append(options)
    training_state.add_groups(assembly, numbers, names)
    return [group.get("lr") for group in numbers]


def manifest(
    assembly: Assembly,
    states: ModelStates,
    *,
    ranks: int,
    parts: Sequence[str],
    lr: Sequence[Any],
    loss_scaler: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest, with the scheduler, the counters and what is plain of the user's client_state."""
    rest = states.rest
    counters: dict[str, Any] = {key: rest[key] for key in _COUNTERS if isinstance(rest.get(key), int)}
    if loss_scaler and loss_scaler.get("cur_scale", 1) != 1:
        counters["loss_scaler"] = {
            name: value for name, value in loss_scaler.items() if isinstance(value, (int, float))
        }
    client = {key: value for key, value in rest.items() if key not in {*_NOT_OF_CLIENT, *_RANDOM_STATES}}
    extra = {"deepspeed": counters, "client_state": _plain_entries(assembly, client, "client_state")}
    random = next((rest[key] for key in _RANDOM_STATES if isinstance(rest.get(key), dict)), None)
    if random is not None:
        training_state.add_rng(assembly, 0, random, states.source)
    return training_state.manifest_of(
        assembly,
        step=_count(states, "global_steps"),
        ranks=ranks,
        parts=parts,
        lr=lr,
        schedulers={"scheduler": rest["lr_scheduler"]} if rest.get("lr_scheduler") else {},
        rng_ranks=0 if random is None else 1,
        extra={name: value for name, value in extra.items() if value},
        versions={"deepspeed": str(rest["ds_version"])} if rest.get("ds_version") else {},
    )


def steps_done(states: ModelStates) -> int:
    """How often the optimizer stepped: those steps whose gradients overflowed are skipped, and count all the same."""
    return _count(states, "global_steps") - _count(states, "skipped_steps")


def _count(states: ModelStates, key: str) -> int:
    value = states.rest.get(key)
    return value if isinstance(value, int) else 0


def _plain_entries(assembly: Assembly, entries: Mapping[str, Any], what: str) -> dict[str, Any]:
    kept = {}
    for key, value in entries.items():
        try:
            kept[str(key)] = plain(value, Budget(_MOST_ENTRIES), 0)
        except NotPlain as fault:
            assembly.notes.append(f"left out, for it holds more than plain values: {what}.{key} ({fault})")
    return kept


def note_unknown(assembly: Assembly, sources: Sequence[RankFile]) -> None:
    """Notes the classes that something inert stands for, those of torch and DeepSpeed apart."""
    unknown = {name for source in sources for name in source.unknown if not name.startswith(("torch.", "deepspeed."))}
    if unknown:
        assembly.notes.append(f"classes that are not needed were not loaded: {', '.join(sorted(unknown))}")
