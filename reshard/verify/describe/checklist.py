"""What a resume needs, and which of it a checkpoint has: judged by its keys and its manifest, without reading a tensor.

Keys alone say what is there, not what the run had: without a manifest, a part that is not found may never have been,
and what another framework keeps of a schedule or a position is there under names of its own, which no resume of ours
reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.manifest import Manifest
from reshard.index.dtypes import FLOATS
from reshard.index.kinds import MODEL_ROOTS, WEIGHTS, is_of_one_rank, kinds_of, optimizer_place, parameter_of

PRESENT, MISSING, NONE = "present", "missing", "run had none"
ADAPTER = "a PEFT adapter"

# How others name what the manifest holds: the first part of a key.
_ROOTS = {
    "scheduler": ("lr_scheduler", "lr_schedulers", "scheduler", "schedulers"),
    "scaler": ("scaler", "grad_scaler"),
    "rng": ("rng", "rng_state", "rng_states", "random_states"),
    "data": ("dataloader", "data", "sampler", "dataset"),
    "step": ("train_state", "step", "global_step", "iteration"),
}
_ADAPTER_KEY = re.compile(r"(?:^|\.)(?:lora_\w+|ia3_l|prompt_embeddings|modules_to_save)(?:\.|$)")
_RNG_KEY = re.compile(r"rng\.rank_(\d+)\.(.+)")


@dataclass(frozen=True)
class Part:
    """One thing that a resume needs.

    Attributes:
        name: what ``load_state`` calls it, where it does.
        status: ``PRESENT``, ``MISSING`` or ``NONE``: the run had no such part.
        detail: what there is of it, or what its loss means.
        is_restored: whether ``load_state`` gives it back; what others keep has no meaning without a manifest.
    """

    name: str
    status: str
    detail: str
    is_restored: bool = True


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer's state, by parameter.

    Attributes:
        by_parameter: key of the weight, or its name where there are no weights -> names of its state.
        without: keys of the weights, of floating-point types, that have none.
        gaps: (parameter, names it has, names it lacks) of those that have part of what others have.
    """

    by_parameter: Mapping[str, frozenset[str]]
    without: list[str]
    gaps: list[tuple[str, list[str], list[str]]]


def optimizer_state(checkpoint: Checkpoint) -> OptimizerState:
    """Which parameters have which state."""
    index = checkpoint.index
    kinds = zip(index.names, kinds_of(index.names, index.shapes), index.dtypes, strict=True)
    weights = {name: dtype for name, kind, dtype in kinds if kind == WEIGHTS}
    known = weights.keys() - set()
    found: dict[str, set[str]] = {}
    for key in (*index.names, *index.objects, *checkpoint.values):
        if (entry := _state_of(key, known)) is not None:
            found.setdefault(entry[0], set()).add(entry[1])
    by_parameter = {parameter: frozenset(names) for parameter, names in found.items()}
    without = [name for name, dtype in weights.items() if dtype in FLOATS and name not in by_parameter]
    return OptimizerState(by_parameter, without if by_parameter else [], _gaps(by_parameter))


def _state_of(key: str, weights: set[str]) -> tuple[str, str] | None:
    """The parameter that an entry of an optimizer's state belongs to, and the entry's own name."""
    place = optimizer_place(key)
    if place is None or not place[1].startswith("state."):
        return None
    rest = place[1].removeprefix("state.")
    parameter = parameter_of(key, weights)
    if parameter is not None:
        bare = parameter.removeprefix(place[0])
        for name in (bare, bare.partition(".")[2]):
            if name and rest.startswith(f"{name}."):
                return parameter, rest[len(name) + 1 :]
    # Megatron puts the entry's name first.
    first, _, tail = rest.partition(".")
    for candidate in (tail, *(f"{model}.{tail}" for model in MODEL_ROOTS)):
        if candidate in weights:
            return candidate, first
    name, _, last = rest.rpartition(".")
    return (name, last) if name else None


def _gaps(by_parameter: Mapping[str, frozenset[str]]) -> list[tuple[str, list[str], list[str]]]:
    """Parameters whose state is a part of what at least as many others have; other optimizers have other names."""
    kinds = Counter(by_parameter.values())
    gaps = []
    for parameter, names in by_parameter.items():
        larger = [other for other in kinds if names < other and kinds[other] >= kinds[names]]
        if larger:
            whole = max(larger, key=lambda other: (kinds[other], len(other)))
            gaps.append((parameter, sorted(names), sorted(whole - names)))
    return gaps


def per_rank_objects(checkpoint: Checkpoint) -> list[str]:
    """Keys of objects that belong to one rank each, and so mean nothing on another number of ranks."""
    return [key for key in (*checkpoint.index.objects, *checkpoint.values) if is_of_one_rank(key)]


def random_states(checkpoint: Checkpoint) -> dict[int, list[str]]:
    """Rank -> generators whose state is there."""
    found: dict[int, list[str]] = {}
    for name in checkpoint.index.names:
        if (match := _RNG_KEY.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), []).append(match[2])
    return found


def checklist(checkpoint: Checkpoint, state: OptimizerState) -> list[Part]:
    """What a resume needs, in the order in which people ask for it."""
    manifest = checkpoint.manifest
    return [
        _model(checkpoint),
        _optimizer(checkpoint, manifest, state),
        _counters(manifest, state),
        *(_other(name, checkpoint, manifest) for name in ("scheduler", "scaler", "rng", "data", "step", "batch")),
        *_extras(manifest),
    ]


def allowed_missing(parts: Sequence[Part]) -> list[str]:
    """What ``load_state`` has to be told may be missing, if the run has it."""
    lacking = [part.name for part in parts if part.status == MISSING or not part.is_restored]
    return [name for name in lacking if name not in ("model", "step counters")]


def holds_alone(checkpoint: Checkpoint, parts: Sequence[Part]) -> str | None:
    """``WEIGHTS`` or ``ADAPTER``, where there is nothing else, and so nothing to resume from; else None."""
    status = {part.name: part.status for part in parts}
    if status.pop("model") != PRESENT or set(status.values()) != {MISSING}:
        return None
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    # The names that PEFT gives to the parameters of its methods, and the file that it writes beside them.
    is_adapter = (folder / "adapter_config.json").exists() or all(map(_ADAPTER_KEY.search, checkpoint.index.names))
    return ADAPTER if is_adapter else WEIGHTS


def _model(checkpoint: Checkpoint) -> Part:
    index = checkpoint.index
    count = kinds_of(index.names, index.shapes).count(WEIGHTS)
    return Part("model", PRESENT, f"{_count(count, 'tensor')}") if count else Part("model", MISSING, "no weights")


def _optimizer(checkpoint: Checkpoint, manifest: Manifest | None, state: OptimizerState) -> Part:
    have = len(state.by_parameter)
    if have and all(name.isdecimal() for name in state.by_parameter):
        detail = f"state of {_count(have, 'parameter')} by number, which does not say whose it is"
        return Part("optimizer", PRESENT, detail, is_restored=False)
    if not have:
        if manifest is not None and _had_no_state(manifest):
            return Part("optimizer", NONE, "it had no state when it was saved" if manifest.optimizers else "")
        return Part("optimizer", MISSING, "no state of any parameter: moments would start from zero")
    total = have + len(state.without)
    detail = f"state of {have} of {_count(total, 'weight')}"
    if manifest is not None and (counts := _recorded(manifest.optimizers)) is not None:
        detail = f"state of {counts[0]} of {_count(counts[1], 'parameter')}"
    if state.without:
        detail += f"; none for {_some(state.without)}: frozen, unused, tied or a buffer"
    return Part("optimizer", PRESENT, f"{detail}; {_groups(checkpoint)}")


def _had_no_state(manifest: Manifest) -> bool:
    """No optimizer, or one such as plain SGD, which keeps nothing."""
    counts = _recorded(manifest.optimizers)
    return manifest.parts.get("optimizer") == "none" or (counts is not None and counts[0] == 0)


def _recorded(optimizers: Mapping[str, Any]) -> tuple[int, int] | None:
    """Parameters with state, and all, as the manifest counted them."""
    have = total = 0
    for entry in optimizers.values():
        if not isinstance(entry, dict) or type(entry.get("with_state")) is not int:
            return None
        if type(entry.get("parameters")) is not int:
            return None
        have, total = have + entry["with_state"], total + entry["parameters"]
    return (have, total) if optimizers else None


def _groups(checkpoint: Checkpoint) -> str:
    keys = [key.partition(".")[2] for key in (*checkpoint.index.objects, *checkpoint.index.names, *checkpoint.values)]
    below = [key.split(".") for key in keys if key.startswith("param_groups.")]
    numbers = {parts[1] for parts in below if parts[1].isdecimal()}
    if numbers:
        return _count(len(numbers), "parameter group")
    return "hyperparameters of each parameter" if below else "no hyperparameters"


def _counters(manifest: Manifest | None, state: OptimizerState) -> Part:
    counted = sum("step" in names for names in state.by_parameter.values())
    if counted:
        return Part("step counters", PRESENT, f"of {_count(counted, 'parameter')}")
    if any("exp_avg" in names for names in state.by_parameter.values()):
        return Part("step counters", MISSING, "Adam's bias correction would start anew")
    if state.by_parameter or (manifest is not None and _had_no_state(manifest)):
        return Part("step counters", NONE, "this optimizer keeps none" if state.by_parameter else "")
    return Part("step counters", MISSING, "")


_LOSS = {
    "scheduler": "the learning rate would start its schedule anew",
    "scaler": "the loss scale would start anew (matters for fp16 only)",
    "rng": "dropout and augmentation would draw other numbers",
    "data": "samples would be seen again from the start",
    "step": "the step would have to be given by hand",
    "batch": "the global batch would have to be kept equal by hand",
}
_TITLES = {"rng": "random states", "data": "data position", "batch": "world, batch plan"}


def title(part: Part) -> str:
    """What people call a part."""
    return _TITLES.get(part.name, part.name)


def _other(name: str, checkpoint: Checkpoint, manifest: Manifest | None) -> Part:
    if manifest is not None:
        detail = _DETAILS[name](manifest, checkpoint)
        if detail is not None:
            return Part(name, PRESENT, detail)
        if manifest.parts.get(name) == "none":
            return Part(name, NONE, "")
        return Part(name, MISSING, _LOSS[name])
    roots = _ROOTS.get(name, ())
    index = checkpoint.index
    keys = [key for key in (*index.objects, *checkpoint.values, *index.names) if re.split(r"[./]", key)[0] in roots]
    if keys:
        return Part(name, PRESENT, f"as {_some(keys, 2)}; not restored without a manifest", is_restored=False)
    return Part(name, MISSING, _LOSS[name])


def _scheduler(manifest: Manifest, _: Checkpoint) -> str | None:
    if not manifest.schedulers:
        return None
    places = [state.get("last_epoch") if isinstance(state, dict) else None for state in manifest.schedulers.values()]
    names = [
        name if place is None else f"{name} at {place}" for name, place in zip(manifest.schedulers, places, strict=True)
    ]
    rates = sorted({rate for rate in manifest.lr if rate is not None})
    return ", ".join(names) + (f"; lr {', '.join(f'{rate:.6g}' for rate in rates[:4])}" if rates else "")


def _scaler(manifest: Manifest, _: Checkpoint) -> str | None:
    if manifest.scaler is None:
        return None
    scale = manifest.scaler.get("scale") if isinstance(manifest.scaler, dict) else None
    return "" if scale is None else f"scale {scale}"


def _rng(manifest: Manifest, checkpoint: Checkpoint) -> str | None:
    found = random_states(checkpoint)
    if not found:
        return None
    generators = sorted({generator for names in found.values() for generator in names})
    return f"of {_count(len(found), 'rank')}: {', '.join(generators)}"


def _data(manifest: Manifest, _: Checkpoint) -> str | None:
    data = manifest.data
    if not isinstance(data, dict):
        return None
    if isinstance(ranks := data.get("ranks"), list):
        return f"one for each of {_count(len(ranks), 'rank')}: it resumes on as many only"
    shared = data.get("shared")
    numbers = [(name, shared.get(name)) for name in ("samples", "epoch", "offset")] if isinstance(shared, dict) else []
    shown = [f"{name} {value}" for name, value in numbers if type(value) is int]
    return ", ".join(["one for all ranks", *shown])


def _step(manifest: Manifest, _: Checkpoint) -> str | None:
    return f"{manifest.step}"


def _batch(manifest: Manifest, _: Checkpoint) -> str | None:
    batch = manifest.batch
    if batch is None:
        return None
    numbers = ("global_batch", "micro_batch", "accumulation", "ranks")
    return "global batch {}: micro-batch {}, accumulation {}, ranks {}".format(*(batch.get(name) for name in numbers))


_DETAILS = {"scheduler": _scheduler, "scaler": _scaler, "rng": _rng, "data": _data, "step": _step, "batch": _batch}


def _extras(manifest: Manifest | None) -> list[Part]:
    if manifest is None:
        return []
    names = [name for name, status in manifest.parts.items() if name.startswith("extra.") and status == "saved"]
    found = {name: name.removeprefix("extra.") in manifest.extra for name in names}
    return [
        Part(name, PRESENT if there else MISSING, "" if there else "the manifest does not hold it")
        for name, there in found.items()
    ]


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _some(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
