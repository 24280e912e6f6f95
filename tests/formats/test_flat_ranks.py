"""Flat parameters and raw optimizers in files made by hand: what fits, and what is refused and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.flat import model as flat_model
from reshard.formats.rescue.flat import ranks as flat_ranks
from reshard.formats.rescue.flat.layout import FlatUnit
from reshard.formats.rescue.flat.units import Parts, laid_out, parts_of
from reshard.formats.rescue.hints import Hints
from reshard.formats.rescue.rank_file import open_rank_files
from reshard.formats.rescue.rank_state import RankState, rank_state
from reshard.formats.rescue.sharded_classes import Held
from reshard.formats.torch_archive import Stored, StoredStorage

GROUP = {"lr": 0.1, "betas": (0.9, 0.95)}


def unit(name: str, shapes: Mapping[str, tuple[int, ...]], **others: Any) -> FlatUnit:
    """A unit whose parameters follow each other without gaps."""
    numels = tuple(int(np.prod(shape)) for shape in shapes.values())
    prefix = f"{name}." if name else ""
    names = tuple(prefix + fqn for fqn in shapes)
    return FlatUnit(name, names, tuple(shapes.values()), numels, (False,) * len(numels), **others)


# 25 elements: 13 and 12, and one of padding, over two ranks.
UNIT = unit("", {"emb": (3, 5), "bias": (7,), "one": (), "none": (0, 4), "last": (1, 2)})


def write(folder: Path, contents: Sequence[Any]) -> list[Path]:
    paths = [folder / f"state_rank{rank}_of_{len(contents)}.pt" for rank in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        torch.save(content, path)
    return paths


def padded(flat: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Parts of one length; what is past the end is no number."""
    length = -(-len(flat) // world)
    whole = torch.cat([flat, torch.full((length * world - len(flat),), float("nan"))])
    return [part.clone() for part in whole.split(length)]


def optimizer(entries: Mapping[int, torch.Tensor], ids: Sequence[int] | None = None) -> dict[str, Any]:
    state = {
        number: {"step": torch.tensor(7.0), "exp_avg": moments, "exp_avg_sq": moments * 2}
        for number, moments in entries.items()
    }
    return {"state": state, "param_groups": [{**GROUP, "params": list(entries if ids is None else ids)}]}


def local_states(folder: Path, contents: Sequence[Any], numels: Mapping[str, int]) -> tuple[Assembly, list[RankState]]:
    """Files in which flat parameters are plain tensors, as if they had been ShardedTensors."""
    assembly = Assembly(folder, write(folder, contents))
    opened = open_rank_files(assembly.files, range(len(contents)))
    for rank, source in enumerate(opened):
        for key, numel in numels.items():
            stored, begin = source.root["model"][key], -(-numel // len(contents)) * rank
            boxes = (((begin,), stored),) if stored.shape != (0,) else ()
            source.root["model"][key] = Held(stored.dtype, (numel,), boxes)
    return assembly, [rank_state(rank, [source]) for rank, source in enumerate(opened)]


def converted(assembly: Assembly, states: Sequence[RankState], hints: Hints) -> Checkpoint:
    model = flat_model.read_flat_model(assembly, states, hints)
    names = flat_model.add_flat_model(assembly, states, model)
    if flat_ranks.has_raw_optimizer(states):
        flat_ranks.add_raw_optimizer(assembly, states, model, names, hints)
    checkpoint = assembly.build("test")
    assert list(checkpoint.index.tiling_faults()) == []
    return checkpoint


def values(checkpoint: Checkpoint, key: str) -> list[float]:
    return np.frombuffer(checkpoint.read_array(key).tobytes(), np.float32).tolist()


def of_25(folder: Path, world: int = 2, ranks_with_optimizer: int | None = None) -> tuple[Assembly, list[RankState]]:
    flat, moments = torch.arange(25.0), torch.arange(100.0, 125.0)
    contents: list[dict[str, Any]] = []
    for rank, (part, moment) in enumerate(zip(padded(flat, world), padded(moments, world), strict=True)):
        contents.append({"model": {"_flat_param": part[~part.isnan()].clone(), "seen": torch.tensor(3)}})
        if ranks_with_optimizer is None or rank < ranks_with_optimizer:
            contents[-1]["optimizer"] = optimizer({0: moment})
    return local_states(folder, contents, {"_flat_param": 25})


# 16 ranks: the last three hold nothing but padding.
@pytest.mark.parametrize("world", [1, 2, 3, 4, 16])
def test_a_flat_parameter_is_split_and_its_padding_dropped(tmp_path: Path, world: int) -> None:
    checkpoint = converted(*of_25(tmp_path, world), Hints(units={"": UNIT}))
    expected = {"emb": (0, 15), "bias": (15, 22), "one": (22, 23), "none": (23, 23), "last": (23, 25)}
    for name, (begin, end) in expected.items():
        assert values(checkpoint, f"model.{name}") == list(range(begin, end))
        assert values(checkpoint, f"optim.state.{name}.exp_avg") == list(range(100 + begin, 100 + end))
        assert values(checkpoint, f"optim.state.{name}.exp_avg_sq") == list(range(200 + 2 * begin, 200 + 2 * end, 2))
        assert values(checkpoint, f"optim.state.{name}.step") == [7.0]
        assert (
            checkpoint.index.shapes[checkpoint.index.number[f"model.{name}"]]
            == dict(zip(UNIT.fqns, UNIT.shapes, strict=True))[name]
        )
    assert checkpoint.paths["optim.param_groups.0.params"] == ("optim", "param_groups", 0, "params")


@pytest.mark.parametrize("last", [(1, 1), (1, 3)])
def test_shapes_of_another_sum_are_refused_with_both_numbers(tmp_path: Path, last: tuple[int, int]) -> None:
    other = unit("", {**dict(zip(UNIT.fqns, UNIT.shapes, strict=True)), "last": last})
    with pytest.raises(UsageError, match=f"expected 25 elements, found {23 + last[1]} in"):
        converted(*of_25(tmp_path), Hints(units={"": other}))
    # Over five ranks, 24 elements and one that makes them divisible would be 25 as well.
    with pytest.raises(UsageError, match=f"expected 25 elements, found {23 + last[1]} in"):
        converted(*of_25(tmp_path, 5), Hints(units={"": other}))


def test_without_a_layout_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no names and shapes .*_flat_param; .*--layout .*--hf-config or --model"):
        converted(*of_25(tmp_path), Hints(optimizer="named"))


def test_to_look_at_it_flat_parameters_are_tensors_of_their_own(tmp_path: Path) -> None:
    assembly, states = of_25(tmp_path)
    checkpoint = converted(assembly, states, Hints())
    assert values(checkpoint, "model._flat_param") == list(range(25))
    assert values(checkpoint, "optim.state.0.exp_avg")[:25] == list(range(100, 125))
    assert values(checkpoint, "optim.state.0.step") == [7.0]
    assert "--layout" in checkpoint.notes[0]


def test_a_layout_of_other_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected '', found '', 'blocks.0'"):
        converted(*of_25(tmp_path), Hints(units={"": UNIT, "blocks.0": unit("blocks.0", {"w": (2,)})}))


def test_an_optimizer_of_rank_0_alone_says_what_it_covers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnsound, match=r"_flat_param: the optimizer covers 7 of 25 elements, 3 of 4 ranks"):
        converted(*of_25(tmp_path, 4, ranks_with_optimizer=1), Hints(units={"": UNIT}))


@pytest.mark.parametrize("length", [12, 14])
def test_moments_of_another_length_are_refused(tmp_path: Path, length: int) -> None:
    contents = [
        {"model": {"_flat_param": torch.ones(size)}, "optimizer": optimizer({0: torch.ones(length)})}
        for size in (13, 12)
    ]
    hints = Hints(units={"": UNIT}, param_order=(("_flat_param",),))
    with pytest.raises(CheckpointUnsound, match=f"rank 0: .* expected 13 elements, of 25 over 2, found {length}"):
        converted(*local_states(tmp_path, contents, {"_flat_param": 25}), hints)


def test_a_part_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    contents = [{"model": {"_flat_param": torch.ones(size)}} for size in (13, 11)]
    with pytest.raises(CheckpointUnsound, match=r"rank 1: .*expected elements 13 to 25 of 25"):
        converted(*local_states(tmp_path, contents, {"_flat_param": 25}), Hints(units={"": UNIT}))


def blocks(folder: Path, frozen: bool) -> tuple[Assembly, list[RankState], dict[str, FlatUnit]]:
    """Two units of one size; the second has the first id."""
    numels = {"a._flat_param": 6, "b._flat_param": 6}
    contents = []
    for rank in range(2):
        model = {key: torch.full((3,), float(rank)) for key in numels}
        entries = {0: torch.full((3,), 20.0 + rank)} | ({} if frozen else {1: torch.full((3,), 10.0 + rank)})
        contents.append({"model": model, "optimizer": optimizer(entries)})
    assembly, states = local_states(folder, contents, numels)
    units = {
        "a": unit("a", {"w": (2, 2), "v": (2,)}, is_trainable=not frozen),
        "b": unit("b", {"w": (2, 2), "v": (2,)}),
    }
    return assembly, states, units


@pytest.mark.parametrize(
    "order",
    [
        [["b._flat_param", "a._flat_param"]],
        [["_fsdp_wrapped_module.b._fsdp_wrapped_module._flat_param", "_fsdp_wrapped_module.a._flat_param"]],
        [["b", "a"]],
        [["b.w", "b.v", "a.w", "a.v"]],
    ],
)
def test_ids_are_named_in_the_order_given(tmp_path: Path, order: list[list[str]]) -> None:
    assembly, states, units = blocks(tmp_path, frozen=False)
    checkpoint = converted(assembly, states, Hints(units=units, param_order=tuple(map(tuple, order))))
    assert values(checkpoint, "optim.state.b.w.exp_avg") == [20.0, 20.0, 20.0, 21.0]
    assert values(checkpoint, "optim.state.b.v.exp_avg") == [21.0, 21.0]
    assert values(checkpoint, "optim.state.a.w.exp_avg") == [10.0, 10.0, 10.0, 11.0]


def test_two_units_of_one_length_are_not_told_apart_by_guessing(tmp_path: Path) -> None:
    assembly, states, units = blocks(tmp_path, frozen=False)
    with pytest.raises(UsageError, match=r"several assignments .*--param-order"):
        converted(assembly, states, Hints(units=units, optimizer="named"))
    assembly, states, units = blocks(tmp_path, frozen=False)
    checkpoint = converted(assembly, states, Hints(units=units))
    assert values(checkpoint, "optim.state.0.exp_avg") == [20.0, 20.0, 20.0, 21.0, 21.0, 21.0]


def test_a_frozen_unit_is_no_candidate_and_has_no_moments(tmp_path: Path) -> None:
    assembly, states, units = blocks(tmp_path, frozen=True)
    checkpoint = converted(assembly, states, Hints(units=units))
    assert values(checkpoint, "optim.state.b.v.exp_avg") == [21.0, 21.0]
    assert values(checkpoint, "model.a.w") == [0.0, 0.0, 0.0, 1.0]
    assert not any(key.startswith("optim.state.a.") for key in checkpoint.index.names)


def test_a_tied_name_is_an_alias(tmp_path: Path) -> None:
    tied = unit("", dict(zip(UNIT.fqns, UNIT.shapes, strict=True)), shared=(("head", "emb"),))
    checkpoint = converted(*of_25(tmp_path), Hints(units={"": tied}))
    assert values(checkpoint, "model.head") == values(checkpoint, "model.emb") == list(range(15))
    assert "optim.state.head.exp_avg" not in checkpoint.index.names


def test_state_that_follows_no_elements_is_refused(tmp_path: Path) -> None:
    contents = [
        {
            "model": {"_flat_param": torch.ones(size)},
            "optimizer": {
                "state": {0: {"state1": torch.ones(13), "absmax1": torch.ones(1)}},
                "param_groups": [{"params": [0]}],
            },
        }
        for size in (13, 12)
    ]
    with pytest.raises(UsageError, match="does not follow the elements"):
        converted(*local_states(tmp_path, contents, {"_flat_param": 25}), Hints(units={"": UNIT}))


# Under use_orig_params=True: 15, 5, 3 and 3 elements lie aligned in 32, 8 to each of four ranks.

ALIGNED = unit("", {"a": (3, 5), "b": (5,), "c": (3,), "d": (3,)})
BEGINS = {"a": (0, 15), "b": (16, 21), "c": (24, 27), "d": (28, 31)}


def test_alignment_is_worked_out_where_the_layout_has_shapes_only() -> None:
    flat = laid_out(ALIGNED, "_flat_param", Path("x"), 32, (4, 4))
    assert {lying.name: (lying.begin, lying.end) for lying in flat.parameters} == BEGINS
    with pytest.raises(UsageError, match="expected 33 elements, found 26"):
        laid_out(ALIGNED, "_flat_param", Path("x"), 33, (4, 4))


def with_orig_params(folder: Path) -> tuple[Assembly, list[RankState]]:
    whole = torch.full((32,), 42.0)
    for number, (begin, end) in enumerate(BEGINS.values()):
        whole[begin:end] = torch.arange(end - begin) + 100.0 * number
    ids = {"d": 0, "c": 1, "b": 2, "a": 3}
    contents = []
    for rank in range(4):
        bounds = {name: (max(begin, 8 * rank), min(end, 8 * rank + 8)) for name, (begin, end) in BEGINS.items()}
        pieces = {name: whole[begin : max(begin, end)] for name, (begin, end) in bounds.items()}
        moments = {ids[name]: piece + 1000 for name, piece in pieces.items() if len(piece)}
        model = {**pieces, "_flat_param": whole[8 * rank : 8 * rank + 8]}
        contents.append({"model": model, "optimizer": optimizer(moments, list(range(4)))})
    return local_states(folder, contents, {"_flat_param": 32})


@pytest.mark.parametrize("order", [None, (("d", "c", "b", "a"),)])
def test_pieces_of_parameters_are_put_together_without_the_gaps(tmp_path: Path, order: Any) -> None:
    # Without an order, c and d are told apart by nothing: both lie on rank 3 alone.
    assembly, states = with_orig_params(tmp_path)
    if order is None:
        with pytest.raises(UsageError, match=r"0, 1 of \(0, 0, 0, 3\): any of c, d"):
            converted(assembly, states, Hints(units={"": ALIGNED}, optimizer="named"))
        return
    checkpoint = converted(assembly, states, Hints(units={"": ALIGNED}, param_order=order))
    for number, (name, (begin, end)) in enumerate(BEGINS.items()):
        expected = [100.0 * number + element for element in range(end - begin)]
        assert values(checkpoint, f"model.{name}") == expected
        assert values(checkpoint, f"optim.state.{name}.exp_avg") == [1000 + value for value in expected]


def test_pieces_that_do_not_add_up_tell_both_counts(tmp_path: Path) -> None:
    assembly, states = with_orig_params(tmp_path)
    assert states[1].optimizer is not None
    del states[1].optimizer.content["state"][3]
    with pytest.raises(CheckpointUnsound, match="a: the optimizer covers 8 of 15 elements"):
        converted(assembly, states, Hints(units={"": ALIGNED}, param_order=(("d", "c", "b", "a"),)))


def test_a_layout_that_the_pieces_contradict_is_refused(tmp_path: Path) -> None:
    assembly, states = with_orig_params(tmp_path)
    swapped = unit("", {"b": (5,), "a": (3, 5), "c": (3,), "d": (3,)})
    with pytest.raises(UsageError, match=r"does not fit the files: expected 0 elements from 8 on .*\(8,\)"):
        converted(assembly, states, Hints(units={"": swapped}))
    # Of one length, and still not the same.
    swapped = unit("", {"a": (3, 5), "b": (5,), "d": (3,), "c": (3,)})
    with pytest.raises(UsageError, match=r"expected 3 elements from 4 on in .* found from 0 on"):
        converted(assembly, states, Hints(units={"": swapped}))


def by_name(
    folder: Path, moments: Sequence[Mapping[int, torch.Tensor]], replicas: int = 1
) -> tuple[Assembly, list[RankState], dict[str, str]]:
    """Linear(3, 5): rows 3 and 2 of both, over two ranks."""
    weight, bias = torch.arange(15.0).reshape(5, 3), torch.arange(5.0)
    world = 2 * replicas
    rows = [(0, 3), (3, 5)] * replicas
    contents = [
        {"model": {"weight": weight[a:b].clone(), "bias": bias[a:b].clone()}, "optimizer": optimizer(moments[rank])}
        for rank, (a, b) in enumerate(rows)
    ]
    assembly = Assembly(folder, write(folder, contents))
    opened = open_rank_files(assembly.files, range(world))
    for source, (begin, _) in zip(opened, rows, strict=True):
        model = source.root["model"]
        model["weight"] = Held("float32", (5, 3), (((begin, 0), model["weight"]),))
        model["bias"] = Held("float32", (5,), (((begin,), model["bias"]),))
    names = {"weight": "weight", "bias": "bias"}
    return assembly, [rank_state(rank, [source]) for rank, source in enumerate(opened)], names


@pytest.mark.parametrize("replicas", [1, 2])
def test_moments_are_cut_by_flat_offset_where_the_model_is_cut_by_rows(tmp_path: Path, replicas: int) -> None:
    flat = torch.arange(20.0)
    assembly, states, names = by_name(tmp_path, [{0: flat[:10]}, {0: flat[10:]}] * replicas, replicas)
    assert flat_ranks.has_raw_optimizer(states)
    hints = Hints(units={"": unit("", {"weight": (5, 3), "bias": (5,)})})
    flat_ranks.add_raw_optimizer(assembly, states, None, names, hints)
    checkpoint = assembly.build("test")
    assert list(checkpoint.index.tiling_faults()) == []
    assert values(checkpoint, "optim.state.weight.exp_avg") == list(range(15))
    assert values(checkpoint, "optim.state.bias.exp_avg") == list(range(15, 20))


@pytest.mark.parametrize("parts", [1, 2])
def test_moments_beside_a_model_that_every_rank_has_whole(tmp_path: Path, parts: int) -> None:
    """FULL_STATE_DICT beside raw moments; on one rank, FSDP1 does not shard at all."""
    weight, bias, flat = torch.arange(15.0).reshape(5, 3), torch.arange(5.0), torch.arange(20.0)
    contents = [{"model": {"weight": weight, "bias": bias}, "optimizer": optimizer({0: flat.chunk(parts)[rank]})}
                for rank in range(parts)]  # fmt: skip
    assembly = Assembly(tmp_path, write(tmp_path, contents))
    states = [rank_state(rank, [file]) for rank, file in enumerate(open_rank_files(assembly.files, range(parts)))]
    assert flat_ranks.has_raw_optimizer(states)
    hints = Hints(units={"": unit("", {"weight": (5, 3), "bias": (5,)})}, optimizer="named")
    flat_ranks.add_raw_optimizer(assembly, states, None, {"weight": "weight", "bias": "bias"}, hints)
    checkpoint = assembly.build("test")
    assert values(checkpoint, "optim.state.weight.exp_avg") == list(range(15))
    assert values(checkpoint, "optim.state.bias.exp_avg") == list(range(15, 20))


def test_moments_of_a_model_that_is_not_sharded_are_not_flat(tmp_path: Path) -> None:
    content = {"model": {"a": torch.ones(5), "b": torch.ones(3)}, "optimizer": optimizer({0: torch.ones(3)})}
    assembly = Assembly(tmp_path, write(tmp_path, [content] * 2))
    states = [rank_state(rank, [file]) for rank, file in enumerate(open_rank_files(assembly.files, range(2)))]
    assert not flat_ranks.has_raw_optimizer(states)


def test_a_rank_without_an_optimizer_leaves_a_part_uncovered(tmp_path: Path) -> None:
    assembly, states, names = by_name(tmp_path, [{0: torch.ones(10)}] * 2)
    states[1].optimizer = None
    hints = Hints(units={"": unit("", {"weight": (5, 3), "bias": (5,)})})
    with pytest.raises(CheckpointUnsound, match="covers 10 of 20 elements, 1 of 2 ranks missing"):
        flat_ranks.add_raw_optimizer(assembly, states, None, names, hints)


def test_flat_moments_without_a_layout_ask_for_one(tmp_path: Path) -> None:
    assembly, states, names = by_name(tmp_path, [{0: torch.ones(10)}] * 2)
    with pytest.raises(UsageError, match=r"moments of flat parameters, and nothing that says .*--layout"):
        flat_ranks.add_raw_optimizer(assembly, states, None, names, Hints(optimizer="named"))
    flat_ranks.add_raw_optimizer(assembly, states, None, names, Hints())
    assert values(assembly.build("test"), "optim.state.0.exp_avg") == [1.0] * 20


def test_a_layout_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    assembly, states, names = by_name(tmp_path, [{0: torch.ones(10)}] * 2)
    hints = Hints(units={"": unit("", {"weight": (3, 5), "bias": (5,)})})
    with pytest.raises(UsageError, match=r"weight: \(3, 5\) in the layout, \(5, 3\) in the files"):
        flat_ranks.add_raw_optimizer(assembly, states, None, names, hints)


@pytest.mark.parametrize("with_layout", [False, True])
def test_pieces_need_no_layout_where_the_model_has_names(tmp_path: Path, with_layout: bool) -> None:
    # use_orig_params=True: 15 and 5 lie from 0 and 16 on in 22, the ranks hold 11 and 4, and 0 and 5 of them.
    moments = [{1: torch.arange(11.0)}, {1: torch.arange(11.0, 15.0), 0: torch.arange(5.0)}]
    assembly, states, names = by_name(tmp_path, moments)
    aligned = FlatUnit("", ("weight", "bias"), ((5, 3), (5,)), (15, 1, 5, 1), (False, True, False, True))
    hints = Hints(units={"": aligned} if with_layout else None)
    flat_ranks.add_raw_optimizer(assembly, states, None, names, hints)
    checkpoint = assembly.build("test")
    assert list(checkpoint.index.tiling_faults()) == []
    assert values(checkpoint, "optim.state.weight.exp_avg") == list(range(15))
    assert values(checkpoint, "optim.state.bias.exp_avg") == list(range(5))


def test_a_flat_parameter_does_not_pass_for_a_frozen_one_of_its_size(tmp_path: Path) -> None:
    # Weight and bias are 20 elements, and so is a table that has no moments.
    assembly, states, names = by_name(tmp_path, [{0: torch.ones(10)}] * 2)
    names["table"] = "table"
    for state, begin in zip(states, (0, 2), strict=True):
        assert state.model is not None
        rows = state.model.content["weight"].boxes[0][1]
        state.model.content["table"] = Held("float32", (4, 5), (((begin, 0), rows._replace(shape=(2, 5))),))
    with pytest.raises(UsageError, match="moments of flat parameters"):
        flat_ranks.add_raw_optimizer(assembly, states, None, names, Hints(optimizer="named"))


def stored(rows: int) -> Stored:
    return Stored(StoredStorage("0", "float32", rows), 0, (rows,), (1,), "float32")


def test_ranks_are_told_by_what_they_hold_and_else_by_their_number() -> None:
    def held(begin: int | None, rows: int = 2) -> dict[str, Held]:
        return {"w": Held("float32", (3,), () if begin is None else (((begin,), stored(rows)),))}

    path = Path("x")
    assert parts_of([held(0), held(2, 1), held(None), held(None)], path) == Parts(4, (0, 1, 2, 3))
    assert parts_of([held(0), held(2, 1), held(0), held(2, 1)], path) == Parts(2, (0, 1, 0, 1))
    # Replicas that are neighbours.
    assert parts_of([held(0), held(0), held(2, 1), held(2, 1)], path) == Parts(2, (0, 0, 1, 1))
    two = [held(0) | {"v": held(2, 1)["w"]}, held(2, 1) | {"v": held(0)["w"]}]
    with pytest.raises(CheckpointUnsound, match="not cut into parts"):
        parts_of(two, path)
