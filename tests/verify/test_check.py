"""What `check` sees without reading tensors: structure, archives, commit, manifest, files of another save."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded import archive, places, training_state, write_sharded
from torch.distributed.checkpoint.metadata import Metadata

from reshard.errors import CheckpointNotFound, UsageError
from reshard.formats import manifest as manifests
from reshard.formats.file_lengths import file_faults
from reshard.formats.fingerprint import fingerprints
from reshard.formats.manifest import Manifest, World
from reshard.formats.opening import open_checkpoint
from reshard.index.index import ARCHIVE, IndexBuilder
from reshard.verify.check.report import Fault
from reshard.verify.check.run import check

OBJECTS = {"optim.param_groups.a.lr": 0.1, "extra.note": ["x", {"y": 1}]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sharded(tmp_path_factory.mktemp("written") / "step-40", training_state(), 4, OBJECTS)


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


def faults(folder: Path, *also: Path, deep: bool = False) -> list[Fault]:
    return check(folder, also, deep=deep).faults


def the_fault(folder: Path, *also: Path, deep: bool = False) -> Fault:
    (fault,) = faults(folder, *also, deep=deep)
    return fault


def edit_metadata(folder: Path, edit: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write_manifest(folder: Path, **fields: Any) -> Manifest:
    manifest = Manifest(
        step=40,
        attempt="1",
        world=World(4, 1, 4, {}),
        parts={"model": "saved", "optimizer": "saved", "scaler": "none"},
        lr=[],
        batch=None,
        data=None,
        schedulers={},
        scaler=None,
        rng=None,
        extra={},
        optimizers={},
        versions={},
        saved_at="",
    )
    manifest = dataclasses.replace(manifest, **fields)
    (folder / manifests.FILE_NAME).write_bytes(manifests.to_bytes(manifest))
    return manifest


def test_what_the_tests_write_is_what_stock_torch_reads(saved: Path) -> None:
    expected = training_state()
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=saved, no_dist=True)
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_checkpoint(saved: Path, deep: bool) -> None:
    report = check(saved, deep=deep)
    assert (report.faults, report.notes, report.is_sound) == ([], [], True)
    assert (report.format, report.tensors, report.objects, report.files) == ("dcp", 32, 2, 4)
    assert report.chunks == len(places(saved)) - 2
    assert report.stored_bytes == sum(path.stat().st_size for path in saved.glob("*.distcp"))
    assert report.verified_records == (7 * (report.chunks + 2) - 2 if deep else 0)


@pytest.mark.parametrize("deep", [False, True])
def test_stock_save_with_many_files(tmp_path: Path, deep: bool) -> None:
    state = {"model": {"a": torch.randn(50, 30).t(), "empty": torch.zeros(0, 4), "n": torch.tensor(1)}, "lr": 0.1}
    writer = dcp.FileSystemWriter(tmp_path / "x", single_file_per_rank=False, thread_count=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, no_dist=True)
    report = check(tmp_path / "x", deep=deep)
    assert (report.faults, report.notes) == ([], [])


def test_a_hole_and_an_overlap(saved: Path) -> None:
    def drop_and_repeat(metadata: Metadata) -> None:
        del metadata.state_dict_metadata["model.a"].chunks[1]
        metadata.state_dict_metadata["model.d"].chunks.append(metadata.state_dict_metadata["model.d"].chunks[0])

    edit_metadata(saved, drop_and_repeat)
    hole, overlap = faults(saved)
    assert (hole.key, hole.what) == ("model.a", "no chunk holds [3:6, 0:5] of the shape (12, 5)")
    assert overlap.key == "model.d" and overlap.what.startswith("two chunks hold [0:3, 0:4]")


@pytest.mark.parametrize(
    ("damage", "what", "found"),
    [
        (lambda path: os.truncate(path, 700), "cut short", "700; lost: "),
        (lambda path: path.write_bytes(b""), "empty (0 bytes)", "0; lost: "),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "a Git LFS pointer", "43"),
        (lambda path: path.unlink(), "missing", "no file"),
    ],
)
def test_a_damaged_file_hides_no_other(saved: Path, damage: Callable[[Path], Any], what: str, found: str) -> None:
    length_bytes = (saved / "__2_0.distcp").stat().st_size
    damage(saved / "__2_0.distcp")
    info = places(saved)["model.a", (0, 0)]
    with (saved / info.relative_path).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"XX")
    first, second = faults(saved)
    assert first.file == str(saved / "__2_0.distcp")
    assert first.rank == 2
    assert first.what.startswith(what)
    assert str(length_bytes) in str(first.expected)
    assert str(first.found).startswith(found)
    assert (second.file, second.rank, second.key) == (str(saved / "__0_0.distcp"), 0, "model.a")


def test_files_on_the_disks_of_other_nodes(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "node-1"
    other.mkdir()
    for rank in (2, 3):
        shutil.move(saved / f"__{rank}_0.distcp", other)
    for fault, rank in zip(faults(saved), (2, 3), strict=True):
        assert (fault.what, fault.rank) == ("missing", rank)
        assert "the files of rank 2-3 are absent and those of rank 0-1 are here" in str(fault)
        assert "--in" in str(fault)
    assert faults(saved, other, deep=True) == []
    with pytest.raises(UsageError, match="not a folder"):
        check(saved, [tmp_path / "nowhere"])


def test_a_missing_file_of_a_rank_that_has_others_is_no_other_node(saved: Path) -> None:
    (saved / "__3_0.distcp").rename(saved / "__2_1.distcp")
    edit_metadata(
        saved,
        lambda metadata: [
            setattr(info, "relative_path", "__2_1.distcp")
            for info in metadata.storage_data.values()
            if info.relative_path == "__3_0.distcp"
        ],
    )
    (saved / "__2_0.distcp").unlink()
    assert the_fault(saved).hint is None


def test_a_zip_that_lies_and_one_without_an_end(saved: Path) -> None:
    lying, endless = places(saved)["model.a", (0, 0)], places(saved)["model.d", (3, 0)]
    path = saved / lying.relative_path
    content = bytearray(path.read_bytes())
    central = content.index(b"PK\x01\x02", lying.offset)
    content[central + 20 : central + 28] = b"\xf0\xff\xff\x00" * 2
    path.write_bytes(content)
    path = saved / endless.relative_path
    content = bytearray(path.read_bytes())
    content[endless.offset + endless.length - 22] ^= 1
    path.write_bytes(content)
    first, second = faults(saved)
    assert (first.key, first.rank) == ("model.a", 0)
    assert "does not fit" in first.what or "lies" in first.what
    assert (second.key, second.rank) == ("model.d", 1)
    assert "does not end as a zip file does" in second.what


def test_a_pickle_that_claims_to_be_large_is_not_read(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", {"w": torch.zeros(1 << 19), "v": torch.ones(3)}, 1)
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    central = content.index(b"PK\x01\x02")
    assert content[central + 46 :].startswith(b"archive/data.pkl")
    content[central + 20 : central + 28] = (3 << 19).to_bytes(4, "little") * 2
    path.write_bytes(content)
    fault = the_fault(folder)
    assert fault.key == "w" and ("overlap" in fault.what or "data.pkl of" in fault.what)


def test_a_chunk_of_another_shape_or_dtype(saved: Path) -> None:
    info = places(saved)["model.a", (0, 0)]
    path = saved / info.relative_path
    for other in (torch.zeros(3, 5, dtype=torch.int32), torch.zeros(5, 3)):
        content = bytearray(path.read_bytes())
        data = archive(other)
        assert len(data) == info.length
        content[info.offset : info.offset + info.length] = data
        path.write_bytes(content)
        fault = the_fault(saved)
        assert fault.key == "model.a" and "of another save" in fault.what
        assert fault.expected == "float32 of (3, 5) at (0, 0)"


def test_an_object_that_is_no_archive(saved: Path) -> None:
    info = places(saved)["extra.note", None]
    with (saved / info.relative_path).open("r+b") as file:
        file.seek(info.offset + info.length - 22)
        file.write(bytes(10))
    fault = the_fault(saved)
    assert fault.key == "extra.note" and "not a sound torch.save archive" in fault.what


def test_a_stale_file_of_a_larger_save_is_a_note(written: Path, saved: Path) -> None:
    folder = write_sharded(saved, training_state(), 2, OBJECTS)
    report = check(folder)
    assert report.faults == []
    stale = [folder / f"__{rank}_0.distcp" for rank in (2, 3)]
    assert [note.split(" bytes")[0] for note in report.notes] == [f"{p}: {p.stat().st_size}" for p in stale]


def test_a_file_of_another_save_is_found_by_its_counters(saved: Path, tmp_path: Path) -> None:
    later = write_sharded(tmp_path / "later", training_state(step=80, seed=1), 4, OBJECTS)
    shutil.copy(later / "__1_0.distcp", saved)
    fault = the_fault(saved)
    assert (fault.file, fault.rank) == (str(saved / "__1_0.distcp"), 1)
    assert (fault.expected, fault.found) == ("40", "80 (3 times)")


def test_parameters_with_fewer_steps_are_a_note(tmp_path: Path) -> None:
    state = training_state()
    for key in ("a", "e"):
        state[f"optim.state.{key}.step"] = torch.tensor(7.0)
    report = check(write_sharded(tmp_path / "x", state, 6))
    assert report.faults == []
    assert "step counters differ: 40 (10 times), 7 (2 times)" in report.notes[0]
    # Rank 0 of 4 has these three and no others. That rank 1 has one as well shows that they are of this save.
    for key in ("i", "b"):
        state[f"optim.state.{key}.step"] = torch.tensor(7.0)
    assert check(write_sharded(tmp_path / "y", state, 4)).faults == []
    state["optim.state.b.step"] = torch.tensor(40.0)
    assert the_fault(write_sharded(tmp_path / "z", state, 4)).rank == 0


def test_a_file_of_another_save_is_found_by_its_fingerprint(saved: Path, tmp_path: Path) -> None:
    with open_checkpoint(saved) as checkpoint:
        recorded = {name: fingerprint.to_json() for name, fingerprint in fingerprints(checkpoint).items()}
    write_manifest(saved, files=recorded)
    assert faults(saved) == []
    other = write_sharded(tmp_path / "other", training_state(seed=1), 4, OBJECTS)
    length_bytes = (saved / "__1_0.distcp").stat().st_size
    shutil.copy(other / "__1_0.distcp", saved)
    with open_checkpoint(other) as checkpoint:
        found = fingerprints(checkpoint)["__1_0.distcp"]
    fault = the_fault(saved)
    assert (fault.file, fault.rank) == (str(saved / "__1_0.distcp"), 1)
    assert fault.expected == f"{length_bytes} bytes with records {recorded['__1_0.distcp']['records']}"
    assert fault.found == str(found) != fault.expected
    write_manifest(saved, files={"__9_0.distcp": recorded["__0_0.distcp"]})
    assert "names a file that .metadata does not" in faults(saved)[0].what
    assert len(faults(saved)) == 5


@pytest.mark.parametrize("name", [".staging-step-40-1", ".trash-step-40-ab12cd34", "step-40.tmp"])
def test_what_was_not_committed(saved: Path, name: str) -> None:
    folder = saved.rename(saved.parent / name)
    fault = the_fault(folder)
    assert (fault.file, fault.found) == (str(folder), name)
    assert "not committed" in fault.what
    link = saved.parent / "latest"
    link.symlink_to(folder)
    assert "not committed" in the_fault(link).what


def test_a_manifest_of_another_step(saved: Path) -> None:
    write_manifest(saved, step=80)
    fault = the_fault(saved)
    assert (fault.key, fault.expected, fault.found) == ("step", "40", "80")
    report = check(saved)
    assert any("counted 40 steps, the manifest says 80" in note for note in report.notes)


def test_a_manifest_that_promises_other_tensors(saved: Path) -> None:
    write_manifest(saved, parts={"model": "saved", "optimizer": "none", "rng": "saved"}, rng={"ranks": 2})
    optimizer, rng, ranks = faults(saved)
    assert (optimizer.key, optimizer.expected) == ("parts.optimizer", "none")
    assert (rng.key, rng.found) == ("parts.rng", "none of it in the checkpoint")
    assert (ranks.key, ranks.found) == ("rng.ranks", "those of 0; none of rank 0, 1")


def test_random_states_of_each_rank(tmp_path: Path) -> None:
    state = training_state() | {f"rng.rank_{rank}.torch": torch.zeros(5, dtype=torch.uint8) for rank in range(2)}
    folder = write_sharded(tmp_path / "step-40", state, 2)
    parts = {"model": "saved", "optimizer": "saved", "rng": "saved"}
    write_manifest(folder, parts=parts, rng={"ranks": 2})
    assert faults(folder) == []
    write_manifest(folder, parts=parts, rng={"ranks": 3})
    assert the_fault(folder).found == "those of 2; none of rank 2"
    write_manifest(folder, parts=parts, rng={"ranks": 1})
    assert the_fault(folder).found == "those of 2"


def test_a_manifest_or_metadata_that_is_damaged(saved: Path) -> None:
    write_manifest(saved)
    (saved / manifests.FILE_NAME).write_bytes(b"{")
    os.truncate(saved / "__1_0.distcp", 10)
    manifest, file = faults(saved)
    assert manifest.file == str(saved / manifests.FILE_NAME) and "not valid JSON" in manifest.what
    assert file.file == str(saved / "__1_0.distcp")
    (saved / ".metadata").write_bytes(b"")
    fault = faults(saved)[0]
    assert fault.file == str(saved / ".metadata") and "empty" in fault.what


def test_a_chunk_that_was_never_stored_is_listed(saved: Path) -> None:
    edit_metadata(saved, lambda metadata: metadata.storage_data.popitem() and None)
    summary, each = faults(saved)
    assert "never stored" in summary.what
    assert each.what.startswith("extra.note")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        check(tmp_path / "none")
    with pytest.raises(CheckpointNotFound):
        check(tmp_path)


def test_a_file_changed_after_the_metadata_is_a_note(saved: Path) -> None:
    written_s = (saved / ".metadata").stat().st_mtime
    os.utime(saved / "__1_0.distcp", (written_s + 100, written_s + 100))
    report = check(saved)
    assert report.faults == []
    assert report.notes == [f"{saved / '__1_0.distcp'}: changed more than 60 s after .metadata, which is written last"]
    for path in saved.glob("*.distcp"):
        os.utime(path, (written_s + 100, written_s + 100))
    assert check(saved).notes == []


def test_many_faults_in_a_file_are_cut_off(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", {f"w{n}": torch.zeros(1) for n in range(150)}, 1)
    content = (folder / "__0_0.distcp").read_bytes().replace(b"PK\x05\x06", b"PK\x05\x07")
    (folder / "__0_0.distcp").write_bytes(content)
    found = faults(folder, deep=True)
    assert len(found) == 101
    assert "too many faults" in found[-1].what


def test_damaged_archives_neither_crash_nor_hang_nor_fill_memory(saved: Path) -> None:
    path = saved / "__0_0.distcp"
    sound = path.read_bytes()
    chance = random.Random(0)
    start_s = time.process_time()
    for _ in range(300):
        content = bytearray(sound)
        for _ in range(chance.choice((1, 1, 1, 3, 20))):
            place = chance.randrange(len(content))
            kind = chance.randrange(3)
            if kind == 0:
                content[place] ^= 1 << chance.randrange(8)
            elif kind == 1:
                content[place : place + 4] = chance.choice((b"\xff" * 4, bytes(4), b"PK\x01\x02"))
            else:
                place, other = (chance.randrange(len(content) - 16) for _ in range(2))
                content[place : place + 16] = content[other : other + 16]
        assert len(content) >= len(sound)
        path.write_bytes(content)
        report = check(saved, deep=chance.random() < 0.5)
        for fault in report.faults:
            assert fault.file == str(path) and fault.key, fault
    assert time.process_time() - start_s < 60


def test_a_million_chunks_cost_no_loop_over_them(tmp_path: Path) -> None:
    builder = IndexBuilder(tmp_path, ARCHIVE)
    files = [builder.file(f"__{rank}_0.distcp") for rank in range(8)]
    for tensor in range(100):
        builder.tensor(f"w{tensor}", "float32", (4000,))
        for row in range(4000):
            builder.chunk((row,), (1,), (files[row % 8], (tensor * 500 + row // 8) * 64, 64))
    index = builder.build()
    for file in files:
        with index.path(file).open("wb") as stream:
            stream.truncate(50_000 * 64)
    paths = [index.path(file) for file in files]
    start_s = time.process_time()
    assert list(file_faults(index, paths)) == []
    assert time.process_time() - start_s < 0.5
    os.truncate(paths[3], 50_000 * 64 - 65)
    (fault,) = file_faults(index, paths)
    assert (fault.file, fault.lost) == (3, "w99 and 1 more")
    assert np.sum(index.file == 3) == 50_000
