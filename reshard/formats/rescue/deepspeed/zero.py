"""A DeepSpeed ZeRO checkpoint: a tag folder with the model's states and every rank's part of the optimizer's.

Which files there are, `reshard.formats.rescue.deepspeed.files` tells, what is in them
`reshard.formats.rescue.deepspeed.states`, and where in the flat partitions a parameter lies
`reshard.formats.rescue.deepspeed.layout`. Put together::

    model.<fqn>                 a trained weight: its fp32 masters from all ranks' partitions, or, in stages 1 and 2,
                                the 16-bit copy in the module where that is wanted
                                a frozen one: the copy in the module, or the fragments of all ranks
                                a buffer: as rank 0 has it
                                a tied one: an alias, as shared_params says
    optim.state.<fqn>.<name>    moments from all ranks' partitions; ``step`` of the flat group, for each parameter

Without ZeRO (stage 0), rank 0 writes the optimizer's state into the model's file:
`reshard.formats.rescue.deepspeed.whole`. A folder with ``zero/`` in it is a universal checkpoint:
`reshard.formats.rescue.deepspeed.universal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointUnsound
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue import training_state
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.deepspeed.files import ZeroFiles, is_deepspeed, listed, tag_folder, zero_files
from reshard.formats.rescue.deepspeed.layout import Piece, flat_states, pieces_of
from reshard.formats.rescue.deepspeed.model import (
    add_options,
    add_shared,
    add_untrained,
    is_stored,
    manifest,
    names_of,
    note_unknown,
    require_data_parallel,
    steps_done,
)
from reshard.formats.rescue.deepspeed.states import ModelStates, OptimizerStates, Shape, model_states, optimizer_states
from reshard.formats.rescue.deepspeed.universal import is_universal, open_universal
from reshard.formats.rescue.deepspeed.whole import add_optimizer
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import open_rank_file, open_rank_files
from reshard.formats.torch_archive import Stored

NAME = "deepspeed"
__all__ = ["NAME", "is_deepspeed", "open_deepspeed", "tag_folder"]


def open_deepspeed(folder: Path, hints: Hints) -> Checkpoint:
    """Opens a tag folder: reads what describes the tensors, and none of them.

    Raises:
        CheckpointUnsound: files are missing, damaged, or contradict each other.
        UsageError: it is of a model-parallel run, or the names of the optimizer's entries cannot be told.
    """
    if is_universal(folder):
        return open_universal(folder, hints)
    files = zero_files(folder)
    assembly = Assembly(folder, files.paths)
    try:
        if files.optimizer:
            return _open_zero(assembly, files, hints)
        return _open_whole(assembly, files, hints)
    finally:
        assembly.files.close()


def _open_zero(assembly: Assembly, files: ZeroFiles, hints: Hints) -> Checkpoint:
    first = optimizer_states(open_rank_file(assembly.files, 0))
    files.require_ranks(first.ranks, first.source.path, first.is_stage_3)
    opened = open_rank_files(assembly.files, range(len(files.paths)))
    note_unknown(assembly, opened)
    states = [optimizer_states(source) for source in opened[: first.ranks]]
    models = [model_states(source) for source in opened[first.ranks :]]
    model = models[0]
    require_data_parallel(model)
    if model.shapes is None:
        raise CheckpointUnsound("a model's states without param_shapes, beside optimizer states that need them",
                                path=model.source.path, hint="files of different checkpoints are mixed")  # fmt: skip
    _require_alike(assembly, states)
    pieces = pieces_of(model.shapes, states, assembly.folder)
    names = names_of(model)
    shapes = {name: shape for group in model.shapes for name, shape in group.items()}
    zero = _Zero(assembly, states, pieces, shapes, names)
    if hints.weights == "stored" and is_stored(model, shapes):
        for name in shapes:
            assembly.add_tensor(training_state.model_key(names[name]), model.module[name], model.source)
    else:
        if hints.weights == "stored":
            assembly.notes.append("the weights are the fp32 masters: the files have no other copy of all of them")
        zero.add_masters()
    add_untrained(assembly, models, names, shapes)
    add_shared(assembly, model, names)
    zero.add_moments()
    zero.add_steps(model)
    of_groups = [[names[name] for number in group["params"] for name in model.shapes[number]] for group in first.groups]
    lr = add_options(assembly, states[0].source, first.groups, of_groups)
    content = manifest(
        assembly, model, ranks=first.ranks, parts=["model", "optimizer"], lr=lr, loss_scaler=first.loss_scaler
    )
    return assembly.build(NAME, content, content.versions.get(NAME))


@dataclass(frozen=True, eq=False)
class _Zero:
    """The partitions of all ranks, and what of which parameter is in them.

    Attributes:
        shapes: by name, as the files spell it.
        names: these, without wrappers.
    """

    assembly: Assembly
    states: Sequence[OptimizerStates]
    pieces: Sequence[Piece]
    shapes: Mapping[str, Shape]
    names: Mapping[str, str]

    def add_masters(self) -> None:
        for piece in self.pieces:
            masters = self.states[piece.rank].masters[piece.group]
            self._add(training_state.model_key(self.names[piece.name]), masters, piece)

    def add_moments(self) -> None:
        moments = [[flat_states(state, group) for group in range(len(state.masters))] for state in self.states]
        for piece in self.pieces:
            for slot, flat in moments[piece.rank][piece.group].items():
                self._add(training_state.state_key(self.names[piece.name], slot), flat, piece)

    def _add(self, key: str, flat: Stored, piece: Piece) -> None:
        source = self.states[piece.rank].source
        self.assembly.add_range(key, self.shapes[piece.name], piece.begin, flat, source, piece.first, piece.numel)

    def add_steps(self, model: ModelStates) -> None:
        """Adds the step, and what else is one number for a flat group, for each of its parameters."""
        first = self.states[0]
        for group, shapes in enumerate(model.shapes or []):
            values = first.states.get(group, {})
            numbers = {slot: value for slot, value in values.items() if slot not in flat_states(first, group)}
            if values:
                numbers["step"] = _step(self.assembly, first, group)
                if numbers["step"] is None:
                    numbers["step"] = steps_done(model)
                    self.assembly.notes.append(f"the optimizer of flat group {group} records no step: "
                                               f"global_steps without the skipped ones, {numbers['step']}")  # fmt: skip
            for name in shapes:
                for slot, value in numbers.items():
                    training_state.add_state(self.assembly, self.names[name], str(slot), value, first.source)


def _step(assembly: Assembly, state: OptimizerStates, group: int) -> float | None:
    """The step of a flat group: of its state, its parameter group, or of all."""
    of_group = next((found for found in state.groups if group in found["params"]), {})
    for step in (state.states.get(group, {}).get("step"), of_group.get("step"), state.step):
        if isinstance(step, Stored):
            return training_state.number_of(step, state.source, assembly, f"step of flat group {group}")
        if isinstance(step, (int, float)):
            return step
    return None


def _require_alike(assembly: Assembly, states: Sequence[OptimizerStates]) -> None:
    """Passes where all ranks' parts are of one save.

    Raises:
        CheckpointUnsound: one says another number of ranks or another step, or lacks moments.
    """
    first = states[0]
    groups = range(len(first.masters))
    slots = [sorted(flat_states(first, group)) for group in groups]
    counted = next((group for group in groups if first.states.get(group)), None)
    step = None if counted is None else _step(assembly, first, counted)
    for rank, state in enumerate(states):
        found: list[tuple[str, object, object]] = [("partition_count", first.ranks, state.ranks)]
        found += [
            (f"moments of flat group {group}", slots[group], sorted(flat_states(state, group))) for group in groups
        ]
        if counted is not None:
            found.append(("step", step, _step(assembly, state, counted)))
        for key, expected, other in found:
            if expected != other:
                raise CheckpointUnsound(
                    "ranks that are not of one save",
                    path=state.source.path,
                    key=key,
                    rank=rank,
                    expected=f"{expected}, as {first.source.path.name} has",
                    found=other,
                    hint="files of different steps are mixed: take all from one save",
                )


def _open_whole(assembly: Assembly, files: ZeroFiles, hints: Hints) -> Checkpoint:
    """Opens a folder without optimizer states of ranks: of stage 0, or of another stage with weights alone."""
    opened = open_rank_files(assembly.files, range(len(files.paths)))
    note_unknown(assembly, opened)
    model = model_states(opened[0])
    require_data_parallel(model)
    if not model.module:
        raise CheckpointUnsound("a model without tensors", path=model.source.path, key="module",
                                expected="tensors by name", found=listed(model.left_out) or "nothing")  # fmt: skip
    names = names_of(model)
    if model.shapes is not None:
        shapes = {name: shape for group in model.shapes for name, shape in group.items()}
        if files.whole_model is None or hints.weights != "stored" or not is_stored(model, shapes):
            raise CheckpointUnsound(
                "no optimizer states, and so no fp32 masters",
                path=assembly.folder,
                expected=f"*_optim_states.pt of {model.rest.get('dp_world_size')} ranks",
                found="none",
                hint="copy them here, or take the 16-bit weights of stages 1 and 2: --weights stored",
            )
        assembly.notes.append("there are no optimizer states: the weights are the copies that the model had")
    trained, lr = add_optimizer(assembly, model, names, hints)
    add_untrained(assembly, [model], names, trained)
    add_shared(assembly, model, names)
    parts = ["model"] if model.optimizer is None else ["model", "optimizer"]
    ranks = model.rest.get("dp_world_size")
    content = manifest(assembly, model, ranks=ranks if isinstance(ranks, int) else 1, parts=parts, lr=lr,
                       loss_scaler=model.optimizer)  # fmt: skip
    return assembly.build(NAME, content, content.versions.get(NAME))
