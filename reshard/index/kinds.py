"""What a tensor of a training state is, judged by its key: weights, moments, masters, counters or others.

Keys follow the layout that a run saves (`model.<fqn>`, `optim.state.<fqn>.<name>`), or one of those that others use:
Lightning's `state_dict.`, torchtitan's weights at the root, the bare names of a safetensors file.
"""

from __future__ import annotations

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
    if is_optimizer(root):
        return _kind_in_optimizer(rest, shape)
    if root in _OTHER_ROOTS and rest:
        return OTHERS
    return WEIGHTS


def is_optimizer(root: str) -> bool:
    """Whether an optimizer's state lies under this first part of a key; Lightning numbers them, ``optimizer_0``."""
    name, _, number = root.rpartition("_")
    return root in OPTIMIZER_ROOTS or (name in OPTIMIZER_ROOTS and number.isdecimal())


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
    root, _, rest = key.partition(".")
    if not is_optimizer(root):
        return None
    name = rest.removeprefix("state.").rpartition(".")[0]
    while name:
        for candidate in (name, *(f"{model}.{name}" for model in MODEL_ROOTS)):
            if candidate in weights:
                return candidate
        name = name.rpartition(".")[0]
    return None
