"""What bytecheckpoint saves: folders like those of DCP, with tensors as bare bytes.

::

    model/.metadata           as of DCP (`reshard.formats.dcp_metadata`), of own classes, and with more attributes
        all_tensor_metadata   dict: MetadataIndex -> pickle of the chunk, a tensor in a storage of its own
        user_defined_dict     dict
    model/__<r>_<n>.distcp    the storages of chunks, one after the other; an object is an archive of torch.save
    optimizer/                likewise: ``state.<fqn>.exp_avg``, ..., and one object, ``param_groups``
    extra_state/extra_state_rank_<r>.pt     of torch.save: "lr_scheduler", "torch_rng_state", "step", ...

"Decomposed", a model of FSDP1 is in flat parameters as they lie in memory, and the metadata says what lies in them::

    model/        "[<unit>.]_flat_param": chunks of one dim, alignment (`reshard.formats.rescue.flat.units`) among them
    user_defined_dict       {"fsdp_flat_param_to_fqns": {key: [name relative to the unit, which may begin with a dot]},
                            "fsdp_shapes", "fsdp_numels_with_padding", "fsdp_is_padding_mask"}
    optimizer/    "state.[<unit>.]_flat_param.exp_avg", without chunks for what is frozen or alignment; steps are
                  ``state.<fqn>.step``; integers are in the groups
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats import dcp_metadata, unpickle
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp_metadata import DcpMetadata
from reshard.formats.object_archive import object_value
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.flat.layout import FlatUnit, flat_unit
from reshard.formats.rescue.flat.units import HOW_TO_GIVE_A_LAYOUT, Flat, add_part, laid_out
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.optimizer_names import names_by_id
from reshard.formats.rescue.rank_file import RankFile, open_rank_file
from reshard.formats.torch_archive import TENSOR_CLASSES, Record, Stored, StoredStorage, persistent_storage
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.names import canonical_names
from reshard.storage.durable import storage_errors

NAME = "bytecheckpoint"

_MODULE = "bytecheckpoint.checkpointer.meta_type"
# Its name stands at the very beginning of the pickle.
_HEAD_BYTES = 256
_PARTS = ("model", "optimizer")
_FLAT = "_flat_param"
_GROUPS = "param_groups"
_EXTRA_STATE = re.compile(r"extra_state_rank_(\d+)\.pt")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_OF_A_RANK = ("lr_scheduler", "torch_rng_state", "step")


def is_bytecheckpoint(folder: Path, names: Sequence[str]) -> bool:
    """Whether a folder is one of a saved state, or of its model or optimizer alone.

    Args:
        names: of what is in it.
    """
    return bool(_folders(folder, names))


def open_bytecheckpoint(folder: Path, hints: Hints) -> Checkpoint:
    """Opens the folder of a state: reads what describes the tensors, and none of them.

    Raises:
        CheckpointUnsound: files are missing, damaged, or contradict each other.
        UsageError: what lies in flat parameters is not known.
    """
    with storage_errors("list the folder", folder):
        folders = _folders(folder, [entry.name for entry in folder.iterdir()])
        beside = folder / "extra_state"
        extra = sorted(beside.iterdir()) if beside.is_dir() else []
    metadata = [dcp_metadata.read_file(path / dcp_metadata.FILE_NAME, _MODULE) for path in folders]
    data = [path / name for path, read in zip(folders, metadata, strict=True) for name in read.index.files]
    states = [path for path in extra if _EXTRA_STATE.fullmatch(path.name)]
    assembly = Assembly(folder, [*data, *states])
    try:
        parts = {}
        first = 0
        for path, read in zip(folders, metadata, strict=True):
            part = _Part.of(path, read, first)
            first += len(read.index.files)
            parts["optimizer" if part.is_optimizer else "model"] = part
        opened = [open_rank_file(assembly.files, len(data) + number) for number in range(len(states))]
        return _assembled(assembly, parts, opened, hints)
    finally:
        assembly.files.close()


def _folders(folder: Path, names: Sequence[str]) -> list[Path]:
    places = [folder] if dcp_metadata.FILE_NAME in names else [folder / name for name in _PARTS if name in names]
    return [place for place in places if _is_part(place)]


def _is_part(folder: Path) -> bool:
    path = folder / dcp_metadata.FILE_NAME
    with storage_errors("read", path):
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _MODULE.encode() in file.read(_HEAD_BYTES)


@dataclass(frozen=True)
class _Part:
    """The folder of a model or an optimizer.

    Attributes:
        sources: its data files, by name, with a record for each chunk.
        pickles: of the chunks, by key and offsets.
    """

    folder: Path
    metadata: DcpMetadata
    sources: Mapping[str, RankFile]
    pickles: Mapping[tuple[Any, Any], Any]

    @classmethod
    def of(cls, folder: Path, metadata: DcpMetadata, first: int) -> _Part:
        """``first``: the number of its first file."""
        index = metadata.index
        if metadata.transforms:
            found = ", ".join(sorted(metadata.transforms))
            raise CheckpointUnsound("its bytes went through stream transforms", path=folder, found=found)
        records: list[dict[str, Record]] = [{} for _ in index.files]
        for row, file in enumerate(index.file.tolist()):
            place = int(index.start_bytes[row]), int(index.length_bytes[row])
            records[file][f"data/{row}"] = Record(*place, crc=0)
        sources = {
            name: RankFile(folder / name, first + number, None, records[number], frozenset())
            for number, name in enumerate(index.files)
        }
        chunks = metadata.others.get("all_tensor_metadata")
        pickles: dict[tuple[Any, Any], Any] = {
            (getattr(key, "fqn", None), getattr(key, "offset", None)): content
            for key, content in (chunks if isinstance(chunks, dict) else {}).items()
        }
        return cls(folder, metadata, sources, pickles)

    @property
    def is_optimizer(self) -> bool:
        """By what is in it, where its folder was given another name."""
        if self.folder.name in _PARTS:
            return self.folder.name == _PARTS[1]
        keys = [*self.metadata.index.names, *self.metadata.index.objects]
        return bool(keys) and all(key == _GROUPS or key.startswith("state.") for key in keys)

    def chunks(self, number: int) -> Iterator[tuple[tuple[int, ...], Stored, RankFile]]:
        """The chunks of a tensor: their offsets, and where their elements lie.

        Raises:
            CheckpointUnsound: what is stored is not of the chunk's shape.
        """
        index = self.metadata.index
        key, dims = index.names[number], len(index.shapes[number])
        for row in range(index.first[number], index.first[number + 1]):
            box, source = index.box(row), self.sources[index.files[index.file[row]]]
            offsets, sizes = box.offsets[:dims], box.sizes[:dims]
            found = self._pickled(key, offsets)
            needed = box.elements * ITEM_BYTES.get(found.dtype, 0)
            has = int(index.length_bytes[row])
            if (found.shape, found.dtype, has) != (sizes, index.dtypes[number], needed) or found.storage_offset:
                raise CheckpointUnsound(
                    "what is stored is not the chunk", path=self.folder / dcp_metadata.FILE_NAME, key=key,
                    expected=f"{needed} bytes, {index.dtypes[number]} of {sizes}",
                    found=f"{has} bytes, {found.dtype} of {found.shape} from element {found.storage_offset} on",
                )  # fmt: skip
            yield offsets, found._replace(storage=StoredStorage(str(row), found.dtype, box.elements)), source

    def _pickled(self, key: str, offsets: tuple[int, ...]) -> Stored:
        """How a chunk lies in its storage, which need not be row-major."""
        path = self.folder / dcp_metadata.FILE_NAME
        content = self.pickles.get((key, offsets))
        if not isinstance(content, bytes):
            raise CheckpointUnsound("no pickle of a chunk", path=path, key=key, found=f"none of that at {offsets}")
        found = unpickle.read(io.BytesIO(content), TENSOR_CLASSES, path=path, persistent=persistent_storage)
        if not isinstance(found, Stored):
            raise CheckpointUnsound("a pickle of a chunk that is no tensor", path=path, key=key)
        return found

    def objects(self, assembly: Assembly) -> Iterator[tuple[str, Any]]:
        """What is not a tensor, by key; None for what is not plain."""
        for key, place in self.metadata.index.objects.items():
            source = self.sources[place.file]
            content = assembly.files.read(source.file, place.start_bytes, place.length_bytes)
            yield key, object_value(bytes(content), source.path, key)


def _assembled(assembly: Assembly, parts: Mapping[str, _Part], states: Sequence[RankFile], hints: Hints) -> Checkpoint:
    flats = _flats(parts, hints)
    groups: list[dict[str, Any]] = []
    saved = []
    if (model := parts.get("model")) is not None:
        _add_model(assembly, model, flats)
        saved.append("model")
    steps: list[float] = []
    if (optimizer := parts.get("optimizer")) is not None and hints.optimizer != "left out":
        steps = _add_state(assembly, optimizer, flats)
        groups = _add_groups(assembly, optimizer, hints)
        saved.append("optimizer")
    roots = [source.root if isinstance(source.root, dict) else {} for source in states]
    for source, root in zip(states, roots, strict=True):
        rank = _EXTRA_STATE.fullmatch(source.path.name)
        assert rank is not None
        training_state.add_rng(assembly, int(rank[1]), {"torch": root.get("torch_rng_state")}, source)
    first = roots[0] if roots else {}
    scheduler, others = first.get("lr_scheduler"), {key: first[key] for key in first if key not in _OF_A_RANK}
    step = first.get("step")
    version = next(iter(parts.values())).metadata.others.get("bytecheckpoint_version")
    manifest = training_state.manifest_of(
        assembly,
        step=step if isinstance(step, int) else int(max(steps, default=0)),
        ranks=_ranks(parts),
        parts=saved,
        lr=[group.get("lr") for group in groups],
        schedulers={"scheduler": scheduler} if scheduler else None,
        rng_ranks=sum("torch_rng_state" in root for root in roots),
        extra={"extra_state": others} if others else None,
        versions={NAME: version} if isinstance(version, str) else None,
    )
    return assembly.build(NAME, manifest, holds_archives=False)


def _ranks(parts: Mapping[str, _Part]) -> int:
    """How many ranks wrote it, as the names of its files say."""
    found = [match for part in parts.values() for name in part.sources if (match := _DATA_FILE.fullmatch(name))]
    return 1 + max((int(match[1]) for match in found), default=0)


def _flats(parts: Mapping[str, _Part], hints: Hints) -> dict[str, Flat]:
    """The flat parameters by key, as the model's metadata describes them.

    Raises:
        UsageError: nothing describes one, and names are wanted.
        CheckpointUnsound: the description is not one.
    """
    part = parts.get("model") or parts["optimizer"]
    numels = {key: shape[0] for part in parts.values() for key, shape in _flat_tensors(part)}
    if not numels:
        return {}
    named = {key: key.rpartition(".")[0] for key in numels}
    units = _units(part) or _units_beside(part) or hints.units_of(named.values(), part.folder) or {}
    missing = [key for key, unit in named.items() if unit not in units]
    if missing and hints.optimizer != "as stored":
        raise UsageError(
            "nothing says what lies in a flat parameter", path=part.folder, found=", ".join(missing),
            hint=HOW_TO_GIVE_A_LAYOUT,
        )  # fmt: skip
    return {
        key: laid_out(units[named[key]], key, part.folder, numel) for key, numel in numels.items() if key not in missing
    }


def _flat_tensors(part: _Part) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys of flat parameters, and the shapes of what is there of them."""
    index, is_optimizer = part.metadata.index, part.is_optimizer
    for name, shape in zip(index.names, index.shapes, strict=True):
        key = name.removeprefix("state.").rpartition(".")[0] if is_optimizer else name
        if key.rpartition(".")[2] == _FLAT and len(shape) == 1:
            yield key, shape


def _units_beside(part: _Part) -> dict[str, FlatUnit]:
    """The same where only the optimizer was named: the model, which lies beside it, describes both."""
    model = part.folder.parent / "model"
    if part.folder == model or not _is_part(model):
        return {}
    return _units(_Part.of(model, dcp_metadata.read_file(model / dcp_metadata.FILE_NAME, _MODULE), 0))


def _units(part: _Part) -> dict[str, FlatUnit]:
    described = part.metadata.others.get("user_defined_dict")
    if not isinstance(described, dict) or "fsdp_flat_param_to_fqns" not in described:
        return {}
    try:
        units = [
            flat_unit(
                {
                    "unit": key.removesuffix(_FLAT).removesuffix("."),
                    "fqns": [name.removeprefix(".") for name in fqns],
                    "shapes": described["fsdp_shapes"][key],
                    "numels_incl_padding_entries": described["fsdp_numels_with_padding"][key],
                    "is_padding": described["fsdp_is_padding_mask"][key],
                }
            )
            for key, fqns in described["fsdp_flat_param_to_fqns"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointUnsound(
            "not a description of flat parameters", path=part.folder / dcp_metadata.FILE_NAME, key="user_defined_dict",
            found=f"{type(error).__name__}: {error}",
        ) from error  # fmt: skip
    return {unit.name: unit for unit in units}


def _add_model(assembly: Assembly, part: _Part, flats: Mapping[str, Flat]) -> None:
    index = part.metadata.index
    names = canonical_names([*index.names, *index.objects])
    for number, spelled in enumerate(index.names):
        name = names[spelled]
        for offsets, stored, source in part.chunks(number):
            if name in flats:
                bounds = offsets[0], offsets[0] + stored.shape[0]
                add_part(assembly, flats[name], training_state.model_key, bounds, stored, source)
            else:
                assembly.add_box(training_state.model_key(name), index.shapes[number], offsets, stored, source)
    for spelled, value in part.objects(assembly):
        if value is not None:
            name = names[spelled]
            assembly.add_object(training_state.model_key(name), value, (training_state.MODEL, name))


def _add_state(assembly: Assembly, part: _Part, flats: Mapping[str, Flat]) -> list[float]:
    """Adds the optimizer's state; the steps that it counts."""
    index, steps = part.metadata.index, []
    split = {key: key.removeprefix("state.").rpartition(".") for key in (*index.names, *index.objects)}
    names = canonical_names(dict.fromkeys(name for name, _, _ in split.values() if name))
    for number, key in enumerate(index.names):
        spelled, _, slot = split[key]
        name = names[spelled]
        if name.rpartition(".")[2] == _FLAT and not index.shapes[number]:
            # How many of its elements are not frozen.
            continue
        for offsets, stored, source in part.chunks(number):
            if (flat := flats.get(name)) is not None:
                bounds = offsets[0], offsets[0] + stored.shape[0]
                add_part(assembly, flat, partial(training_state.state_key, slot=slot), bounds, stored, source)
            else:
                assembly.add_box(training_state.state_key(name, slot), index.shapes[number], offsets, stored, source)
            if slot == "step" and not offsets:
                steps.append(training_state.number_of(stored, source, assembly, key))
    for key, value in part.objects(assembly):
        spelled, _, slot = split[key]
        if spelled:
            source = next(iter(part.sources.values()))
            training_state.add_state(assembly, names[spelled], slot, value, source)
    return steps


def _add_groups(assembly: Assembly, part: _Part, hints: Hints) -> list[dict[str, Any]]:
    """Adds the parameter groups."""
    content = dict(part.objects(assembly)).get(_GROUPS)
    if not isinstance(content, list) or not all(isinstance(group, dict) for group in content):
        assembly.notes.append("the parameter groups hold more than plain values, and were left out")
        return []
    ids = [list(group.get("params", ())) for group in content]
    if all(isinstance(entry, str) for group in ids for entry in group):
        short = canonical_names(entry for group in ids for entry in group)
        training_state.add_groups(assembly, content, [[short[entry] for entry in group] for group in ids])
        return content
    prefix = f"{training_state.OPTIMIZER}.state."
    shapes = {
        key.removeprefix(prefix).rpartition(".")[0]: assembly.shape(key)
        for key in assembly.keys
        if key.startswith(prefix) and assembly.shape(key)
    }
    if len(ids) == 1:
        names = [list(shapes)]
    elif hints.param_order is not None:
        by_id = names_by_id(ids, {}, shapes, hints.param_order, part.folder)
        names = [[by_id[entry] for entry in group] for group in ids]
    else:
        assembly.notes.append("which parameters are in which group is not in the files; --param-order FILE gives it")
        names = [[] for _ in ids]
    training_state.add_groups(assembly, content, names)
    return content
