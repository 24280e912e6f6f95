"""Names for an optimizer's entries where a file has integers: ids count the parameters in the order of the groups.

Which name an id has, a user's list says, or `reshard.formats.rescue.model_order`, or else the shape, if only one
parameter has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.errors import UsageError
from reshard.formats.rescue.model_order import names_in_model_order

_SHOWN = 6
Shape = tuple[int, ...]


def names_by_id(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    order: Sequence[Sequence[str]] | None,
    path: Path,
    *,
    model_orders: Sequence[Sequence[str]] = (),
    is_strict: bool = True,
) -> dict[int, str]:
    """The parameter of each id.

    Args:
        groups: ids of each parameter group.
        shapes: of the ids that have any state with one.
        parameters: shape of every parameter of the model that the optimizer may have.
        order: names in the order of the ids, one list or one a group; None where nobody gave it.
        path: what errors name.
        model_orders: names as ``model.parameters()`` has them, all that the optimizer may have been given; several
            where there may have been more or fewer. The first with as many names as there are ids is meant.
        is_strict: refuse what has several possible names, rather than leave it out of the answer.

    Raises:
        UsageError: several assignments fit, or the order given does not.
    """
    ids = [number for group in groups for number in group]
    if order is not None:
        return _as_given(groups, ids, shapes, parameters, order, path)
    if (in_order := next((names for names in model_orders if len(names) == len(ids)), None)) is not None:
        return names_in_model_order(groups, shapes, parameters, in_order, path)
    fitting: dict[Shape, list[str]] = {}
    for name, shape in parameters.items():
        fitting.setdefault(shape, []).append(name)
    by_shape: dict[Shape, list[int]] = {}
    for number, shape in shapes.items():
        by_shape.setdefault(shape, []).append(number)
    names: dict[int, str] = {}
    ambiguous: list[str] = []
    for shape, numbers in by_shape.items():
        candidates = fitting.get(shape, [])
        if len(candidates) < len(numbers):
            raise UsageError(
                "an optimizer that is not of this model",
                path=path,
                key=f"state of parameters {_listed(numbers)}",
                expected=f"as many parameters of {shape}",
                found=_listed(candidates) or "none",
                hint="the files are of different models or steps",
            )
        if len(candidates) == 1:
            names[numbers[0]] = candidates[0]
        else:
            ambiguous.append(f"{_listed(numbers)} of {shape}: any of {_listed(candidates)}")
    if ambiguous and is_strict:
        raise UsageError(
            "the optimizer names its entries by integers, and several assignments to the parameters fit",
            path=path,
            found=ambiguous[0],
            hint="give the names in the order of the ids with --param-order FILE, "
            f"or {_model_hint(ids, model_orders)}; or leave the optimizer out with --only model",
            details=ambiguous[1:],
        )
    return names


def _as_given(
    groups: Sequence[Sequence[int]],
    ids: Sequence[int],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    order: Sequence[Sequence[str]],
    path: Path,
) -> dict[int, str]:
    named = [name for group in order for name in group]
    fault = None
    if len(named) != len(ids):
        fault = (f"{len(ids)} names", str(len(named)))
    elif len(order) > 1 and [len(group) for group in order] != [len(group) for group in groups]:
        fault = (f"groups of {[len(group) for group in groups]}", str([len(group) for group in order]))
    elif unknown := [name for name in named if name not in parameters]:
        fault = ("names of this model's parameters", _listed(unknown))
    elif len(set(named)) != len(named):
        fault = ("each name once", _listed([name for name in named if named.count(name) > 1]))
    if fault is not None:
        raise UsageError("the order of the parameters does not fit the optimizer", path=path, key="--param-order",
                         expected=fault[0], found=fault[1])  # fmt: skip
    names = dict(zip(ids, named, strict=True))
    for number, shape in shapes.items():
        if parameters[names[number]] != shape:
            raise UsageError(
                "the order of the parameters does not fit the optimizer",
                path=path,
                key=f"--param-order: {names[number]}, id {number}",
                expected=f"the shape of the moments, {shape}",
                found=parameters[names[number]],
            )
    return names


def _model_hint(ids: Sequence[int], orders: Sequence[Sequence[str]]) -> str:
    if not orders:
        return "the model with --model"
    counts = " or ".join(dict.fromkeys(str(len(order)) for order in orders))
    return f"another model: this one has {counts} parameters, for {len(ids)} ids"


def _listed(values: Sequence[object]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
