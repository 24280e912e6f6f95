from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import assert_holds

from reshard.errors import CheckpointUnsound
from reshard.formats.rescue.deepspeed.zero import open_deepspeed
from reshard.formats.rescue.hints import Hints

A, B = torch.arange(1.0, 7).reshape(3, 2), torch.arange(10.0, 15)
FROZEN = torch.full((4,), 7.0, dtype=torch.bfloat16)
WEIGHTS = {"a": A, "b": B}


def write(folder: Path, is_stage_3: bool = False, **of_optimizer: Any) -> Path:
    """What ds_to_universal.py makes, of two ranks and two flat groups."""
    for name, tensor in WEIGHTS.items():
        (folder / "zero" / name).mkdir(parents=True)
        for slot, value in {"fp32": tensor, "exp_avg": tensor * 10, "exp_avg_sq": tensor * 100}.items():
            content = value.flatten() if is_stage_3 else {"param": value, "cat_dim": 0}
            torch.save(content, folder / "zero" / name / f"{slot}.pt")
        if not is_stage_3:
            torch.save(torch.tensor(3.0), folder / "zero" / name / "step.pt")
    groups = [{"lr": 0.5, "params": [0]}, {"lr": 1.5, "params": [1]}]
    torch.save({"param_groups": groups, **of_optimizer}, folder / "zero" / "optimizer_state.pt")
    weights = {name: torch.empty(0) if is_stage_3 else tensor.bfloat16() for name, tensor in WEIGHTS.items()}
    for rank in range(2 if is_stage_3 else 1):
        states = {
            "module": {**weights, "frozen": torch.empty(0) if is_stage_3 else FROZEN, "seen": torch.tensor(5)},
            "buffer_names": ["seen"],
            "param_shapes": [{"a": A.shape}, {"b": B.shape}],
            "shared_params": {"tied": "a"},
            "frozen_param_shapes": {"frozen": FROZEN.shape},
            "frozen_param_fragments": {"frozen": FROZEN[2 * rank : 2 * rank + 2] if is_stage_3 else FROZEN},
            "global_steps": 5,
            "skipped_steps": 1,
            "dp_world_size": 2,
            "ds_version": "0.19.8",
        }
        prefix = f"zero_pp_rank_{rank}_" if is_stage_3 else ""
        torch.save(states, folder / f"{prefix}mp_rank_00_model_states.pt")
    return folder


def expected(step: float = 3) -> dict[str, torch.Tensor]:
    state = {"model.tied": A, "model.frozen": FROZEN, "model.seen": torch.tensor(5)}
    for name, tensor in WEIGHTS.items():
        state |= {
            f"model.{name}": tensor,
            f"optim.state.{name}.exp_avg": tensor * 10,
            f"optim.state.{name}.exp_avg_sq": tensor * 100,
            f"optim.state.{name}.step": torch.tensor(float(step)),
        }
    return state


def test_of_stages_1_and_2(tmp_path: Path) -> None:
    checkpoint = open_deepspeed(write(tmp_path / "x"), Hints())
    assert_holds(checkpoint, expected())
    assert checkpoint.format == "deepspeed-universal"
    assert checkpoint.manifest is not None
    assert (checkpoint.manifest.step, checkpoint.manifest.lr) == (5, [0.5, 1.5])


def test_of_stage_3_tensors_are_flat(tmp_path: Path) -> None:
    states = {"state": {n: {"step": torch.tensor(3.0)} for n in range(2)}}
    assert_holds(open_deepspeed(write(tmp_path / "x", True, optimizer_state_dict=states), Hints()), expected())


def test_a_step_that_is_nowhere(tmp_path: Path) -> None:
    assert_holds(open_deepspeed(write(tmp_path / "x", True), Hints()), expected(4))


def test_stored_weights(tmp_path: Path) -> None:
    state = expected() | {f"model.{name}": tensor.bfloat16() for name, tensor in WEIGHTS.items()}
    state["model.tied"] = A.bfloat16()
    assert_holds(open_deepspeed(write(tmp_path / "x"), Hints(weights="stored")), state)


def test_what_is_not_trained_comes_from_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    for name, tensor in {"frozen": FROZEN, "seen": torch.tensor(5)}.items():
        (folder / "zero" / name).mkdir()
        torch.save({"param": tensor.float()}, folder / "zero" / name / "fp32.pt")
    assert_holds(open_deepspeed(folder, Hints()), expected())


def test_a_parameter_without_moments(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        (folder / "zero" / "b" / f"{slot}.pt").unlink()
    state = {name: tensor for name, tensor in expected().items() if not name.startswith("optim.state.b")}
    assert_holds(open_deepspeed(folder, Hints()), state)


def test_a_vocabulary_without_its_padding(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    for slot, factor in {"fp32": 1, "exp_avg": 10, "exp_avg_sq": 100}.items():
        content = {"param": (A * factor)[:2], "cat_dim": 0, "vocab_tensor": True}
        torch.save(content, folder / "zero" / "a" / f"{slot}.pt")
    state = expected()
    for name in ("model.a", "model.tied", "optim.state.a.exp_avg", "optim.state.a.exp_avg_sq"):
        state[name] = state[name][:2]
    assert_holds(open_deepspeed(folder, Hints()), state)


def test_missing_parameters(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    (folder / "zero" / "b" / "fp32.pt").unlink()
    with pytest.raises(
        CheckpointUnsound, match=r"zero: b: parameters without files: expected fp32\.pt of 2 .* found of 1"
    ):
        open_deepspeed(folder, Hints())


@pytest.mark.parametrize("content", [torch.zeros(7), {"other": 1}, 3, {"param": torch.zeros(2, 2)}])
def test_tensors_of_other_sizes(tmp_path: Path, content: object) -> None:
    folder = write(tmp_path / "x")
    torch.save(content, folder / "zero" / "a" / "exp_avg.pt")
    with pytest.raises(
        CheckpointUnsound, match=r"exp_avg\.pt: optim\.state\.a\.exp_avg: elements .* expected a tensor"
    ):
        open_deepspeed(folder, Hints())


def test_a_step_that_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    torch.save("three", folder / "zero" / "a" / "step.pt")
    with pytest.raises(CheckpointUnsound, match=r"step\.pt: optim\.state\.a\.step: not a step"):
        open_deepspeed(folder, Hints())


@pytest.mark.parametrize("groups", [3, [{"lr": 1.0}], [{"params": [2]}]])
def test_groups_that_are_none(tmp_path: Path, groups: object) -> None:
    with pytest.raises(CheckpointUnsound, match=r"optimizer_state\.pt: param_groups.*: not what DeepSpeed writes"):
        open_deepspeed(write(tmp_path / "x", param_groups=groups), Hints())
