"""Files of ranks that would do harm: nothing in them is run, and whatever is wrong is an error of ours, soon."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import pickle
import random
import resource
import struct
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy import fake_rank, sharded, write_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import reshard
from reshard.errors import CheckpointUnsound, ReshardError
from reshard.verify.check.run import check

NAME = "model_world_size_2_rank_{rank}.pt"
WEIGHT = torch.arange(10.0).reshape(5, 2)


class Runs:
    """Calls something with one argument as soon as it is unpickled."""

    def __init__(self, function: Callable[..., Any], argument: Any) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


PAYLOADS: dict[str, tuple[Callable[[Path], Runs], str]] = {
    "system": (lambda marker: Runs(os.system, f"touch {marker}"), "posix.system"),
    "eval": (lambda marker: Runs(builtins.eval, f"open({str(marker)!r}, 'w')"), "__builtin__.eval"),
    "load": (lambda marker: Runs(torch.load, _armed(marker)), "torch.serialization.load"),
}


def _armed(marker: Path) -> str:
    """A file that runs a command if torch.load is let loose on it."""
    path = marker.parent / "armed"
    torch.save(Runs(os.system, f"touch {marker}"), path)
    return str(path)


def in_spec(tensor: Any, payload: Runs) -> Any:
    object.__setattr__(tensor._spec, "beside", payload)
    return tensor


PLACES: dict[str, Callable[[Any, Runs], Any]] = {
    "root": lambda tensor, payload: payload,
    "value": lambda tensor, payload: {"model": {"w": tensor}, "args": payload},
    "value in the model": lambda tensor, payload: {"w": tensor, "extra": payload},
    "key": lambda tensor, payload: {"model": {"w": tensor}, "args": {payload: 1}},
    "deep": lambda tensor, payload: {"model": {"w": tensor}, "lr_scheduler": {"lr": [({"x": payload},)]}},
    "placement": lambda tensor, payload: {"model": {"w": in_spec(tensor, payload)}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_that_a_rank_file_names_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str, place: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "marker"
    make, name = PAYLOADS[payload]

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {NAME: PLACES[place](sharded(WEIGHT, mesh, [Shard(0)]), make(marker))}

    folder = write_ranks(tmp_path / "x", 2, content)
    with fake_rank(0, 2):
        # The attack is real.
        torch.load(folder / NAME.format(rank=0), weights_only=False, pickle_module=_PlainPickle)
    assert marker.exists()
    marker.unlink()
    with reshard.open_checkpoint(folder) as checkpoint:
        if place != "root":
            assert torch.equal(checkpoint.read("model.w"), WEIGHT)
        assert any(name in note for note in checkpoint.notes)
    check(folder, deep=True)
    if place != "root":
        reshard.convert(folder, tmp_path / "made", to="torch", only="model")
        assert torch.equal(torch.load(tmp_path / "made" / "pytorch_model.bin", weights_only=True)["w"], WEIGHT)
    assert not marker.exists()


class _PlainPickle:
    """For torch.load: the standard library's, which unpickles what was put into a DTensor as well."""

    Unpickler = pickle.Unpickler
    load = staticmethod(pickle.load)


@pytest.fixture
def not_installed() -> Iterator[types.ModuleType]:
    """A package that is there when a file is saved, and not when it is read."""
    module = types.ModuleType("not_installed_pkg")

    class Config(dict):  # type: ignore[type-arg]
        pass

    Config.__module__, Config.__qualname__ = module.__name__, "Config"
    module.Config = Config  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    sys.modules.pop(module.__name__, None)


def test_classes_that_are_not_there(tmp_path: Path, not_installed: types.ModuleType) -> None:
    config = not_installed.Config(lr=0.1)
    config.path = Path("/data")

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {
            NAME: {
                "model": {"w": sharded(WEIGHT, mesh, [Shard(0)])},
                "args": argparse.Namespace(config=config),
                "lr_scheduler": {"last_epoch": 4, "owner": config},
            }
        }

    folder = write_ranks(tmp_path / "x", 2, content)
    del sys.modules["not_installed_pkg"]
    with reshard.open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read("model.w"), WEIGHT)
        assert any("not_installed_pkg.Config" in note for note in checkpoint.notes)
        assert any("scheduler.scheduler" in note for note in checkpoint.notes)
    assert "not_installed_pkg" not in sys.modules


def test_files_without_foreign_classes_have_no_notes(tmp_path: Path) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {NAME: {"w": sharded(WEIGHT, mesh, [Shard(0)]), "p": torch.nn.Parameter(torch.ones(2))}}

    with reshard.open_checkpoint(write_ranks(tmp_path / "x", 2, content)) as checkpoint:
        assert checkpoint.notes == ()


def saved(state: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def with_pickle(path: Path, content: bytes) -> Path:
    """A rank's file, the only one, with a pickle of our own, and one storage of 16 bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        archive.writestr("x/byteorder", "little")
        archive.writestr("x/data/0", bytes(16))
        archive.writestr("x/version", "3\n")
    return path


def _doubled_lists(levels: int) -> bytes:
    """A list of two times the list before, and so on."""
    body = b"]\x94"
    for level in range(levels):
        body += b"0](" + 2 * (b"j" + struct.pack("<I", level)) + b"e\x94"
    return body


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _name(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


_MEMO_FREE_TENSOR = (
    _name("torch._utils", "_rebuild_tensor_v2")
    + b"("
    + b"(" + _text("storage") + _name("torch", "FloatStorage") + _text("0") + _text("cpu") + b"K\x04tQ"
    + b"K\x00K\x04\x85K\x01\x85\x89}tR"
)  # fmt: skip


def _of(module: str, name: str, state: bytes) -> bytes:
    """An object with attributes: no constructor of its own is called."""
    return _name(module, name) + b")\x81" + state + b"b"


def _dtensor(layout_shape: bytes, size: bytes = b"K\x04\x85") -> bytes:
    """A DTensor of one Shard(0) whose mesh has the given shape."""
    layout = _of("torch.distributed._mesh_layout", "_MeshLayout", b"}" + _text("shape") + layout_shape + b"s")
    mesh = _of(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        b"}(" + _text("_layout") + layout + _text("_coordinate_on_dim") + b"K\x00\x85u",
    )
    shard = _of("torch.distributed.tensor.placement_types", "Shard", b"}" + _text("dim") + b"K\x00s")
    spec = _of(
        "torch.distributed.tensor._dtensor_spec",
        "DTensorSpec",
        b"}(" + _text("mesh") + mesh + _text("placements") + shard + b"\x85u",
    )
    kind = _name("torch.distributed.tensor", "DTensor")
    arguments = b"(" + kind + _name("torch", "float32") + size + b"t"
    state = b"}(" + _text("_local_tensor") + _MEMO_FREE_TENSOR + _text("_spec") + spec + b"u"
    rebuild = _name("torch._tensor", "_rebuild_from_type_v2")
    return rebuild + b"(" + _name("torch._utils", "_rebuild_wrapper_subclass") + kind + arguments + state + b"tR"


def _model(value: bytes) -> bytes:
    return b"\x80\x04}" + _text("w") + value + b"s."


def test_the_pickles_made_here_are_those_of_torch(tmp_path: Path) -> None:
    """What the attacks below are made of reads well where it is sound."""
    path = with_pickle(tmp_path / "model_world_size_1_rank_0.pt", _model(_dtensor(b"K\x01\x85")))
    with reshard.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("model.w").tolist() == [0.0] * 4


_HUGE = b"\x8a\x08" + struct.pack("<q", 1 << 60)
BOMBS = {
    "lists as the shape of a mesh": _model(_dtensor(_doubled_lists(48))),
    "a shape that no tensor has": _model(_dtensor(b"K\x01\x85", size=_HUGE + _HUGE + b"\x86")),
    "a shape of many dims": _model(_dtensor(b"K\x01\x85", size=b"(" + 100 * b"K\x01" + b"t")),
    "a dim beyond memory": _model(_dtensor(b"K\x01\x85", size=b"\x8a\x08" + struct.pack("<q", 1 << 50) + b"\x85")),
    "a mesh without ranks": _model(_dtensor(b"K\x00\x85")),
    "a mesh that is itself": _model(_dtensor(b"]\x94h\x00a")),
    "a scheduler of lists": b"\x80\x04}(" + _text("lr_scheduler") + b"}" + _text("x") + _doubled_lists(48) + b"s"
    + _text("model") + b"}" + _text("w") + _dtensor(b"K\x01\x85") + b"su.",
    "options of lists": b"\x80\x04}(" + _text("state") + b"}" + _text("param_groups") + b"]}(" + _text("params") + b"]"
    + _text("o0") + _doubled_lists(48) + b"".join(_text(f"o{n}") + b"j0\x00\x00\x00" for n in range(1, 200)) + b"uau.",
    "keys of tuples": b"\x80\x04})\x94"
    + b"".join(b"0" + 2 * (b"j" + struct.pack("<I", n)) + b"\x86\x94" for n in range(48)) + b"Ns.",
    "random states of lists": b"\x80\x04}" + _text("rng") + b"}(" + _text("python") + _doubled_lists(48)
    + _text("numpy") + b"j0\x00\x00\x00us.",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_few_bytes_do_not_unfold_without_end(tmp_path: Path, bomb: str) -> None:
    path = with_pickle(tmp_path / "model_world_size_1_rank_0.pt", BOMBS[bomb])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.process_time()
    try:
        reshard.convert(path, tmp_path.parent / f"{tmp_path.name}-made", to="torch")
    except ReshardError as error:
        assert str(path.parent) in str(error)
    # As many entries are looked at as the largest of optimizers has, and no more.
    assert time.process_time() - start_s < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200_000


def _optimizer(state: Any, groups: Any) -> dict[str, Any]:
    return {"model": {"w": WEIGHT}, "optimizer": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize(
    "content",
    [
        _optimizer({0: 3}, [{"params": [0]}]),
        _optimizer({0: {"exp_avg": WEIGHT}}, 7),
        _optimizer({0: {"exp_avg": WEIGHT}}, [7]),
        _optimizer({0: {"exp_avg": WEIGHT}}, [{"lr": 0.1}]),
        _optimizer({0: {"exp_avg": WEIGHT}}, [{"params": 0}]),
        _optimizer({0: {"exp_avg": WEIGHT}}, [{"params": [[0]]}]),
        _optimizer({(1, 2): {"exp_avg": WEIGHT}}, [{"params": [(1, 2)]}]),
        _optimizer({"w": {"exp_avg": WEIGHT}}, [{"params": [0, "w"]}]),
        {"model": {"w": WEIGHT}, "rng": {"numpy": (1, 2, 3, 4, 5), "python": (1, 2, 3)}},
        {"model": {"w": WEIGHT}, "lr_scheduler": 5},
        {"model": {"w": torch.zeros(1).expand(1 << 40, 1 << 17)}},
        [WEIGHT],
        WEIGHT,
        {},
        {1: WEIGHT},
    ],
)
def test_odd_contents_open_or_raise_our_errors(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "state_rank0_of_1.pt"
    torch.save(content, path)
    for look in (reshard.open_checkpoint, lambda p: reshard.convert(p, tmp_path / "made", force=True)):
        try:
            look(path)
        except ReshardError:
            continue


def two_ranks(folder: Path) -> tuple[Path, Path]:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {NAME: {"w": sharded(WEIGHT, mesh, [Shard(0)]), "b": torch.arange(100.0)}}

    write_ranks(folder, 2, content)
    return folder / NAME.format(rank=0), folder / NAME.format(rank=1)


def test_every_truncation_is_told_by_file(tmp_path: Path) -> None:
    _, path = two_ranks(tmp_path / "x")
    whole = path.read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointUnsound, match=re_of(path)):
            reshard.open_checkpoint(path.parent)


def re_of(path: Path) -> str:
    # An empty file is told by its rank.
    return rf"{path.name.replace('.', chr(92) + '.')}|rank 1 is empty"


def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    paths = two_ranks(tmp_path / "x")
    for path in paths:
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CheckpointUnsound) as raised:
        reshard.open_checkpoint(tmp_path / "x")
    assert all(path.name in str(raised.value) for path in paths)


def test_a_storage_shorter_than_its_tensor(tmp_path: Path) -> None:
    path = with_pickle(
        tmp_path / "model_world_size_1_rank_0.pt", _model(_MEMO_FREE_TENSOR.replace(b"K\x04\x85", b"K\x05\x85"))
    )
    with pytest.raises(CheckpointUnsound, match="ends at byte 20 of a storage of 16") as raised:
        reshard.open_checkpoint(path)
    assert raised.value.key == "model.w" and path.name in str(raised.value)


def test_a_tensor_larger_than_any(tmp_path: Path) -> None:
    """Its one stored element stands for all, so that no storage is too short."""
    spread = _MEMO_FREE_TENSOR.replace(b"K\x04\x85K\x01\x85", _HUGE + _HUGE + b"\x86K\x00K\x00\x86")
    path = with_pickle(tmp_path / "model_world_size_1_rank_0.pt", _model(spread))
    with pytest.raises(CheckpointUnsound, match="no tensor has this shape") as raised:
        reshard.open_checkpoint(path)
    assert raised.value.key == "model.w"


def test_a_storage_that_is_not_there(tmp_path: Path) -> None:
    path = with_pickle(
        tmp_path / "model_world_size_1_rank_0.pt", _model(_MEMO_FREE_TENSOR.replace(_text("0"), _text("7")))
    )
    with pytest.raises(CheckpointUnsound, match="no record data/7") as raised:
        reshard.open_checkpoint(path)
    assert raised.value.key == "model.w"


def test_flipped_bytes_open_or_raise_our_errors(tmp_path: Path) -> None:
    _, path = two_ranks(tmp_path / "x")
    original = path.read_bytes()
    end = original.index(b"data/0")
    chance = random.Random(2)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        content = bytearray(original)
        content[chance.randrange(end)] = chance.randrange(256)
        path.write_bytes(content)
        try:
            reshard.open_checkpoint(path.parent).close()
            outcomes[True] += 1
        except ReshardError as error:
            assert str(tmp_path) in str(error)
            outcomes[False] += 1
    assert min(outcomes.values()) > 10
