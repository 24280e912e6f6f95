"""What a tensor of a training state is, judged by its key: weights, moments, masters, counters or others.

Keys follow the layout that a run saves (`model.<fqn>`, `optim.state.<fqn>.<name>`), or one of those that others use:
Lightning's `state_dict.`, torchtitan's weights at the root, the bare names of a safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WEIGHTS = "weights"
MOMENTS = "moments"
MASTERS = "masters"
COUNTERS = "counters"
OTHERS = "others"
KINDS = (WEIGHTS, MOMENTS, MASTERS, COUNTERS, OTHERS)

MODEL_ROOTS = ("model", "state_dict", "module")
OPTIMIZER_ROOTS = ("optim", "optimizer", "optimizers", "optimizer_states", "optimizer_state_dict")
_OTHER_ROOTS = (
    "rng", "extra", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "loops", "callbacks",
    "scaler", "ema",
)  # fmt: skip


def kind_of(key: str, shape: Sequence[int]) -> str:
    """The kind of a tensor with this key and global shape."""
    root, _, rest = key.partition(".")
    if root in OPTIMIZER_ROOTS:
        return _kind_in_optimizer(rest, shape)
    if root in _OTHER_ROOTS and rest:
        return OTHERS
    return WEIGHTS


def _kind_in_optimizer(key: str, shape: Sequence[int]) -> str:
    if key.partition(".")[0] == "param_groups":
        return OTHERS
    name = key.rpartition(".")[2]
    if "master" in name or name.startswith("fp32"):
        return MASTERS
    if name == "step" or math.prod(shape) <= 1 and not shape:
        return COUNTERS
    return MOMENTS


def parameter_of(key: str, weights: frozenset[str] | set[str]) -> str | None:
    """The key of the weight that a tensor of an optimizer's state belongs to, among `weights`; None where there is none."""
    root, _, rest = key.partition(".")
    if root not in OPTIMIZER_ROOTS:
        return None
    name = rest.removeprefix("state.").rpartition(".")[0]
    while name:
        for candidate in (name, *(f"{model}.{name}" for model in MODEL_ROOTS)):
            if candidate in weights:
                return candidate
        name = name.rpartition(".")[0]
    return None
