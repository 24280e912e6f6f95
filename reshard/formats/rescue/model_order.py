"""Names for an optimizer's integer ids from the order of the model's parameters.

Ids count the parameters in the order of the groups, and within a group parameters stand in the order of the model,
since that is how they were picked. With one group, nothing is left open. With several, where each name goes is a path
through a grid, with as many axes as there are groups; a step along an axis gives the group's next id the model's next
name, if their shapes agree::

    model      w1 (4, 4), b1 (4,), w2 (4, 4), b2 (4,)          ids   0 1 | 2 3
    shapes     0 (4, 4), 1 (4, 4), 2 (4,), 3 (4,)              path  0 2 1 3, the only one

A path that is the only one is taken. Where there are several, ids that have other names on others are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reshard.errors import UsageError

_SHOWN = 6
# Points of the grid that are looked at before it is given up.
_MOST_POINTS = 1 << 20

Shape = tuple[int, ...]
# How many ids of each group have names.
_Point = tuple[int, ...]


def names_in_model_order(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    names: Sequence[str],
    path: Path,
) -> dict[int, str]:
    """The parameter of each id.

    Args:
        groups: ids of each parameter group.
        shapes: of the ids that have any state with one.
        parameters: shape of every parameter in the files.
        names: as many as there are ids, in the order of the model.
        path: what errors name.

    Raises:
        UsageError: the model has other names or shapes, or several assignments fit.
    """
    if unknown := [name for name in names if name not in parameters]:
        raise UsageError(
            "a model of other names than the files have", path=path, key="--model",
            expected=_listed(sorted(parameters)), found=_listed(unknown),
        )  # fmt: skip
    if len(groups) == 1:
        return _one_group(groups[0], shapes, parameters, names, path)
    points = _points(groups, shapes, [parameters[name] for name in names], path)
    possible: dict[int, list[str]] = {}
    for name, here, following in zip(names, points, points[1:], strict=False):
        for number, _ in _steps(groups, shapes, parameters[name], here, following):
            possible.setdefault(number, []).append(name)
    if open_ones := [f"{number}: any of {_listed(found)}" for number, found in possible.items() if len(found) > 1]:
        raise UsageError(
            "the optimizer names its entries by integers, and several assignments to the parameters fit",
            path=path, found=f"id {open_ones[0]}", details=[f"id {one}" for one in open_ones[1:]],
            hint="the order of the model does not tell which group a parameter is in: give the names in the order of "
            "the ids with --param-order FILE; or leave the optimizer out with --only model",
        )  # fmt: skip
    return {number: found[0] for number, found in possible.items()}


def _one_group(
    ids: Sequence[int],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    names: Sequence[str],
    path: Path,
) -> dict[int, str]:
    named = dict(zip(ids, names, strict=True))
    wrong = [
        f"{name}, id {number}: {parameters[name]} in the model, {shapes[number]} of the moments"
        for number, name in named.items()
        if shapes.get(number, parameters[name]) != parameters[name]
    ]
    if wrong:
        raise UsageError("a model that does not fit the optimizer", path=path, key="--model", found=wrong[0],
                         hint=_OTHER_ORDER, details=wrong[1:])  # fmt: skip
    return named


def _points(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], sequence: Sequence[Shape], path: Path
) -> list[set[_Point]]:
    """The points of the grid that lie on a path through all of it, by how many names lie behind them."""
    points: list[set[_Point]] = [{(0,) * len(groups)}]
    looked_at = 0
    for number, shape in enumerate(sequence):
        points.append({after for _, after in _steps(groups, shapes, shape, points[-1])})
        looked_at += len(points[-1])
        if not points[-1] or looked_at > _MOST_POINTS:
            raise UsageError(
                "a model that does not fit the optimizer" if not points[-1] else "too many groups to tell their ids",
                path=path, key="--model",
                found=f"no group has an id for parameter {number} of {shape}" if not points[-1] else len(groups),
                hint=_OTHER_ORDER,
            )  # fmt: skip
    for number in reversed(range(len(sequence))):
        leads_on = {before for before in points[number]
                    if next(_steps(groups, shapes, sequence[number], {before}, points[number + 1]), None)}  # fmt: skip
        points[number] = leads_on
    return points


def _steps(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    shape: Shape,
    before: set[_Point],
    after: set[_Point] | None = None,
) -> Iterator[tuple[int, _Point]]:
    """The ids that a name of a shape may have from some points on, and the points that this leads to."""
    seen = set()
    for point in before:
        for axis, done in enumerate(point):
            if done < len(groups[axis]) and shapes.get(number := groups[axis][done], shape) == shape:
                next_point = (*point[:axis], done + 1, *point[axis + 1 :])
                if (after is None or next_point in after) and (number, next_point) not in seen:
                    seen.add((number, next_point))
                    yield number, next_point


def _listed(values: Sequence[str]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(values[:_SHOWN]) + more


_OTHER_ORDER = "it is another model, or its parameters were given in another order: name them with --param-order FILE"
