from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from sharded import training_state, write_sharded

from reshard.errors import CheckpointUnsound
from reshard.formats import fingerprint, manifest
from reshard.formats.fingerprint import Fingerprint, fingerprints
from reshard.formats.manifest import Manifest, World
from reshard.formats.opening import open_checkpoint

OBJECTS = {"extra.a": {"x": [1, 2]}, "extra.b": "text" * 30_000}


def expected(folder: Path) -> dict[str, Fingerprint]:
    """By `zipfile`, archive by archive."""
    storage = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    found = {}
    for path in sorted(folder.glob("*.distcp")):
        content = path.read_bytes()
        crcs = b""
        for info in sorted((i for i in storage.values() if i.relative_path == path.name), key=lambda i: i.offset):
            with zipfile.ZipFile(io.BytesIO(content[info.offset : info.offset + info.length])) as archive:
                records = {name.partition("/")[2]: entry.CRC for name, entry in archive.NameToInfo.items()}
            crcs += struct.pack("<I", records.get("data/0", records["data.pkl"]))
        found[path.name] = Fingerprint(len(content), f"{zlib.crc32(crcs):08x}")
    return found


def of(folder: Path) -> dict[str, Fingerprint]:
    with open_checkpoint(folder) as checkpoint:
        return fingerprints(checkpoint)


def test_is_what_zipfile_says(tmp_path: Path) -> None:
    state = training_state() | {"model.empty": torch.zeros(0, 3), "model.t": torch.randn(4, 6).t()}
    folder = write_sharded(tmp_path / "x", state, 3, OBJECTS)
    found = of(folder)
    assert found == expected(folder)
    assert len(found) == 3


def test_of_some_files(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", training_state(), 3, OBJECTS)
    with open_checkpoint(folder) as checkpoint:
        assert fingerprints(checkpoint, [1]) == {checkpoint.index.files[1]: of(folder)[checkpoint.index.files[1]]}
        assert fingerprints(checkpoint, []) == {}


def test_changes_with_any_element_and_with_any_object(tmp_path: Path) -> None:
    first = of(write_sharded(tmp_path / "x", training_state(), 2, OBJECTS))
    assert of(write_sharded(tmp_path / "same", training_state(), 2, OBJECTS)) == first
    state = training_state()
    state["model.d"][0, 0] += 1
    assert of(write_sharded(tmp_path / "y", state, 2, OBJECTS))["__0_0.distcp"] != first["__0_0.distcp"]
    changed = of(write_sharded(tmp_path / "z", training_state(), 2, OBJECTS | {"extra.a": {"x": [1, 3]}}))
    assert [name for name in first if changed[name] != first[name]] == ["__0_0.distcp"]
    assert all(changed[name].length_bytes == first[name].length_bytes for name in first)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", {}, 1, {"extra.a": 1})
    content = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(content.replace(b"PK\x05\x06", b"PK\x05\x07"))
    with pytest.raises(CheckpointUnsound, match=r"__0_0\.distcp: extra\.a: not a sound torch\.save archive"):
        of(folder)


def test_of_a_format_without_archives_only_lengths_count(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (found,) = of(tmp_path / "model.safetensors").values()
    assert found == Fingerprint((tmp_path / "model.safetensors").stat().st_size, f"{zlib.crc32(bytes(4)):08x}")


def test_through_the_manifest(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "x", training_state(), 2)
    found = of(folder)
    content = Manifest(1, "1", World(1, 1, 1, {}), {}, [], None, None, {}, None, None, {}, {}, {}, "")
    assert fingerprint.recorded(content) is None
    files = {name: entry.to_json() for name, entry in found.items()}
    content = Manifest(1, "1", World(1, 1, 1, {}), {}, [], None, None, {}, None, None, {}, {}, {}, "", files)
    (folder / manifest.FILE_NAME).write_bytes(manifest.to_bytes(content))
    assert fingerprint.recorded(manifest.read(folder)) == found
