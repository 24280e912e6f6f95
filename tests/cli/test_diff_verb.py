"""`reshard diff`: exit codes, text, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from reshard.cli import diff as verb
from reshard.cli.main import main

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(3)}


def save(folder: Path, **changes: Any) -> str:
    content = {"model": {name: tensor.clone() for name, tensor in WEIGHTS.items()}, "lr": 0.1}
    content["model"].update(changes.pop("model", {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**content, **changes}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def test_equal_checkpoints_are_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", save(tmp_path / "a"), save(tmp_path / "b")]) == 0
    assert capsys.readouterr() == ("equal: 2 tensors (36 B), 1 object\n", "")


def test_different_checkpoints_are_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save(tmp_path / "b", model={"a.weight": WEIGHTS["a.weight"] + 0.25, "c": torch.ones(2)}, lr=0.2)
    assert main(["diff", save(tmp_path / "a"), other]) == 1
    assert capsys.readouterr().out == (
        "tensors only in B: 1\n"
        "  model.c\n"
        "\n"
        "different: 1\n"
        "  model.a.weight  float32 (2, 3)  6 of 6  max |a-b| 0.25  max rel 1  at (0, 0)\n"
        "\n"
        "objects that differ: 1\n"
        "  lr  A 0.1  B 0.2\n"
        "\n"
        "different: 2 of 3 tensors, 1 of 1 object\n"
    )


def test_a_tolerance_makes_them_equal_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = {"a.weight": WEIGHTS["a.weight"] + 2**-10}
    argv = ["diff", save(tmp_path / "a"), save(tmp_path / "b", model=near)]
    assert main([*argv, "--atol", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "equal within the tolerance: 1\n" in out
    assert out.endswith("equal: 2 tensors, 1 of them within the tolerance only, 1 object\n")
    assert main([*argv, "--rtol", "1e-6"]) == 1


def test_bits_that_differ_by_nothing_and_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"a.bias": torch.tensor([-0.0, 0.0, 0.0]), "a.weight": WEIGHTS["a.weight"] / 0}
    assert main(["diff", save(tmp_path / "a"), save(tmp_path / "b", model=other)]) == 1
    out = capsys.readouterr().out
    assert "1 of 3  only bits differ, by 0" in out
    assert "1 NaN only in B" in out


def test_a_safetensors_file_of_bare_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    folder = tmp_path / "a"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True)
    assert main(["diff", str(folder), str(tmp_path / "model.safetensors")]) == 0
    assert "note: the weights of B were compared under model.<name>\n" in capsys.readouterr().out


def test_long_lists_are_cut_in_text_and_whole_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {f"b.{number}": torch.ones(1) for number in range(50)}
    argv = ["diff", save(tmp_path / "a", model=more), save(tmp_path / "b")]
    assert main(argv) == 1
    assert f"  ... and {50 - verb._MOST_LINES} more; --json lists all" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert (fields["equal"], len(fields["only_a"]), fields["same"], fields["tensors"]) == (False, 50, 2, 52)
    assert (fields["a_format"], fields["b"]) == ("dcp", argv[2])


def test_json_has_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"a.weight": WEIGHTS["a.weight"] + torch.tensor([[0, 0, 0], [0, 4.0, 0]])}
    assert main(["diff", save(tmp_path / "a"), save(tmp_path / "b", model=other, lr=[1]), "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    (entry,) = fields["different"]
    assert (entry["key"], entry["where"], entry["shape"]) == ("model.a.weight", [1, 1], [2, 3])
    assert entry["tally"]["max_abs"] == 4.0 and entry["tally"]["max_rel"] == 0.5
    assert fields["objects"] == {"lr": [{"where": "", "a": "0.1", "b": "[1]"}]} or fields["only_objects_a"] == ["lr"]


def test_what_cannot_be_read_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(tmp_path / "a"), save(tmp_path / "b")
    (tmp_path / "b" / "__0_0.distcp").unlink()
    assert main(["diff", a, b]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"reshard: error: {b}/__0_0.distcp: missing")
    assert main(["diff", a, str(tmp_path / "nowhere")]) == 2
    assert main(["diff", a, a, "--atol", "-1"]) == 2
    assert main(["diff", a, a, "--atol", "x"]) == 2


def test_progress_is_shown_where_a_person_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = save(tmp_path / "a")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["diff", a, a]) == 0
    out, err = capsys.readouterr()
    assert "comparing" in err and "/72.0" in err
    assert out == "equal: 2 tensors (36 B), 1 object\n"


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    a, b = save(tmp_path / "a"), save(tmp_path / "b", lr=0.2)
    for argv, expected in (([a, a], 0), ([a, b], 1)):
        done = subprocess.run([sys.executable, "-c", code, "diff", *argv], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (expected, "")
