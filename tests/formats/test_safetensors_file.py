from __future__ import annotations

import json
import random
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reshard.errors import CheckpointUnsound, ReshardError, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.opening import open_checkpoint
from reshard.formats.safetensors_file import open_file, open_folder
from reshard.formats.safetensors_header import TORCH_NAMES, header_bytes, read_header
from reshard.index.dtypes import ITEM_BYTES

INDEX = "model.safetensors.index.json"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_holds(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.keys) == sorted(expected)
    for name, tensor in expected.items():
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found), bits(tensor)), name


def every_dtype() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    tensors = {}
    for name in TORCH_NAMES.values():
        content = torch.randint(0, 2, (6 * ITEM_BYTES[name],), generator=chance, dtype=torch.uint8)
        tensors[f"of.{name}"] = content.view(getattr(torch, name)).reshape(3, 2)
    return tensors


def weights() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(15.0).reshape(5, 3),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "step": torch.tensor(3),
        "ü.🙂": torch.tensor([True, False]),
    }


def test_one_file_of_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    save_file(every_dtype() | weights(), path, metadata={"made": "here"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert_holds(checkpoint, load_file(path))
        part = checkpoint.read("a.weight", (slice(1, 3), slice(2)))
        assert torch.equal(part, weights()["a.weight"][1:3, :2])


def test_reads_only_the_part_that_is_asked_for(tmp_path: Path) -> None:
    save_file({"w": torch.arange(100_000.0).reshape(1000, 100)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        before = checkpoint.files.bytes_read
        checkpoint.read("w", slice(10, 12))
        assert checkpoint.files.bytes_read - before == 800


def split(folder: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face folder of two files with an index."""
    tensors = weights()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def rewrite(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / INDEX).read_text())
    fields["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(fields))


def test_folder_with_an_index_and_without(tmp_path: Path) -> None:
    tensors = split(tmp_path)
    # What lies beside the files of the index is not of this model.
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    for path in (tmp_path, tmp_path / INDEX):
        with open_checkpoint(path) as checkpoint:
            assert_holds(checkpoint, tensors)
            assert checkpoint.metadata_files == (INDEX,)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)


def test_a_single_whole_file_goes_before_others(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, weights())


def test_a_file_that_the_index_names_is_missing(tmp_path: Path) -> None:
    split(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointUnsound, match=r"model-00002-of-00002\.safetensors: none: missing, and .* names it"):
        open_folder(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointUnsound, match=r"missing, first model-00002-of-00002\.safetensors"):
        open_folder(tmp_path)


def test_a_tensor_missing_in_its_file(tmp_path: Path) -> None:
    split(tmp_path)
    rewrite(tmp_path, step="model-00001-of-00002.safetensors", lost="model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointUnsound, match=r"index\.json: step: names 2 tensors .* model-00002-of") as caught:
        open_folder(tmp_path)
    assert caught.value.details == ("lost: not in model-00001-of-00002.safetensors",)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointUnsound, match=r"b\.safetensors: w: in two files: .* a\.safetensors and b"):
        open_folder(tmp_path)


@pytest.mark.parametrize("file", ["../model-00001-of-00002.safetensors", "/etc/passwd", "..", "", "a\0b", "\ud800", 7])
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, file: object) -> None:
    split(tmp_path)
    rewrite(tmp_path, step=file)
    with pytest.raises(CheckpointUnsound, match=r"index\.json: step: not the name of a file"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "b", "a": "c"}}', "[" * 100_000]
)
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointUnsound, match=r"index\.json: (empty|not an index)"):
        open_folder(tmp_path)


def test_an_index_of_nothing(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointUnsound, match="names no safetensors files"):
        open_folder(tmp_path)


def test_several_indexes(tmp_path: Path) -> None:
    tensors = split(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "a.safetensors.index.json")
    shutil.copy(tmp_path / "a.safetensors.index.json", tmp_path / "b.safetensors.index.json")
    with pytest.raises(UsageError, match=r"several indexes.*a\.safetensors\.index\.json, b"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path / "b.safetensors.index.json") as checkpoint:
        assert_holds(checkpoint, tensors)


def test_empty_pointer_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content, match in (
        (b"", r"empty \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"something else altogether", "not a safetensors file: expected the length of a JSON header"),
        (struct.pack("<Q", 500) + b"{}", "cut short inside the safetensors header: expected 508 bytes, found 10"),
    ):
        path.write_bytes(content)
        for place in (path, tmp_path):
            with pytest.raises(CheckpointUnsound, match=rf"model\.safetensors: .*{match}"):
                open_checkpoint(place)


def write(path: Path, fields: dict[str, Any], content: bytes) -> None:
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def entry(dtype: str, shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"a": entry("F32", [2], 0, 4)}, "a: 4 bytes"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, "a and b overlap"),
        ({"a": entry("F32", [4], 0, 16)}, "a: ends at byte"),
        ({"a": entry("F31", [2], 0, 8)}, "unknown dtype"),
        ({"a": entry("F4", [3], 0, 1)}, "half a byte"),
        ({"a": entry("F4", [], 0, 1)}, "half a byte"),
        ({"a": entry("U8", [1] * 65, 0, 1)}, "a size or an offset"),
        ({"a": entry("U8", [-1, -1], 0, 1)}, "a size or an offset"),
        ({"a": entry("U8", [True], 0, 1)}, "a size or an offset"),
        ({"a": entry("U8", 1, 0, 1)}, "TypeError"),
        ({"a": 5}, "TypeError"),
        ({"__metadata__": {"a": 5}}, "other than strings"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, fields: dict[str, Any], match: str) -> None:
    path = tmp_path / "model.safetensors"
    write(path, fields, bytes(12))
    with pytest.raises(CheckpointUnsound, match=rf"model\.safetensors: not a sound .*{match}"):
        open_file(path)


def test_a_header_is_read_by_safetensors_itself(tmp_path: Path) -> None:
    tensors = every_dtype() | weights()
    names = [(name, str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in tensors.items()]
    head, starts = header_bytes(names, {"format": "pt"})
    assert len(head) % 8 == 0
    path = tmp_path / "written"
    path.write_bytes(head + b"".join(bytes(bits(tensor).tolist()) for tensor in tensors.values()))
    assert_holds(open_file(path), load_file(path))
    assert_holds(open_file(path), tensors)
    content = path.read_bytes()
    header = read_header(lambda start, length: content[start : start + length], len(content))
    assert header is not None and header.metadata == {"format": "pt"}
    assert [entry[2] for entry in header.tensors.values()] == starts


def test_a_header_of_nothing() -> None:
    head, starts = header_bytes([])
    assert (len(head) % 8, starts) == (0, [])


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "bits8", "qint8", "no such"])
def test_a_dtype_without_a_name_is_refused(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"layer.w: safetensors has no name for this dtype: found {dtype}"):
        header_bytes([("layer.w", dtype, (2,))])


def test_names_that_a_header_cannot_have() -> None:
    for names in (["a", "a"], ["__metadata__"]):
        with pytest.raises(UsageError, match="second entry"):
            header_bytes([(name, "float32", (2,)) for name in names])


def sharded_state() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return {
        "rows": torch.randn(7, 4, generator=chance),
        "few": torch.randn(2, 3, generator=chance),
        "columns": torch.randn(4, 9, generator=chance),
        "whole": torch.arange(5),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    }


def save_shards(folder: str, consolidate: bool, files: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    placements = {"columns": [Shard(1)], "whole": [Replicate()], "scalar": [Replicate()]}
    state = {
        name: distribute_tensor(tensor, mesh, placements.get(name, [Shard(0)]))
        for name, tensor in sharded_state().items()
        if not consolidate or tensor.is_floating_point()
    }
    writer = HuggingFaceStorageWriter(
        path=folder,
        save_distributed=True,
        enable_consolidation=consolidate,
        fqn_to_index_mapping={name: 1 + number % files for number, name in enumerate(state)},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    run_ranks(3, save_shards, str(folder), False, 2)
    return folder


@pytest.fixture
def copied(shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shards, tmp_path / "copied"))


def test_shards_of_the_dcp_writer(shards: Path) -> None:
    with open_checkpoint(shards) as checkpoint:
        assert_holds(checkpoint, sharded_state())
        assert torch.equal(checkpoint.read("rows", slice(2, 5)), sharded_state()["rows"][2:5])
        assert len(checkpoint.index.tensor("rows").chunks) == 3
        assert len(checkpoint.index.tensor("whole").chunks) == 1


def test_one_shard_stands_for_all(shards: Path) -> None:
    with open_checkpoint(shards / "shard-00002-model-00001-of-00002.safetensors") as checkpoint:
        assert_holds(checkpoint, sharded_state())


def test_the_consolidated_copy_goes_before_the_shards(tmp_path: Path) -> None:
    run_ranks(3, save_shards, str(tmp_path), True, 1)
    expected = {name: tensor for name, tensor in sharded_state().items() if tensor.is_floating_point()}
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.index.files == ["model-00001-of-00001.safetensors"]
        # What the file says: torch 2.13 consolidates a 0-dim tensor to zero.
        assert_holds(checkpoint, load_file(tmp_path / "model-00001-of-00001.safetensors"))
        assert torch.equal(checkpoint.read("columns"), expected["columns"])
    with open_checkpoint(tmp_path / "sharded") as checkpoint:
        assert len(checkpoint.index.files) == 3
        assert_holds(checkpoint, expected)
    # torch stops halfway where a tensor of integers is among them, and leaves files that have headers only.
    (tmp_path / INDEX).unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path / "sharded"


def test_a_shard_is_missing(copied: Path) -> None:
    for path in copied.glob("shard-00002-*"):
        path.unlink()
    with pytest.raises(
        CheckpointUnsound, match=r"copied: columns: the shards do not hold every element once \(no chunk"
    ) as caught:
        open_checkpoint(copied)
    assert "rows: no chunk holds [3:6, 0:4] of the shape (7, 4)" in caught.value.details


def test_a_part_of_all_shards_is_missing(copied: Path) -> None:
    for path in copied.glob("*-model-00002-of-00002.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointUnsound, match=r"missing, first model-00002-of-00002\.safetensors"):
        open_checkpoint(copied)


def test_a_shard_of_another_save(copied: Path) -> None:
    shutil.copy(
        copied / "shard-00001-model-00001-of-00002.safetensors", copied / "shard-00009-model-00001-of-00002.safetensors"
    )
    with pytest.raises(CheckpointUnsound, match="two chunks hold"):
        open_checkpoint(copied)


@pytest.mark.parametrize(
    "info", ["", "[]", '{"w": {}}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}', "[" * 9999]
)
def test_sharding_info_that_is_none(tmp_path: Path, info: str) -> None:
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.zeros(2, 2)}, path, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(CheckpointUnsound, match=r"shard-00001.*: no sound DCP_SHARDING_INFO"):
        open_checkpoint(tmp_path)


def test_shards_that_differ_in_dtype(tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.float32, torch.float16)):
        info = json.dumps({"w": {"saved_offsets": [2 * number]}})
        path = tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors"
        save_file({"w": torch.zeros(2, dtype=dtype)}, path, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(CheckpointUnsound, match="w: shards of one tensor differ in dtype"):
        open_checkpoint(tmp_path)


def test_mutated_and_truncated_files_raise_only_our_errors(tmp_path: Path, copied: Path) -> None:
    split(tmp_path)
    chance = random.Random(0)
    for path in [*tmp_path.glob("*.safetensors"), tmp_path / INDEX, *list(copied.glob("*"))[:2]]:
        original = path.read_bytes()
        for turn in range(120):
            content = bytearray(original)
            if turn % 3:
                for _ in range(chance.choice((1, 1, 4))):
                    content[chance.randrange(len(content))] = chance.randrange(256)
            else:
                del content[chance.randrange(len(content)) :]
            path.write_bytes(content)
            try:
                with open_folder(path.parent) as checkpoint:
                    for name in checkpoint.keys:
                        checkpoint.read_array(name)
            except ReshardError as error:
                assert str(path.parent) in str(error).splitlines()[0]
        path.write_bytes(original)
