"""Real checkpoints of other tools, converted: every tensor bit for bit, nothing else; read by stock torch as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from rewriting import bits, stock_tensors
from safetensors.torch import load_file

import reshard
from reshard.cli.main import main
from reshard.formats import manifest
from reshard.formats.object_archive import object_value

# What these hold beside model and optimizer.
OTHER_ROOTS = ("rng.", "train_state.")


def assert_as_expected(case: str, found: dict[str, torch.Tensor]) -> None:
    expected = peers.expected(case)
    kept = {key for key in found if not key.startswith(OTHER_ROOTS)}
    assert kept == set(expected)
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(found[key]) == bits(tensor), key


@pytest.mark.parametrize("case", peers.CASES)
def test_every_tensor_and_nothing_else(tmp_path: Path, case: str) -> None:
    options: dict[str, Any] = {**peers.hint_files(case, tmp_path), "unstack": peers.STACKED.get(case, ())}
    for ranks in (1, 3, 5):
        made = tmp_path / f"for-{ranks}"
        reshard.convert(peers.folder(case), made, world_size=ranks, **options)
        assert_as_expected(case, stock_tensors(made))
        with reshard.open_checkpoint(made) as opened:
            assert_as_expected(case, {key: opened.read(key) for key in opened.keys})
    reshard.convert(peers.folder(case), tmp_path / "made.safetensors", to="safetensors", **options)
    assert_as_expected(case, load_file(tmp_path / "made.safetensors"))
    assert_hyperparameters(case, tmp_path / "for-3")
    assert main(["check", "--deep", str(tmp_path / "for-5")]) == 0


def assert_hyperparameters(case: str, made: Path) -> None:
    recorded = peers.record(case).get("param_groups_at_save")
    if not any(key.startswith("optim.") for key in peers.expected(case)):
        return
    with reshard.open_checkpoint(made) as opened:
        found = {key: object_value(opened.object_bytes(key), made, key) for key in opened.index.objects}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        if key.startswith("optim.param_groups."):
            group, _, option = key.removeprefix("optim.param_groups.").rpartition(".")
            groups.setdefault(group, {})[option] = value
    assert groups
    numbered = [groups[group] for group in sorted(groups) if group.isdigit()]
    if recorded and numbered:
        for expected, group in zip(recorded, numbered, strict=True):
            for option in ("lr", "weight_decay", "eps"):
                if option in expected:
                    assert group[option] == expected[option], option
            assert list(group["betas"]) == list(expected["betas"])
    assert manifest.read(made).step > 0


@pytest.mark.parametrize("case", peers.CASES)
def test_it_is_described_and_checked_without_hints(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(peers.folder(case))]) == 0
    assert "tensors" in capsys.readouterr().out
    assert main(["check", "--deep", str(peers.folder(case))]) == 0, capsys.readouterr().out
