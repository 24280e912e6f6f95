"""The optimizer of a model in flat parameters, as each rank's own ``optimizer.state_dict()`` has it.

The ids count what the optimizer was given, in the order of its groups. A number or a tensor without dims (``step``) is
one for all elements; every other tensor has one dim and follows the elements that a rank holds::

    use_orig_params=False    an id is a flat parameter; its tensors are a part of it, with the padding that the model's
    and fairscale            file may lack. A frozen unit has no entry
    use_orig_params=True     an id is a parameter; its tensors are this rank's piece. A rank that holds nothing of it
                             has no entry, so ids differ from rank to rank

Nothing in the files names the ids. Where nobody gave the names in order, an id is the parameter whose elements are held
by the same ranks, as many by each. If that is not one alone, it is refused (`reshard.formats.rescue.optimizer_names`);
or, for who only looks at the checkpoint, it stays an integer, and its tensors are the ranks' parts one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.flat.units import Flat, Parts, add_part
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.optimizer_names import names_by_id
from reshard.formats.rescue.rank_file import RankFile
from reshard.formats.rescue.rank_state import Part, is_tensor
from reshard.formats.torch_archive import Stored
from reshard.index.names import canonical_names

_WITHOUT = "or leave the optimizer out with --only model"
# Of fairscale, below each of its wrappers.
_FLATTENED = "_fpw_module"

Shape = tuple[int, ...]
Order = Sequence[Sequence[str]] | None


@dataclass(frozen=True)
class Entries:
    """The optimizer as the files of some ranks hold it.

    Attributes:
        parts: rank -> what its file has.
        ranks: how many there should be.
        lengths: of each id with tensors of one dim -> elements of them, by rank.
    """

    parts: Mapping[int, Part]
    ranks: int
    lengths: Mapping[int, Mapping[int, int]]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return list(self._first.content["param_groups"])

    @property
    def ids(self) -> list[list[int]]:
        """Of each group."""
        return [list(group["params"]) for group in self.groups]

    @property
    def source(self) -> RankFile:
        """The file that errors name."""
        return self._first.source

    @property
    def _first(self) -> Part:
        return next(iter(self.parts.values()))


def read_entries(parts: Mapping[int, Part], ranks: int) -> Entries:
    """The optimizer's state in the files of ranks.

    Raises:
        UsageError: its tensors do not follow the elements of what it optimizes.
    """
    lengths: dict[int, dict[int, int]] = {}
    for rank, part in parts.items():
        for entry, slots in part.content["state"].items():
            found = {slot: value.shape for slot, value in slots.items() if is_tensor(value) and value.shape}
            if len(set(found.values())) > 1 or any(len(shape) != 1 for shape in found.values()):
                raise UsageError(
                    "an optimizer whose state does not follow the elements of a flat parameter",
                    path=part.source.path, key=f"state of {entry}", expected="tensors of one dim and one length",
                    found=found, hint="leave it out with --only model",
                )  # fmt: skip
            if found:
                lengths.setdefault(entry, {})[rank] = next(iter(found.values()))[0]
    return Entries(parts, ranks, dict(sorted(lengths.items())))


def add_by_unit(
    assembly: Assembly, entries: Entries, flats: Sequence[Flat], parts: Parts, hints: Hints
) -> list[dict[str, Any]]:
    """Adds an optimizer of flat parameters; its groups.

    Raises:
        UsageError: which entry is of which flat parameter cannot be told.
        CheckpointUnsound: entries are longer or shorter than their part, or do not cover a flat parameter.
    """
    by_key = {flat.key: flat for flat in flats}
    signatures = {flat.key: tuple(parts.numel(flat.numel) for _ in entries.parts) for flat in flats}
    candidates = {flat.key for flat in flats if flat.is_trainable}
    units = {flat.key.rpartition(".")[0]: flat for flat in flats}
    model_orders = (
        hints.model.unit_orders({name: flat.is_trainable for name, flat in units.items()}) if hints.model else []
    )
    in_order = [[units[name].key for name in names] for names in model_orders]
    keys = _named(entries, signatures, candidates, _unit_order(hints.param_order, flats), in_order, hints)
    for entry, lengths in entries.lengths.items():
        if entry not in keys:
            continue
        flat = by_key[keys[entry]]
        expected = parts.numel(flat.numel)
        for rank, length in lengths.items():
            if length != expected:
                of = f"{expected} elements, of {flat.numel} over {parts.count}"
                raise _not_its_part(entries, rank, flat.key, of, length)
        covered = {parts.of_rank[rank]: parts.range(flat.numel, rank) for rank in lengths}
        _check_covered(entries, flat.key, sum(end - begin for begin, end in covered.values()), flat.numel)

    def add(entry: int, slot: str, value: Stored, rank: int) -> None:
        flat = by_key[keys[entry]]
        bounds, source = parts.range(flat.numel, rank), entries.parts[rank].source
        add_part(assembly, flat, lambda name: training_state.state_key(name, slot), bounds, value, source)

    names = {entry: [lying.name for lying in by_key[key].parameters] for entry, key in keys.items()}
    return _add(assembly, entries, parts, names, add)


def add_by_parameter(
    assembly: Assembly,
    entries: Entries,
    shapes: Mapping[str, Shape],
    pieces: Mapping[str, Sequence[int]] | None,
    frozen: Iterable[str],
    parts: Parts,
    hints: Hints,
) -> list[dict[str, Any]]:
    """Adds an optimizer of parameters that lie in flat ones; its groups.

    Args:
        shapes: of the parameters.
        pieces: how many elements of each every rank holds; None where no layout says.
        frozen: those that the optimizer has nothing of.

    Raises:
        UsageError: which entry is of which parameter cannot be told.
        CheckpointUnsound: the pieces do not add up to their parameter.
    """
    numels = {name: math.prod(shape) for name, shape in shapes.items()}
    begins, totals = _one_after_the_other(entries, parts)
    if pieces is None:
        summed = {entry: {min(entries.parts): total} for entry, total in totals.items()}
        counted = Entries({min(entries.parts): entries.parts[min(entries.parts)]}, entries.ranks, summed)
        signatures: dict[str, Shape] = {name: (numel,) for name, numel in numels.items()}
    else:
        counted = entries
        signatures = {name: tuple(pieces[name][rank] for rank in entries.parts) for name in shapes}
    candidates = shapes.keys() - set(frozen)
    names = _named(counted, signatures, candidates, _clean(hints.param_order), hints.orders, hints)
    for entry, lengths in entries.lengths.items():
        if (name := names.get(entry)) is None:
            continue
        _check_covered(entries, name, totals[entry], numels[name])
        by_part = {parts.of_rank[rank]: length for rank, length in lengths.items()}
        for rank, length in lengths.items():
            expected = by_part[parts.of_rank[rank]] if pieces is None else pieces[name][rank]
            if length != expected:
                raise _not_its_part(entries, rank, name, f"{expected} elements", length)

    def add(entry: int, slot: str, value: Stored, rank: int) -> None:
        key, begin = training_state.state_key(names[entry], slot), begins[entry, parts.of_rank[rank]]
        assembly.add_range(key, shapes[names[entry]], begin, value, entries.parts[rank].source)

    return _add(assembly, entries, parts, {entry: [name] for entry, name in names.items()}, add)


def add_unnamed(assembly: Assembly, entries: Entries, parts: Parts) -> list[dict[str, Any]]:
    """Adds an optimizer of which no entry has a name; its groups."""

    def add(entry: int, slot: str, value: Stored, rank: int) -> None:
        raise AssertionError("no entry has a name")

    return _add(assembly, entries, parts, {}, add)


def _add(
    assembly: Assembly,
    entries: Entries,
    parts: Parts,
    names: Mapping[int, list[str]],
    add: Callable[[int, str, Stored, int], None],
) -> list[dict[str, Any]]:
    """Adds every entry of every rank, and the groups.

    Args:
        names: of the parameters of each entry; one that has none stays an integer.
        add: adds a tensor of one dim of an entry that has a name: entry, slot, tensor, rank.
    """
    begins, totals = _one_after_the_other(entries, parts)
    for rank, part in entries.parts.items():
        for entry, slots in part.content["state"].items():
            for slot, value in slots.items():
                if not isinstance(value, Stored) or not value.shape:
                    for name in names.get(entry, [str(entry)]):
                        training_state.add_state(assembly, name, str(slot), value, part.source)
                elif entry in names:
                    add(entry, str(slot), value, rank)
                else:
                    key, begin = training_state.state_key(str(entry), str(slot)), begins[entry, parts.of_rank[rank]]
                    assembly.add_range(key, (totals[entry],), begin, value, part.source)
    of_groups = [[name for entry in ids for name in names.get(entry, [str(entry)])] for ids in entries.ids]
    training_state.add_groups(assembly, entries.groups, of_groups)
    return entries.groups


def _one_after_the_other(entries: Entries, parts: Parts) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Where each part of an entry begins, by (entry, part), and how many elements all have."""
    begins: dict[tuple[int, int], int] = {}
    totals = {}
    for entry, lengths in entries.lengths.items():
        by_part = {parts.of_rank[rank]: length for rank, length in lengths.items()}
        begin = 0
        for part in range(parts.count):
            begins[entry, part] = begin
            begin += by_part.get(part, 0)
        totals[entry] = begin
    return begins, totals


def _named(
    entries: Entries,
    signatures: Mapping[str, Shape],
    candidates: Iterable[str],
    order: Order,
    model_orders: Sequence[Sequence[str]],
    hints: Hints,
) -> dict[int, str]:
    """The name of each id, by the order, by that of the model, or by how many elements each rank has of it."""
    path = entries.source.path
    if order is not None:
        # What is then wrong with a length is told by the number of elements, not as a shape.
        return names_by_id(entries.ids, {}, signatures, order, path)
    lengths = {entry: tuple(held.get(rank, 0) for rank in entries.parts) for entry, held in entries.lengths.items()}
    is_strict, count = hints.optimizer == "named", sum(map(len, entries.ids))
    if any(len(names) == count for names in model_orders):
        return names_by_id(entries.ids, lengths, signatures, None, path, model_orders=model_orders)
    wanted = set(candidates)
    possible = {name: signature for name, signature in signatures.items() if name in wanted}
    return names_by_id(entries.ids, lengths, possible, None, path, model_orders=model_orders, is_strict=is_strict)


def _not_its_part(entries: Entries, rank: int, key: str, expected: str, found: int) -> CheckpointUnsound:
    return CheckpointUnsound(
        "moments of another length than this rank's part", path=entries.parts[rank].source.path, key=key, rank=rank,
        expected=expected, found=found,
        hint="the layout or the order of the parameters is of another model, or the files are mixed",
    )  # fmt: skip


def _check_covered(entries: Entries, key: str, covered: int, needed: int) -> None:
    if covered == needed:
        return
    missing = [rank for rank in range(entries.ranks) if rank not in entries.parts]
    raise CheckpointUnsound(
        f"the optimizer covers {covered} of {needed} elements"
        + (f", {len(missing)} of {entries.ranks} ranks missing" if missing else ""),
        path=entries.source.path.parent,
        key=key,
        hint=f"find the files of the other ranks, {_WITHOUT}"
        if missing
        else f"the files are mixed: name others, {_WITHOUT}",
    )


def _unit_order(order: Order, flats: Sequence[Flat]) -> Order:
    """Flat parameters in the order of the ids, from theirs or from those of the parameters in them."""
    known = {lying.name: flat.key for flat in flats for lying in flat.parameters}
    known |= {flat.key.rpartition(".")[0]: flat.key for flat in flats} | {flat.key: flat.key for flat in flats}
    clean = _clean(order)
    return None if clean is None else [list(dict.fromkeys(known.get(name, name) for name in group)) for group in clean]


def _clean(order: Order) -> Order:
    """The order with names as they are without wrappers, those of fairscale among them."""
    if order is None:
        return None
    short = canonical_names(name for group in order for name in group)
    return [[short[name].replace(f"{_FLATTENED}.", "") for name in group] for group in order]
