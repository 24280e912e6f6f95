"""One seed of the bed of real runs: triage names the class of every one, and the piece where a column or the checkpoint
shows it; and the benchmark that says so can say otherwise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "triage.py"


def benchmark(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bed")
    finished = benchmark(folder, "--json", str(folder / "verdicts.jsonl"))
    (folder / "told.txt").write_text(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


def test_every_run_is_told_for_what_it_is(bed: Path) -> None:
    verdicts = [json.loads(line) for line in (bed / "verdicts.jsonl").read_text().splitlines()]
    assert [verdict for verdict in verdicts if verdict["fault"]] == []
    assert len({verdict["case"] for verdict in verdicts}) == 20
    assert len(verdicts) == 40
    clean = [verdict for verdict in verdicts if verdict["case"].startswith("none")]
    assert len(clean) == 8
    assert not any(verdict["alarm"] for verdict in clean)
    assert "40 verdicts, 0 wrong" in (bed / "told.txt").read_text()


def test_a_miss_and_a_false_alarm_are_exit_1(bed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bed"
    shutil.copytree(bed, folder)
    places = {path.name: path / "trace.jsonl" for path in folder.glob("seed-0/part-*/*") if path.is_dir()}
    kept = places["none, 2 ranks"].read_bytes()
    places["none, 2 ranks"].write_bytes(places["moments"].read_bytes())
    places["moments"].write_bytes(kept)
    finished = benchmark(folder)
    assert finished.returncode == 1
    assert "wrong: none, 2 ranks, seed 0, by past: false alarm" in finished.stdout
    assert "wrong: moments, seed 0, by past: class continuous, not fast-decaying spike" in finished.stdout
    assert "40 verdicts, 4 wrong" in finished.stdout
