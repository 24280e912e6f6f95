"""The ``.metadata`` that we write, unpickled by torch itself."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from reshard.formats import dcp_metadata
from reshard.formats.dcp_metadata_writer import metadata_bytes
from reshard.index.index import ARCHIVE, IndexBuilder, Place

DATA = Path(__file__).parent.parent / "data" / "dcp_metadata"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    state = {
        "model": {"a.weight": torch.randn(5, 3), "b": torch.zeros(0, 4), "half": torch.ones(7, dtype=torch.bfloat16)},
        "optim": {"state": {"a.weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]},
        "naïve ключ": torch.tensor([1, 2]),
        "name": "run",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def written(metadata: dcp_metadata.DcpMetadata) -> Metadata:
    loaded = pickle.loads(metadata_bytes(metadata.index, metadata.index.objects, metadata.paths))
    assert isinstance(loaded, Metadata)
    return loaded


def assert_same(found: Metadata, expected: Metadata) -> None:
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for key, entry in expected.state_dict_metadata.items():
        ours = found.state_dict_metadata[key]
        assert type(ours) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(ours, TensorStorageMetadata)
            assert type(ours.size) is torch.Size
            assert (ours.size, ours.chunks) == (entry.size, entry.chunks)
            for name in ("dtype", "layout", "memory_format", "pin_memory"):
                assert getattr(ours.properties, name) == getattr(entry.properties, name)


def test_it_is_what_stock_wrote(stock: Path) -> None:
    with (stock / ".metadata").open("rb") as file:
        assert_same(written(dcp_metadata.read(stock)), pickle.load(file))


def test_stock_reads_it_and_the_tensors(stock: Path) -> None:
    metadata = dcp_metadata.read(stock)
    (stock / ".metadata").write_bytes(metadata_bytes(metadata.index, metadata.index.objects, metadata.paths))
    state = {"model.a.weight": torch.zeros(5, 3), "naïve ключ": torch.zeros(2, dtype=torch.int64), "name": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=stock, no_dist=True)
    assert state["naïve ключ"].tolist() == [1, 2] and state["name"] == "run"
    assert state["model.a.weight"].abs().sum() > 0


def test_what_was_written_is_read_as_the_same_index(stock: Path, tmp_path: Path) -> None:
    for path in [stock / ".metadata", *DATA.glob("*.metadata")]:
        first = dcp_metadata.read_file(path)
        (tmp_path / ".metadata").write_bytes(metadata_bytes(first.index, first.index.objects, first.paths))
        second = dcp_metadata.read(tmp_path)
        assert second.index.extents() == first.index.extents()
        for name in first.index.names:
            assert second.index.tensor(name) == first.index.tensor(name)


def test_large_numbers_and_keys_without_paths(tmp_path: Path) -> None:
    builder = IndexBuilder(tmp_path, ARCHIVE)
    builder.tensor("w", "float32", (1 << 40, 3))
    for start in (0, 1 << 39):
        builder.chunk((start, 0), (1 << 39, 3), (builder.file("a file"), start + 300, 70_000))
    index = builder.build()
    (tmp_path / ".metadata").write_bytes(metadata_bytes(index, {"o": Place("a file", 255, 256)}, {}))
    found = dcp_metadata.read(tmp_path)
    assert found.index.tensor("w") == index.tensor("w")
    assert found.index.objects == {"o": Place("a file", 255, 256)}
    assert found.paths == {"w": ("w",), "o": ("o",)}


NUMBERS = [0, 1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 40) + 3, (1 << 60) + 1]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_every_length(number: int) -> None:
    builder = IndexBuilder(Path(), ARCHIVE)
    builder.tensor("t", "bfloat16", (number + 1, 3))
    builder.chunk((number, 0), (1, 3), (builder.file("__0_0.distcp"), number, number))
    objects = {"o": Place("another file", number, number)}
    metadata = pickle.loads(metadata_bytes(builder.build(), objects, {"o": ("o", number % (1 << 31))}))
    entry = metadata.state_dict_metadata["t"]
    assert entry.size == torch.Size((number + 1, 3))
    assert entry.chunks[0].offsets == torch.Size((number, 0))
    places = list(metadata.storage_data.values())
    assert [(place.offset, place.length) for place in places] == [(number, number)] * 2
    assert [place.relative_path for place in places] == ["__0_0.distcp", "another file"]
    assert metadata.planner_data == {"t": ("t",), "o": ("o", number % (1 << 31))}


def test_nothing_at_all() -> None:
    metadata = pickle.loads(metadata_bytes(IndexBuilder(Path(), ARCHIVE).build(), {}, {}))
    assert (metadata.state_dict_metadata, metadata.storage_data) == ({}, {})
