"""The keys that a run of ours gives a state, whoever wrote it: ``model.<fqn>``, ``optim.state.<fqn>.<name>``.

Trainers put the model at the root, or under a name of their own, and the optimizer under another. What is neither keeps
its key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from reshard.errors import UsageError
from reshard.formats import dcp
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.object_archive import object_archive, object_value
from reshard.index.index import Place
from reshard.index.kinds import MODEL_ROOTS, WEIGHTS, kind_of, nested_path, optimizer_place

MODEL, OPTIMIZER = "model.", "optim."
_STATE, _GROUPS = "optim.state.", "optim.param_groups."
_RENAMED = "(renamed groups)"
_SHOWN = 6

Renaming = tuple["re.Pattern[str]", str]


def with_training_keys(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with the keys of a run of ours.

    Raises:
        UsageError: two keys become one.
    """
    roots = _model_roots(checkpoint)

    def key(name: str) -> str:
        if (place := optimizer_place(name)) is not None:
            return OPTIMIZER + place[1]
        root = next((root for root in roots if name.startswith(root)), None)
        if root is not None:
            return MODEL + name[len(root) :]
        if not roots and name not in checkpoint.index.objects and kind_of(name, (1,)) == WEIGHTS:
            return MODEL + name
        return name

    return renamed(checkpoint, key)


def _model_roots(checkpoint: Checkpoint) -> list[str]:
    """What stands before the model's names; nothing where they are at the root."""
    names = [*checkpoint.index.names, *checkpoint.index.objects]
    # A dot in a step is the name's own: where the state was nested, its first steps are the roots.
    nested = [path for path in checkpoint.paths.values() if len(path) > 1]
    if nested:
        found = {root for path in nested if (root := _root_of(tuple(map(str, path[:-1])))) is not None}
        return sorted(found)
    roots = {name: _root_of(tuple(name.split(".")[:-1])) for name in names}
    found = {root for root in roots.values() if root is not None}
    if any(optimizer_place(name) is not None for name in names):
        return sorted(found)
    # Many models have a module called "model". Where there is nothing but a model, files of weights have its own names;
    # with DCP, somebody has put all of it under one name.
    is_all = checkpoint.format == dcp.NAME and all(root is not None for root in roots.values())
    return sorted(found) if is_all else []


def _root_of(steps: Sequence[str]) -> str | None:
    """The steps of a path that lead to a model, joined, with a dot behind."""
    for count in (1, 2):
        if len(steps) >= count and steps[count - 1] in MODEL_ROOTS:
            return ".".join(steps[:count]) + "."
    return None


def with_renamings(checkpoint: Checkpoint, renamings: Sequence[Renaming]) -> Checkpoint:
    """Maps the names of parameters and buffers, in the model and in the optimizer.

    Args:
        checkpoint: with the keys of a run of ours.
        renamings: patterns that are searched for in a name, and what replaces each match, as in ``re.sub``; one after
            the other.

    Raises:
        UsageError: two names become one, or a pattern matches nothing.
    """
    unused = set(range(len(renamings)))

    def name(fqn: str) -> str:
        for number, (pattern, replacement) in enumerate(renamings):
            fqn, count = pattern.subn(replacement, fqn)
            if count:
                unused.discard(number)
        return fqn

    def key(old: str) -> str:
        if old.startswith(MODEL):
            return MODEL + name(old.removeprefix(MODEL))
        if old.startswith(_STATE):
            fqn, _, slot = old.removeprefix(_STATE).rpartition(".")
            return f"{_STATE}{name(fqn)}.{slot}"
        return old

    result = _with_group_names(renamed(checkpoint, key), name)
    if unused:
        pattern = renamings[min(unused)][0].pattern
        raise UsageError("matches no name", key=f"--rename {pattern}", hint="`reshard inspect --tree` lists the names")
    return result


def _with_group_names(checkpoint: Checkpoint, name: Callable[[str], str]) -> Checkpoint:
    """The same checkpoint with other names in the lists of what its parameter groups hold."""
    made = bytearray()
    places: dict[str, Place] = {}
    for key in checkpoint.index.objects:
        if key.startswith(_GROUPS) and key.endswith(".params"):
            names = object_value(checkpoint.object_bytes(key), checkpoint.path, key)
            if isinstance(names, list) and all(isinstance(fqn, str) for fqn in names):
                content = object_archive([name(fqn) for fqn in names])
                places[key] = Place(_RENAMED, len(made), len(content))
                made += content
    if not places:
        return checkpoint
    checkpoint.files.add_in_memory(checkpoint.path / _RENAMED, made)
    index = checkpoint.index
    return dataclasses.replace(
        checkpoint,
        index=dataclasses.replace(index, files=[*index.files, _RENAMED], objects={**index.objects, **places}),
    )


def renamed(checkpoint: Checkpoint, key: Callable[[str], str]) -> Checkpoint:
    """The same checkpoint with other keys.

    Raises:
        UsageError: two keys become one.
    """
    index = checkpoint.index
    names = [key(name) for name in index.names]
    objects = {key(name): place for name, place in index.objects.items()}
    _require_distinct(checkpoint, [*index.names, *index.objects], [*names, *(key(name) for name in index.objects)])
    paths = {
        key(name): path if key(name) == name else nested_path(key(name)) for name, path in checkpoint.paths.items()
    }
    return dataclasses.replace(
        checkpoint,
        index=dataclasses.replace(index, names=names, objects=objects),
        paths=paths,
        values={key(name): value for name, value in checkpoint.values.items()},
    )


def _require_distinct(checkpoint: Checkpoint, old: Iterable[str], new: Iterable[str]) -> None:
    origins: dict[str, str] = {}
    faults = []
    for before, after in zip(old, new, strict=True):
        if after in origins:
            faults.append(f"{origins[after]} and {before} both become {after}")
        origins[after] = before
    if faults:
        raise UsageError(
            "two names become one", path=checkpoint.path, found=faults[0], hint="rename them apart with --rename",
            details=faults[1:_SHOWN],
        )  # fmt: skip
