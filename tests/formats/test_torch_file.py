from __future__ import annotations

import argparse
import collections
import datetime
import io
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard.errors import CheckpointUnsound, ReshardError, UnsafePickle
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.opening import open_checkpoint
from reshard.formats.torch_file import open_torch_file
from reshard.index.dtypes import ITEM_BYTES

pytestmark = pytest.mark.filterwarnings("ignore")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def leaves(value: Any, steps: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every leaf of what torch.load gives, entering lists and tuples too."""
    if isinstance(value, dict):
        entries = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)):
        entries = [(str(number), entry) for number, entry in enumerate(value)]
    else:
        return {".".join(steps): value}
    return {key: leaf for step, entry in entries for key, leaf in leaves(entry, (*steps, step)).items()}


def assert_holds(checkpoint: Checkpoint, path: Path) -> None:
    """The tensors of the file, as torch itself loads them."""
    loaded = leaves(torch.load(path, weights_only=False))
    expected = {key: leaf for key, leaf in loaded.items() if isinstance(leaf, torch.Tensor)}
    assert sorted(checkpoint.keys) == sorted(expected)
    for key, tensor in expected.items():
        found = checkpoint.read(key)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(bits(found), bits(tensor)), key


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": [torch.get_rng_state(), torch.tensor([1, 2])],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "epoch": 3,
    }


def test_a_training_state(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.pt", training_state())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "torch"
        assert_holds(checkpoint, path)
        assert checkpoint.values["epoch"] == 3
        assert checkpoint.values["optimizer.param_groups.0.lr"] == 0.1
        assert checkpoint.values["optimizer.param_groups.0.betas"] == (0.9, 0.999)
        assert checkpoint.values["optimizer.param_groups.0.params"] == [0, 1, 2, 3]
        assert checkpoint.paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
        assert checkpoint.paths["optimizer.state.0.exp_avg"] == ("optimizer", "state", "0", "exp_avg")
        assert checkpoint.paths["model.0.weight"] == ("model", "0.weight")
        assert checkpoint.paths["rng.1"] == ("rng", 1)


def test_the_keys_are_those_of_dcp(tmp_path: Path) -> None:
    state = training_state() | {"parameter": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with (
        open_checkpoint(saved(tmp_path / "state.pt", state)) as ours,
        open_checkpoint(tmp_path / "dcp") as stock,
    ):
        assert sorted(ours.keys) == sorted(stock.keys)
        assert ours.values.keys() == stock.index.objects.keys()
        assert ours.paths == stock.paths


def test_every_dtype(tmp_path: Path) -> None:
    state = {}
    for name, item_bytes in ITEM_BYTES.items():
        content = torch.randint(0, 2, (6 * item_bytes,), dtype=torch.uint8)
        state[name] = content.view(getattr(torch, name)).reshape(2, 3)
    path = saved(tmp_path / "dtypes", state)
    with open_checkpoint(path) as checkpoint:
        assert_holds(checkpoint, path)


def test_views_share_their_storage(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(5, 12)
    state = {
        "base": base,
        "tied": base,
        "transposed": base.T,
        "part": base[1:4, 2:9],
        "steps": base[::2, ::3],
        "scalar": base[2, 3],
        "repeated": base[1, :4].expand(3, 4),
        "empty": base[:0],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    path = saved(tmp_path / "views", state)
    with open_checkpoint(path) as checkpoint:
        assert_holds(checkpoint, path)
        index, payloads = checkpoint.index, checkpoint.payloads
        assert len(set(payloads.record_start_bytes[:8].tolist())) == 1
        assert index.start_bytes[0] == index.start_bytes[1] == payloads.start_bytes[0]
        assert payloads.strides[index.number["transposed"]] == (1, 12)
        assert index.number["base"] not in payloads.strides
        part = checkpoint.read("transposed", (slice(3, 7), slice(1, 3)))
        assert torch.equal(part, base.T[3:7, 1:3])
        # No chunk ends behind its record.
        ends = index.start_bytes + index.length_bytes
        assert (ends <= payloads.record_start_bytes + payloads.record_bytes).all()


@pytest.mark.parametrize("with_crc", [True, False])
def test_checksums_are_known_where_there_are_any(tmp_path: Path, with_crc: bool) -> None:
    torch.serialization.set_crc32_options(with_crc)
    try:
        path = saved(tmp_path / "crc", {"w": torch.arange(4.0), "none": torch.empty(0)})
    finally:
        torch.serialization.set_crc32_options(True)
    with open_torch_file(path) as checkpoint:
        crc = zlib.crc32(np.arange(4, dtype=np.float32).tobytes())
        assert checkpoint.payloads.crc[0] == (crc if with_crc else -1)
        assert checkpoint.payloads.record_bytes.tolist() == [16, 0]


def test_plain_values(tmp_path: Path) -> None:
    values = {
        "none": None, "yes": True, "number": 2**80, "float": 0.5, "complex": 1 + 2j, "text": "ü", "bytes": b"\xff\0",
        "no_bytes": b"", "byte_array": bytearray(b"\1\2"), "set": {1, 2}, "frozen": frozenset("a"),
        "slice": slice(1, None, 2), "list": [1, [2, 3]], "tuple": (1, ("a",)), "size": torch.Size([2, 3]),
        "when": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc), "day": datetime.date(2026, 1, 2),
        "while": datetime.timedelta(days=1, microseconds=2), "empty": {}, "empty_list": [],
        "keyed": {(1, 2): "pair"}, "counted": collections.Counter("aab"),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3), "column_major": np.asfortranarray(np.eye(2, 3)),
        "scalar": np.float64(0.25), "no_numbers": np.zeros((0, 2)), "words": np.array(["a", "bc"]),
        "big_endian": np.arange(3, dtype=">u4"), "numpy_bool": np.bool_(True),
    }  # fmt: skip
    changed = {
        "dtype": (torch.bfloat16, "bfloat16"),
        "device": (torch.device("cuda", 1), "cuda:1"),
        "cpu": (torch.device("cpu"), "cpu"),
        "path": (pathlib.PurePosixPath("/a/b"), "/a/b"),
        "windows": (pathlib.PureWindowsPath("c:/a"), "c:\\a"),
    }
    path = saved(tmp_path / "values", values | {key: value for key, (value, _) in changed.items()})
    with open_torch_file(path) as checkpoint:
        found = dict(checkpoint.values)
    assert {key.partition(".")[0] for key in found} == values.keys() | changed.keys()
    assert {key: found[key] for key in changed} == {key: value for key, (_, value) in changed.items()}
    assert found.pop("counted.a") == 2 and found.pop("counted.b") == 1
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(found[key], value) and found[key].dtype == value.dtype
        elif key != "counted":
            assert found[key] == value, key
            assert type(found[key]) is {torch.Size: tuple, np.float64: float, np.bool_: bool}.get(
                type(value), type(value)
            )


def test_namespaces_and_default_dicts_are_entered(tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(lr=0.1, items=5, inner=argparse.Namespace(w=torch.ones(2))),
        "state": collections.defaultdict(dict, {0: {"step": torch.tensor(1.0)}}),
        "ordered": collections.OrderedDict(b=1, a=2),
        "listed": [{"lr": 0.1}, [argparse.Namespace(x=1)], (torch.zeros(1), 2)],
    }
    path = saved(tmp_path / "state", state)
    with open_torch_file(path) as checkpoint:
        assert checkpoint.keys == ["args.inner.w", "state.0.step", "listed.2.0"]
        assert checkpoint.values == {
            "args.lr": 0.1, "args.items": 5, "ordered.b": 1, "ordered.a": 2, "listed.0.lr": 0.1, "listed.1.0.x": 1,
            "listed.2.1": 2,
        }  # fmt: skip


@pytest.mark.parametrize("root", [[torch.zeros(1)], (torch.zeros(1),), {7: torch.zeros(1)}, {None: torch.zeros(1)}])
def test_roots_without_text_keys(tmp_path: Path, root: Any) -> None:
    path = saved(tmp_path / "root", root)
    with open_torch_file(path) as checkpoint:
        assert_holds(checkpoint, path)


def test_any_name_of_file_and_folder(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.b.pt", {"w": torch.arange(3)})
    moved = path.rename(tmp_path / "weights")
    copy = tmp_path / "copy"
    with zipfile.ZipFile(moved) as source, zipfile.ZipFile(copy, "w") as target:
        for name in source.namelist():
            target.writestr("any folder/" + name.partition("/")[2], source.read(name))
    for place in (moved, copy):
        with open_checkpoint(place) as checkpoint:
            assert checkpoint.read("w").tolist() == [0, 1, 2]


def test_needs_no_torch(tmp_path: Path) -> None:
    path = saved(tmp_path / "state", training_state())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import reshard\n"
        "print(reshard.open_checkpoint(sys.argv[1]).read_array('rng.1'))"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[1 2]"


def test_colliding_keys(tmp_path: Path) -> None:
    for state, found in (
        ({"a": {"b": torch.zeros(1)}, "a.b": 5}, r"\['a', 'b'\] and \['a\.b'\]"),
        ({"a": {"b": 1, "c": {0: 1, "0": 2}}}, "as text and as a number"),
    ):
        with pytest.raises(CheckpointUnsound, match=rf"state: a\..*: two entries have this key: found .*{found}"):
            open_torch_file(saved(tmp_path / "state", state))


@pytest.mark.parametrize("root", [torch.zeros(1), 5, "text", {}, [1, 2], {(1, 2): 3}])
def test_what_has_no_names(tmp_path: Path, root: Any) -> None:
    with pytest.raises(CheckpointUnsound, match="root: holds nothing that has a name"):
        open_torch_file(saved(tmp_path / "root", root))


def test_a_tensor_that_cannot_have_a_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "state", {"a": {"pairs": {(1, 2): torch.zeros(1)}}})
    with pytest.raises(CheckpointUnsound, match=r"state: a\.pairs: a tensor where it cannot have a name"):
        open_torch_file(path)


class Custom:
    pass


def test_foreign_classes_are_refused_by_name(tmp_path: Path) -> None:
    for value, name in (
        (Custom(), "Custom"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "_rebuild_qtensor"),
        (torch.ones(2).to_sparse(), "_rebuild_sparse_tensor"),
        (np.array([None]), "numpy's O8 is not a type of plain numbers"),
    ):
        with pytest.raises(CheckpointUnsound, match=name) as caught:
            open_torch_file(saved(tmp_path / "foreign", {"x": value}))
        assert str(tmp_path / "foreign") in str(caught.value)
    assert isinstance(caught.value, CheckpointUnsound)


def archive(path: Path, content: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        for name, data in {"data.pkl": content, "version": b"3\n", **records}.items():
            target.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


def called(module: str, name: str, argument: bytes) -> bytes:
    """A pickle of {"x": module.name(argument)}."""
    return b"}X\1\0\0\0x" + f"c{module}\n{name}\n".encode() + b"(" + argument + b"tRs."


def test_the_calls_that_are_allowed_are_cheap(tmp_path: Path) -> None:
    # Ten to the 12th bytes, were it the real one.
    number = b"\x8a\6" + (10**12).to_bytes(6, "little")
    for module, name in (("__builtin__", "bytearray"), ("builtins", "bytes"), ("builtins", "int"), ("numpy", "dtype")):
        with pytest.raises(CheckpointUnsound, match="not a readable pickle"):
            open_torch_file(archive(tmp_path / "call", called(module, name, number)))
    for module, name in (("posix", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("numpy", "load")):
        with pytest.raises(UnsafePickle, match=f"{module}.{name}"):
            open_torch_file(archive(tmp_path / "call", called(module, name, number)))


def test_structures_that_never_end(tmp_path: Path) -> None:
    inside_itself: list[Any] = []
    inside_itself.append(inside_itself)
    keyed: dict[str, Any] = {}
    keyed["again"] = keyed
    deep: Any = 1
    wide: Any = [1]
    wide_dict: Any = {"a": 1}
    for _ in range(60):
        wide = [wide, wide]
        wide_dict = {"a": wide_dict, "b": wide_dict}
    for _ in range(400):
        deep = [deep]
    for value in (inside_itself, {"x": inside_itself}, keyed, {"x": deep}, {"x": wide}, wide_dict):
        path = archive(tmp_path / "endless", pickle.dumps(value, protocol=2))
        with pytest.raises(CheckpointUnsound, match=r"endless: .*(too many places|levels deep)"):
            open_torch_file(path)


def test_old_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.addfile(tarfile.TarInfo("pickle"))
    for content in (old, pickle.dumps({"a": 1}), pickle.dumps({"a": 1}, protocol=2), tar.getvalue()):
        path.write_bytes(content)
        with pytest.raises(
            CheckpointUnsound, match=r"old\.pt: a file of torch before 1\.6.*expected a zip archive.*save"
        ):
            open_checkpoint(path)


def test_empty_pointer_and_archives_of_others(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for content, match in (
        (b"", r"empty \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ):
        path.write_bytes(content)
        for opener in (open_checkpoint, open_torch_file):
            with pytest.raises(CheckpointUnsound, match=rf"file\.pt: .*{match}"):
                opener(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", "<w/>")
    with pytest.raises(CheckpointUnsound, match=r"file\.pt: a zip .*expected a record data\.pkl .*found document\.xml"):
        open_checkpoint(path)
    np.savez(tmp_path / "arrays.npz", a=np.zeros(2))
    with pytest.raises(CheckpointUnsound, match=r"arrays\.npz: not a sound torch\.save archive .*in no folder"):
        open_checkpoint(tmp_path / "arrays.npz")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"}." + bytes(1000))
    with pytest.raises(CheckpointUnsound, match=r"file\.pt: not a sound torch\.save archive .*compressed"):
        open_checkpoint(path)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "big", b"}.", byteorder=b"big")
    with pytest.raises(CheckpointUnsound, match="another byte order: expected little, found b'big'"):
        open_torch_file(path)


def test_a_tensor_that_its_storage_does_not_hold(tmp_path: Path) -> None:
    path = saved(tmp_path / "state", {"a": {"w": torch.zeros(4)}})
    with zipfile.ZipFile(path) as file:
        content = file.read("state/data.pkl")
    archive(tmp_path / "state", content, data__0=bytes(12))
    with pytest.raises(CheckpointUnsound, match=r"state: a\.w: the tensor ends at byte 16 of a storage of 12"):
        open_torch_file(path)
    archive(tmp_path / "state", content)
    with pytest.raises(CheckpointUnsound, match=r"state: a\.w: no record data/0"):
        open_torch_file(path)
    # Of a size that only a stride of zero makes possible.
    huge = content.replace(b"K\x04\x85", b"\x8a\x08" + struct.pack("<q", 1 << 61) + b"\x85").replace(
        b"K\x01\x85", b"K\x00\x85"
    )
    archive(tmp_path / "state", huge, data__0=bytes(16))
    with pytest.raises(CheckpointUnsound, match=r"state: a\.w: no tensor has this shape"):
        open_torch_file(path)


def test_mutated_and_truncated_files_raise_only_our_errors(tmp_path: Path) -> None:
    chance = random.Random(0)
    path = saved(tmp_path / "state.pt", training_state() | {"numpy": np.arange(3), "args": argparse.Namespace(a=1)})
    original = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("state/data.pkl")
        pickled = range(info.header_offset, info.header_offset + 100 + info.file_size)
    for turn in range(600):
        content = bytearray(original)
        if turn % 4:
            places = pickled if turn % 4 == 1 else range(len(content))
            for _ in range(chance.choice((1, 1, 5))):
                content[chance.choice(places)] = chance.randrange(256)
        else:
            del content[chance.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            with open_torch_file(path) as checkpoint:
                for name in checkpoint.keys:
                    if checkpoint.index.length_bytes[checkpoint.index.number[name]] < 10_000:
                        checkpoint.read_array(name)
        except ReshardError as error:
            assert str(path) in str(error).splitlines()[0]
