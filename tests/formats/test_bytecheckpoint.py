"""Checkpoints of bytecheckpoint, made here as it writes them: by name, in flat parameters, damaged and hostile."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from reshard.cli.main import main
from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.opening import open_checkpoint
from reshard.formats.rescue import bytecheckpoint
from reshard.formats.rescue.hints import Hints

Chunks = Sequence[tuple[tuple[int, ...], torch.Tensor]]
GROUPS = [{"lr": 0.5, "betas": (0.9, 0.95), "params": ["w", "b"]}]
# What lies in it: a (2, 3), two elements of alignment, b (5,), c (1,), which is frozen.
FLAT = torch.cat([torch.arange(6.0), torch.full((2,), 42.0), torch.arange(10.0, 15.0), torch.tensor([7.0])])
LAYOUT = {
    "fsdp_flat_param_to_fqns": {"_flat_param": [".a", "in.b", "in.c"]},
    "fsdp_shapes": {"_flat_param": [(2, 3), (5,), (1,)]},
    "fsdp_numels_with_padding": {"_flat_param": (6, 2, 5, 1)},
    "fsdp_is_padding_mask": {"_flat_param": [False, True, False, False]},
}


class _Plain:
    """Pickled by its attributes alone."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Metadata(_Plain):
    pass


class _StorageInfo(_Plain):
    pass


class Foreign(_Plain):
    pass


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes under the names that bytecheckpoint has."""
    for kind in (Metadata, _StorageInfo, Foreign):
        monkeypatch.setattr(kind, "__module__", "bytecheckpoint.checkpointer.meta_type")
    found = types.ModuleType("bytecheckpoint.checkpointer.meta_type")
    found.__dict__.update(Metadata=Metadata, _StorageInfo=_StorageInfo, Foreign=Foreign)
    for name in ("bytecheckpoint", "bytecheckpoint.checkpointer", found.__name__):
        monkeypatch.setitem(sys.modules, name, found)


def pickled(tensor: torch.Tensor) -> bytes:
    """The pickle of a chunk, whose storage is elsewhere."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=2)
    pickler.persistent_id = lambda value: (  # type: ignore[method-assign]
        ("storage", {4: torch.FloatStorage, 8: torch.LongStorage}[tensor.element_size()], "0", "cpu", tensor.numel())
        if isinstance(value, torch.storage.TypedStorage)
        else None
    )
    pickler.dump(tensor)
    return content.getvalue()


def write(
    folder: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], Chunks]],
    objects: Mapping[str, Any] | None = None,
    user: Mapping[str, Any] | None = None,
) -> Metadata:
    """Writes a model or an optimizer: the n-th chunk of a tensor is rank n's."""
    folder.mkdir(parents=True)
    described: dict[str, Any] = {}
    storage, pickles = {}, {}
    files: dict[str, bytes] = {}

    def keep(index: Any, name: str, content: bytes) -> None:
        begin = len(files.setdefault(name, b""))
        files[name] += content
        storage[index] = _StorageInfo(relative_path=name, offset=begin, length=len(content))

    for key, value in (objects or {}).items():
        described[key] = dcp.BytesStorageMetadata()
        content = io.BytesIO()
        torch.save(value, content)
        keep(dcp.MetadataIndex(key), "__0_0.distcp", content.getvalue())
    for key, (shape, chunks) in tensors.items():
        boxes = [dcp.ChunkStorageMetadata(torch.Size(begin), chunk.shape) for begin, chunk in chunks]
        properties = dcp.TensorProperties.create_from_tensor(chunks[0][1])
        described[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), boxes)
        for rank, (begin, chunk) in enumerate(chunks):
            index = dcp.MetadataIndex(key, torch.Size(begin), rank)
            keep(index, f"__{rank}_0.distcp", bytes(chunk.untyped_storage()))
            pickles[index] = pickled(chunk)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    metadata = Metadata(
        state_dict_metadata=described, planner_data={}, storage_data=storage, all_tensor_metadata=pickles,
        bytecheckpoint_version="0.0.2", user_defined_dict=dict(user or {}),
    )  # fmt: skip
    describe(folder, metadata)
    return metadata


def describe(folder: Path, metadata: Metadata) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rows(tensor: torch.Tensor, *counts: int) -> tuple[tuple[int, ...], Chunks]:
    """A tensor, cut along its first dim."""
    parts = [part.clone() for part in tensor.split(list(counts))]
    begins = [(sum(counts[:number]), *[0] * (tensor.ndim - 1)) for number in range(len(counts))]
    return tuple(tensor.shape), list(zip(begins, parts, strict=True))


def whole(tensor: torch.Tensor) -> tuple[tuple[int, ...], Chunks]:
    return tuple(tensor.shape), [((0,) * tensor.ndim, tensor)]


def by_name(run: Path) -> Path:
    """A state of two ranks by name; the folder of its step."""
    folder = run / "global_step_4"
    weight = torch.arange(15.0).reshape(5, 3)
    # A clone keeps the order of the dims, and with it that of the bytes.
    turned = ((5, 3), [((0, 0), weight[:3].T.contiguous().T), ((3, 0), weight[3:].clone())])
    write(folder / "model", {"w": turned, "b": rows(torch.ones(1), 1, 0), "seen": whole(torch.tensor(9))})
    state = {"state.w.exp_avg": rows(weight + 1, 3, 2), "state.w.step": whole(torch.tensor(4.0)),
             "state.b.exp_avg": rows(torch.zeros(1), 1, 0), "state.b.step": whole(torch.tensor(4.0))}  # fmt: skip
    write(folder / "optimizer", state, {"param_groups": GROUPS})
    (folder / "extra_state").mkdir()
    for rank in range(2):
        extra = {"lr_scheduler": {"last_epoch": 4}, "torch_rng_state": torch.get_rng_state(), "step": 4, "seen": 11}
        torch.save(extra, folder / "extra_state" / f"extra_state_rank_{rank}.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    return folder


def flat(run: Path) -> Path:
    """A state of two ranks in a flat parameter."""
    folder = run / "global_step_4"
    write(folder / "model", {"_flat_param": rows(FLAT, 7, 7)}, user=LAYOUT)
    moments = ((14,), [((0,), FLAT[:6].clone()), ((8,), FLAT[8:13].clone())])
    state = {"state._flat_param.exp_avg": moments,
             "state._flat_param.fsdp_optimizer_requires_grad_numel": whole(torch.tensor(11)),
             "state.a.step": whole(torch.tensor(4.0)), "state.in.b.step": whole(torch.tensor(4.0))}  # fmt: skip
    groups = [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}]
    write(folder / "optimizer", state, {"param_groups": groups})
    return folder


def read(opened: Checkpoint) -> dict[str, Any]:
    return {key: opened.read(key).tolist() for key in opened.keys if not key.startswith("rng.")}


def names_of_groups(opened: Checkpoint) -> list[Any]:
    from reshard.formats.object_archive import object_value

    keys = [key for key in opened.index.objects if key.endswith(".params")]
    return [object_value(opened.object_bytes(key), opened.path, key) for key in sorted(keys)]


WEIGHT = torch.arange(15.0).reshape(5, 3)


def test_a_state_by_name(tmp_path: Path) -> None:
    by_name(tmp_path)
    with open_checkpoint(tmp_path) as opened:
        assert opened.format == bytecheckpoint.NAME
        assert read(opened) == {
            "model.w": WEIGHT.tolist(), "model.b": [1.0], "model.seen": 9,
            "optim.state.w.exp_avg": (WEIGHT + 1).tolist(), "optim.state.w.step": 4.0,
            "optim.state.b.exp_avg": [0.0], "optim.state.b.step": 4.0,
        }  # fmt: skip
        manifest = opened.manifest
        assert manifest is not None
        assert (manifest.step, manifest.world.ranks, manifest.lr) == (4, 2, [0.5])
        assert manifest.parts.keys() >= {"model", "optimizer", "scheduler", "rng", "extra.extra_state", "step"}
        assert manifest.versions == {"bytecheckpoint": "0.0.2"}
        assert names_of_groups(opened) == [["w", "b"]]
    assert main(["check", "--deep", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["model", "optimizer", "model/__0_0.distcp"])
def test_a_part_by_itself(tmp_path: Path, name: str) -> None:
    with open_checkpoint(by_name(tmp_path) / name) as opened:
        roots = {key.partition(".")[0] for key in opened.keys}
        assert roots == ({"optim"} if name == "optimizer" else {"model"})


def test_the_optimizer_can_be_left_out(tmp_path: Path) -> None:
    with open_checkpoint(by_name(tmp_path), hints=Hints(optimizer="left out")) as opened:
        assert not any(key.startswith("optim.") for key in opened.keys)


def test_flat_parameters_are_taken_apart(tmp_path: Path) -> None:
    folder = flat(tmp_path)
    moments = {"a": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "in.b": [10.0, 11.0, 12.0, 13.0, 14.0]}
    expected = {f"optim.state.{name}.exp_avg": value for name, value in moments.items()}
    expected |= {f"optim.state.{name}.step": 4.0 for name in moments}
    with open_checkpoint(folder) as opened:
        assert read(opened) == {**{f"model.{name}": value for name, value in moments.items()}, "model.in.c": [7.0],
                                **expected}  # fmt: skip
        # Groups of integers do not say whose they are.
        assert names_of_groups(opened) == [[], []]
        assert any("--param-order" in note for note in opened.notes)
    assert main(["check", "--deep", str(folder)]) == 0
    with open_checkpoint(folder, hints=Hints(param_order=(("in.b",), ("a",)))) as opened:
        assert names_of_groups(opened) == [["in.b"], ["a"]]
    with open_checkpoint(folder / "optimizer") as opened:
        assert read(opened) == expected


def test_flat_parameters_that_nothing_describes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, {"_flat_param": rows(FLAT, 7, 7)})
    with open_checkpoint(folder) as opened:
        assert opened.keys == ["model._flat_param"]
    with pytest.raises(UsageError, match="--layout"):
        open_checkpoint(folder, hints=Hints(optimizer="named"))


def test_a_layout_of_other_numbers(tmp_path: Path) -> None:
    write(tmp_path / "model", {"_flat_param": rows(FLAT[:-1], 7, 6)}, user=LAYOUT)
    with pytest.raises(UsageError, match=r"expected 13 elements, found 14"):
        open_checkpoint(tmp_path / "model")
    write(tmp_path / "other" / "model", {"_flat_param": rows(FLAT, 7, 7)}, user={**LAYOUT, "fsdp_shapes": 3})
    with pytest.raises(CheckpointUnsound, match="user_defined_dict"):
        open_checkpoint(tmp_path / "other" / "model")


def test_what_is_stored_is_the_chunk(tmp_path: Path) -> None:
    metadata = write(tmp_path / "model", {"w": rows(WEIGHT, 3, 2)})
    first = next(iter(metadata.storage_data))
    sound = metadata.all_tensor_metadata[first]
    for content, said in ((None, "no pickle"), (pickled(torch.ones(2, 3)), "not the chunk"),
                          (pickled(torch.ones(3, 3, dtype=torch.int64)), "not the chunk"),
                          (pickle.dumps(3), "no tensor"), (sound[:20], "not a readable pickle")):  # fmt: skip
        metadata.all_tensor_metadata[first] = content
        describe(tmp_path / "model", metadata)
        with pytest.raises(CheckpointUnsound, match=said):
            open_checkpoint(tmp_path / "model")
    metadata.all_tensor_metadata[first] = sound
    metadata.storage_data[first].length -= 4
    describe(tmp_path / "model", metadata)
    with pytest.raises(CheckpointUnsound, match=r"36 bytes.*32 bytes"):
        open_checkpoint(tmp_path / "model")


def test_a_file_that_is_cut_short_is_found(tmp_path: Path) -> None:
    folder = by_name(tmp_path)
    file = folder / "model" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-4])
    assert main(["check", str(folder)]) == 1


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("run",)


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = write(tmp_path / "model", {"w": rows(WEIGHT, 3, 2)}, user={"evil": Evil(), "foreign": Foreign(x=1)})
    with open_checkpoint(tmp_path / "model") as opened:
        assert read(opened) == {"model.w": WEIGHT.tolist()}
    metadata.all_tensor_metadata = dict.fromkeys(metadata.all_tensor_metadata, pickle.dumps(Evil()))
    describe(tmp_path / "model", metadata)
    with pytest.raises(CheckpointUnsound, match="not on the allow-list"):
        open_checkpoint(tmp_path / "model")
    metadata.storage_data = {index: Evil() for index in metadata.storage_data}
    describe(tmp_path / "model", metadata)
    with pytest.raises(CheckpointUnsound, match="not the metadata"):
        open_checkpoint(tmp_path / "model")
    assert not (tmp_path / "run").exists()


def test_groups_that_are_not_plain_are_told(tmp_path: Path) -> None:
    write(tmp_path / "optimizer", {"state.w.exp_avg": rows(WEIGHT, 3, 2)},
          {"param_groups": [{"lr": torch.tensor(0.5), "params": ["w"]}]})  # fmt: skip
    with open_checkpoint(tmp_path / "optimizer") as opened:
        assert any("parameter groups" in note for note in opened.notes)
