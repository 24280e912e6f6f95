"""The trace as several attempts of a run write it."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from reshard import TraceWriter
from reshard.errors import StorageError
from reshard.verify.traces.trace import TraceRow, read_trace


def row(step: int, attempt: str = "a", **fields: Any) -> TraceRow:
    return TraceRow(
        step=step,
        loss=1 / 3 + step,
        lr=(0.1, 3e-5),
        ranks=2,
        accumulation=6,
        samples=12 * step,
        attempt=attempt,
        **fields,
    )


def write(path: Path, *rows: TraceRow) -> None:
    with TraceWriter(path) as trace:
        for each in rows:
            trace.write(each)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [row(1, grad_norm=0.1, scale=65536.0, tokens_per_s=1e6), row(2, grad_norm=None), row(3, scale=math.inf)]
    write(tmp_path / "trace.jsonl", *rows)
    assert read_trace(tmp_path / "trace.jsonl") == rows
    assert [json.loads(line)["lr"] for line in (tmp_path / "trace.jsonl").open()] == [[0.1, 3e-5]] * 3


def test_a_diverged_loss_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", TraceRow(step=1, loss=math.nan), TraceRow(step=2, loss=math.inf))
    first, second = read_trace(tmp_path / "trace.jsonl")
    assert math.isnan(first.loss)
    assert second.loss == math.inf


def test_a_later_attempt_appends_and_supersedes(tmp_path: Path) -> None:
    path = tmp_path / "runs/a/trace.jsonl"
    write(path, *[row(step, "a") for step in range(1, 6)])
    write(path, *[row(step, "b") for step in range(4, 7)])
    assert len(path.read_text().splitlines()) == 8
    assert [(each.step, each.attempt) for each in read_trace(path)] == [
        *[(step, "a") for step in (1, 2, 3)],
        *[(step, "b") for step in (4, 5, 6)],
    ]


@pytest.mark.parametrize("cut_bytes", [1, 2, 20, 200])
def test_a_line_torn_by_a_kill_is_mended(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, row(1), row(2))
    os.truncate(path, path.stat().st_size - min(cut_bytes, len(row(2).to_json_line())))
    write(path, row(2, "b"), row(3, "b"))
    assert read_trace(path) == [row(1), row(2, "b"), row(3, "b")]


def test_every_step_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """A killed run keeps every step that it finished."""
    trace = TraceWriter(tmp_path / "trace.jsonl")
    for step in (1, 2):
        trace.write(row(step))
        assert [each.step for each in read_trace(tmp_path / "trace.jsonl")] == list(range(1, step + 1))
    trace.close()
    trace.close()


def on_all_ranks(path: str) -> Any:
    rank = dist.get_rank()
    with TraceWriter(path if rank == 0 else f"{path}/not/for/rank-{rank}") as trace:
        for step in range(1, 4):
            trace.write(row(step, f"rank-{rank}"))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    run_ranks(3, on_all_ranks, str(tmp_path / "trace.jsonl"))
    assert read_trace(tmp_path / "trace.jsonl") == [row(step, "rank-0") for step in range(1, 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_home_and_a_change_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with TraceWriter("~/trace.jsonl") as trace:
        trace.write(row(1))
    assert read_trace(tmp_path / "trace.jsonl") == [row(1)]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/trace.jsonl: cannot open the trace: .*"):
        TraceWriter(tmp_path / "file/trace.jsonl")
    with pytest.raises(StorageError, match=r"cannot .*the trace"):
        TraceWriter(tmp_path)


def out_of_space(path: str) -> Any:
    trace = TraceWriter(path)
    trace.write(row(1))
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path(path).stat().st_size + 10, former[1]))
    try:
        trace.write(row(2))
    except StorageError as error:
        return str(error), read_trace(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_trace_that_cannot_grow_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ((text, left),) = run_ranks(1, out_of_space, str(path))
    assert text.startswith(f"{path}: cannot write the trace: over the limit of ")
    assert left == [row(1)]
