"""What a tensor of a training state is, judged by its key: weights, moments, masters, counters or others.

Keys follow the layout that a run saves (`model.<fqn>`, `optim.state.<fqn>.<name>`), or one of those that others use:
Lightning's `state_dict.` and `optimizer_0.`, torchtitan's weights at the root, the bare names of a safetensors file, or
any of these below a name of the user's own (`app.optim.state...`, as in torch's recipe for DCP).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

WEIGHTS = "weights"
MOMENTS = "moments"
MASTERS = "masters"
COUNTERS = "counters"
OTHERS = "others"
KINDS = (WEIGHTS, MOMENTS, MASTERS, COUNTERS, OTHERS)

MODEL_ROOTS = ("model", "state_dict", "module")
_OPTIMIZER_ROOT = re.compile(r"(?:optims?|optimizers?|opts?)(?:_states?)?(?:_dict)?(?:_\d+)?")
_OTHER_ROOTS = (
    "rng", "extra", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "loops", "callbacks",
    "scaler", "ema",
)  # fmt: skip
# Names that no parameter has, so that they tell without any root.
_MOMENT_NAMES = frozenset(["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"])

# Another framework's loader state of one rank, and the like: nothing says how to make it one of other ranks.
_OF_ONE_RANK = re.compile(r"(?:^|[._-])(?:dp_)?(?:rank|shard)[._-]?\d+(?:[._-]|$)")


def kind_of(key: str, shape: Sequence[int]) -> str:
    """The kind of a tensor with this key and global shape."""
    root, _, rest = key.partition(".")
    if (place := optimizer_place(key)) is not None:
        return _kind_in_optimizer(place[1], shape)
    if root in _OTHER_ROOTS and rest:
        return OTHERS
    return MOMENTS if key.rpartition(".")[2] in _MOMENT_NAMES else WEIGHTS


def kinds_of(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[str]:
    """The kind of each tensor of a checkpoint: where some lie under a name for the model, no others are weights."""
    kinds = [kind_of(name, shape) for name, shape in zip(names, shapes, strict=True)]
    if not any(map(is_of_model, names)):
        return kinds
    return [
        _kind_outside(name) if kind == WEIGHTS and not is_of_model(name) else kind
        for name, kind in zip(names, kinds, strict=True)
    ]


def _kind_outside(name: str) -> str:
    root = name.partition(".")[0]
    return MASTERS if "master" in root or root.startswith("fp32") else OTHERS


def is_of_model(key: str) -> bool:
    """Whether a key lies under a name for the model, at the root or below one other name."""
    first, _, rest = key.partition(".")
    return first in MODEL_ROOTS or (first not in _OTHER_ROOTS and rest.partition(".")[0] in MODEL_ROOTS)


def optimizer_place(key: str) -> tuple[str, str] | None:
    """What stands before and behind the name of an optimizer in a key; None where it has none.

    An optimizer is at the root, or below one name that is none of the model's.
    """
    first, _, rest = key.partition(".")
    if first in MODEL_ROOTS or not rest:
        return None
    if _OPTIMIZER_ROOT.fullmatch(first):
        return "", rest
    second, _, tail = rest.partition(".")
    if tail and first not in _OTHER_ROOTS and _OPTIMIZER_ROOT.fullmatch(second):
        return f"{first}.", tail
    return None


def nested_path(key: str) -> tuple[str | int, ...]:
    """The way to an entry in the nested state that stock torch saves, for a key of a run of ours."""
    first, _, rest = key.partition(".")
    if first == "model" and rest:
        return ("model", rest)
    if key.startswith("optim.state."):
        name, _, slot = key.removeprefix("optim.state.").rpartition(".")
        return ("optim", "state", name, slot)
    if key.startswith("optim.param_groups."):
        group, _, option = key.removeprefix("optim.param_groups.").partition(".")
        return ("optim", "param_groups", int(group) if group.isdigit() else group, option)
    return (key,)


def is_of_one_rank(key: str) -> bool:
    """Whether an object or a file is one rank's of the job that wrote it, such as ``dataloader.dp_rank_3``."""
    return _OF_ONE_RANK.search(key) is not None


def _kind_in_optimizer(key: str, shape: Sequence[int]) -> str:
    if key.partition(".")[0] == "param_groups":
        return OTHERS
    name = key.rpartition(".")[2]
    if "master" in name or name.startswith("fp32"):
        return MASTERS
    if name == "step" or not shape:
        return COUNTERS
    return MOMENTS


def parameter_of(key: str, weights: frozenset[str] | set[str]) -> str | None:
    """Which of `weights` a tensor of an optimizer's state belongs to; None where none fits."""
    place = optimizer_place(key)
    if place is None:
        return None
    before, rest = place
    name = rest.removeprefix("state.").rpartition(".")[0]
    while name:
        for candidate in (before + name, *(f"{before}{model}.{name}" for model in MODEL_ROOTS)):
            if candidate in weights:
                return candidate
        name = name.rpartition(".")[0]
    return None
