"""What fairscale records of its flat parameters beside them: names and shapes, and the padding of a rank's part.

::

    {"param_metadata": [{                               a unit
         "fsdp_path": its name, "" for the root
         "params": {"flat_param_0": {                   or, with flatten_parameters=False, the name of a parameter
              "names", "shapes", "numels",              of what lies in it; names are relative to the unit
              "padding"}},                              how many elements at the end of this rank's part are none
         "shared_param_info": [(name, another name of the same)],
         "no_broadcast_optim_state": whether each rank has parameters of its own, as experts are}],
     "buffer_names": [name]}                            also of those that no file holds

Where a trainer left this out, a layout that the user gives says the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue.flat.units import HOW_TO_GIVE_A_LAYOUT, Flat, Lying, Parts, laid_out
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.torch_archive import Stored
from reshard.index.names import canonical_names

FLAT_NAME = re.compile(r"(?:^|\.)flat_param_\d+$")
_KEYS = ("shard_metadata", "fsdp_metadata")


def metadata_of(root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The metadata in a rank's file, if there is any."""
    for key in _KEYS:
        found = root.get(key)
        if isinstance(found, dict) and "param_metadata" in found:
            return found
    return None


def flat_parameters(sources: Sequence[RankFile], hints: Hints, folder: Path) -> list[Flat]:
    """The flat parameters of a model, by what the files of all ranks say of them, or else a layout.

    Where neither does, and one only looks at the checkpoint, each is a tensor by itself, padding included.

    Raises:
        UsageError: neither says it.
        CheckpointUnsound: the ranks contradict each other, or do not make up the parameters.
    """
    flats: dict[str, Flat] = {}
    held: dict[str, list[int]] = {}
    for rank, source in enumerate(sources):
        metadata = metadata_of(source.root)
        if metadata is None:
            return _from_layout(source, hints, len(sources))
        try:
            described = list(_flats(metadata))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointUnsound(
                "metadata of fairscale that is not as it writes it",
                path=source.path, rank=rank, found=f"{type(error).__name__}: {error}",
            ) from error  # fmt: skip
        for flat, padding in described:
            if flats.setdefault(flat.key, flat) != flat:
                raise CheckpointUnsound(
                    "the ranks disagree on what lies in it", path=source.path, key=flat.key, rank=rank,
                    hint="files of different checkpoints are mixed: name one of them",
                )  # fmt: skip
            part = source.root["model"].get(flat.key)
            if isinstance(part, Stored):
                held.setdefault(flat.key, []).append(math.prod(part.shape) - padding)
    parts = Parts(len(sources), tuple(range(len(sources))))
    faults = []
    for key, flat in flats.items():
        bounds = [parts.range(flat.numel, rank) for rank in range(len(sources))]
        if (own := held.get(key, [])) != [end - begin for begin, end in bounds]:
            faults.append(f"{key}: {sum(own)} elements in {own} of each rank, {flat.numel} in the shapes")
    if faults:
        raise CheckpointUnsound(
            "parts that do not add up to their flat parameter", path=folder, found=faults[0], details=faults[1:],
            hint="are there files of all ranks, and all of one checkpoint?",
        )  # fmt: skip
    return list(flats.values())


def _flats(metadata: Mapping[str, Any]) -> Iterator[tuple[Flat, int]]:
    """Flat parameters, and how many elements at the end of the rank's part are padding."""
    for unit in metadata["param_metadata"]:
        prefix = f"{unit['fsdp_path']}." if unit["fsdp_path"] else ""
        if unit.get("no_broadcast_optim_state"):
            raise UsageError(
                "a unit of which each rank has parameters of its own, as experts are", key=prefix.rstrip("."),
                hint="not supported: put it together with the tool that wrote it",
            )  # fmt: skip
        shared = [(prefix + str(name), prefix + str(of)) for of, name in unit.get("shared_param_info") or ()]
        for key, content in unit["params"].items():
            parameters, begin = [], 0
            for name, shape, numel in zip(content["names"], content["shapes"], content["numels"], strict=True):
                sizes = tuple(int(size) for size in shape)
                if math.prod(sizes) != numel:
                    raise ValueError(f"{numel} elements of {sizes} in {prefix}{name}")
                parameters.append(Lying(prefix + name, sizes, begin, begin + numel))
                begin += numel
            fqns = {lying.name for lying in parameters}
            tied = tuple((name, of) for name, of in shared if of in fqns)
            yield Flat(prefix + key, tuple(parameters), begin, tied), int(content["padding"])


def _from_layout(source: RankFile, hints: Hints, ranks: int) -> list[Flat]:
    keys = [key for key in canonical_names(source.root["model"]).values() if FLAT_NAME.search(key)]
    named = {key.rpartition(".")[0]: key for key in keys}
    units = hints.units_of(named, source.path)
    if units is None and hints.optimizer == "as stored":
        numels = {key: math.prod(source.root["model"][key].shape) * ranks for key in keys}
        return [Flat(key, (Lying(key, (numel,), 0, numel),), numel) for key, numel in numels.items()]
    if units is None:
        raise UsageError(
            "need shard_metadata, which names what lies in a flat parameter, and this file has none",
            path=source.path, found=", ".join(keys), hint=HOW_TO_GIVE_A_LAYOUT,
        )  # fmt: skip
    if named.keys() != units.keys() or len(named) != len(keys):
        raise UsageError(
            "a layout of other units than the files have",
            path=source.path, expected=", ".join(keys), found=", ".join(map(repr, sorted(units))),
        )  # fmt: skip
    flats = [laid_out(units[name], key, source.path) for name, key in named.items()]
    parts = Parts(ranks, tuple(range(ranks)))
    for flat in flats:
        part = source.root["model"].get(flat.key)
        if isinstance(part, Stored) and math.prod(part.shape) != parts.numel(flat.numel):
            raise UsageError(
                "a layout that does not fit the flat parameter", path=source.path, key=flat.key,
                expected=f"{math.prod(part.shape)} elements a rank, or up to {math.prod(part.shape) * ranks} in all",
                found=f"{flat.numel} in the layout",
            )  # fmt: skip
    return flats
