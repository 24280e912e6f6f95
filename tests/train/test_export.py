"""Weights alone, under bare names, in one file that is not called a checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import odd
import pytest
import torch
from odd import assert_equal, whole_model, wrapped
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import reshard
from reshard import ReshardError, TrainState
from reshard.errors import CheckpointNotFound, StorageError, UsageError
from reshard.storage.steps import committed_steps


def export(folder: str, wrap: str) -> dict[str, Any]:
    model = wrapped(odd.Odd(), wrap)
    path = reshard.export_weights(folder, model)
    assert path == Path(folder) / "weights.pt"
    return whole_model(model)


@pytest.mark.parametrize(("wrap", "world"), [("fsdp2", 3), ("fsdp1", 2), ("fsdp1-flat", 2), ("fsdp1", 1), ("plain", 1)])
def test_a_plain_model_loads_it(tmp_path: Path, wrap: str, world: int) -> None:
    expected = run_ranks(world, export, str(tmp_path / "out"), wrap)[0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights.pt"]
    weights = torch.load(tmp_path / "out" / "weights.pt", weights_only=True)
    assert_equal(weights, expected)
    assert_equal(weights, dict(odd.Odd().state_dict()))
    odd.Odd(seed=1).load_state_dict(weights)


def export_after_evaluation(folder: str) -> None:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(3, 5), mp_policy=policy)
    with torch.no_grad():
        model(torch.ones(1, 3))
    reshard.export_weights(folder, model)


def test_after_an_evaluation_in_bf16_the_weights_are_whole(tmp_path: Path) -> None:
    run_ranks(2, export_after_evaluation, str(tmp_path))
    torch.manual_seed(0)
    assert_equal(torch.load(tmp_path / "weights.pt"), dict(nn.Linear(3, 5).state_dict()))


def test_it_is_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    reshard.export_weights(tmp_path, model)
    assert committed_steps(tmp_path) == []
    with pytest.raises(CheckpointNotFound):
        reshard.load_state(tmp_path, TrainState(model))


def test_it_replaces_the_file_of_before(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        reshard.export_weights(tmp_path, model)
    assert torch.load(tmp_path / "weights.pt")["weight"].unique().tolist() == [2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="format: unknown format: expected torch or safetensors, found onnx"):
        reshard.export_weights(tmp_path, nn.Linear(2, 2), format="onnx")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def failing(folder: str) -> str:
    try:
        reshard.export_weights(folder, wrapped(odd.Odd(), "fsdp2"))
    except ReshardError as fault:
        return f"{type(fault).__name__}: {fault}"
    raise AssertionError("wrote into a file")


def test_every_rank_hears_of_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    messages = run_ranks(2, failing, str(tmp_path / "out"))
    assert len(set(messages)) == 1
    assert messages[0].startswith("StorageError")
    assert str(tmp_path / "out") in messages[0]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "weights.pt").mkdir()
    (tmp_path / "weights.pt" / "in the way").touch()
    with pytest.raises(StorageError):
        reshard.export_weights(tmp_path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


has_safetensors = importlib.util.find_spec("safetensors") is not None


@pytest.mark.skipif(has_safetensors, reason="safetensors is installed")
def test_safetensors_is_asked_for_and_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"safetensors is not installed; pip install 'reshard\[hf\]'"):
        reshard.export_weights(tmp_path / "out", nn.Linear(2, 2), format="safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not has_safetensors, reason="safetensors is not installed")
def test_safetensors_with_tied_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    reshard.export_weights(tmp_path, model, format="safetensors")
    assert_equal(load_file(tmp_path / "weights.safetensors"), dict(model.state_dict()))
    with pytest.raises(UsageError, match=r"meter\._extra_state.*format='torch'"):
        reshard.export_weights(tmp_path, odd.Odd(), format="safetensors")
