"""`reshard offline` as it is typed: output, exit codes, torchrun, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rewriting
import sharded
import torch
from rewriting import any_bits, assert_same, rewrite, stock_tensors
from sharded import write_sharded

from reshard.cli.main import main

BIN = Path(sys.executable).parent
CLEAN = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    objects = {"optim.param_groups.0.lr": 0.1, "dataloader.dp_rank_3": {"position": 7}}
    return write_sharded(tmp_path_factory.mktemp("source") / "saved", sharded.training_state(), 4, objects)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reshard", "offline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=CLEAN, **options)


def torchrun(ranks: int, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone", "--no_python"),
        *(sys.executable, "-m", "reshard", "offline", *map(str, arguments)),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**CLEAN, **environment})


def test_a_summary_for_people(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offline", str(source), str(tmp_path / "made"), "--world-size", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"wrote {tmp_path / 'made'}: ") and "GB/s" in out and "peak memory" in out
    assert len(out.splitlines()) == 1
    assert "dataloader.dp_rank_3" in err and "--drop" in err
    assert len(err.splitlines()) == 1
    assert_same(stock_tensors(tmp_path / "made"), sharded.training_state())


def test_json_is_one_object(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mesh", "dp_replicate=2,dp_shard=3", "--drop", "dataloader.", "--json", "--memory", "16M"]
    assert main(["offline", str(source), str(tmp_path / "made"), *options]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["destination"] == str(tmp_path / "made")
    assert (found["ranks"], found["mesh"], found["processes"]) == (6, {"dp_replicate": 2, "dp_shard": 3}, 1)
    assert found["dropped"] == ["dataloader.dp_rank_3"] and found["objects_of_one_rank"] == []
    lengths = {name: len(content) for name, content in rewriting.file_bytes(tmp_path / "made").items()}
    assert found["files"] == {name: length for name, length in lengths.items() if name != ".metadata"}
    assert found["bytes_to_write"] == sum(lengths.values())
    assert found["tensors"] == len(sharded.training_state())


def test_a_dry_run_writes_nothing(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = rewriting.file_bytes(source)
    arguments = ["offline", str(source), str(tmp_path / "made"), "--world-size", "3", "--dry-run"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "nothing was written" in text and "dataloader.dp_rank_3" in text and "3 ranks" in text
    assert main([*arguments, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    assert rewriting.file_bytes(source) == before
    assert main([*arguments[:-1], "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert {key: done[key] for key in planned} == planned
    # What is there would be refused, and the dry run says so.
    assert main(arguments) == 2


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--world-size", "0"],
        ["--world-size", "two"],
        ["--world-size", "-1"],
        ["--world-size", "2", "--mesh", "dp_shard=2"],
        ["--mesh", "tp=2"],
        ["--mesh", "dp_shard=2,dp_shard=2"],
        ["--world-size", "2", "--only", "optimizer"],
        ["--world-size", "2", "--dtype", "int8"],
        ["--world-size", "2", "--memory", "1M"],
        ["--world-size", "2", "--memory", "much"],
        ["--world-size", "2", "--drop", "no such key"],
        ["--world-size", "2", "--mem", "16M"],
    ],
    ids=" ".join,
)
def test_usage_errors(tmp_path: Path, source: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offline", str(source), str(tmp_path / "made"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_source_is_exit_1_and_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_sharded(tmp_path / "source", sharded.training_state(), 4)
    os.truncate(source / "__2_0.distcp", 100)
    assert main(["offline", str(source), str(tmp_path / "made"), "--world-size", "3"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert "__2_0.distcp" in err.splitlines()[0] and "100" in err.splitlines()[0]


def test_torch_is_not_needed(tmp_path: Path, source: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "offline", str(source), str(tmp_path / "made"), "--world-size", "3"]
    result = subprocess.run(command, capture_output=True, text=True, env=CLEAN)
    assert result.returncode == 0, result.stderr
    assert_same(stock_tensors(tmp_path / "made"), sharded.training_state())


def test_torchrun_shares_the_work(tmp_path: Path, source: Path) -> None:
    rewrite(source, tmp_path / "one", 5)
    result = torchrun(3, source, tmp_path / "three", "--world-size", 5, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["processes"] == 3
    assert rewriting.file_bytes(tmp_path / "three") == rewriting.file_bytes(tmp_path / "one")
    assert result.stderr.count("dataloader.dp_rank_3") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three"]


def our_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("reshard: error")]


@pytest.mark.parametrize("fault", ["cut short", "flipped bit", "exists"])
def test_under_torchrun_a_fault_is_told_once(tmp_path: Path, fault: str) -> None:
    state = {f"model.p{n}": any_bits((64, 9), torch.float32, n) for n in range(6)}
    source = write_sharded(tmp_path / "source", state, 4)
    path = source / "__3_0.distcp"
    if fault == "cut short":
        os.truncate(path, 2000)
    elif fault == "flipped bit":
        # Of the last chunk in the last file, which the last rank copies.
        path, start, length = rewriting.payload_place(source, "model.p5", (48, 0))
        content = bytearray(path.read_bytes())
        content[start + length // 2] ^= 4
        path.write_bytes(content)
    else:
        (tmp_path / "made").mkdir()
    result = torchrun(3, source, tmp_path / "made", "--world-size", 8)
    assert result.returncode == 1
    lines = our_lines(result)
    assert len(lines) == 1, result.stderr
    assert {"cut short": "__3_0.distcp", "flipped bit": "model.p5", "exists": "exists already"}[fault] in lines[0]
    if fault != "exists":
        assert not (tmp_path / "made").exists()


MEASURE = """
import sys, resource, json
from pathlib import Path
import reshard.cli.main, reshard.rewrite.run, reshard.cli.progress, numpy
from reshard.rewrite import run as offline
from reshard.rewrite.prepare import prepare
from reshard.geometry.mesh import Mesh
tiny, source, made, memory, ranks, dtype = sys.argv[1:]

def copy(source, made):
    prepared = prepare(source, Mesh(int(ranks)), memory_bytes=int(memory), dtype=dtype or None)
    return prepared.source_bytes, offline.run(prepared, Path(made))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

copy(tiny, made + "-tiny")
before = peak()
needed, summary = copy(source, made)
print(json.dumps([peak() - before, needed, summary.read_bytes]))
"""


@pytest.mark.parametrize("memory", [4 << 20, 16 << 20])
@pytest.mark.parametrize(("before", "after", "dtype"), [(4, 3, ""), (1, 6, ""), (5, 1, "bf16")])
def test_memory_is_bounded_and_nothing_is_read_twice(
    tmp_path: Path, memory: int, before: int, after: int, dtype: str
) -> None:
    """Ten times the budget in three tensors: the peak above a run that copies next to nothing."""
    rows = memory * 10 // 3 // (1024 * 4)
    state = {f"model.p{n}": torch.rand(rows, 1024) for n in range(3)}
    source = write_sharded(tmp_path / "source", state, before)
    tiny = write_sharded(tmp_path / "tiny", {"model.p": torch.zeros(9, 9)}, 2)
    arguments = [tiny, source, tmp_path / "made", memory, after, dtype]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True, env=CLEAN
    )
    assert result.returncode == 0, result.stderr
    grown, needed, read = json.loads(result.stdout)
    assert needed == 3 * rows * 4096
    assert needed <= read <= needed * 1.02 + (1 << 16)
    assert grown <= memory + (8 << 20)
    if not dtype:
        assert_same(stock_tensors(tmp_path / "made"), state)


def test_a_preempted_run_goes_on(tmp_path: Path) -> None:
    """SIGTERM and SIGKILL in the middle of a real copy; the next run says what it found done."""
    state = {f"model.p{n}": any_bits((3000, 1000), torch.float32, n) for n in range(14)}
    source = write_sharded(tmp_path / "source", state, 2)
    made = tmp_path / "made"
    command = [sys.executable, "-m", "reshard", "offline", str(source), str(made), "--world-size", "3"]
    journal = tmp_path / ".offline-made" / "work" / "journal-0.jsonl"
    for kill in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [*command, "--memory", "4M"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=CLEAN
        )
        before = journal.stat().st_size if journal.exists() else 0
        while process.poll() is None and not (journal.exists() and journal.stat().st_size > before):
            time.sleep(0.002)
        process.send_signal(kill)
        process.communicate()
        if made.exists():
            pytest.skip("this machine was too fast to be interrupted")
    result = run(source, made, "--world-size", 3, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["bytes_continued"] >= 64 << 20
    assert found["bytes_continued"] + found["bytes_written"] == sum(found["files"].values())
    rewrite(source, tmp_path / "straight", 3)
    assert rewriting.file_bytes(made) == rewriting.file_bytes(tmp_path / "straight")
