"""The benchmark of the offline half runs, small, and says what it has to say; how fast things are is not asked here."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offline.py"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run without stock torch's slow contenders prints, and the folder that it worked in."""
    folder = tmp_path_factory.mktemp("benchmark")
    options = [
        "--gigabytes",
        "0.02",
        "--repeat",
        "1",
        "--no-torch",
        "--only",
        "memory",
        "--only",
        "check",
        "--only",
        "plan",
    ]
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, folder


@pytest.fixture(scope="module")
def lines(output: tuple[str, Path]) -> list[dict[str, Any]]:
    """The lines of JSON."""
    return [json.loads(line) for line in output[0].splitlines() if line.startswith("{")]


def test_the_first_line_says_what_was_measured_where(lines: list[dict[str, Any]]) -> None:
    assert lines[0]["section"] == "about"
    assert {"date", "gigabytes", "repeats", "file_systems", "page_cache", "torch", "cores", "commit"} <= lines[0].keys()


def test_every_contender_has_a_line(lines: list[dict[str, Any]]) -> None:
    measured = {(line["section"], line["contender"]) for line in lines if "contender" in line}
    assert measured == {
        ("memory", "reshard"),
        *(("check", name) for name in ("cat", "crc", "check --deep", "diff", "inspect")),
        *(("plan", name) for name in ("4096 -> 2048", "512 -> 256")),
    }
    assert all(line["seconds"] > 0 and line["peak_bytes"] > 0 for line in lines if "contender" in line)


def test_ratios_are_those_of_the_measurements(lines: list[dict[str, Any]]) -> None:
    ratios = {(line["section"], line["ratio"]): line for line in lines if "ratio" in line}
    of = {(line["section"], line["contender"]): line for line in lines if "contender" in line}
    moved = of["memory", "reshard"]
    allowed = moved["peak_above_bytes"] / (moved["budget_bytes"] + (128 << 20))
    assert ratios["memory", "memory / allowed"]["median"] == pytest.approx(allowed, rel=1e-3)
    assert ratios["memory", "memory / allowed"]["met"] is True
    beside_cat = of["check", "check --deep"]["seconds"] / of["check", "cat"]["seconds"]
    assert ratios["check", "check --deep / cat"]["each"] == pytest.approx([beside_cat], rel=1e-3)
    assert ratios["plan", "chunks / those of 512"]["median"] > 6


def test_the_table_names_each_goal_and_nothing_is_left_behind(output: tuple[str, Path]) -> None:
    text, folder = output
    table = [line for line in text.splitlines() if not line.startswith("{")]
    assert any("memory / allowed" in line and line.endswith("met") for line in table)
    assert list(folder.iterdir()) == []


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The benchmark's `contest` and `record`, as its own scripts import them."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("contest"), importlib.import_module("record")


def test_a_contender_that_fails_is_reported_and_the_others_go_on(modules: tuple[Any, Any], tmp_path: Path) -> None:
    contest, record = modules
    commands = {
        "absent": ["/no/such/program"],
        "fails": [sys.executable, "-c", "raise SystemExit('out of luck')"],
        "works": [sys.executable, "-c", "print('{\"inside_s\": 0.5}')"],
    }
    contenders = {name: contest.Contender(command) for name, command in commands.items()}
    kept = record.Record(io.StringIO())
    contest.Bench(kept, {"disk": tmp_path}, 1.0, 1, False).contest("any", "case", "disk", contenders)
    of = {line["contender"]: line for line in kept.lines}
    assert "No such file" in of["absent"]["failed"]
    assert "out of luck" in of["fails"]["failed"]
    assert of["works"]["inside_s"] == 0.5
    rows = record.medians(kept.lines, [record.Column("s", "seconds")])
    assert any("failed: " in row[4] for row in rows)


def test_a_ratio_is_the_median_of_the_ratios_within_repeats(modules: tuple[Any, Any]) -> None:
    _, record = modules
    place = {"section": "s", "case": "c", "where": "disk"}
    seconds = {"ours": [1.0, 10.0, 2.0], "theirs": [2.0, 40.0, 6.0, 1.0]}
    lines = [
        {**place, "contender": name, "repeat": repeat, "seconds": value}
        for name, values in seconds.items()
        for repeat, value in enumerate(values)
    ]
    goal = record.Goal("s", "theirs / ours", ("theirs", "seconds"), ("ours", "seconds"), False, 3.0)
    (found,) = goal.found(lines)
    assert (found["each"], found["median"], found["met"]) == ([2.0, 4.0, 3.0], 3.0, True)
