from __future__ import annotations

import enum
import io
import json
import os
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.errors import CheckpointUnsound, ReshardError, UnsafePickle
from reshard.formats import dcp_metadata
from reshard.index.index import Chunk, Extent

DATA = Path(__file__).parent.parent / "data" / "dcp_metadata"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by stock DCP, with what a training state is made of."""
    folder = tmp_path_factory.mktemp("saved")
    state = {
        "model": {"a.weight": torch.randn(5, 3), "b": torch.zeros(0, 4), "half": torch.ones(7, dtype=torch.bfloat16)},
        "optim": {"state": {"a.weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]},
        "seen": torch.tensor([1, 2]),
        "name": "run",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def stock(path: Path) -> Metadata:
    with path.open("rb") as file:
        loaded = pickle.load(file)
    assert isinstance(loaded, Metadata)
    return loaded


def assert_same_as_stock(found: dcp_metadata.DcpMetadata, expected: Metadata) -> None:
    entries = expected.state_dict_metadata
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    assert found.index.objects.keys() == entries.keys() - tensors.keys()
    assert found.index.names == list(tensors)
    for key, entry in tensors.items():
        tensor = found.index.tensor(key)
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(entry.properties.dtype), tuple(entry.size))
        places = [expected.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in entry.chunks]
        assert tensor.chunks == tuple(
            Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
            for chunk, place in zip(entry.chunks, places, strict=True)
        )
        assert all(type(chunk.offsets) is tuple for chunk in tensor.chunks)
    by_file: dict[str, list[Extent]] = {}
    for index, place in expected.storage_data.items():
        by_file.setdefault(place.relative_path, []).append(Extent(place.offset, place.length, index.fqn))
    assert found.index.extents() == {file: sorted(extents) for file, extents in by_file.items()}
    assert found.paths == (expected.planner_data or {})


def test_agrees_with_torch_on_its_own_checkpoint(saved: Path) -> None:
    found = dcp_metadata.read(saved)
    assert_same_as_stock(found, stock(saved / ".metadata"))
    assert found.paths["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")
    assert found.index.tensor("model.half").dtype == "bfloat16"
    assert found.index.tensor("optim.state.a.weight.step").shape == ()
    assert not found.transforms


@pytest.mark.parametrize("path", sorted(DATA.glob("*.metadata")), ids=lambda path: path.stem)
def test_agrees_with_torch_on_what_others_wrote(path: Path) -> None:
    assert_same_as_stock(dcp_metadata.read_file(path), stock(path))


def test_chunks_of_ranks_without_rows_are_kept() -> None:
    index = dcp_metadata.read_file(DATA / "torch_2_4_rank_without_rows.metadata").index
    tensor = index.tensor("model.small")
    assert [chunk.offsets for chunk in tensor.chunks] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert tensor.chunks[3].sizes == (0, 24)


def test_every_dtype_of_torch_is_known(tmp_path: Path) -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes.discard(getattr(torch, "bit", torch.float32))
    metadata = Metadata(
        {str(dtype): TensorStorageMetadata(TensorProperties(dtype), torch.Size(), []) for dtype in dtypes}
    )
    metadata.storage_data = {}
    index = read(tmp_path, metadata).index
    assert [f"torch.{dtype}" for dtype in index.dtypes] == index.names


def test_the_spelling_of_torch_2_2(tmp_path: Path) -> None:
    metadata = tiny()
    text = pickle.dumps(metadata, protocol=2)
    module = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    text = text.replace(b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n", module + b"TensorProperties\n")
    old = text.replace(
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n", module + b"MEM_FORMAT_ENCODING\n"
    )
    assert old.count(module) == 2
    (tmp_path / ".metadata").write_bytes(old)
    assert_same_as_stock(dcp_metadata.read(tmp_path), metadata)


def test_needs_no_torch(saved: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from reshard.formats import dcp_metadata\n"
        "print(dcp_metadata.read(sys.argv[1]).index.files)"
    )
    result = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.replace("'", '"')) == ["__0_0.distcp"]


def tiny(**places: Any) -> Metadata:
    """Two chunks of a tensor and one object, in one file; ``places`` overrides where they are."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), chunks)
    return Metadata(
        {"w": tensor, "lr": BytesStorageMetadata()},
        planner_data={"w": ("w",), "lr": ("lr",)},
        storage_data={
            MetadataIndex("w", [0, 0]): places.get("first", _StorageInfo("__0_0.distcp", 0, 10)),
            MetadataIndex("w", [2, 0], 1): places.get("second", _StorageInfo("__0_0.distcp", 15, 10)),
            MetadataIndex("lr"): places.get("object", _StorageInfo("__0_0.distcp", 10, 5)),
        },
    )


def read(folder: Path, metadata: object) -> dcp_metadata.DcpMetadata:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return dcp_metadata.read(folder)


def test_extents_are_in_order(tmp_path: Path) -> None:
    extents = read(tmp_path, tiny()).index.extents()
    assert extents == {"__0_0.distcp": [Extent(0, 10, "w"), Extent(10, 5, "lr"), Extent(15, 10, "w")]}


def test_transforms_are_reported(tmp_path: Path) -> None:
    found = read(tmp_path, tiny(first=_StorageInfo("__0_0.distcp", 0, 10, ["zstd"])))
    assert found.transforms == {"zstd"}


@pytest.mark.parametrize(
    "name", ["../other/__0_0.distcp", "/etc/passwd", "a/../../b", "..", "", "a/", "a\0b", "\ud800"]
)
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointUnsound, match="not inside the checkpoint"):
        read(tmp_path, tiny(second=_StorageInfo(name, 0, 10)))


def test_a_subfolder_is_fine(tmp_path: Path) -> None:
    assert "sub/..x.distcp" in read(tmp_path, tiny(second=_StorageInfo("sub/..x.distcp", 0, 10))).index.files


def test_chunks_and_objects_without_bytes_are_all_named(tmp_path: Path) -> None:
    metadata = tiny()
    metadata.storage_data = {MetadataIndex("w", [0, 0]): _StorageInfo("f", 0, 1)}
    with pytest.raises(CheckpointUnsound, match="never stored") as caught:
        read(tmp_path, metadata)
    assert [detail.split(":")[0] for detail in caught.value.details] == ["w", "lr"]
    assert "(2, 3) at (2, 0)" in caught.value.details[0]


def test_data_of_another_planner_gives_no_paths(tmp_path: Path) -> None:
    for planner_data in ("own format", {"w": "w"}, {1: ("w",)}, {"w": (("w",),)}, None):
        metadata = tiny()
        metadata.planner_data = planner_data
        assert read(tmp_path, metadata).paths == {}


def test_a_foreign_class_is_refused_by_name(tmp_path: Path) -> None:
    metadata = tiny()
    metadata.planner_data = random.Random()
    with pytest.raises(UnsafePickle, match=r"random\.Random"):
        read(tmp_path, metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        {"not": "metadata"},
        TensorProperties(torch.float32),
        Metadata({"w": "nothing"}, storage_data={}),  # type: ignore[dict-item]
        Metadata({1: BytesStorageMetadata()}, storage_data={}),  # type: ignore[dict-item]
        Metadata({}, storage_data=None),
        Metadata({}, storage_data={"key": _StorageInfo("f", 0, 1)}),
        tiny(first=_StorageInfo("f", -1, 10)),
        tiny(first=_StorageInfo("f", 0, 1 << 70)),
        tiny(first=_StorageInfo("f", True, 10)),
        tiny(first=_StorageInfo("f", 0, 10, 5)),  # type: ignore[arg-type]
        tiny(first=_StorageInfo(7, 0, 10)),  # type: ignore[arg-type]
    ],
)
def test_a_pickle_of_something_else_is_unsound(tmp_path: Path, metadata: object) -> None:
    with pytest.raises(CheckpointUnsound, match="not the metadata of a checkpoint"):
        read(tmp_path, metadata)


def test_a_chunk_of_other_rank_than_its_tensor_is_unsound(tmp_path: Path) -> None:
    metadata = tiny()
    metadata.state_dict_metadata["w"].size = torch.Size([12])  # type: ignore[union-attr]
    with pytest.raises(CheckpointUnsound, match="in a tensor of"):
        read(tmp_path, metadata)


def test_missing_metadata_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnsound, match=r"\.metadata: missing; the save was not finished"):
        dcp_metadata.read(tmp_path)
    with pytest.raises(CheckpointUnsound, match="missing"):
        dcp_metadata.read(tmp_path / "no such folder")
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(CheckpointUnsound, match=r"use_collectives=False.*reshard offline"):
        dcp_metadata.read(tmp_path)


def test_empty_pointer_and_truncated(tmp_path: Path, saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    for head, reason in [(b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")]:
        (tmp_path / ".metadata").write_bytes(head)
        with pytest.raises(CheckpointUnsound, match=reason):
            dcp_metadata.read(tmp_path)
    for length in range(1, len(content), 37):
        (tmp_path / ".metadata").write_bytes(content[:length])
        with pytest.raises(CheckpointUnsound, match="not a readable pickle"):
            dcp_metadata.read(tmp_path)


def test_flipped_bytes_raise_only_our_errors(tmp_path: Path, saved: Path) -> None:
    chance = random.Random(0)
    originals = [(saved / ".metadata").read_bytes(), *(path.read_bytes() for path in DATA.glob("*.metadata"))]
    for turn in range(900):
        content = bytearray(originals[turn % len(originals)])
        content[chance.randrange(len(content))] = chance.randrange(256)
        (tmp_path / ".metadata").write_bytes(content)
        try:
            dcp_metadata.read(tmp_path)
        except ReshardError as error:
            assert os.fspath(tmp_path) in str(error)


class ByName(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_memory_formats_by_name_are_read(saved: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    ByName(content, protocol=4).dump(stock(saved / ".metadata"))
    assert b"getattr" in content.getvalue()
    (tmp_path / ".metadata").write_bytes(content.getvalue())
    assert_same_as_stock(dcp_metadata.read(tmp_path), stock(saved / ".metadata"))


@pytest.mark.parametrize("reach", [(Path, "unlink"), (Metadata, "__init__"), (torch.Size, "__class__")])
def test_no_other_attribute_is_reached(tmp_path: Path, reach: tuple[Any, str]) -> None:
    class Reaching:
        def __reduce__(self) -> Any:
            return (getattr, reach)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Reaching()))
    with pytest.raises(CheckpointUnsound):
        dcp_metadata.read(tmp_path)
