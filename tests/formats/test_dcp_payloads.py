"""Chunks found and read by byte range in what stock torch wrote: strides, dtypes, empty ones, both serializations."""

from __future__ import annotations

import tempfile
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewriting import DTYPES, any_bits, assert_same, bits, rows_of, write_boxes
from torch.distributed.checkpoint.filesystem import SerializationFormat

from reshard import open_checkpoint
from reshard.errors import CheckpointUnsound
from reshard.formats import checkpoint as stored
from reshard.formats import dcp_payloads
from reshard.formats.checkpoint import Checkpoint
from reshard.geometry.box import Box
from reshard.storage.byte_ranges import SourceFiles

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def everything() -> dict[str, torch.Tensor]:
    state = {}
    for number, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        state[f"{name}.plain"] = any_bits((5, 3), dtype, number)
        state[f"{name}.turned"] = any_bits((4, 6), dtype, number).t()
        state[f"{name}.cube"] = any_bits((2, 3, 4), dtype, number).permute(2, 0, 1)
        state[f"{name}.scalar"] = any_bits((), dtype, number)
        state[f"{name}.empty"] = any_bits((0, 3), dtype, number)
        state[f"{name}.part"] = any_bits((9, 4), dtype, number)[3:6, 1:3]
    return state


@pytest.mark.parametrize("options", [{}, {"thread_count": 3, "single_file_per_rank": False}], ids=["one", "many"])
def test_every_dtype_and_stride_that_stock_saves(tmp_path: Path, options: dict[str, Any]) -> None:
    state = everything()
    folder = save(tmp_path / "saved", state, **options)
    with open_checkpoint(folder) as checkpoint:
        assert_same({key: checkpoint.read(key) for key in checkpoint.keys}, state)
        assert any(checkpoint.payloads.strides.values())


@st.composite
def tensors_and_boxes(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    tensor = any_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    if draw(st.booleans()):
        tensor = tensor.permute(tuple(draw(st.permutations(range(tensor.dim())))))
    boxes = []
    for _ in range(4):
        low = [draw(st.integers(0, size)) for size in tensor.shape]
        sizes = [draw(st.integers(0, size - start)) for start, size in zip(low, tensor.shape, strict=True)]
        boxes.append(Box(tuple(low), tuple(sizes)))
    return tensor, boxes


@given(tensors_and_boxes(), st.integers(1, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_box_is_the_slice_of_the_whole(case: tuple[torch.Tensor, list[Box]], parts: int) -> None:
    tensor, boxes = case
    with tempfile.TemporaryDirectory() as name:
        write_boxes(Path(name), {"t": (tensor, rows_of(tensor, parts))})
        with open_checkpoint(name) as checkpoint:
            for box in boxes:
                place = tuple(slice(low, end) for low, end in zip(box.offsets, box.ends, strict=True))
                assert_same({"t": checkpoint.read("t", box)}, {"t": tensor[place]})


def test_a_slice_costs_its_own_bytes(tmp_path: Path) -> None:
    tensor = any_bits((4000, 250), torch.float32)
    with open_checkpoint(sharded.write_sharded(tmp_path / "saved", {"t": tensor}, 4)) as checkpoint:
        heads = 4 * (dcp_payloads._HEAD_BYTES + dcp_payloads._TAIL_BYTES)
        assert_same({"t": checkpoint.read("t", slice(990, 1010))}, {"t": tensor[990:1010]})
        assert checkpoint.files.bytes_read <= 20 * 1000 + heads
        before = checkpoint.files.bytes_read
        # What is known is not read again.
        assert_same({"t": checkpoint.read("t", slice(100, 1100))}, {"t": tensor[100:1100]})
        assert checkpoint.files.bytes_read - before == 1000 * 1000
        before = checkpoint.files.bytes_read
        columns = checkpoint.read("t", (slice(0, 10), slice(20, 30)))
        assert torch.equal(columns.view(torch.int32), tensor[0:10, 20:30].contiguous().view(torch.int32))
        # The gaps, longer than a cache line, are not read.
        assert checkpoint.files.bytes_read - before == 10 * 10 * 4


@st.composite
def strided(draw: st.DrawFn) -> tuple[list[int], list[int], int, Box]:
    """Strides of any kind, overlapping ones and those of expanded dims among them; elements in the file; a box."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    strides = [draw(st.integers(0, 40)) for _ in shape]
    low = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - start)) for start, size in zip(low, shape, strict=True)]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return shape, strides, reach, Box(tuple(low), tuple(sizes))


@given(
    strided(),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 99),
    st.integers(1, 80),
    st.integers(1, 200),
    st.integers(1, 5),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_strides_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[list[int], list[int], int, Box],
    width: int,
    start: int,
    gap_bytes: int,
    block_bytes: int,
    planned: int,
) -> None:
    shape, strides, reach, box = case
    dtype = np.dtype({1: np.uint8, 4: np.uint32, 16: np.complex128}[width])
    content = np.random.default_rng(start).integers(0, 256, start + reach * width, dtype=np.uint8)
    path = tmp_path_factory.mktemp("strided") / "elements"
    path.write_bytes(content.tobytes())
    elements = np.frombuffer(content.tobytes()[start:], dtype=dtype)
    whole = np.lib.stride_tricks.as_strided(elements, shape, [stride * width for stride in strides])
    told: list[tuple[int, bytes]] = []
    with pytest.MonkeyPatch.context() as patch, SourceFiles([path]) as files:
        patch.setattr(stored, "_GAP_BYTES", gap_bytes)
        patch.setattr(stored, "_LONG_BYTES", gap_bytes)
        patch.setattr(stored, "_BLOCK_BYTES", max(width, block_bytes))
        patch.setattr(stored, "_PLANNED_READS", planned)
        found = stored.read_strided(
            files, 0, start, dtype, strides, box, lambda at, view: told.append((at, bytes(view)))
        )
    place = tuple(slice(low, end) for low, end in zip(box.offsets, box.ends, strict=True))
    assert found.shape == box.sizes and found.flags.c_contiguous
    assert found.tobytes() == whole[place].tobytes()
    # In order, no byte twice, and none outside the span of the slice.
    ends = [start, *(at + len(part) for at, part in told)]
    assert all(at >= end for (at, _), end in zip(told, ends, strict=False))
    assert all(content[at : at + len(part)].tobytes() == part for at, part in told)
    if told:
        steps = list(zip(box.offsets, box.sizes, strides, strict=True))
        assert told[0][0] == start + width * sum(offset * stride for offset, _, stride in steps)
        assert ends[-1] == start + width * (1 + sum((low + size - 1) * stride for low, size, stride in steps))


def counted_reads(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each read."""
    reads: list[int] = []
    real = checkpoint.files.read_into

    def reading(file: int, start: int, pieces: Any) -> None:
        reads.append(sum(map(len, pieces)))
        real(file, start, pieces)

    monkeypatch.setattr(checkpoint.files, "read_into", reading)
    return reads


def test_an_expanded_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = any_bits((64,), torch.float32)
    state = {"rows": row.expand(50, 64), "columns": row[:50, None].expand(50, 64), "huge": row[3].expand(1 << 31)}
    torch.save(state, tmp_path / "state.pt")
    with open_checkpoint(tmp_path / "state.pt") as checkpoint:
        reads = counted_reads(checkpoint, monkeypatch)
        for key in ("rows", "columns"):
            assert_same({key: checkpoint.read(key)}, {key: state[key]})
        assert_same({"huge": checkpoint.read("huge", slice(1 << 30, (1 << 30) + 500))}, {"huge": row[3].expand(500)})
        assert reads == [256, 200, 4]


def test_a_narrow_column_takes_few_reads_and_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = any_bits((600_000, 8), torch.uint8)
    torch.save({"w": tensor}, tmp_path / "state.pt")
    with open_checkpoint(tmp_path / "state.pt") as checkpoint:
        reads = counted_reads(checkpoint, monkeypatch)
        tracemalloc.start()
        column = checkpoint.read_array("w", (slice(None), slice(2, 3)))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert column.tobytes() == tensor[:, 2].numpy().tobytes()
        assert len(reads) < 10 and sum(reads) <= 8 * len(tensor)
        assert peak_bytes < 2 * len(tensor) + (4 << 20)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys whose archives are unpickled."""
    parsed: list[str] = []
    real = dcp_payloads.read_tensor

    def reading(*arguments: Any) -> Any:
        parsed.append(arguments[3])
        return real(*arguments)

    monkeypatch.setattr(dcp_payloads, "read_tensor", reading)
    return parsed


@pytest.mark.parametrize("large", [False, True])
def test_of_many_alike_one_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    shape = (300, 31) if large else (3, 4)
    state = {f"t{n:03}": any_bits(shape, torch.float32, n) for n in range(100)}
    folder = sharded.write_sharded(tmp_path / "saved", state, 2)
    parsed = counted(monkeypatch)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.locate(np.arange(len(checkpoint.index.file)))
        assert len(parsed) <= 4
        assert_same({key: checkpoint.read(key) for key in checkpoint.keys}, state)
        # The checksums are each archive's own.
        for row, crc in enumerate(checkpoint.payloads.crc.tolist()):
            assert crc == _zlib(checkpoint.read_chunk(row, Box((0, 0), checkpoint.index.box(row).sizes)))


def _zlib(elements: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(elements))


def test_one_that_differs_among_many_alike_is_noticed(tmp_path: Path) -> None:
    """Archives of one length: another shape, other strides, another dtype of the same width and length of name."""
    tensor = any_bits((40, 6), torch.float32)
    boxes = rows_of(tensor, 10)
    wrong = {
        "shape": any_bits((6, 4), torch.float32),
        "dtype": any_bits((4, 6), torch.int32),
        "dims": any_bits((24,), torch.float32),
    }
    lengths = {len(sharded.archive(value)) for value in (tensor[:4].clone(), wrong["shape"])}
    assert len(lengths) == 1
    for name, value in wrong.items():
        source = write_boxes(
            tmp_path / name, {"t": (tensor, boxes)}, archives={("t", 7): sharded.archive(value)}, files=1
        )
        with open_checkpoint(source) as checkpoint, pytest.raises(CheckpointUnsound, match="another save") as caught:
            checkpoint.read("t")
        assert caught.value.key == "t" and "(28, 0)" in str(caught.value)
    turned = tensor[28:32].t().contiguous().t()
    assert turned.stride() == (1, 4)
    source = write_boxes(
        tmp_path / "turned", {"t": (tensor, boxes)}, archives={("t", 7): sharded.archive(turned)}, files=1
    )
    with open_checkpoint(source) as checkpoint:
        assert_same({"t": checkpoint.read("t")}, {"t": tensor})


def test_chunks_without_rows(tmp_path: Path) -> None:
    """As stock writes them for trailing ranks: at an offset equal to the rows."""
    tensor = any_bits((3, 5), torch.bfloat16)
    boxes = [*rows_of(tensor, 3), ((3, 0), (0, 5))]
    source = write_boxes(tmp_path / "saved", {"t": (tensor, boxes)})
    with open_checkpoint(source) as checkpoint:
        checkpoint.locate(np.arange(4))
        assert_same({"t": checkpoint.read("t")}, {"t": tensor})


def test_the_safetensors_serialization(tmp_path: Path) -> None:
    known = (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
        *(torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    )
    state: dict[str, Any] = {f"m.{str(dtype)[6:]}": any_bits((7, 3), dtype, n) for n, dtype in enumerate(known)}
    state["m.scalar"] = any_bits((), torch.float32)
    try:
        folder = save(
            tmp_path / "saved", {**state, "note": "text"}, serialization_format=SerializationFormat.SAFETENSORS
        )
    except TypeError:
        pytest.skip("this torch has no such option")
    with open_checkpoint(folder) as checkpoint:
        assert_same({key: checkpoint.read(key) for key in checkpoint.keys}, state)
        part = checkpoint.read("m.float32", slice(2, 5))
        assert bits(part) == bits(state["m.float32"][2:5])


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_are_refused_by_name(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.rand(4, 6), 0.1, 0, torch.qint8)
    tensor = any_bits((8, 6), torch.float32)
    source = write_boxes(
        tmp_path / "s", {"w": (tensor, rows_of(tensor, 2))}, archives={("w", 1): sharded.archive(quantised)}
    )
    with open_checkpoint(source) as checkpoint, pytest.raises(CheckpointUnsound) as caught:
        checkpoint.read("w")
    assert "w" in str(caught.value).splitlines()[0] and (
        "qint8" in str(caught.value) or "_rebuild_qtensor" in str(caught.value)
    )


def test_threads_that_look_for_the_same_chunks(tmp_path: Path) -> None:
    state = {f"t{n}": any_bits((n % 5 + 1, 4), torch.float32, n) for n in range(60)}
    with (
        open_checkpoint(sharded.write_sharded(tmp_path / "saved", state, 3)) as checkpoint,
        ThreadPoolExecutor(6) as pool,
    ):
        for found in pool.map(lambda _: {key: checkpoint.read(key) for key in checkpoint.keys}, range(6)):
            assert_same(found, state)
        length = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.distcp"))
        assert checkpoint.files.bytes_read <= length * 1.2 + 6 * sum(tensor.nbytes for tensor in state.values())
