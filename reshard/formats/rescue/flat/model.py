"""FSDP1's LOCAL_STATE_DICT: a model as flat parameters, of which each rank's file has a part.

::

    {"[<unit>.]_flat_param": ShardedTensor of one dim,      a part without padding; ``flat_param`` before torch 2.0
     "<fqn>": tensor of one dim,                            under use_orig_params=True: what this rank holds of each
                                                            parameter, 0 elements where it is nothing
     "<fqn>": tensor, ...}                                  buffers and ignored parameters, whole on every rank

What lies in a flat parameter is nowhere in the files; a layout says it (`reshard.formats.rescue.hints`). A tied
parameter lies there once, and its other names are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.flat.layout import FlatUnit, innermost, unpadded_unit
from reshard.formats.rescue.flat.units import HOW_TO_GIVE_A_LAYOUT, Flat, Lying, Parts, add_part, laid_out, parts_of
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.rescue.rank_state import RankState, is_tensor
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import Stored
from reshard.index.dtypes import ITEM_BYTES
from reshard.index.names import canonical_names

_FLAT_NAMES = ("_flat_param", "flat_param")


@dataclass(frozen=True)
class FlatModel:
    """A model as flat parameters.

    Attributes:
        names: as the files spell them, of all tensors -> without wrappers.
        has_pieces: whether the files also have each rank's piece of every parameter: use_orig_params=True.
        is_described: whether a layout says what lies in the flat parameters; else these are all that is known.
    """

    names: Mapping[str, str]
    flats: tuple[Flat, ...]
    parts: Parts
    has_pieces: bool
    is_described: bool = True


def is_flat(states: Sequence[RankState]) -> bool:
    """Whether there are flat parameters in the model's files."""
    return any(_is_flat(name, value) for state in states if state.model for name, value in state.model.content.items())


def read_flat_model(assembly: Assembly, states: Sequence[RankState], hints: Hints) -> FlatModel:
    """What the files hold, with what the layout says of it.

    Raises:
        UsageError: there is no layout, or it is of another model.
        CheckpointUnsound: ranks hold what does not make up flat parameters.
    """
    spelled = {name: None for state in states if state.model for name in state.model.content}
    names = canonical_names(spelled)
    held: list[dict[str, Held]] = [
        {names[name]: value for name, value in state.model.content.items() if _is_flat(name, value)}
        if state.model
        else {}
        for state in states
    ]
    numels = {key: value.shape[0] for tensors in held for key, value in tensors.items()}
    parts = parts_of(held, assembly.folder)
    _check_parts(assembly, held, numels, parts)
    units = _units(assembly, list(numels), states, names, hints)
    if units is None and hints.optimizer == "as stored":
        assembly.notes.append("what lies in the flat parameters is not in the files; " + HOW_TO_GIVE_A_LAYOUT)
        flats = tuple(Flat(key, (Lying(key, (numel,), 0, numel),), numel) for key, numel in numels.items())
        return FlatModel(names, flats, parts, False, is_described=False)
    if units is None:
        raise UsageError(
            "LOCAL files carry no names and shapes of what lies in a flat parameter", path=assembly.folder,
            found=", ".join(numels), hint=HOW_TO_GIVE_A_LAYOUT,
        )  # fmt: skip
    has_pieces = not {name for unit in units.values() for name in unit.fqns}.isdisjoint(names.values())
    widths = {key: ITEM_BYTES[value.dtype or "float32"] for tensors in held for key, value in tensors.items()}
    flats = tuple(
        laid_out(units[key], key, assembly.folder, numel, (widths[key], parts.count) if has_pieces else None)
        for key, numel in numels.items()
    )
    return FlatModel(names, flats, parts, has_pieces)


def add_flat_model(assembly: Assembly, states: Sequence[RankState], model: FlatModel) -> dict[str, str]:
    """Adds the model; the names of its tensors.

    Raises:
        UsageError: a rank's file contradicts the layout.
        CheckpointUnsound: it lacks data.
    """
    by_key = {flat.key: flat for flat in model.flats}
    pieces = {lying.name: (flat, lying) for flat in model.flats for lying in flat.parameters}
    tied = {name: of for flat in model.flats for name, of in flat.shared}
    unknown = set() if model.is_described else _piece_names(states, model.names)
    for state in states:
        if state.model is None:
            continue
        source = state.model.source
        held = {model.names[name]: value for name, value in state.model.content.items() if _is_flat(name, value)}
        for spelled, value in state.model.content.items():
            name = model.names[spelled]
            if not is_tensor(value) or name in tied or name in unknown:
                continue
            if name in held:
                for offsets, stored in value.boxes:
                    bounds = (offsets[0], offsets[0] + stored.shape[0])
                    add_part(assembly, by_key[name], training_state.model_key, bounds, stored, source)
            elif name in pieces:
                flat, lying = pieces[name]
                _check_piece(source, model.parts, state.rank, flat, lying, value, held[flat.key])
            else:
                assembly.add_tensor(training_state.model_key(name), value, source)
    for name, of in tied.items():
        assembly.add_alias(training_state.model_key(name), training_state.model_key(of))
    fqns = [*pieces, *tied, *(name for name in model.names.values() if name not in by_key)]
    return {name: name for name in fqns if name not in unknown}


def _check_piece(
    source: RankFile, parts: Parts, rank: int, flat: Flat, lying: Lying, piece: Stored | Held, held: Held
) -> None:
    """Passes where a piece is what the layout says; its elements are those of the flat parameter."""
    length, (begin, _) = parts.overlap(flat, lying, rank), parts.range(flat.numel, rank)
    at = max(0, lying.begin - begin)
    expected, found = f"{length} elements from {at} on in this rank's part of {flat.key}", f"shape {piece.shape}"
    if isinstance(piece, Stored) and piece.shape == (length,):
        whole = held.boxes[0][1] if held.boxes else None
        # In a storage of its own, where somebody copied it, its place is not recorded.
        if not length or whole is None or piece.storage.key != whole.storage.key:
            return
        if (found_at := piece.storage_offset - whole.storage_offset) == at:
            return
        found = f"from {found_at} on"
    raise UsageError(
        "a layout that does not fit the files", path=source.path, key=lying.name, rank=rank,
        expected=expected, found=found, hint="it describes another model, or one that is wrapped otherwise",
    )  # fmt: skip


def _piece_names(states: Sequence[RankState], names: Mapping[str, str]) -> set[str]:
    """Names of what lies in a flat parameter, where only the files can tell: it is in the same storage on some rank."""
    found = set()
    for state in states:
        content = state.model.content if state.model else {}
        flat = {part.storage.key for name, value in content.items() if _is_flat(name, value) for _, part in value.boxes}
        for name, value in content.items():
            if isinstance(value, Stored) and value.storage.key in flat:
                found.add(names[name])
    return found


def _whole_names(
    states: Sequence[RankState], names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Parameters of a model that were not to be wrapped: every rank has them in their own shapes."""
    contents = [state.model.content for state in states if state.model]
    whole = {
        name
        for spelled, name in names.items()
        if name in shapes and all(getattr(content.get(spelled), "shape", None) == shapes[name] for content in contents)
    }
    return whole - _piece_names(states, names)


def _is_flat(name: str, value: object) -> bool:
    return isinstance(value, Held) and len(value.shape) == 1 and name.rpartition(".")[2] in _FLAT_NAMES


def _units(
    assembly: Assembly, keys: Sequence[str], states: Sequence[RankState], names: Mapping[str, str], hints: Hints
) -> dict[str, FlatUnit] | None:
    """The unit of each flat parameter; None where nothing says it."""
    named = {key.rpartition(".")[0]: key for key in keys}
    outside = _whole_names(states, names, hints.model.parameters) if hints.model is not None else ()
    units = hints.units_of(named, assembly.folder, outside)
    if units is None:
        units = _units_of_pieces(assembly, named, states, names, hints)
    if units is None:
        return None
    if named.keys() != units.keys():
        raise UsageError(
            "a layout of other units than the files have",
            path=assembly.folder,
            expected=", ".join(repr(name) for name in sorted(named)),
            found=", ".join(repr(name) for name in sorted(units)),
            hint="it describes another model, or one that is wrapped otherwise",
        )
    return {key: units[name] for name, key in named.items()}


def _units_of_pieces(
    assembly: Assembly,
    units: Collection[str],
    states: Sequence[RankState],
    names: Mapping[str, str],
    hints: Hints,
) -> dict[str, FlatUnit] | None:
    """Units whose parameters the files name, and of which another part of the checkpoint has the shapes.

    The files list them in the order of the modules, in which they lie.
    """
    shapes, pieces = hints.shapes or {}, _piece_names(states, names)
    if not shapes or not pieces:
        return None
    unknown = sorted(pieces - shapes.keys())
    if unknown and hints.optimizer == "as stored":
        return None
    if unknown:
        raise UsageError(
            "no shape of what lies in a flat parameter: the optimizer beside it has none of these",
            path=assembly.folder, found=", ".join(unknown), hint=HOW_TO_GIVE_A_LAYOUT,
        )  # fmt: skip
    inside: dict[str, list[str]] = {unit: [] for unit in units}
    for name in names.values():
        if name in pieces and (unit := innermost(name, inside)) is not None:
            inside[unit].append(name)
    return {unit: unpadded_unit(unit, fqns, shapes) for unit, fqns in inside.items()}


def _check_parts(
    assembly: Assembly, held: Sequence[Mapping[str, Held]], numels: Mapping[str, int], parts: Parts
) -> None:
    for rank, tensors in enumerate(held):
        for key, numel in numels.items():
            value = tensors.get(key)
            begin, end = parts.range(numel, rank)
            found = [(offsets[0], offsets[0] + part.shape[0]) for offsets, part in value.boxes] if value else []
            if value is None or value.shape != (numel,) or found != ([(begin, end)] if begin < end else []):
                raise CheckpointUnsound(
                    "not this rank's part of the flat parameter",
                    path=assembly.folder,
                    key=key,
                    rank=rank,
                    expected=f"elements {begin} to {end} of {numel}",
                    found=f"{found} of {value.shape}" if value else "nothing",
                    hint="files of different checkpoints are mixed: name one of them",
                )
