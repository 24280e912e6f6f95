"""The optimizer of a DeepSpeed run without ZeRO (stage 0): whole, in rank 0's file of model states.

By the precision of the run, under ``optimizer``::

    fp32                 {"state": {id: {"step", "exp_avg", ...}}, "param_groups"}
    fp16, bf16           {"optimizer_state_dict": as above, cur_scale, ...}, and as fp32 masters one of
      fused              fp32_groups_flat    [flat tensor], a parameter group each; states too, ids count groups
      not fused          fp32_groups         [[tensor]], a parameter group each, in the order of the ids

No names are among them. Ids count the parameters in the order of the groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.deepspeed.layout import Piece, parts
from reshard.formats.rescue.deepspeed.model import add_options, add_step, steps_done
from reshard.formats.rescue.deepspeed.states import ModelStates, Shape
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.optimizer_names import names_by_id
from reshard.formats.rescue.rank_state import is_optimizer
from reshard.formats.torch_archive import Stored

_FLAT, _BY_ID = "fp32_groups_flat", "fp32_groups"


def add_optimizer(
    assembly: Assembly, states: ModelStates, names: Mapping[str, str], hints: Hints
) -> tuple[set[str], list[Any]]:
    """Adds the optimizer's state, and the masters where they are to be the weights.

    Returns:
        The names, as the file spells them, of the weights that were added, and the learning rates.

    Raises:
        CheckpointUnsound: it is none, or does not fit the model.
        UsageError: the names of its entries cannot be told.
    """
    outer = states.optimizer
    if outer is None:
        return set(), []
    inner = outer.get("optimizer_state_dict", outer)
    if not is_optimizer(inner) or not all(isinstance(slots, dict) for slots in inner["state"].values()):
        raise CheckpointUnsound("not an optimizer that is known", path=states.source.path, key="optimizer",
                                expected="state and param_groups", found=", ".join(map(str, outer)))  # fmt: skip
    adding = _Adding(assembly, states, names, hints, inner)
    of_groups = adding.add_flat(outer[_FLAT]) if _FLAT in outer else adding.add_by_id(outer.get(_BY_ID) or [])
    return adding.weights, add_options(assembly, states.source, inner["param_groups"], of_groups)


class _Adding:
    """Adds states and masters to those parameters that the optimizer may have: frozen ones are among them.

    Attributes:
        weights: names of the weights that were added.
    """

    def __init__(
        self,
        assembly: Assembly,
        states: ModelStates,
        names: Mapping[str, str],
        hints: Hints,
        optimizer: Mapping[str, Any],
    ) -> None:
        self._assembly = assembly
        self._model = states
        self._order = hints.param_order
        self._model_orders = hints.orders
        self._wants_masters = hints.weights == "masters"
        self._state = optimizer["state"]
        self._groups = optimizer["param_groups"]
        self._names = names
        # Tied weights are one parameter, which lies in one place; it goes by the first of its names.
        self._tied: dict[str, list[str]] = {}
        first_of: dict[tuple[Any, ...], str] = {}
        for name, tensor in states.module.items():
            if name not in states.buffers:
                place = (tensor.storage.key, tensor.storage_offset, tensor.shape, tensor.strides)
                first = first_of.setdefault(place if math.prod(tensor.shape) else (name,), name)
                self._tied.setdefault(names[first], []).append(name)
        self._shapes: dict[str, Shape] = {name: states.module[same[0]].shape for name, same in self._tied.items()}
        self.weights: set[str] = set()

    def add_by_id(self, masters: Sequence[Sequence[Stored]]) -> list[list[str]]:
        """Adds tensors of the parameters' own shapes; the names of each group."""
        groups = [group["params"] for group in self._groups]
        ids = [number for group in groups for number in group]
        of_groups = [tensor for group in masters for tensor in group]
        if masters and len(of_groups) != len(ids):
            raise self._unsound(_BY_ID, f"{len(ids)} masters", len(of_groups))
        master_of = dict(zip(ids, of_groups, strict=False))
        shapes = {number: tensor.shape for number, tensor in master_of.items()}
        for number, slots in self._state.items():
            for value in _tensors(slots).values():
                shapes[number] = value.shape
        path = self._model.source.path
        by_id = names_by_id(groups, shapes, self._shapes, self._order, path, model_orders=self._model_orders)
        for group, numbers in zip(self._groups, groups, strict=True):
            for number in numbers:
                slots = self._state.get(number, {})
                if number not in by_id:
                    continue
                for slot, value in slots.items():
                    if slot != "step":
                        training_state.add_state(self._assembly, by_id[number], slot, value, self._model.source)
                self._add_step(by_id[number], slots, group)
                if number in master_of and self._wants_masters:
                    key = training_state.model_key(by_id[number])
                    self._assembly.add_tensor(key, master_of[number], self._model.source)
                    self._add_tied(by_id[number])
        return [[by_id.get(number, str(number)) for number in numbers] for numbers in groups]

    def add_flat(self, masters: Sequence[Stored]) -> list[list[str]]:
        """Adds tensors of which each has all parameters of a group; the names of each group."""
        order = [] if self._order is None else list(self._order)
        named = [name for names in order for name in names]
        if len(order) != len(masters) or len({*named}) != len(named) or {*named} - {*self._shapes}:
            raise UsageError(
                "an optimizer whose groups are flat, and nothing says which parameters are in them",
                path=self._model.source.path,
                key=f"optimizer.{_FLAT}",
                expected=f"the names of {len(masters)} groups, each once",
                found=f"{[len(names) for names in order]} names" if order else "none",
                hint="give the names, a list for each group, with --param-order FILE",
            )
        for number, (group, names, master) in enumerate(zip(self._groups, order, masters, strict=True)):
            shapes = {name: self._shapes[name] for name in names}
            slots = self._state.get(number, {})
            flat = _tensors(slots)
            needed = (sum(map(math.prod, shapes.values())),)
            for slot, value in {_FLAT: master, **flat}.items():
                if value.shape != needed:
                    raise self._unsound(f"{slot} of group {number}", needed, value.shape)
            for piece in parts(number, shapes, 1):
                for slot, value in slots.items():
                    if slot in flat:
                        self._add_piece(training_state.state_key(piece.name, slot), piece, shapes, value)
                    elif slot != "step":
                        training_state.add_state(self._assembly, piece.name, slot, value, self._model.source)
                self._add_step(piece.name, slots, group)
                if self._wants_masters:
                    self._add_piece(training_state.model_key(piece.name), piece, shapes, master)
                    self._add_tied(piece.name)
        return [list(names) for names in order]

    def _add_piece(self, key: str, piece: Piece, shapes: Mapping[str, Shape], flat: Stored) -> None:
        self._assembly.add_range(key, shapes[piece.name], 0, flat, self._model.source, piece.first, piece.numel)

    def _add_tied(self, name: str) -> None:
        first, *others = self._tied[name]
        for other in others:
            self._assembly.add_alias(training_state.model_key(self._names[other]), training_state.model_key(name))
        self.weights |= {first, *others}

    def _add_step(self, name: str, slots: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        """Adds the step of a parameter with a state: its own, or that of its group."""
        if slots:
            step = slots.get("step", group.get("step", steps_done(self._model)))
            add_step(self._assembly, name, step, self._model.source)

    def _unsound(self, key: str, expected: object, found: object) -> CheckpointUnsound:
        return CheckpointUnsound("elements that do not add up", path=self._model.source.path, key=f"optimizer.{key}",
                                 expected=expected, found=found)  # fmt: skip


def _tensors(slots: Mapping[str, Any]) -> dict[str, Stored]:
    """Moments: what has as many elements as its parameters."""
    return {
        slot: value for slot, value in slots.items() if isinstance(value, Stored) and value.shape and slot != "step"
    }
