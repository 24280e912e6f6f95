"""Keys of other trainers as those of a run of ours; renaming, and stacked layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import stock_tensors, write_boxes

import reshard
from reshard.errors import UsageError
from reshard.formats import manifest
from reshard.formats.object_archive import object_value


def saved(folder: Path, tensors: dict[str, torch.Tensor], objects: dict[str, Any] | None = None) -> Path:
    boxes = {key: (tensor, [((0,) * tensor.ndim, tuple(tensor.shape))]) for key, tensor in tensors.items()}
    return write_boxes(folder, boxes, objects)


def converted(tmp_path: Path, source: Path, **options: Any) -> dict[str, torch.Tensor]:
    reshard.convert(source, tmp_path / "made", world_size=2, force=True, **options)
    return stock_tensors(tmp_path / "made")


W, M = torch.arange(6.0).reshape(3, 2), torch.arange(6.0, 12.0).reshape(3, 2)
STEP = torch.tensor(7.0)
OURS = {"model.l.w": W, "optim.state.l.w.exp_avg": M, "optim.state.l.w.step": STEP}


@pytest.mark.parametrize(
    "keys",
    [
        ("model.l.w", "optim.state.l.w"),
        ("l.w", "optimizer.state.l.w"),
        ("state_dict.l.w", "optimizer_0.state.l.w"),
        ("model.l.w", "optimizer.state.l.w"),
        ("app.model.l.w", "app.optim.state.l.w"),
    ],
    ids=lambda keys: keys[0],
)
def test_roots_of_other_trainers(tmp_path: Path, keys: tuple[str, str]) -> None:
    weight, state = keys
    source = saved(tmp_path / "source", {weight: W, f"{state}.exp_avg": M, f"{state}.step": STEP})
    found = converted(tmp_path, source)
    assert set(found) == set(OURS)
    assert all(torch.equal(found[key], tensor) for key, tensor in OURS.items())


def test_other_parts_keep_their_keys(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", {**OURS, "train_state.tokens": torch.tensor(5)}, {"dataloader.epoch": 3})
    assert set(converted(tmp_path, source)) == {*OURS, "train_state.tokens"}
    with reshard.open_checkpoint(tmp_path / "made") as opened:
        assert set(opened.index.objects) == {"dataloader.epoch"}


def test_a_manifest_is_made_of_what_there_is(tmp_path: Path) -> None:
    objects = {
        "optim.param_groups.0.lr": 0.25,
        "optim.param_groups.1.lr": 0.5,
        "optim.param_groups.0.params": ["l.w"],
        "lr_scheduler.last_epoch": 7,
        "lr_scheduler.base_lrs": [0.25, 0.5],
    }
    converted(tmp_path, saved(tmp_path / "source", OURS, objects))
    found = manifest.read(tmp_path / "made")
    assert (found.step, found.lr) == (7, [0.25, 0.5])
    assert found.schedulers == {"scheduler": {"last_epoch": 7, "base_lrs": [0.25, 0.5]}}
    assert found.parts == {"model": "saved", "optimizer": "saved", "scheduler": "saved", "step": "saved"}


def test_a_model_alone_gets_no_manifest(tmp_path: Path) -> None:
    converted(tmp_path, saved(tmp_path / "source", {"l.w": W}))
    assert not manifest.exists(tmp_path / "made")


def test_renaming_reaches_the_optimizer_and_its_groups(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", OURS, {"optim.param_groups.0.params": ["l.w"], "optim.param_groups.0.lr": 0.1})
    found = converted(tmp_path, source, rename=[r"^l\.(.*)=>layers.\1", "w$=>weight"])
    assert set(found) == {"model.layers.weight", *(f"optim.state.layers.weight.{slot}" for slot in ("exp_avg", "step"))}
    assert torch.equal(found["optim.state.layers.weight.exp_avg"], M)
    with reshard.open_checkpoint(tmp_path / "made") as opened:
        content = opened.object_bytes("optim.param_groups.0.params")
        assert object_value(content, tmp_path, "params") == ["layers.weight"]
        assert opened.paths["optim.state.layers.weight.exp_avg"] == ("optim", "state", "layers.weight", "exp_avg")


def test_names_that_become_one_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", {"model.a.w": W, "model.b.w": W})
    with pytest.raises(
        UsageError, match=r"two names become one: found model\.a\.w and model\.b\.w both become model\.w"
    ):
        converted(tmp_path, source, rename=[r"^[ab]\.=>"])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("text", "fault"), [("abc", "no => in it"), ("(=>x", "--rename"), ("q=>r", "matches no name")])
def test_renamings_that_cannot_be_meant(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=re.escape(fault)):
        converted(tmp_path, saved(tmp_path / "source", {"model.a.w": W}), rename=[text])


def test_stacked_layers_become_numbered(tmp_path: Path) -> None:
    stacked = torch.arange(24.0).reshape(3, 4, 2)
    norms = torch.arange(3.0)
    state = {
        "model.blocks.w": stacked,
        "model.blocks.norm": norms,
        "model.head": W,
        "optim.state.blocks.w.exp_avg": stacked + 100,
        "optim.state.blocks.w.step": STEP,
    }
    rows = [((0, 0, 0), (2, 4, 2)), ((2, 0, 0), (1, 1, 2)), ((2, 1, 0), (1, 3, 2))]
    boxes = {
        key: (tensor, rows if tensor.ndim == 3 else [((0,) * tensor.ndim, tuple(tensor.shape))])
        for key, tensor in state.items()
    }
    found = converted(tmp_path, write_boxes(tmp_path / "source", boxes), unstack=["blocks"])
    expected = {"model.head": W}
    for layer in range(3):
        expected[f"model.blocks.{layer}.w"] = stacked[layer]
        expected[f"model.blocks.{layer}.norm"] = norms[layer]
        expected[f"optim.state.blocks.{layer}.w.exp_avg"] = stacked[layer] + 100
        expected[f"optim.state.blocks.{layer}.w.step"] = STEP
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_what_is_no_stack_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", {"model.blocks.a": W, "model.blocks.b": torch.zeros(4, 2)})
    with pytest.raises(UsageError, match=r"not a stack of layers.*found 3 in model\.blocks\.a, 4 in model\.blocks\.b"):
        converted(tmp_path, source, unstack=["blocks"])
    with pytest.raises(UsageError, match="found no tensor"):
        converted(tmp_path, source, unstack=["layers"])
