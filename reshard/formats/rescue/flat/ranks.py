"""FSDP1's optimizer as each rank saved its own: beside flat parameters, or beside a model by name, as verl does.

verl's model file has DTensors by name, cut by rows; its optimizer file has what ``optimizer.state_dict()`` gave, cut by
elements of the flat parameters (`reshard.formats.rescue.flat.optimizer`)::

    model    weight (5, 3): rows 0-2 | rows 3-4      bias (5,): 0-2 | 3-4
    optim    weight and bias, 20 elements flat: 0-9 | 10-19

Whether its ids are flat parameters or, under use_orig_params=True, parameters, nothing says but the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import UsageError
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.flat.layout import FlatUnit
from reshard.formats.rescue.flat.model import FlatModel, is_flat
from reshard.formats.rescue.flat.optimizer import Entries, add_by_parameter, add_by_unit, add_unnamed, read_entries
from reshard.formats.rescue.flat.units import HOW_TO_GIVE_A_LAYOUT, Flat, Parts, laid_out, parts_of
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.model_outline import ModelOutline
from reshard.formats.rescue.rank_state import RankState, is_tensor
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import Stored

Shape = tuple[int, ...]


def has_raw_optimizer(states: Sequence[RankState]) -> bool:
    """Whether integers name its entries, and its tensors are flat where the model's are sharded."""
    optimizers = [state.optimizer.content["state"] for state in states if state.optimizer]
    if not optimizers or any(isinstance(entry, str) for entries in optimizers for entry in entries):
        return False
    if is_flat(states):
        return True
    tensors = [
        value for entries in optimizers for slots in entries.values() for value in slots.values() if is_tensor(value)
    ]
    moments = [value for value in tensors if isinstance(value, Held) or value.shape]
    if not moments or not all(isinstance(value, Stored) and len(value.shape) == 1 for value in moments):
        return False
    model = [value for state in states if state.model for value in state.model.content.values() if is_tensor(value)]
    # Beside a whole model, moments of one dim may be those of its biases.
    whole = {value.shape for value in model}
    return any(isinstance(value, Held) for value in model) or any(value.shape not in whole for value in moments)


def add_raw_optimizer(
    assembly: Assembly,
    states: Sequence[RankState],
    model: FlatModel | None,
    names: Mapping[str, str],
    hints: Hints,
) -> list[dict[str, Any]]:
    """Adds the optimizer; its groups.

    Args:
        model: in flat parameters, if it is so.
        names: of the model's tensors, as the files spell them -> without wrappers.

    Raises:
        UsageError: names or shapes are missing, or do not fit.
        CheckpointUnsound: entries do not cover what they are of.
    """
    entries = read_entries({state.rank: state.optimizer for state in states if state.optimizer}, len(states))
    if model is not None:
        if not model.is_described:
            return add_unnamed(assembly, entries, model.parts)
        if not model.has_pieces:
            return add_by_unit(assembly, entries, model.flats, model.parts, hints)
        shapes = {lying.name: lying.shape for flat in model.flats for lying in flat.parameters}
        held = _pieces(model.flats, model.parts, len(states))
        return add_by_parameter(assembly, entries, shapes, held, _frozen(model.flats), model.parts, hints)
    sharded = [
        {names[name]: value for name, value in state.model.content.items() if isinstance(value, Held)}
        if state.model
        else {}
        for state in states
    ]
    shapes = {name: value.shape for tensors in sharded for name, value in tensors.items()} or _whole(states, names)
    ranks = len(states)
    # A whole model, as rank 0 gathers it, does not tell how many parts there are: one a rank, or, unsharded, one.
    possible = [parts_of(sharded, assembly.folder)] if any(sharded) else [_every(ranks, n) for n in sorted({ranks, 1})]
    flats = _described(assembly, hints.units, shapes)
    if flats is None and hints.model is not None and _are_even(entries):
        flats = _of_model(assembly, hints.model, shapes, entries, possible)
    are_named = hints.param_order is not None
    fitting = [parts for parts in possible if _fits(entries, parts, shapes, flats, are_named)]
    if flats is None and not fitting:
        if hints.optimizer == "as stored":
            return add_unnamed(assembly, entries, possible[-1])
        raise UsageError(
            "moments of flat parameters, and nothing that says which parameters lie in them",
            path=entries.source.path,
            hint=f"{HOW_TO_GIVE_A_LAYOUT} and --wrap CLASS for each class of wrapped modules, "
            "or leave the optimizer out with --only model",
        )  # fmt: skip
    if len(fitting) > 1:
        raise UsageError(
            "moments that could be whole ones as well as parts", path=entries.source.path,
            hint="save the model with SHARDED_STATE_DICT, or leave the optimizer out with --only model",
        )  # fmt: skip
    # Where nothing fits, what is missing or too much is told by what it would be.
    parts = fitting[0] if fitting else possible[-1]
    if flats is not None and _are_even(entries):
        return add_by_unit(assembly, entries, flats, parts, hints)
    pieces = _pieces(flats, parts, ranks) if flats is not None else None
    return add_by_parameter(assembly, entries, shapes, pieces, _frozen(flats or ()), parts, hints)


def _whole(states: Sequence[RankState], names: Mapping[str, str]) -> dict[str, Shape]:
    models = [state.model.content for state in states if state.model]
    return {names[name]: value.shape for model in models for name, value in model.items() if is_tensor(value)}


def _described(
    assembly: Assembly, units: Mapping[str, FlatUnit] | None, shapes: Mapping[str, Shape], what: str = "layout"
) -> list[Flat] | None:
    """The flat parameters of a layout, or of what errors call otherwise; None where there is none.

    Raises:
        UsageError: the model's tensors are others.
    """
    if units is None:
        return None
    wrong = [
        f"{name}: {shape} in the {what}, {shapes.get(name, 'missing')} in the files"
        for unit in units.values()
        for name, shape in zip(unit.fqns, unit.shapes, strict=True)
        if shapes.get(name) != shape
    ]
    if wrong:
        raise UsageError(f"a {what} of other tensors", path=assembly.folder, found=wrong[0], details=wrong[1:])
    return [
        laid_out(unit, f"{name}._flat_param" if name else "_flat_param", assembly.folder)
        for name, unit in units.items()
    ]


def _of_model(
    assembly: Assembly,
    model: ModelOutline,
    shapes: Mapping[str, Shape],
    entries: Entries,
    possible: Sequence[Parts],
) -> list[Flat] | None:
    """The flat parameters as a model is said to be wrapped; None where they are not as long as the optimizer's entries.

    Raises:
        UsageError: the model has no such modules, or the files have other tensors.
    """
    flats = _described(assembly, model.wrapped_units(), shapes, "model") or []
    found = sorted(next(iter(held.values())) for held in entries.lengths.values())
    for parts in possible:
        if found == sorted(parts.numel(flat.numel) for flat in flats if flat.is_trainable):
            return flats
    if model.wrap:
        expected = sorted(possible[-1].numel(flat.numel) for flat in flats if flat.is_trainable)
        raise UsageError(
            "other modules than were wrapped", path=entries.source.path, key=f"--wrap {' '.join(model.wrap)}",
            expected=f"flat parameters of {found} elements a rank, as the optimizer has",
            found=f"{expected}, of units {', '.join(repr(flat.key.rpartition('.')[0]) for flat in flats)}",
            hint="name every class whose modules were wrapped, frozen ones among them",
        )  # fmt: skip
    return None


def _every(ranks: int, count: int) -> Parts:
    return Parts(count, tuple(rank % count for rank in range(ranks)))


def _pieces(flats: Sequence[Flat], parts: Parts, ranks: int) -> dict[str, list[int]]:
    return {
        lying.name: [parts.overlap(flat, lying, rank) for rank in range(ranks)]
        for flat in flats
        for lying in flat.parameters
    }


def _frozen(flats: Sequence[Flat]) -> list[str]:
    return [lying.name for flat in flats if not flat.is_trainable for lying in flat.parameters]


def _fits(
    entries: Entries, parts: Parts, shapes: Mapping[str, Shape], flats: Sequence[Flat] | None, are_named: bool
) -> bool:
    """Whether entries are flat parameters of a layout, or else parameters, if they are cut so."""
    if flats is not None and _are_even(entries):
        lengths = {parts.numel(flat.numel) for flat in flats}
        return {length for held in entries.lengths.values() for length in held.values()} <= lengths
    if flats is None and _are_even(entries) and not are_named and len(entries.lengths) != len(shapes):
        # A flat parameter may have as many elements as a parameter that has no moments.
        return False
    repeats = len(parts.of_rank) // parts.count
    numels = {repeats * math.prod(shape) for shape in shapes.values()}
    return all(sum(held.values()) in numels for held in entries.lengths.values())


def _are_even(entries: Entries) -> bool:
    """Whether every rank has as many elements of an entry: of two parameters in a flat one, none has."""
    return all(
        held.keys() == entries.parts.keys() and len(set(held.values())) == 1 for held in entries.lengths.values()
    )
