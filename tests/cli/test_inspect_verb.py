"""`reshard inspect`: what it prints, exit codes, JSON, and what a start costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small import Small

import reshard
from reshard.cli.main import main
from reshard.cli.units import bytes_text, count_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    small = Small()
    small.train(2)
    reshard.save_state(folder, small.state)
    return folder


def inspect(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main(["inspect", *map(str, argv)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def save(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_run_of_ours(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = inspect(capsys, run)
    assert code == 0
    assert out.startswith(f"{run}: 1 step: 2\n\n{run / 'step-2'}\n  format      DCP (torch.distributed.checkpoint)")
    assert f"torch {torch.__version__}" in out
    assert "  world       1 rank on 1 node\n" in out
    assert "  weights         5        33    140 B           4.24  float32 124 B, int64 16 B\n" in out
    assert "  optimizer          present  state of 4 of 4 parameters; 2 parameter groups\n" in out
    assert "missing" not in out and "unsound" not in out


def test_a_stock_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = inspect(
        capsys, save(tmp_path / "x", {"model": {"w": torch.ones(3)}, "lr_scheduler": {"last_epoch": 3}})
    )
    assert code == 0
    assert "written by  stock torch or another tool: no reshard.json\n" in out
    assert "world       1 rank, judged by the names of the files\n" in out
    assert "scheduler          present  as lr_scheduler.last_epoch; not restored without a manifest\n" in out
    assert "optimizer          missing  no state of any parameter: moments would start from zero\n" in out
    assert "load_state(..., allow_missing=['optimizer', 'scheduler'," in out


def test_weights_alone_are_not_scolded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "w.pt")
    code, out = inspect(capsys, tmp_path / "w.pt")
    assert (code, out.endswith("to resume\n  model  present  1 tensor, and nothing else\n")) == (0, True)
    assert "world       not recorded\n" in out


def test_absent_and_unreferenced_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(run / "step-2", tmp_path / "step-2"))
    away = tmp_path / "away"
    away.mkdir()
    (folder / "__0_0.distcp").rename(away / "__0_0.distcp")
    (folder / "__9_0.distcp").write_bytes(bytes(2000))
    code, out = inspect(capsys, folder)
    assert code == 1
    assert "absent: 1 of 1 file: __0_0.distcp\n  present: none\n" in out and "--in" in out
    assert "unreferenced: 1 file, 2 kB, of an earlier save or another: __9_0.distcp\n" in out
    assert "unsound: 1 fault\n" in out and f"  {folder}/__0_0.distcp: missing: expected" in out
    code, out = inspect(capsys, folder, "--in", tmp_path, "--in", away)
    assert (code, "absent: " in out) == (0, False)


def test_what_cannot_be_read_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "x", {"w": torch.ones(2)})
    (folder / ".metadata").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert main(["inspect", str(folder)]) == 1
    assert capsys.readouterr().err.startswith(f"reshard: error: {folder / '.metadata'}: a Git LFS pointer")
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2


def test_the_tree_lists_every_tensor_chunk_and_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {f"layers.{number}.w": torch.ones(2, 3) for number in (10, 2)}
    folder = save(tmp_path / "x", {"model": {**layers, "s": torch.tensor(1.0)}, "lr": 0.1})
    _, out = inspect(capsys, folder, "--tree")
    tree = out[out.index("model.layers.2") :].splitlines()
    assert tree[0:2] == ["model.layers.2", "  w  float32  (2, 3)  24 B  weights"]
    assert tree[2].startswith("    [0:2, 0:3]  __0_0.distcp  ")
    assert tree[4] == "model.layers.10"
    assert "  s  float32  ()  4 B  weights" in out and "\nobjects\n  lr  __0_0.distcp  " in out


def test_json_has_the_same_facts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = inspect(capsys, run, "--json")
    fields = json.loads(out)
    assert (code, fields["sound"], fields["step"], fields["format"]) == (0, True, 2, "dcp")
    assert fields["world"] == {"ranks": 1, "from": "manifest", "nodes": 1, "gpus_per_node": 0, "mesh": {}}
    assert fields["run"]["steps"] == [2]
    assert fields["kinds"]["moments"]["bytes"] == 248
    assert fields["parts"]["scaler"]["status"] == "present"
    assert "tree" not in fields
    _, out = inspect(capsys, run, "--json", "--tree")
    tree = json.loads(out)["tree"]
    assert len(tree) == fields["tensors"]
    (chunk,) = next(entry for entry in tree if entry["name"] == "model.0.weight")["chunks"]
    assert (chunk["offsets"], chunk["sizes"], chunk["file"]) == ([0, 0], [5, 4], "__0_0.distcp")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_600, "1 MB"), (1_234_567_890, "1.23 GB")],
)
def test_units_are_decimal(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_counts_are_named_as_models_are() -> None:
    assert [count_text(count) for count in (7, 1500, 7_241_732_096)] == ["7", "1.5 k", "7.24 B"]


def test_it_needs_no_torch_and_little_time(tmp_path: Path) -> None:
    weights = {f"layers.{number}.w": torch.zeros(8, 4) for number in range(150)}
    state = {
        name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": torch.tensor(1.0)} for name, tensor in weights.items()
    }
    folder = save(tmp_path / "x", {"model": weights, "optim": {"state": state}})
    code = "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    elapsed_s = []
    for _ in range(3):
        start_s = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code, "inspect", str(folder)], capture_output=True, timeout=60)
        elapsed_s.append(time.monotonic() - start_s)
        assert (done.returncode, done.stderr) == (0, b"")
    # About 0.35 s on an idle machine; importing torch alone takes longer than this allows.
    assert min(elapsed_s) < 1.5
