"""The manifest of a training state that another tool wrote with DCP, from its objects and counters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.object_archive import object_value
from reshard.formats.rescue import training_state
from reshard.formats.torch_file import open_torch_file
from reshard.index.dtypes import values
from reshard.index.kinds import COUNTERS, kind_of

_SCHEDULERS = ("lr_scheduler", "lr_schedulers", "scheduler", "schedulers")
_STEP_KEYS = ("train_state.step", "trainer_state.global_step", "global_step", "step", "iteration")
_STEP_IN_NAME = re.compile(r"(?:.*[^a-z])?(?:global_?step|step|iter)[-_=]?0*(\d+)(?:\D.*)?", re.IGNORECASE)
_DISTCP = re.compile(r"__(\d+)_\d+\.distcp$")
_RATE = re.compile(r"optim\.param_groups\.(.+)\.lr")
_RNG = re.compile(r"rng\.rank_(\d+)\.")


def with_manifest(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with a manifest, where it is a training state and has none, or one without rates.

    Args:
        checkpoint: with the keys of a run of ours.
    """
    names = checkpoint.index.names
    known = checkpoint.manifest
    has_optimizer = any(name.startswith("optim.state.") for name in names)
    if checkpoint.manifest_fault is not None or not has_optimizer or (known is not None and known.lr):
        return checkpoint
    if known is not None:
        rates = _rates(checkpoint)
        optimizers: dict[str, Any] = {"optimizer": {"groups": list(range(len(rates)))}}
        filled = replace(known, step=known.step or _step(checkpoint), lr=rates, optimizers=optimizers)
        return replace(checkpoint, manifest=filled)
    notes: list[str] = []
    manifest = training_state.manifest_at(
        checkpoint.path,
        notes,
        step=_step(checkpoint),
        ranks=_writers(checkpoint),
        parts=[*(["model"] if any(name.startswith("model.") for name in names) else []), "optimizer"],
        lr=_rates(checkpoint),
        schedulers=dict(_schedulers(checkpoint)),
        rng_ranks=len({match[1] for name in names if (match := _RNG.match(name))}),
    )
    return replace(checkpoint, manifest=manifest, notes=(*checkpoint.notes, *notes))


def _writers(checkpoint: Checkpoint) -> int:
    """How many ranks wrote it, as the names of its files say."""
    ranks = {match[1] for name in checkpoint.index.files if (match := _DISTCP.search(name))}
    return max(1, len(ranks))


def _rates(checkpoint: Checkpoint) -> list[float | None]:
    """The learning rate of each parameter group; none in the flattened form, where every parameter has its own."""
    found = {match[1]: key for key in checkpoint.index.objects if (match := _RATE.fullmatch(key))}
    numbered = sorted((int(group), key) for group, key in found.items() if group.isdigit())
    rates = [_value(checkpoint, key) for _, key in numbered]
    return [float(rate) if isinstance(rate, (int, float)) else None for rate in rates]


def _value(checkpoint: Checkpoint, key: str) -> Any:
    return object_value(checkpoint.object_bytes(key), checkpoint.path, key)


def _schedulers(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and state of each, put together from its entries."""
    states: dict[str, dict[str, Any]] = {}
    for key in checkpoint.index.objects:
        path = checkpoint.paths.get(key, (key,))
        root, *steps = path if len(path) > 1 else key.split(".")
        if root not in _SCHEDULERS or not steps:
            continue
        name = "scheduler"
        if len(steps) > 1 and str(steps[0]).isdigit():
            name, steps = str(steps[0]), steps[1:]
        if len(steps) == 1:
            states.setdefault(name, {})[str(steps[0])] = _value(checkpoint, key)
    yield from states.items()
    yield from _of_lightning(checkpoint)


def _of_lightning(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """What Lightning keeps beside its DCP files: a file of torch.save with all that is not sharded."""
    path = checkpoint.path / "meta.pt"
    if not path.is_file():
        return
    with open_torch_file(path) as beside:
        states: dict[str, dict[str, Any]] = {}
        for key, value in beside.values.items():
            root, *steps = beside.paths.get(key, (key,))
            if root == "lr_schedulers" and len(steps) == 2:
                states.setdefault(str(steps[0]), {})[str(steps[1])] = value
    for name, state in states.items():
        yield ("scheduler" if len(states) == 1 else name), state


def _step(checkpoint: Checkpoint) -> int:
    for key in _STEP_KEYS:
        if key in checkpoint.index.objects and isinstance(step := _value(checkpoint, key), int):
            return step
    for name, shape, dtype in zip(
        checkpoint.index.names, checkpoint.index.shapes, checkpoint.index.dtypes, strict=True
    ):
        if not shape and name.endswith(".step") and kind_of(name, shape) == COUNTERS:
            return int(values(checkpoint.read_array(name), dtype).reshape(-1)[0])
    match = _STEP_IN_NAME.fullmatch(checkpoint.path.name)
    return int(match[1]) if match is not None else 0
