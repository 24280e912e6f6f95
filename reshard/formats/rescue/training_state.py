"""A training state put together from another tool's files: the keys and the manifest that a run of ours has.

Model tensors are ``model.<fqn>``, an optimizer's ``optim.state.<fqn>.<name>``, its hyperparameters, as stock DCP has
them, objects ``optim.param_groups.<group>.<name>``. The manifest records which parts the source held.
"""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.formats import tagged
from reshard.formats.manifest import Manifest, World
from reshard.formats.plain_values import Budget, NotPlain, plain
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import Stored
from reshard.index.dtypes import values

MODEL, OPTIMIZER = "model", "optim"
# In all that is kept of one kind: a list that stands in several places counts in each.
_MOST_GROUP_ENTRIES = 1 << 20
_MOST_STATE_ENTRIES = 1 << 18
# Of one rank; a generator's state takes some hundred.
_MOST_RNG_ENTRIES = 1 << 14


def model_key(name: str) -> str:
    """Of a tensor of the model."""
    return f"{MODEL}.{name}"


def state_key(name: str, slot: str) -> str:
    """Of an entry of the optimizer's state of a parameter."""
    return f"{OPTIMIZER}.state.{name}.{slot}"


def add_state(assembly: Assembly, name: str, slot: str, value: Any, source: RankFile) -> None:
    """Adds an entry of the optimizer's state: what a rank has of a tensor, or a number."""
    key = state_key(name, slot)
    if isinstance(value, (Stored, Held)):
        assembly.add_tensor(key, value, source)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in assembly.keys:
        add_number(assembly, key, value)


def add_number(assembly: Assembly, key: str, value: float) -> None:
    """Adds a float32 without dims, which is what torch's optimizers keep as ``step``."""
    assembly.add_made(key, "float32", (), struct.pack("<f", value))


def add_groups(assembly: Assembly, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> None:
    """Adds the hyperparameters of the parameter groups; what is no plain value is among the notes.

    Args:
        names: of each group's parameters.
    """
    budget = Budget(_MOST_GROUP_ENTRIES)
    left_out: list[str] = []
    fault: NotPlain | None = None
    for number, (group, fqns) in enumerate(zip(groups, names, strict=True)):
        for option, value in {**group, "params": list(fqns)}.items():
            steps = (OPTIMIZER, "param_groups", number, str(option))
            try:
                content = plain(value, budget, 0)
            except NotPlain as found:
                left_out.append(".".join(map(str, steps)))
                fault = fault or found
                continue
            assembly.add_object(".".join(map(str, steps)), content, steps)
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        assembly.notes.append(f"left out, for it is no plain value: {left_out[0]}{more} ({fault})")


def add_rng(assembly: Assembly, rank: int, states: Mapping[str, Any], source: RankFile) -> None:
    """Adds a rank's random states as far as they are those of torch, NumPy and Python, in whatever form."""
    budget = Budget(_MOST_RNG_ENTRIES)
    for name, value in states.items():
        if isinstance(value, Stored):
            known = {"cpu": "torch", "torch": "torch", "cuda": "cuda_0", "device": "cuda_0"}.get(name)
            if known is not None:
                assembly.add_tensor(f"rng.rank_{rank}.{known}", value, source)
            continue
        if name not in _RNG_OF:
            continue
        generator, of_value = _RNG_OF[name]
        try:
            content = json.dumps(of_value(*plain(value, budget, 0))).encode()
        except (NotPlain, TypeError, ValueError, OverflowError):
            # Whatever has this name is not what the generator gives.
            continue
        assembly.add_made(f"rng.rank_{rank}.{generator}", "uint8", (len(content),), content)


def _python_rng(version: Any, internal: Any, gauss: Any) -> list[Any]:
    return [version, list(internal), gauss]


def _numpy_rng(kind: Any, keys: Any, position: Any, has_gauss: Any, cached: Any) -> list[Any]:
    return [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]


_RNG_OF: dict[str, tuple[str, Callable[..., list[Any]]]] = {
    "random": ("python", _python_rng),
    "python": ("python", _python_rng),
    "numpy": ("numpy", _numpy_rng),
}


def number_of(value: Stored, source: RankFile, assembly: Assembly, key: str) -> float:
    """The one number that a tensor holds, read now."""
    found = source.locate(value, key)
    data = assembly.files.read(source.file, found.start_bytes, found.record.length_bytes)
    return float(values(data, found.dtype).reshape(-1)[0])


def manifest_of(assembly: Assembly, **fields: Any) -> Manifest:
    """`manifest_at` for what was put together; what cannot be kept is among its notes."""
    return manifest_at(assembly.folder, assembly.notes, **fields)


def manifest_at(
    path: Path,
    notes: list[str],
    *,
    step: int,
    ranks: int,
    parts: Sequence[str],
    lr: Sequence[Any] = (),
    schedulers: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    rng_ranks: int = 0,
    extra: Mapping[str, Any] | None = None,
    encoded_extra: Mapping[str, tagged.Json] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Manifest:
    """A manifest of what another tool's files held; parts that they lacked are not in it.

    Args:
        path: of the checkpoint.
        notes: gets what cannot be kept.
        parts: which of model and optimizer are there.
        lr: of each parameter group.
        schedulers, extra: states by name.
        encoded_extra: further ones, as the manifest has them.
        rng_ranks: how many ranks' random states are there.
    """
    encoded = _encoded(notes, schedulers or {}, "scheduler")
    others = {**_encoded(notes, extra or {}, "extra"), **(encoded_extra or {})}
    held = [
        *parts,
        *(["scheduler"] if encoded else []),
        *(["rng"] if rng_ranks else []),
        *(f"extra.{n}" for n in others),
    ]
    return Manifest(
        step=step,
        attempt=f"converted from {path.name}",
        world=World(ranks, 1, 0, dict(mesh or {})),
        parts=dict.fromkeys([*held, "step"], "saved"),
        lr=[float(rate) if isinstance(rate, (int, float)) else None for rate in lr],
        batch=None,
        data=None,
        schedulers=encoded,
        scaler=None,
        rng={"ranks": rng_ranks} if rng_ranks else None,
        extra=others,
        # By the name that a run with one optimizer gives it; the class is in no file.
        optimizers={"optimizer": {"groups": list(range(len(lr)))}} if "optimizer" in parts else {},
        versions=dict(versions or {}),
        saved_at=datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc).isoformat(
            timespec="seconds"
        ),
    )


def _encoded(notes: list[str], states: Mapping[str, Any], kind: str) -> dict[str, tagged.Json]:
    encoded = {}
    budget = Budget(_MOST_STATE_ENTRIES)
    for name, state in states.items():
        where = f"{kind}.{name}"
        try:
            encoded[name] = tagged.encode(plain(state, budget, 0), where=where)
        except (NotPlain, UsageError) as fault:
            notes.append(f"left out, for it holds more than plain values: {where} ({fault})")
    return encoded
