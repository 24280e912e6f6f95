from __future__ import annotations

import enum
import json
import math
import os
import pickle
import shutil
import struct
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import assert_holds

from reshard.errors import CheckpointUnsound, StateMismatch, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rescue.deepspeed.zero import open_deepspeed, tag_folder
from reshard.formats.rescue.hints import Hints

PEERS = Path(__file__).resolve().parents[3] / "shared" / "peers"
STORED = Hints(weights="stored")
A, B = torch.arange(1.0, 7).reshape(3, 2), torch.arange(10.0, 15)
State = dict[str, Any]


@dataclass
class fragment_address:
    numel: int
    start: int


class ZeroStageEnum(enum.IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False


_CLASSES = {
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
}


@pytest.fixture(autouse=True)
def _deepspeed_classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes pickles name the classes as those of DeepSpeed do."""
    for name, kind in _CLASSES.items():
        packages = name.split(".")
        for level in range(1, 1 + len(packages)):
            monkeypatch.setitem(sys.modules, ".".join(packages[:level]), types.ModuleType(packages[level - 1]))
        setattr(sys.modules[name], kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", name)
    yield


@dataclass
class Zero:
    """A checkpoint as DeepSpeed writes it.

    Attributes:
        groups: masters of each parameter group; moments are ten and a hundred times as large.
        is_bf16_optimizer: what pads masters too and records no stage.
        change: edits what is written to a file, by its name.
    """

    groups: Sequence[Mapping[str, torch.Tensor]]
    ranks: int
    stage: int = 2
    is_bf16: bool = True
    is_bf16_optimizer: bool = False
    frozen: Mapping[str, torch.Tensor] | None = None
    buffers: Mapping[str, torch.Tensor] | None = None
    shared: Mapping[str, str] | None = None
    step: int = 3
    client: Mapping[str, Any] | None = None
    change: Callable[[str, State], None] = lambda name, content: None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        prefix = "bf16_zero" if self.is_bf16 else "zero"
        for rank in range(self.ranks):
            optimizer = {"optimizer_state_dict": self._optimizer(rank), "ds_config": {}, "ds_version": "0.19.8"}
            self._save(folder / f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt", optimizer)
            if self.stage == 3:
                self._save(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", self._model(rank))
        if self.stage != 3:
            self._save(folder / "mp_rank_00_model_states.pt", self._model(0))
        return folder

    def _save(self, path: Path, content: State) -> None:
        self.change(path.name, content)
        torch.save(content, path)

    def _model(self, rank: int) -> State:
        dtype = torch.bfloat16 if self.is_bf16 else torch.float32
        weights = {name: tensor.to(dtype) for group in self.groups for name, tensor in group.items()}
        frozen = {name: tensor.to(dtype) for name, tensor in (self.frozen or {}).items()}
        module = OrderedDict({**weights, **frozen})
        for name, other in (self.shared or {}).items():
            module[name] = module[other]
        fragments: State | None = dict(frozen)
        if self.stage == 3:
            module = OrderedDict((name, torch.empty(0, dtype=dtype)) for name in module)
            fragments = {name: _part(tensor, rank, self.ranks) for name, tensor in frozen.items()}
        if self.stage == 1:
            fragments = None
        module.update(self.buffers or {})
        return {
            "module": module,
            "buffer_names": list(self.buffers or ()),
            "optimizer": None,
            "param_shapes": [OrderedDict((n, t.shape) for n, t in group.items()) for group in self.groups],
            "frozen_param_shapes": None if fragments is None else {n: t.shape for n, t in frozen.items()},
            "shared_params": dict(self.shared or {}) if rank == 0 else {},
            "frozen_param_fragments": fragments,
            "lr_scheduler": {"last_epoch": self.step, "_last_lr": [0.5]},
            "data_sampler": None,
            "skipped_steps": 0,
            "global_steps": self.step,
            "global_samples": 8 * self.step,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
            **(self.client or {}),
        }

    def _optimizer(self, rank: int) -> State:
        flat = [self._flat(group, rank) for group in self.groups]
        states = {
            number: {"step": torch.tensor(float(self.step)), "exp_avg": values * 10, "exp_avg_sq": values * 100}
            for number, (values, _, _) in enumerate(flat)
        }
        options = [{"lr": 0.5 + n, "betas": (0.9, 0.95), "params": [n]} for n in range(len(self.groups))]
        base = {"state": states, "param_groups": options}
        if self.stage == 3:
            masters = []
            for values, _, _ in flat:
                masters.append(values.clone())
                masters[-1].ds_id = "0_1"  # type: ignore[attr-defined]
            return {
                "zero_stage": ZeroStageEnum.weights,
                "loss_scaler": LossScaler(1.0),
                "partition_count": self.ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        stripped = [values if self.is_bf16_optimizer else values[: len(values) - pad] for values, pad, _ in flat]
        content = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": stripped,
            "group_paddings": [pad for _, pad, _ in flat],
            "partition_count": [self.ranks] * len(self.groups),
            "param_slice_mappings": [places for _, _, places in flat],
        }
        if self.is_bf16_optimizer:
            return content
        return content | {"zero_stage": ZeroStageEnum(self.stage), "loss_scaler": LossScaler(1.0)}

    def _flat(self, group: Mapping[str, torch.Tensor], rank: int) -> tuple[torch.Tensor, int, State]:
        """A rank's partition, the padding in it, and what it has of each parameter."""
        if self.stage == 3:
            return torch.cat([_part(tensor, rank, self.ranks) for tensor in group.values()]), 0, {}
        whole = torch.cat([tensor.flatten() for tensor in group.values()])
        unit = 2 * self.ranks
        padded = torch.full((-(-len(whole) // unit) * unit,), 9e9)
        padded[: len(whole)] = whole
        length = len(padded) // self.ranks
        begin, end = rank * length, (rank + 1) * length
        places: State = OrderedDict()
        at = 0
        for name, tensor in group.items():
            low, high = max(at, begin), min(at + tensor.numel(), end)
            if low < high:
                places[name] = fragment_address(high - low, low - begin)
            at += tensor.numel()
        return padded[begin:end].clone(), min(length, max(0, end - len(whole))), places


def _part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part in stage 3; the padding is what nobody may see."""
    length = -(-tensor.numel() // ranks)
    padded = torch.full((length * ranks,), 9e9, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.flatten()
    return padded[rank * length : (rank + 1) * length].clone()


def expected(groups: Sequence[Mapping[str, torch.Tensor]], step: float = 3) -> dict[str, torch.Tensor]:
    state = {}
    for group in groups:
        for name, tensor in group.items():
            state[f"model.{name}"] = tensor
            state[f"optim.state.{name}.exp_avg"] = tensor * 10
            state[f"optim.state.{name}.exp_avg_sq"] = tensor * 100
            state[f"optim.state.{name}.step"] = torch.tensor(float(step))
    return state


def opened(folder: Path, hints: Hints | None = None) -> Checkpoint:
    return open_deepspeed(folder, hints or Hints())


def optimizer_file(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_partitions_become_whole_tensors(tmp_path: Path, stage: int, ranks: int) -> None:
    groups = [{"a": A, "b": B}]
    folder = Zero(groups, ranks, stage).write(tmp_path / "global_step3")
    assert_holds(opened(folder), expected(groups))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_files_of_bf16_optimizer_pad_masters_too(tmp_path: Path, ranks: int) -> None:
    groups = [{"a": A, "b": B}, {"c": torch.ones(1)}]
    folder = Zero(groups, ranks, 1, is_bf16_optimizer=True).write(tmp_path / "x")
    assert_holds(opened(folder), expected(groups))


@pytest.mark.parametrize("stage", [1, 3])
def test_each_parameter_group_is_flat_by_itself(tmp_path: Path, stage: int) -> None:
    groups = [{"decay": A}, {"bias": B, "norm": torch.tensor([20.0, 21.0])}]
    folder = Zero(groups, 2, stage).write(tmp_path / "x")
    checkpoint = opened(folder)
    assert_holds(checkpoint, expected(groups))
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.lr == [0.5, 1.5]
    assert "optim.param_groups.1.params" in checkpoint.index.objects


def test_sub_groups_of_stage_3_belong_to_their_parameter_group(tmp_path: Path) -> None:
    def one_group(name: str, content: State) -> None:
        if "optim_states" in name:
            content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"] = [{"lr": 0.5, "params": [0, 1]}]

    groups = [{"a": A}, {"b": B}]
    checkpoint = opened(Zero(groups, 2, 3, change=one_group).write(tmp_path / "x"))
    assert_holds(checkpoint, expected(groups))
    assert checkpoint.paths["optim.param_groups.0.params"] == ("optim", "param_groups", 0, "params")
    assert "optim.param_groups.1.params" not in checkpoint.paths


def test_what_the_ranks_hold_is_derived_where_it_is_not_recorded(tmp_path: Path) -> None:
    def forget(name: str, content: State) -> None:
        content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)

    groups = [{"a": A, "b": B}]
    assert_holds(opened(Zero(groups, 3, change=forget).write(tmp_path / "x")), expected(groups))


def test_stored_weights_in_place_of_masters(tmp_path: Path) -> None:
    groups = [{"a": A + 1 / 1024, "b": B}]
    folder = Zero(groups, 2).write(tmp_path / "x")
    state = expected(groups)
    state |= {f"model.{name}": tensor.bfloat16() for name, tensor in groups[0].items()}
    assert_holds(opened(folder, STORED), state)
    with opened(folder) as checkpoint:
        assert checkpoint.read("model.a")[0, 0] == 1 + 1 / 1024
        assert checkpoint.notes == ()


def test_stage_3_has_masters_only(tmp_path: Path) -> None:
    groups = [{"a": A}]
    checkpoint = opened(Zero(groups, 2, 3).write(tmp_path / "x"), STORED)
    assert_holds(checkpoint, expected(groups))
    assert checkpoint.notes == ("the weights are the fp32 masters: the files have no other copy of all of them",)


def test_tied_weights_are_those_that_are_recorded(tmp_path: Path) -> None:
    groups = [{"first": B, "wte.weight": A, "same": B.clone()}]
    for stage in (2, 3):
        folder = Zero(groups, 2, stage, shared={"lm_head.weight": "wte.weight"}).write(tmp_path / str(stage))
        assert_holds(opened(folder), expected(groups) | {"model.lm_head.weight": A})


def test_tied_to_what_is_not_there(tmp_path: Path) -> None:
    def lose(name: str, content: State) -> None:
        if "model_states" in name:
            content["shared_params"] = {"head": "other"}

    with pytest.raises(
        CheckpointUnsound, match=r"model_states\.pt: head: tied to a weight that is not there: .* other"
    ):
        opened(Zero([{"a": A}], 2, change=lose).write(tmp_path / "x"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_and_buffers_are_as_they_were(tmp_path: Path, stage: int) -> None:
    groups = [{"a": A}]
    frozen = {"table": B, "other": torch.tensor([[1.0, 2.0, 3.0]])}
    buffers = {"seen": torch.tensor(16777217), "mask": torch.tensor([True, False]), "none": torch.empty(0)}
    folder = Zero(groups, 2, stage, frozen=frozen, buffers=buffers).write(tmp_path / "x")
    others = {name: tensor.bfloat16() for name, tensor in frozen.items()} | buffers
    assert_holds(opened(folder), expected(groups) | {f"model.{name}": tensor for name, tensor in others.items()})


def test_placeholders_without_fragments_are_named(tmp_path: Path) -> None:
    def lose(name: str, content: State) -> None:
        if "model_states" in name:
            content["frozen_param_fragments"] = content["frozen_param_shapes"] = None

    folder = Zero([{"a": A}], 2, 3, frozen={"table": B, "lora": A}, change=lose).write(tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match=r"(?s)table: placeholders of shape \(0,\).* 2 such weights.*lora"):
        opened(folder)


def test_shapes_of_frozen_weights_without_fragments(tmp_path: Path) -> None:
    def lose(name: str, content: State) -> None:
        if "model_states" in name:
            content["frozen_param_fragments"] = None

    folder = Zero([{"a": A}], 2, 3, frozen={"table": B}, change=lose).write(tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match=r"zero_pp_rank_0_.*: table: placeholders"):
        opened(folder)


def test_a_fragment_of_another_size(tmp_path: Path) -> None:
    def grow(name: str, content: State) -> None:
        if name.startswith("zero_pp_rank_1"):
            content["frozen_param_fragments"]["table"] = torch.zeros(4)

    folder = Zero([{"a": A}], 2, 3, frozen={"table": B}, change=grow).write(tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match=r"table: rank 1: elements .* expected \(3,\).* found \(4,\)"):
        opened(folder)


@pytest.mark.parametrize(("ranks", "most"), [(2, 12), (3, 12), (4, 16)])
def test_more_elements_than_padding(tmp_path: Path, ranks: int, most: int) -> None:
    def grow(name: str, content: State) -> None:
        if name == optimizer_file(ranks - 1):
            state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
            state["exp_avg"] = torch.cat([state["exp_avg"], torch.ones(1)])

    folder = Zero([{"a": A, "b": B}], ranks, change=grow).write(tmp_path / "x")
    match = rf"exp_avg of flat group 0: .* expected 11, padded to {most} at most, found {most + 1}"
    with pytest.raises(CheckpointUnsound, match=match):
        opened(folder)


def test_too_few_elements(tmp_path: Path) -> None:
    def shrink(name: str, content: State) -> None:
        if name == optimizer_file(1):
            content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(4)

    folder = Zero([{"a": A, "b": B}], 2, change=shrink).write(tmp_path / "x")
    with pytest.raises(
        CheckpointUnsound, match=r"masters of flat group 0: .* expected 11, padded to 12 at most, found 10"
    ):
        opened(folder)


def test_another_number_of_elements_in_stage_3(tmp_path: Path) -> None:
    def grow(name: str, content: State) -> None:
        if name == optimizer_file(1):
            content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(7)

    folder = Zero([{"a": A, "b": B}], 2, 3, change=grow).write(tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match=r"_rank_1_.*: rank 1: .* expected 6 on a rank of 2, found 7"):
        opened(folder)


def test_masters_on_nvme(tmp_path: Path) -> None:
    def offload(name: str, content: State) -> None:
        if "optim_states" in name:
            content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(0)

    folder = Zero([{"a": A, "b": B}], 2, 3, change=offload).write(tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match="found 0; DeepSpeed leaves out what it offloads to NVMe"):
        opened(folder)


def test_slices_that_do_not_make_up_a_parameter(tmp_path: Path) -> None:
    def shrink(name: str, content: State) -> None:
        if name == optimizer_file(1):
            content["optimizer_state_dict"]["param_slice_mappings"][0]["b"].numel = 4

    folder = Zero([{"a": A, "b": B}], 2, change=shrink).write(tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match=r"b: elements that do not add up: expected 5 of \(5,\), found 4"):
        opened(folder)


def test_slices_in_one_place(tmp_path: Path) -> None:
    def move(name: str, content: State) -> None:
        if name == optimizer_file(0):
            content["optimizer_state_dict"]["param_slice_mappings"][0]["b"].start = 3

    folder = Zero([{"a": A, "b": B}], 1, change=move).write(tmp_path / "x")
    with pytest.raises(
        CheckpointUnsound, match="b: rank 0: two parameters in one place: expected from element 6 on, found 3"
    ):
        opened(folder)


def test_a_slice_of_a_parameter_that_is_not_in_the_model(tmp_path: Path) -> None:
    def rename(name: str, content: State) -> None:
        if "model_states" in name:
            shapes = content["param_shapes"][0]
            shapes["c"] = shapes.pop("b")

    with pytest.raises(CheckpointUnsound, match="b: rank 1: part of a parameter that the model's file does not list"):
        opened(Zero([{"a": A, "b": B}], 2, change=rename).write(tmp_path / "x"))


def test_paddings_between_parameters(tmp_path: Path) -> None:
    """Since 0.19, parameters may begin at a multiple of some bytes."""

    def pad(name: str, content: State) -> None:
        if "optim_states" not in name:
            return
        state = content["optimizer_state_dict"]
        flat = torch.cat([A.flatten(), torch.full((2,), 9e9), B, torch.full((3,), 9e9)])
        state["single_partition_of_fp32_groups"] = [flat[:13]]
        state["base_optimizer_state"]["state"][0] |= {"exp_avg": flat * 10, "exp_avg_sq": flat * 100}
        state["param_slice_mappings"][0]["b"].start = 8
        state["param_alignment_paddings"] = [[2, 0]]

    groups = [{"a": A, "b": B}]
    # 13 elements are padded to 14 at most.
    with pytest.raises(
        CheckpointUnsound, match=r"exp_avg of flat group 0: .* expected 13, padded to 14 at most, found 16"
    ):
        opened(Zero(groups, 1, change=pad).write(tmp_path / "x"))

    def pad_less(name: str, content: State) -> None:
        pad(name, content)
        if "optim_states" in name:
            state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
            state |= {slot: state[slot][:14].clone() for slot in ("exp_avg", "exp_avg_sq")}

    assert_holds(opened(Zero(groups, 1, change=pad_less).write(tmp_path / "y")), expected(groups))


@pytest.mark.parametrize("place", ["number", "group", "elastic", "nowhere"])
def test_the_step_of_every_parameter(tmp_path: Path, place: str) -> None:
    def move(name: str, content: State) -> None:
        if "model_states" in name:
            content["skipped_steps"] = 1
        if "optim_states" not in name:
            return
        content = content["optimizer_state_dict"]
        base = content["base_optimizer_state"]
        if place == "number":
            base["state"][0]["step"] = 7
            return
        del base["state"][0]["step"]
        if place == "group":
            base["param_groups"][0]["step"] = 7
        if place == "elastic":
            content["base_optimizer_state"] = [base["state"][0]]
            content["base_optimizer_state_step"] = 7

    groups = [{"a": A, "b": B}]
    checkpoint = opened(Zero(groups, 2, change=move).write(tmp_path / "x"))
    assert_holds(checkpoint, expected(groups, 2 if place == "nowhere" else 7))
    assert bool(checkpoint.notes) == (place == "nowhere")
    assert "optim.param_groups.0.step" not in checkpoint.paths


def test_a_group_without_moments(tmp_path: Path) -> None:
    """The optimizer keeps none of parameters that never had a gradient."""

    def drop(name: str, content: State) -> None:
        if "optim_states" in name:
            del content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]

    groups = [{"a": A}, {"b": B}]
    folder = Zero(groups, 2, change=drop).write(tmp_path / "x")
    assert_holds(opened(folder), expected(groups[:1]) | {"model.b": B})


def test_moments_that_one_rank_lacks(tmp_path: Path) -> None:
    def drop(name: str, content: State) -> None:
        if name == optimizer_file(1):
            del content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]

    with pytest.raises(
        CheckpointUnsound, match=r"moments of flat group 0: rank 1: ranks .* expected \['exp_avg', .* found \[\]"
    ):
        opened(Zero([{"a": A, "b": B}], 2, change=drop).write(tmp_path / "x"))


def test_ranks_of_different_steps(tmp_path: Path) -> None:
    new, old = (Zero([{"a": A, "b": B}], 2, step=step).write(tmp_path / str(step)) for step in (6, 3))
    shutil.copy(old / optimizer_file(1), new / optimizer_file(1))
    with pytest.raises(
        CheckpointUnsound, match=r"_rank_1_.*: step: rank 1: ranks that are not of one save: expected 6.0, .* found 3.0"
    ):
        opened(new)


def test_wrappers_are_not_part_of_names(tmp_path: Path) -> None:
    groups = [{"module._orig_mod.a": A, "module.b._checkpoint_wrapped_module.c": B}]
    folder = Zero(groups, 2).write(tmp_path / "x")
    assert_holds(opened(folder), expected([{"a": A, "b.c": B}]))
    folder = Zero([{"module.a": A, "module._orig_mod.a": B}], 2).write(tmp_path / "y")
    with pytest.raises(StateMismatch, match="two names are one"):
        opened(folder)


def test_the_manifest(tmp_path: Path) -> None:
    def scale(name: str, content: State) -> None:
        if "optim_states" in name:
            content["optimizer_state_dict"]["loss_scaler"] = LossScaler(1024.0)

    client = {"epoch": 2, "tensor": torch.ones(2), "rng": {"cpu": torch.zeros(8, dtype=torch.uint8)}}
    checkpoint = opened(Zero([{"a": A}], 2, step=5, client=client, change=scale).write(tmp_path / "x"))
    found = checkpoint.manifest
    assert found is not None
    assert (found.step, found.world.ranks, found.versions, checkpoint.version) == (
        5,
        2,
        {"deepspeed": "0.19.8"},
        "0.19.8",
    )
    assert found.schedulers == {"scheduler": {"last_epoch": 5, "_last_lr": [0.5]}}
    assert found.extra["client_state"] == {"epoch": 2}
    scaler = {"cur_scale": 1024.0, "dynamic": False}
    assert found.extra["deepspeed"] == {"global_samples": 40, "skipped_steps": 0, "loss_scaler": scaler}
    assert "rng.rank_0.torch" in checkpoint.keys
    assert set(found.parts) == {
        "model",
        "optimizer",
        "scheduler",
        "rng",
        "extra.client_state",
        "extra.deepspeed",
        "step",
    }
    assert len(checkpoint.notes) == 1
    assert "client_state.tensor" in checkpoint.notes[0]


class Foreign:
    pass


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['RESHARD_EVIL']}",)


def test_unknown_classes_are_noted_and_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_EVIL", str(tmp_path / "ran"))
    monkeypatch.setattr(Foreign, "__module__", "not_installed")
    monkeypatch.setitem(sys.modules, "not_installed", types.ModuleType("not_installed"))
    monkeypatch.setattr(sys.modules["not_installed"], "Foreign", Foreign, raising=False)
    groups = [{"a": A}]
    folder = Zero(groups, 2, client={"args": Foreign(), "evil": Evil()}).write(tmp_path / "x")
    checkpoint = opened(folder)
    assert_holds(checkpoint, expected(groups))
    assert "not_installed.Foreign" in checkpoint.notes[0]
    assert "system" in checkpoint.notes[0]
    assert not (tmp_path / "ran").exists()
    assert pickle.loads(pickle.dumps(Evil())) == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("single_partition_of_fp32_groups", None),
        ("single_partition_of_fp32_groups", [torch.zeros(2, 3)]),
        ("single_partition_of_fp32_groups", ["text"]),
        ("base_optimizer_state", None),
        ("base_optimizer_state", {"state": {5: {}}, "param_groups": []}),
        ("base_optimizer_state", {"state": {}, "param_groups": [{"params": [3]}]}),
        ("base_optimizer_state", {"state": {}, "param_groups": [{}]}),
        ("partition_count", None),
        ("partition_count", [2, 1]),
        ("param_slice_mappings", [{"a": 3}]),
        ("param_slice_mappings", []),
        ("param_alignment_paddings", [[-1]]),
        ("param_alignment_paddings", []),
    ],
)
def test_other_contents_of_optimizer_states(tmp_path: Path, key: str, value: Any) -> None:
    def put(name: str, content: State) -> None:
        if "optim_states" in name:
            content["optimizer_state_dict"][key] = value

    with pytest.raises(CheckpointUnsound, match="not what DeepSpeed writes: expected"):
        opened(Zero([{"a": A}], 2, change=put).write(tmp_path / "x"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("module", None),
        ("module", {1: torch.zeros(2)}),
        ("buffer_names", 3),
        ("param_shapes", 3),
        ("param_shapes", [{"a": 3}]),
        ("param_shapes", [{"a": (-1,)}]),
        ("frozen_param_shapes", [1]),
        ("frozen_param_fragments", {"a": 1}),
        ("shared_params", [1]),
        ("optimizer", 1),
    ],
)
def test_other_contents_of_model_states(tmp_path: Path, key: str, value: Any) -> None:
    def put(name: str, content: State) -> None:
        if "model_states" in name:
            content[key] = value

    with pytest.raises(CheckpointUnsound, match="not what DeepSpeed writes: expected"):
        opened(Zero([{"a": A}], 2, change=put).write(tmp_path / "x"))


def test_cuts_that_only_the_content_tells(tmp_path: Path) -> None:
    def cut(name: str, content: State) -> None:
        if "model_states" in name:
            content["mp_world_size"] = 2

    with pytest.raises(UsageError, match=r"mp_world_size: weights cut over model-parallel ranks.* expected 1, found 2"):
        opened(Zero([{"a": A}], 2, change=cut).write(tmp_path / "x"))


def test_another_number_of_flat_groups(tmp_path: Path) -> None:
    def add(name: str, content: State) -> None:
        if "model_states" in name:
            content["param_shapes"].append({"b": torch.Size([5])})

    with pytest.raises(
        CheckpointUnsound, match=r"a number of flat groups that is not the model's: expected 2, .* found 1"
    ):
        opened(Zero([{"a": A}], 2, change=add).write(tmp_path / "x"))


def _read_expected(case: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    content = (case / "expected.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    state = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        key = f"optim.state.{name.removeprefix('optim.')}" if name.startswith("optim.") else name
        state[key] = tuple(entry["shape"]), content[begin:end]
    return state


@pytest.mark.skipif(not PEERS.is_dir(), reason="no checkpoints of other tools beside the repository")
@pytest.mark.parametrize("case", sorted(path.name for path in PEERS.glob("*ds*_z*")) or ["none"])
def test_what_deepspeed_itself_wrote(case: str) -> None:
    tag = tag_folder(PEERS / case / "ckpt")
    assert tag is not None
    state = _read_expected(PEERS / case)
    with opened(tag) as checkpoint:
        assert sorted(checkpoint.keys) == sorted(state)
        assert list(checkpoint.index.tiling_faults()) == []
        for name, (shape, content) in state.items():
            found = checkpoint.read_array(name)
            assert (found.shape, found.tobytes()) == (shape, content), name
            assert math.prod(shape) == found.size
