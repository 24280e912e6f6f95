"""Segments and blocks so small that every record is cut everywhere: the files must not show where."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rewriting import any_bits, assert_same, file_bytes, rewrite, rows_of, stock_tensors, write_boxes

from reshard.engine import bands, run, segment
from reshard.engine.blocks import PAGE_BYTES
from reshard.engine.run import Budget
from reshard.geometry.mesh import Mesh
from reshard.rewrite import run as offline
from reshard.rewrite.prepare import prepare
from reshard.verify.check.run import check

COLUMNS = [((0, 0), (600, 3)), ((0, 3), (600, 1)), ((0, 4), (600, 5))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records shorter and longer than pages, columns to be put together, empty ones, and objects."""
    tensors = {
        **{f"model.t{n}": any_bits((n * 37 % 23, 5), torch.float32, n) for n in range(40)},
        "model.large": any_bits((3000, 7), torch.bfloat16),
        "model.columns": any_bits((600, 9), torch.float32),
        "model.scalar": torch.tensor(3.0),
        "model.empty": torch.zeros(0, 4),
    }
    boxes = {key: rows_of(tensor, 3) for key, tensor in tensors.items()}
    boxes["model.columns"] = COLUMNS
    objects = {"lr": 0.1, "text": "x" * 9000, "none": None}
    folder = tmp_path_factory.mktemp("source") / "checkpoint"
    return write_boxes(folder, {key: (tensor, boxes[key]) for key, tensor in tensors.items()}, objects)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str | None], dict[str, bytes]]:
    """The files in one segment each, once torch has read them as the same tensors."""
    found = {}
    for ranks, dtype in ((2, None), (5, None), (2, "bf16")):
        folder = tmp_path_factory.mktemp("expected") / "out"
        rewrite(source, folder, ranks, dtype=dtype)
        if dtype is None:
            assert_same(stock_tensors(folder), stock_tensors(source))
        # Bits at random are NaN now and then; every checksum is right.
        assert all("NaN" in fault.what or "infinit" in fault.what for fault in check(folder, deep=True).faults)
        found[ranks, dtype] = file_bytes(folder)
    return found


@pytest.mark.parametrize(("ranks", "dtype"), [(2, None), (5, None), (2, "bf16")])
@pytest.mark.parametrize("pages", [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_where_files_are_cut_does_not_show(
    source: Path,
    expected: dict[tuple[int, str | None], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    dtype: str | None,
    pages: tuple[int, int],
) -> None:
    for module in (run, offline):
        monkeypatch.setattr(module, "SEGMENT_BYTES", pages[0] * PAGE_BYTES)
    monkeypatch.setattr(Budget, "of", classmethod(lambda cls, *_: cls(3, pages[1] * PAGE_BYTES)))
    monkeypatch.setattr(bands, "BAND_BYTES", 700)
    monkeypatch.setattr(segment, "_COMBINED_BYTES", 100)
    rewrite(source, tmp_path / "out", ranks, dtype=dtype)
    found = file_bytes(tmp_path / "out")
    assert found.keys() == expected[ranks, dtype].keys()
    for name, content in expected[ranks, dtype].items():
        assert found[name] == content, name


def test_segments_in_any_order_by_several_processes_to_be(
    source: Path,
    expected: dict[tuple[int, str | None], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As processes of a launch do: each plans for itself, and knows of the others by what they left."""
    monkeypatch.setattr(run, "SEGMENT_BYTES", 3 * PAGE_BYTES)
    outcomes = []
    order = random.Random(0)
    for part in range(4):
        prepared = prepare(source, Mesh(5))
        with prepared.checkpoint:
            segments = run.segments_of(prepared.job)
            run.create_files(prepared.job, tmp_path)
            mine = segments[part::4]
            order.shuffle(mine)
            run.write_segments(
                prepared.job,
                tmp_path,
                mine,
                Budget(2, 2 * PAGE_BYTES),
                lambda done: outcomes.extend(outcome for _, outcome in done),
            )
    order.shuffle(outcomes)
    prepared = prepare(source, Mesh(5))
    with prepared.checkpoint:
        run.finish(prepared.job, tmp_path, outcomes)
    for name, content in expected[5, None].items():
        if name.endswith(".distcp"):
            assert (tmp_path / name).read_bytes() == content


def test_a_segment_stops_where_another_failed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SEGMENT_BYTES", PAGE_BYTES)
    monkeypatch.setattr(run, "SETTLE_S", 0)
    prepared = prepare(source, Mesh(2))
    done: list[object] = []

    def fail(written: Sequence[object]) -> None:
        done.extend(written)
        if len(done) >= 3:
            raise RuntimeError("the third")

    run.create_files(prepared.job, tmp_path)
    with prepared.checkpoint, pytest.raises(RuntimeError, match="the third"):
        run.write_segments(prepared.job, tmp_path, run.segments_of(prepared.job), Budget(2, PAGE_BYTES), fail)
    assert 3 <= len(done) < len(run.segments_of(prepared.job)) // 2


@pytest.mark.parametrize("megabytes", [4, 5, 17, 64, 256, 4096])
def test_buffers_fit_the_budget(megabytes: int) -> None:
    for processes in (1, 2, 8):
        budget = Budget.of(megabytes << 20, processes)
        assert budget.threads >= 1 and budget.block_bytes >= PAGE_BYTES
        assert budget.block_bytes % PAGE_BYTES == 0
        assert budget.threads * budget.block_bytes <= megabytes << 20
