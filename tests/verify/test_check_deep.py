"""What only reading every byte shows: flipped bits, NaN and infinities, replicas that differ."""

from __future__ import annotations

import pickle
import shutil
import struct
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded import archive, places, training_state, write_sharded
from torch.distributed.checkpoint.filesystem import SerializationFormat

from reshard.formats.opening import open_checkpoint
from reshard.verify.check import content
from reshard.verify.check.report import Fault, Report
from reshard.verify.check.run import check


def deep_faults(path: Path) -> list[Fault]:
    return check(path, deep=True).faults


def the_fault(path: Path) -> Fault:
    (fault,) = deep_faults(path)
    return fault


def flip(path: Path, place: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@contextmanager
def no_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def test_a_flipped_bit_of_an_element(tmp_path: Path) -> None:
    state = training_state() | {"model.odd": torch.full((8, 3), 500.0)}
    folder = write_sharded(tmp_path / "x", state, 4)
    path = folder / "__2_0.distcp"
    place = path.read_bytes().index(struct.pack("<f", 500.0) * 6)
    flip(path, place + 4 * 4 + 3, 6)
    assert struct.unpack_from("<f", path.read_bytes(), place + 16)[0] == pytest.approx(1.47e-36, rel=1e-2)
    assert check(folder).faults == []
    fault = the_fault(folder)
    assert (fault.file, fault.key, fault.rank) == (str(path), "model.odd", 2)
    assert fault.what == "damaged: the checksum of data/0 is not the one that was saved"
    assert len(str(fault.expected)) == len(str(fault.found)) == 8 and fault.expected != fault.found


def test_a_flipped_bit_of_an_object(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", training_state(), 2, {"extra.note": "abcdef" * 40})
    info = places(folder)["extra.note", None]
    path = folder / info.relative_path
    flip(path, path.read_bytes().index(b"abcdef", info.offset) + 100)
    assert check(folder).faults == []
    fault = the_fault(folder)
    assert (fault.file, fault.key) == (str(path), "extra.note")
    assert "checksum of data.pkl" in fault.what


def test_every_byte_of_an_archive_is_verified_or_does_not_matter_to_stock_torch(tmp_path: Path) -> None:
    weight = torch.arange(1, 7.0)
    # The second archive: it is recognised as one like the first.
    folder = write_sharded(tmp_path / "x", {"v": weight + 1, "w": weight}, 1)
    path = folder / "__0_0.distcp"
    sound = path.read_bytes()
    elements = sound.index(weight.numpy().tobytes())
    start = places(folder)["w", (0,)].offset
    central = sound.index(b"PK\x01\x02", start)
    harmless = 0
    for place in {*range(start, len(sound), 7), *range(elements, elements + 24), *range(central, central + 62)}:
        flip(path, place, place * 5 % 8)
        if not deep_faults(folder):
            assert not elements <= place < elements + 24
            state = {"w": torch.zeros(6)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(state, checkpoint_id=folder, no_dist=True)
            assert torch.equal(state["w"], weight), place
            harmless += 1
        path.write_bytes(sound)
    # Padding, dates, versions, and what local headers and descriptors repeat.
    assert harmless


def test_saved_without_checksums_is_said_once(tmp_path: Path) -> None:
    with no_checksums():
        folder = write_sharded(tmp_path / "x", {"model.a": torch.ones(6, 2), "model.b": torch.ones(3)}, 2, {"o": 1})
    report = check(folder, deep=True)
    assert report.faults == []
    assert report.notes == ["saved without checksums (5 of 5 chunks and objects): flipped bits in them cannot be seen"]
    assert report.verified_records == 0
    assert check(folder).notes == []


def test_some_archives_without_checksums(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", {"a": torch.ones(4), "b": torch.ones(4)}, 1)
    with no_checksums():
        content_without = archive(torch.ones(4))
    info = places(folder)["a", (0,)]
    path = folder / info.relative_path
    stored = bytearray(path.read_bytes())
    stored[info.offset : info.offset + info.length] = content_without
    path.write_bytes(stored)
    report = check(folder, deep=True)
    assert report.faults == []
    assert "(1 of 2 chunks and objects)" in report.notes[0]
    assert report.verified_records == 7


def nan_at(tensor: torch.Tensor, *places: tuple[int, ...], value: float = float("nan")) -> torch.Tensor:
    for place in places:
        tensor[place] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_nan_in_a_weight(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = nan_at(torch.ones(12, 5, dtype=dtype), (7, 2), (8, 0), (2, 4))
    folder = write_sharded(tmp_path / "x", {"model.w": weight, "model.v": torch.ones(12, 5)}, 4)
    assert check(folder).faults == []
    fault = the_fault(folder)
    assert (fault.file, fault.key, fault.rank) == (str(folder / "__0_0.distcp"), "model.w", 0)
    assert fault.what == "NaN in its weights"
    assert (fault.expected, fault.found) == ("finite elements", "3 of 60 elements, the first at (2, 4)")


def test_nan_in_8_bit_floats(tmp_path: Path) -> None:
    state = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.ones(6)
        numbers[3] = float("nan")
        state[f"model.{dtype}"] = numbers.to(dtype)
    assert [fault.found for fault in deep_faults(write_sharded(tmp_path / "x", state, 1))] == [
        "1 of 6 elements, the first at (3,)"
    ] * 2


def test_the_place_in_a_transposed_tensor(tmp_path: Path) -> None:
    weight = nan_at(torch.ones(5, 12).t(), (4, 3), (10, 1))
    state = {"model.w": weight}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert not weight.is_contiguous()
    with open_checkpoint(tmp_path / "x") as checkpoint:
        checkpoint.read_array("model.w")
        assert checkpoint.payloads.strides
    assert str(the_fault(tmp_path / "x").found).startswith("2 of 60 elements, the first at (10, 1)")


def test_the_place_far_into_a_large_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BLOCK_BYTES", 4096)
    weight = nan_at(torch.ones(600, 50), (599, 49), (431, 7), (432, 0))
    folder = write_sharded(tmp_path / "x", {"model.w": weight}, 2)
    assert the_fault(folder).found == "3 of 30000 elements, the first at (431, 7)"
    flip(folder / "__1_0.distcp", 5000)
    # The elements are not those that were saved, so what they are is not judged.
    assert "checksum" in the_fault(folder).what


def test_where_infinities_are_faults(tmp_path: Path) -> None:
    infinite = nan_at(torch.ones(4), (1,), value=float("-inf"))
    state = {
        "model.mask": infinite,
        "model.trained": infinite,
        "model.overflown": -infinite,
        "optim.state.trained.exp_avg": infinite,
        "optim.state.trained.step": torch.tensor(float("inf")),
        "extra.mask": infinite,
        "rng.rank_0.torch": torch.tensor([255], dtype=torch.uint8),
        "model.counts": torch.tensor([-(2**63)]),
    }
    report = check(write_sharded(tmp_path / "x", state, 1), deep=True)
    assert {(fault.key, fault.what) for fault in report.faults} == {
        ("model.trained", "infinities in its weights"),
        ("model.overflown", "infinities in its weights"),
        ("optim.state.trained.exp_avg", "infinities in its moments"),
    }
    assert report.faults[0].found is not None and "the first at (1,)" in report.faults[0].found
    assert [note for note in report.notes if "model.mask" in note and "as masks have" in note]


def test_one_torch_file_with_views_of_one_storage(tmp_path: Path) -> None:
    storage = torch.ones(40)
    storage[7] = float("nan")
    state = {"w": storage[10:30].view(4, 5), "every_third": storage[:9:3], "with_nan": storage[:9].view(3, 3)}
    path = tmp_path / "state.pt"
    torch.save(state, path)
    report = check(path, deep=True)
    assert [(fault.key, fault.found) for fault in report.faults] == [
        ("with_nan", "1 of 9 elements, the first at (2, 1)")
    ]
    assert report.verified_records == 7
    data = path.read_bytes().index(storage.numpy().tobytes())
    flip(path, data + 4 * 35)
    assert "checksum" in the_fault(path).what


def test_safetensors_have_no_checksums_and_are_searched_for_nan(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"w": nan_at(torch.ones(4, 3, dtype=torch.bfloat16), (3, 2))}, tmp_path / "model.safetensors")
    report = check(tmp_path / "model.safetensors", deep=True)
    (fault,) = report.faults
    assert (fault.key, fault.found) == ("w", "1 of 12 elements, the first at (3, 2)")
    assert report.notes == ["saved without checksums (1 of 1 chunks and objects): flipped bits in them cannot be seen"]


def test_distcp_files_in_the_safetensors_serialization(tmp_path: Path) -> None:
    state = {"model.a": nan_at(torch.ones(5, 3), (2, 0)), "model.b": torch.ones(4), "note": [1]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(tmp_path / "x", serialization_format=SerializationFormat.SAFETENSORS)
        dcp.save(state, storage_writer=writer, no_dist=True)
    report = check(tmp_path / "x", deep=True)
    assert [(fault.key, fault.found) for fault in report.faults] == [
        ("model.a", "1 of 15 elements, the first at (2, 0)")
    ]
    assert "(2 of 3 chunks and objects)" in report.notes[0]


def write_replicas(folder: Path, *states: dict[str, torch.Tensor]) -> Path:
    """What ranks that each save all of a state leave, with ``use_collectives=False``."""
    folder.mkdir()
    for rank, state in enumerate(states):
        own = write_sharded(folder / "own", state, 1)
        metadata = pickle.loads((own / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = f"__{rank}_0.distcp"
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
        (own / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
        shutil.rmtree(own)
    return folder


def test_replicas_that_agree(tmp_path: Path) -> None:
    report = check(write_replicas(tmp_path / "x", training_state(), training_state()), deep=True)
    assert (report.faults, report.notes) == ([], [])
    assert report.verified_records == 2 * 7 * report.chunks


@pytest.mark.parametrize("checksums", [True, False])
def test_replicas_that_differ(tmp_path: Path, checksums: bool) -> None:
    other = training_state()
    other["model.c"][1, 2] += 1e-3
    other["model.c"][0, 1] -= 5e-4
    with no_checksums() if not checksums else warnings.catch_warnings():
        folder = write_replicas(tmp_path / "x", training_state(), other)
    assert check(folder).faults == []
    fault = the_fault(folder)
    assert (fault.file, fault.key, fault.rank) == (str(folder / "__1_0.distcp"), "model.c", 1)
    assert str(folder / "__0_0.distcp") in fault.what
    assert str(fault.found).startswith("2 elements that differ, largest |a - b| 0.00")
    assert float(str(fault.found).rpartition(" ")[2]) == pytest.approx(1e-3, rel=1e-3)


def test_a_damaged_replica(tmp_path: Path) -> None:
    folder = write_replicas(tmp_path / "x", training_state(), training_state())
    path = folder / "__1_0.distcp"
    flip(path, path.read_bytes().index(training_state()["model.d"].numpy().tobytes()) + 3, 6)
    # The checksums that were saved agree, so that the replicas did.
    fault = the_fault(folder)
    assert (fault.file, fault.key) == (str(path), "model.d")
    assert "checksum of data/0" in fault.what


def test_a_missing_file_of_replicas_is_one_fault(tmp_path: Path) -> None:
    folder = write_replicas(tmp_path / "x", training_state(), training_state())
    (folder / "__1_0.distcp").unlink()
    fault = the_fault(folder)
    assert (fault.what, fault.rank) == ("missing", 1)


def test_memory_is_bounded_and_every_byte_is_read_once(tmp_path: Path) -> None:
    state = {f"model.w{n}": torch.zeros(6 << 20, dtype=torch.bfloat16) for n in range(4)}
    folder = write_sharded(tmp_path / "x", state, 2)
    del state
    check(folder)
    done: list[int] = []

    @contextmanager
    def progress(total_bytes: int) -> Iterator[content.Advance]:
        done.append(-total_bytes)
        yield done.append

    tracemalloc.start()
    report = check(folder, deep=True, progress=progress)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.faults == []
    assert peak_bytes < 32 << 20
    assert report.stored_bytes <= report.read_bytes < report.stored_bytes * 1.02
    assert sum(done) == 0


def test_the_same_faults_whatever_the_size_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = training_state()
    state["model.d"][4, 1] = float("nan")
    folder = write_sharded(tmp_path / "x", state, 3)
    flip(folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size // 2)
    reports: list[Report] = []
    for block_bytes in (1 << 22, 1 << 14, 1 << 10, 64):
        monkeypatch.setattr(content, "BLOCK_BYTES", block_bytes)
        reports.append(check(folder, deep=True))
    assert len(reports[0].faults) >= 1
    assert all(report.faults == reports[0].faults for report in reports)
    assert all(report.verified_records == reports[0].verified_records for report in reports)
