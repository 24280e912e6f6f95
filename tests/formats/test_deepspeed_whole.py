from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import assert_holds

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.rescue.deepspeed.zero import open_deepspeed
from reshard.formats.rescue.hints import Hints

A, B = torch.arange(1.0, 7).reshape(3, 2), torch.arange(10.0, 15)
FROZEN, BUFFER = torch.full((4,), 7.0), torch.tensor(16777217)


def write(folder: Path, module: dict[str, torch.Tensor], optimizer: Any, **rest: Any) -> Path:
    folder.mkdir()
    states = {
        "module": {**module, "frozen": FROZEN, "seen": BUFFER},
        "buffer_names": ["seen"],
        "optimizer": optimizer,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 1,
        "global_steps": 4,
        "dp_world_size": 4,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    torch.save(states | rest, folder / "mp_rank_00_model_states.pt")
    return folder


def state_of(*tensors: torch.Tensor) -> dict[str, Any]:
    states = {n: {"step": torch.tensor(3.0), "exp_avg": tensor * 10} for n, tensor in enumerate(tensors)}
    return {"state": states, "param_groups": [{"lr": 0.5, "params": list(states)}]}


def expected(weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {f"model.{name}": tensor for name, tensor in {**weights, "frozen": FROZEN, "seen": BUFFER}.items()}
    for name, tensor in moments.items():
        state |= {f"optim.state.{name}.exp_avg": tensor * 10, f"optim.state.{name}.step": torch.tensor(3.0)}
    return state


def test_one_replicated_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"a": A, "b": B}, state_of(A, B))
    checkpoint = open_deepspeed(folder, Hints())
    assert_holds(checkpoint, expected({"a": A, "b": B}, {"a": A, "b": B}))
    assert checkpoint.manifest is not None
    assert (checkpoint.manifest.step, checkpoint.manifest.lr, checkpoint.manifest.world.ranks) == (4, [0.5], 4)
    assert checkpoint.manifest.extra == {"deepspeed": {"skipped_steps": 1}}
    assert checkpoint.notes == ()


def test_without_an_optimizer(tmp_path: Path) -> None:
    checkpoint = open_deepspeed(write(tmp_path / "x", {"a": A}, None), Hints())
    assert_holds(checkpoint, expected({"a": A}, {}))
    assert checkpoint.manifest is not None
    assert set(checkpoint.manifest.parts) == {"model", "extra.deepspeed", "step"}


def test_names_that_cannot_be_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"a": A, "b": B, "c": B + 1}, state_of(A, B, B + 1))
    with pytest.raises(UsageError, match="several assignments"):
        open_deepspeed(folder, Hints())
    hints = Hints(param_order=(("a", "b", "c"),))
    weights = {"a": A, "b": B, "c": B + 1}
    assert_holds(open_deepspeed(folder, hints), expected(weights, weights))


def test_a_step_that_the_group_or_nobody_has(tmp_path: Path) -> None:
    optimizer = state_of(A)
    del optimizer["state"][0]["step"]
    assert_holds(open_deepspeed(write(tmp_path / "x", {"a": A}, optimizer), Hints()), expected({"a": A}, {"a": A}))
    optimizer["param_groups"][0]["step"] = 9
    checkpoint = open_deepspeed(write(tmp_path / "y", {"a": A}, optimizer), Hints())
    assert_holds(checkpoint, expected({"a": A}, {"a": A}) | {"optim.state.a.step": torch.tensor(9.0)})


@pytest.mark.parametrize("weights", ["masters", "stored"])
def test_masters_by_id(tmp_path: Path, weights: str) -> None:
    module = {"a": A.bfloat16(), "b": B.bfloat16()}
    optimizer = {"optimizer_state_dict": state_of(A, B), "fp32_groups": [[A + 1 / 1024, B]], "cur_scale": 8.0}
    checkpoint = open_deepspeed(write(tmp_path / "x", module, optimizer), Hints(weights=weights))
    found = {"a": A + 1 / 1024, "b": B} if weights == "masters" else module
    assert_holds(checkpoint, expected(found, {"a": A, "b": B}))
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.extra == {"deepspeed": {"skipped_steps": 1, "loss_scaler": {"cur_scale": 8.0}}}


def test_too_few_masters(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"a": A, "b": B}, {"optimizer_state_dict": state_of(A, B), "fp32_groups": [[A]]})
    with pytest.raises(CheckpointUnsound, match=r"optimizer\.fp32_groups: .* expected 2 masters, found 1"):
        open_deepspeed(folder, Hints())


@pytest.mark.parametrize("weights", ["masters", "stored"])
def test_flat_groups_need_names(tmp_path: Path, weights: str) -> None:
    flat = torch.cat([B, A.flatten()])
    module = {"a": A.half(), "b": B.half()}
    folder = write(tmp_path / "x", module, {"optimizer_state_dict": state_of(flat), "fp32_groups_flat": [flat]})
    for order in (None, (("b",), ("a",)), (("b", "c"),), (("b", "b"),)):
        with pytest.raises(UsageError, match="nothing says which parameters are in them"):
            open_deepspeed(folder, Hints(param_order=order))
    with pytest.raises(CheckpointUnsound, match=r"fp32_groups_flat of group 0: .* expected \(5,\), found \(11,\)"):
        open_deepspeed(folder, Hints(param_order=(("b",),)))
    checkpoint = open_deepspeed(folder, Hints(param_order=(("b", "a"),), weights=weights))
    assert_holds(checkpoint, expected({"a": A, "b": B} if weights == "masters" else module, {"a": A, "b": B}))


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    tied = A.bfloat16()
    module = {"wte": tied, "head": tied, "same": A.bfloat16() + 1}
    optimizer = {"optimizer_state_dict": state_of(A, A + 1), "fp32_groups": [[A, A + 1]]}
    folder = write(tmp_path / "x", module, optimizer)
    checkpoint = open_deepspeed(folder, Hints(param_order=(("wte", "same"),)))
    assert_holds(checkpoint, expected({"wte": A, "head": A, "same": A + 1}, {"wte": A, "same": A + 1}))


@pytest.mark.parametrize("optimizer", [{"other": 1}, {"state": {0: 3}, "param_groups": []}])
def test_another_optimizer(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    with pytest.raises(CheckpointUnsound, match="not an optimizer that is known"):
        open_deepspeed(write(tmp_path / "x", {"a": A}, optimizer), Hints())


def test_a_module_that_is_nested(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {}, None)
    torch.save({"module": {"language_model": {"a": A}}}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointUnsound, match=r"module: a model without tensors: .* found language_model"):
        open_deepspeed(folder, Hints())


def test_placeholders_are_no_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"a": A, "lora": torch.empty(0)}, None)
    with pytest.raises(CheckpointUnsound, match=r"lora: placeholders of shape \(0,\)"):
        open_deepspeed(folder, Hints())


def test_zero_without_its_optimizer_states(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "x", {"a": A.bfloat16()}, None, param_shapes=[{"a": torch.Size([3, 2])}], shared_params={}
    )
    with pytest.raises(CheckpointUnsound, match=r"no optimizer states.* expected \*_optim_states\.pt of 4 ranks"):
        open_deepspeed(folder, Hints())
    checkpoint = open_deepspeed(folder, Hints(weights="stored"))
    assert_holds(checkpoint, expected({"a": A.bfloat16()}, {}))
    assert len(checkpoint.notes) == 1
