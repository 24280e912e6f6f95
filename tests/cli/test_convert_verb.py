"""`reshard convert` as it is typed: output, exit codes, several folders, torchrun, and a run that is cut short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import stock_tensors

from reshard.cli.main import main

CLEAN = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
WORLD = 3


def weight(rows: int = 7) -> torch.Tensor:
    return torch.arange(rows * 4.0).reshape(rows, 4)


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Plain tensors that every rank saved whole, with an optimizer whose names follow from the shapes."""
    folder = tmp_path / "run" / "global_step_5"
    folder.mkdir(parents=True)
    for rank in range(WORLD):
        torch.save({"w": weight(), "b": torch.ones(4)}, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
        state = {
            number: {"step": torch.tensor(5.0), "exp_avg": value}
            for number, value in enumerate((torch.ones(4), weight()))
        }
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1]}]}
        torch.save(optimizer, folder / f"optim_world_size_{WORLD}_rank_{rank}.pt")
        extra = {"lr_scheduler": {"last_epoch": 5}, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(extra, folder / f"extra_state_world_size_{WORLD}_rank_{rank}.pt")
    return folder


def test_a_summary_for_people(tmp_path: Path, ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(ranks.parent), str(tmp_path / "made"), "--world-size", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "fsdp-ranks: model, optimizer, scheduler, rng of step 5"
    assert out.splitlines()[1].startswith(f"wrote {tmp_path / 'made'}: ")
    assert err == ""
    found = stock_tensors(tmp_path / "made")
    assert torch.equal(found["model.w"], weight())
    assert torch.equal(found["optim.state.w.exp_avg"], weight()) and torch.equal(
        found["optim.state.b.exp_avg"], torch.ones(4)
    )
    recorded = json.loads((tmp_path / "made" / "reshard.json").read_text())
    assert (recorded["step"], recorded["lr"], recorded["schedulers"]) == (5, [0.5], {"scheduler": {"last_epoch": 5}})
    assert recorded["rng"] == {"ranks": WORLD}
    assert main(["check", str(tmp_path / "made"), "--deep"]) == 0
    assert main(["diff", str(ranks), str(tmp_path / "made")]) == 0


def test_a_plan_and_json(tmp_path: Path, ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(ranks), str(tmp_path / "made"), "--dry-run", "--json", "--world-size", "2"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "made").exists()
    assert main(["convert", str(ranks), str(tmp_path / "made"), "--json", "--world-size", "2"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert planned.items() <= done.items()
    assert (done["from"], done["to"], done["ranks"], done["notes"]) == ("fsdp-ranks", "dcp", 2, [])
    assert main(["convert", str(ranks), str(tmp_path / "made"), "--dry-run"]) == 2


def test_files_of_several_nodes(tmp_path: Path, ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "node-1"
    other.mkdir()
    for path in list(ranks.glob("*rank_1.pt")):
        shutil.move(path, other)
    assert main(["convert", str(ranks), str(tmp_path / "made")]) == 1
    assert "world size 3: extra_state_world_size_3_rank_*.pt: missing ranks 1 of 3" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert main(["convert", str(ranks), str(other), str(tmp_path / "made"), "--only", "model"]) == 0
    assert set(stock_tensors(tmp_path / "made")) == {"model.w", "model.b"}


def test_what_cannot_be_meant(tmp_path: Path, ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands: dict[str, list[Any]] = {
        "the following arguments are required: DST": [ranks],
        "no such file or folder": [tmp_path / "nowhere", tmp_path / "made"],
        "the destination overlaps the source": [ranks, ranks / "made"],
        "not a renaming": [ranks, tmp_path / "made", "--rename", "abc"],
        "not JSON": [ranks, tmp_path / "made", "--param-order", ranks / f"model_world_size_{WORLD}_rank_0.pt"],
    }
    for expected, arguments in commands.items():
        assert main(["convert", *map(str, arguments)]) == 2, expected
        err = capsys.readouterr().err
        assert expected in err and "Traceback" not in err
    assert not (tmp_path / "made").exists()


def test_an_order_of_parameters_that_does_not_fit(
    tmp_path: Path, ranks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for order, expected in (
        (["w", "b"], "expected the shape of the moments, (4,), found (7, 4)"),
        (["w"], "expected 2 names, found 1"),
    ):
        (tmp_path / "order.json").write_text(json.dumps(order))
        assert main(["convert", str(ranks), str(tmp_path / "made"), "--param-order", str(tmp_path / "order.json")]) == 2
        assert expected in capsys.readouterr().err
    (tmp_path / "order.json").write_text(json.dumps(["b", "w"]))
    assert main(["convert", str(ranks), str(tmp_path / "made"), "--param-order", str(tmp_path / "order.json")]) == 0


def test_processes_share_the_work(tmp_path: Path, ranks: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "--no_python"),
        *(sys.executable, "-m", "reshard", "convert", str(ranks), str(tmp_path / "made"), "--world-size", "2"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=CLEAN)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2, result.stdout
    assert torch.equal(stock_tensors(tmp_path / "made")["model.w"], weight())


def test_it_needs_no_torch(tmp_path: Path, ranks: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["inspect", str(ranks)], ["convert", str(ranks), str(tmp_path / "made")]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr


def test_memory_stays_within_its_budget(tmp_path: Path) -> None:
    """A source of more than ten times the budget, with a tensor of three times it."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(4):
        model = {f"layer.{number}": torch.full((256, 4096), float(number)) for number in range(8)}
        torch.save(model | {"large": torch.ones(3072, 4096)}, folder / f"model_rank_{rank}.pt")
    command = [
        sys.executable,
        "-m",
        "reshard",
        "convert",
        str(folder),
        str(tmp_path / "made"),
        "--memory",
        "16M",
        "--json",
    ]
    result = subprocess.run([*command, "--world-size", "3"], capture_output=True, text=True, timeout=120, env=CLEAN)
    assert result.returncode == 0, result.stderr
    done = json.loads(result.stdout)
    source_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert source_bytes > 10 * (16 << 20)
    assert done["peak_memory_bytes"] < (16 << 20) + (128 << 20)
    # What every rank holds whole is read from one of them.
    assert done["bytes_read"] < 1.02 * source_bytes / 4
