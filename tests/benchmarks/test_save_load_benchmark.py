"""The benchmark of saves and loads runs, small, and lets nobody win who does wrong; how fast they are is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = {"a.weight": [7, 3], "b.weight": [16, 5], "step": []}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run of one section prints, and the folder that it worked in."""
    folder = tmp_path_factory.mktemp("benchmark")
    options = ["--gigabytes", "0.001", "--repeat", "1", "--only", "async", "--folder", str(folder / "work")]
    (folder / "work").mkdir()
    command = [sys.executable, str(BENCHMARKS / "save_load.py"), *options, "--chart", str(folder / "chart.png")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, folder


def test_every_contender_has_a_line_with_what_is_to_be_reported(output: tuple[str, Path]) -> None:
    lines = [json.loads(line) for line in output[0].splitlines() if line.startswith("{")]
    measured = {line["contender"]: line for line in lines if "repeat" in line}
    left_out = {line["contender"] for line in lines if "left_out" in line}
    assert {"ours", "stock", "memory copy"} <= measured.keys()
    # The others save in no background; those that are not installed are all left out.
    assert "torch_checkpointing" in measured.keys() | left_out
    fields = {"seconds", "gb_per_s", "to_stock", "to_raw", "cpu_s_per_gb", "peak_above_bytes", "bytes"}
    assert all(fields <= line.keys() for line in measured.values())
    assert measured["stock"]["to_stock"] == measured["memory copy"]["to_raw"] == 1


def test_the_table_names_the_goal_and_nothing_is_left_behind(output: tuple[str, Path]) -> None:
    text, folder = output
    assert any("ours / memory copy" in line and line.endswith(("met", "MISSED")) for line in text.splitlines())
    assert list((folder / "work").iterdir()) == []
    assert (folder / "chart.png").stat().st_size > 1000


def test_who_loads_nothing_or_fails_on_a_rank_is_found_out(tmp_path: Path) -> None:
    run_ranks(2, _take_turns, tmp_path, "write", ["stock"])
    names = ["ours", "stock", "RangeReader", "reads nothing", "fails on a rank"]
    lines = _by_contender(run_ranks(2, _take_turns, tmp_path, "load", names)[0])
    assert "wrong content: a.weight" in lines["reads nothing"][0]["failed"]
    assert "rank 1: OSError: out of luck" in lines["fails on a rank"][0]["failed"]
    for name in names[:3]:
        assert [line["repeat"] for line in lines[name]] == [0, 1]
        assert all(line["seconds"] > 0 and line["bytes_read"] > 4 * (21 + 80) for line in lines[name])


def test_who_saves_nothing_is_found_out(tmp_path: Path) -> None:
    names = ["ours", "stock", "RangeWriter", "torch.save", "safetensors", "raw I/O", "writes nothing"]
    lines = _by_contender(run_ranks(2, _take_turns, tmp_path, "save", names)[0])
    assert "wrote 4 bytes only" in lines["writes nothing"][0]["failed"]
    for name in names[:-1]:
        assert [line["repeat"] for line in lines[name]] == [0, 1]
    assert lines["ours"][0]["most_over_mean"] >= 1


def _by_contender(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [line for line in lines if line["contender"] == name] for name in {x["contender"] for x in lines}}


def _take_turns(folder: Path, action: str, names: list[str]) -> list[dict[str, Any]]:
    """A job on the ranks that there are, with three contenders that are up to no good."""
    sys.path.insert(0, str(BENCHMARKS))
    import torch.distributed as dist
    import turns
    from jobs import Job
    from libraries import Library

    def fail(state: Any, source: Path) -> None:
        if dist.get_rank() == 1:
            raise OSError("out of luck")

    def write_nothing(state: Any, destination: Path) -> None:
        destination.mkdir(exist_ok=True)
        (destination / "small").write_text("none")

    turns.ALL |= {
        "reads nothing": Library(load=lambda state, source: None),
        "fails on a rank": Library(load=fail),
        "writes nothing": Library(write_nothing),
    }
    results = folder / f"{action}.results"
    shapes = {name: tuple(shape) for name, shape in SHAPES.items()}
    job = Job(action, ["case"], shapes, [2], names, str(folder / "files"), 2, results=str(results))
    (folder / "files").mkdir(exist_ok=True)
    turns.Turns(job).run()
    dist.barrier()
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
