"""What is in the files that DeepSpeed writes: model states and optimizer states, as far as they are needed.

::

    *_model_states.pt
        module                      {fqn: tensor}: weights and buffers; in stage 3 weights are placeholders, shape (0,)
        buffer_names                [fqn]
        param_shapes                [{fqn: shape}] a flat group, in the order in which they lie; None in stage 0
        frozen_param_shapes         {fqn: shape}, of stages 2 and 3; None in stages 0 and 1
        frozen_param_fragments      {fqn: tensor}: in stage 3 this rank's part, flat and padded
        shared_params               {fqn: the one that it is tied to, which alone is stored}, complete on rank 0
        optimizer                   stage 0: the optimizer's state dict; otherwise None
        lr_scheduler, global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, ds_version, ...
        and whatever the user gave as client_state, on the same level

    *_optim_states.pt               optimizer_state_dict:
      stages 1, 2                   zero_stage, loss_scaler, group_paddings, partition_count [a group]
        single_partition_of_fp32_groups     [masters of the rank, flat], a group each, without padding at the end
        base_optimizer_state        {"state": {group: {"step", "exp_avg", ...}}, "param_groups"}, flat and with padding;
                                    or with elastic_checkpoint: [{"exp_avg", ...}], a group each
        param_slice_mappings        [{fqn: fragment_address{numel, start}}]: what the rank has of each parameter, and
                                    where in its partition
        param_alignment_paddings    [[elements behind each parameter]], since 0.19
      BF16_Optimizer                as stage 1, without zero_stage and loss_scaler, and the masters too with padding
      stage 3                       zero_stage, loss_scaler, partition_count
        fp32_flat_groups            [masters of the rank, flat], one a sub-group of a parameter group
        optimizer_state_dict        {"state": {sub-group: {"step", "exp_avg", ...}}, "param_groups"}

The ids in ``param_groups`` are numbers of flat groups. ``step`` is a tensor or a number, with the moments or, by older
optimizers, with the parameter group; ``base_optimizer_state_step`` is that of elastic checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.torch_archive import Stored

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModelStates:
    """A file of model states.

    Attributes:
        module: its tensors.
        left_out: names in the module of what is not a tensor.
        shapes: of each flat group; None where there are none.
        rest: everything else.
    """

    source: RankFile
    module: dict[str, Stored]
    left_out: tuple[str, ...]
    buffers: frozenset[str]
    shapes: list[dict[str, Shape]] | None
    frozen_shapes: dict[str, Shape]
    frozen: dict[str, Stored]
    shared: dict[str, str]
    optimizer: dict[str, Any] | None
    rest: dict[str, Any]

    @property
    def placeholders(self) -> list[str]:
        """Names in the module that stand for weights which lie elsewhere."""
        return [name for name, tensor in self.module.items() if tensor.shape == (0,) and name not in self.buffers]


@dataclass(frozen=True)
class Fragment:
    """What a rank has of a parameter, in its partition."""

    start: int
    numel: int


@dataclass(frozen=True, eq=False)
class OptimizerStates:
    """A file of a rank's optimizer states.

    Attributes:
        ranks: how many hold a part.
        masters: of each flat group.
        states: of the flat groups, by number: ``exp_avg`` and the like, ``step``.
        groups: the parameter groups, with the numbers of their flat groups as ``params``.
        fragments: of each flat group, in stages 1 and 2.
        paddings: behind each parameter of a flat group.
        step: of all, where it is not with the states.
        loss_scaler: its attributes.
    """

    source: RankFile
    ranks: int
    is_stage_3: bool
    masters: list[Stored]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    fragments: list[dict[str, Fragment]] | None
    paddings: list[int]
    step: Any
    loss_scaler: dict[str, Any]


_OF_DEEPSPEED = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments",
}  # fmt: skip


def model_states(source: RankFile) -> ModelStates:
    """What a file of model states holds.

    Raises:
        CheckpointUnsound: it is not one, or contradicts itself.
    """
    with _faults_of(source):
        return _model_states(source)


def optimizer_states(source: RankFile) -> OptimizerStates:
    """What a file of optimizer states holds.

    Raises:
        CheckpointUnsound: it is not one, or contradicts itself.
    """
    with _faults_of(source):
        return _optimizer_states(source)


def common_states(source: RankFile, flat_groups: int) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Parameter groups, and steps of flat groups as far as known, in ``optimizer_state.pt`` of a universal checkpoint.

    Raises:
        CheckpointUnsound: it is no such file, or contradicts itself.
    """
    with _faults_of(source):
        root = _dict(source.root, "the file")
        groups = _parameter_groups(root.get("param_groups", []), "param_groups", flat_groups)
        states = _dict(_dict(root.get("optimizer_state_dict") or {}, "optimizer_state_dict").get("state", {}), "state")
        steps = {number: group.get("step") for group in groups for number in group["params"]}
        own = {number: _dict(state, "state").get("step") for number, state in states.items()}
        return groups, steps | {number: step for number, step in own.items() if step is not None}


class _Fault(Exception):
    """What an entry should be, and what it is."""

    def __init__(self, key: str, expected: str, found: object) -> None:
        super().__init__(key)
        self.key, self.expected, self.found = key, expected, found


@contextmanager
def _faults_of(source: RankFile) -> Iterator[None]:
    try:
        yield
    except _Fault as fault:
        raise CheckpointUnsound(
            "not what DeepSpeed writes",
            path=source.path,
            key=fault.key,
            expected=fault.expected,
            found=fault.found,
            hint="copy it anew, or save the checkpoint again",
        ) from None


def _model_states(source: RankFile) -> ModelStates:
    root = _dict(source.root, "the file")
    module = _named(root.get("module"), "module")
    shapes = root.get("param_shapes")
    return ModelStates(
        source=source,
        module={name: value for name, value in module.items() if isinstance(value, Stored)},
        left_out=tuple(sorted(name for name, value in module.items() if not isinstance(value, Stored))),
        buffers=frozenset(map(str, _list(root.get("buffer_names", []), "buffer_names"))),
        shapes=None if shapes is None else [_shapes(group, "param_shapes") for group in _groups(shapes)],
        frozen_shapes=_shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes"),
        frozen=_tensors(root.get("frozen_param_fragments") or {}, "frozen_param_fragments"),
        shared={
            str(name): str(other) for name, other in _dict(root.get("shared_params") or {}, "shared_params").items()
        },
        optimizer=None if root.get("optimizer") is None else _dict(root["optimizer"], "optimizer"),
        rest={key: value for key, value in root.items() if key not in _OF_DEEPSPEED},
    )


def _optimizer_states(source: RankFile) -> OptimizerStates:
    outer = "optimizer_state_dict"
    root = _dict(_dict(source.root, "the file").get(outer), outer)
    is_stage_3 = "fp32_flat_groups" in root
    masters_key = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
    states_key = "optimizer_state_dict" if is_stage_3 else "base_optimizer_state"
    masters = _list(root.get(masters_key), masters_key)
    if bad := [value for value in masters if not isinstance(value, Stored) or len(value.shape) != 1]:
        raise _Fault(masters_key, "flat tensors", type(bad[0]).__name__)
    states, groups = _states(root.get(states_key), states_key, len(masters))
    if foreign := [number for number in states if number not in range(len(masters))]:
        raise _Fault(states_key, f"numbers of its {len(masters)} flat groups", foreign)
    return OptimizerStates(
        source=source,
        ranks=_ranks(root.get("partition_count")),
        is_stage_3=is_stage_3,
        masters=masters,
        states=states,
        groups=groups,
        fragments=_fragments(root.get("param_slice_mappings"), len(masters)),
        paddings=_paddings(root.get("param_alignment_paddings"), len(masters)),
        step=root.get("base_optimizer_state_step"),
        loss_scaler=dict(vars(root["loss_scaler"])) if hasattr(root.get("loss_scaler"), "cur_scale") else {},
    )


def _states(value: Any, key: str, flat_groups: int) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """States by flat group, and parameter groups: of elastic checkpoints none."""
    if isinstance(value, list):
        return {number: _dict(state, key) for number, state in enumerate(value)}, []
    value = _dict(value, key)
    states = _dict(value.get("state"), f"{key}.state")
    groups = _parameter_groups(value.get("param_groups"), f"{key}.param_groups", flat_groups)
    return {number: _dict(state, f"{key}.state") for number, state in states.items()}, groups


def _parameter_groups(value: Any, key: str, flat_groups: int) -> list[dict[str, Any]]:
    groups = _list(value, key)
    for group in groups:
        params = _list(_dict(group, key).get("params"), f"{key}.params")
        if foreign := [number for number in params if number not in range(flat_groups)]:
            raise _Fault(f"{key}.params", f"numbers of its {flat_groups} flat groups", foreign)
    return groups


def _ranks(value: Any) -> int:
    """Of how many ranks: stages 1 and 2 say it for each group, and groups of experts have fewer."""
    counts = set(value) if isinstance(value, list) and value else {value}
    if len(counts) != 1 or not all(isinstance(count, int) and count > 0 for count in counts):
        raise _Fault("partition_count", "the same number of ranks for each group", value)
    return int(counts.pop())


def _fragments(value: Any, groups: int) -> list[dict[str, Fragment]] | None:
    key = "param_slice_mappings"
    if value is None:
        return None
    mappings = _list(value, key)
    if len(mappings) != groups:
        raise _Fault(key, f"one for each of {groups} flat groups", len(mappings))
    return [
        {
            name: Fragment(_count(getattr(place, "start", None)), _count(getattr(place, "numel", None)))
            for name, place in _dict(mapping, key).items()
        }
        for mapping in mappings
    ]


def _paddings(value: Any, groups: int) -> list[int]:
    key = "param_alignment_paddings"
    if value is None:
        return [0] * groups
    counts = [sum(map(_count, _list(group, key))) for group in _list(value, key)]
    if len(counts) != groups:
        raise _Fault(key, f"one for each of {groups} flat groups", len(counts))
    return counts


def _groups(value: Any) -> Sequence[Any]:
    """Of shapes; early releases had one dict for all."""
    return [value] if isinstance(value, dict) else _list(value, "param_shapes")


def _shapes(value: Any, key: str) -> dict[str, Shape]:
    shapes = _named(value, key)
    for name, shape in shapes.items():
        if not isinstance(shape, (tuple, list)) or not all(type(size) is int and size >= 0 for size in shape):
            raise _Fault(f"{key}.{name}", "a shape", shape)
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(value: Any, key: str) -> dict[str, Stored]:
    tensors = _named(value, key)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Stored):
            raise _Fault(f"{key}.{name}", "a tensor", type(tensor).__name__)
    return tensors


def _dict(value: Any, key: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Fault(key, "a dict", _kind(value))
    return value


def _named(value: Any, key: str) -> dict[str, Any]:
    content = _dict(value, key)
    if others := [name for name in content if not isinstance(name, str)]:
        raise _Fault(key, "names", others[0])
    return content


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Fault(key, "a list", _kind(value))
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _Fault("a number of elements", "0 or more", _kind(value))
    return value


def _kind(value: Any) -> str:
    return "none" if value is None else str(value) if isinstance(value, int) else f"a {type(value).__name__}"
