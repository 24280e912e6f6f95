"""The parts of a training state in one rank's files: model, optimizer, and what else a trainer keeps.

Trainers spread the parts over files or put them under keys of one file, and call them what they like. A part is told
by its content: an optimizer's state has ``state`` and ``param_groups``; a model's is names and tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import Stored

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state", "optimizer_states")
EMA = "ema"
_EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "ema_state")
_IN_EMA_FILE = re.compile(r"(?:^|[_\-.])ema(?:[_\-.]|$)", re.IGNORECASE)
_SCHEDULER_KEYS = ("lr_scheduler", "scheduler", "lr_schedulers", "scheduler_state_dict")


@dataclass
class Part:
    """A dict of a file."""

    content: dict[Any, Any]
    source: RankFile


@dataclass
class RankState:
    """What one rank's files hold.

    Attributes:
        rest: key -> value, of what is neither; a scheduler has the key ``scheduler``, a moving average ``ema``.
    """

    rank: int
    model: Part | None = None
    optimizer: Part | None = None
    rest: dict[str, tuple[Any, RankFile]] = field(default_factory=dict)


def is_tensor(value: Any) -> bool:
    """Whether it stands for a tensor."""
    return isinstance(value, (Stored, Held))


def is_optimizer(value: Any) -> bool:
    """Whether it is what an optimizer's ``state_dict`` gives."""
    return isinstance(value, dict) and "param_groups" in value and isinstance(value.get("state"), dict)


def is_model(value: Any) -> bool:
    """Whether it is a dict of tensors by name, which may have other values among them."""
    return (
        isinstance(value, dict)
        and any(map(is_tensor, value.values()))
        and all(isinstance(key, str) for key in value)
        and not any(isinstance(entry, dict) and any(map(is_tensor, entry.values())) for entry in value.values())
    )


def rank_state(rank: int, files: Iterable[RankFile]) -> RankState:
    """Sorts out what a rank's files hold.

    Raises:
        CheckpointUnsound: two files have the same part, or an optimizer is not as torch gives it.
    """
    state = RankState(rank)
    for source in files:
        root = source.root
        if _is_average(root, source):
            _set_ema(state, root, source)
        elif is_optimizer(root):
            _set(state, "optimizer", root, source)
        elif isinstance(root, dict) and (found := _under(root, _MODEL_KEYS, is_model)) is not None:
            _set(state, "model", root[found], source)
            _sort_rest(state, {key: value for key, value in root.items() if key != found}, source)
        elif is_model(root):
            _set(state, "model", root, source)
        elif isinstance(root, dict):
            _sort_rest(state, root, source)
        else:
            state.rest[source.path.stem] = root, source
    if state.model is None and EMA in state.rest and is_model(state.rest[EMA][0]):
        # Without a model beside it, the average is the model that is asked for.
        state.model = Part(*state.rest.pop(EMA))
    return state


def _is_average(root: Any, source: RankFile) -> bool:
    """Whether a file is named after an average, and has nothing that belongs to a run's own weights."""
    is_named = isinstance(root, dict) and _IN_EMA_FILE.search(source.path.stem) is not None
    return is_named and not is_optimizer(root) and _under(root, _OPTIMIZER_KEYS, is_optimizer) is None


def _sort_rest(state: RankState, content: dict[Any, Any], source: RankFile) -> None:
    found = _under(content, _OPTIMIZER_KEYS, is_optimizer)
    for key, value in content.items():
        if key == found:
            _set(state, "optimizer", value, source)
        elif key in _EMA_KEYS and isinstance(value, dict):
            _set_ema(state, value, source)
        else:
            state.rest["scheduler" if key in _SCHEDULER_KEYS else str(key)] = value, source


def _set_ema(state: RankState, content: dict[Any, Any], source: RankFile) -> None:
    if EMA in state.rest:
        raise _twice("a moving average", state.rank, source, state.rest[EMA][1])
    # A file that holds nothing else has it under a key of that name, or at its root.
    inner = [key for key in _EMA_KEYS if isinstance(content.get(key), dict)]
    state.rest[EMA] = (content[inner[0]] if inner and len(content) == 1 else content), source


def _under(content: dict[Any, Any], keys: Iterable[str], fits: Any) -> str | None:
    return next((key for key in keys if key in content and fits(content[key])), None)


def _is_by_id(optimizer: dict[Any, Any]) -> bool:
    """Whether the entries of the state are dicts by id or name, and the groups list these."""
    groups, state = optimizer["param_groups"], optimizer["state"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    listed = [group.get("params") for group in groups]
    if not all(isinstance(ids, list) for ids in listed) or not all(isinstance(slots, dict) for slots in state.values()):
        return False
    return {type(number) for ids in (state, *listed) for number in ids} in (set(), {int}, {str})


def _set(state: RankState, part: str, content: dict[Any, Any], source: RankFile) -> None:
    if part == "optimizer" and not _is_by_id(content):
        raise CheckpointUnsound(
            "an optimizer's state that is not as torch gives it",
            path=source.path,
            rank=state.rank,
            expected="entries by id or by name, and groups that list these",
            hint="save optimizer.state_dict() as it is",
        )
    if (known := getattr(state, part)) is not None:
        raise _twice("a model" if part == "model" else "an optimizer", state.rank, source, known.source)
    setattr(state, part, Part(content, source))


def _twice(what: str, rank: int, source: RankFile, other: RankFile) -> CheckpointUnsound:
    return CheckpointUnsound(
        f"two files of a rank hold {what}",
        path=source.path,
        rank=rank,
        found=other.path.name,
        hint="name the folder or a file of one checkpoint",
    )
