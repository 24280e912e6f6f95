from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reshard
from reshard.errors import CheckpointNotFound, CheckpointUnsound, ReshardError, StorageError, UnsafePickle, UsageError
from reshard.formats.opening import open_checkpoint


def save_dcp(folder: Path, value: float = 1.0) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=folder, no_dist=True)
    return folder


def assert_is(path: str | Path, format: str, folder: Path, value: float = 1.0) -> None:
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.format, checkpoint.path) == (format, folder)
        assert checkpoint.read("w").tolist() == [value] * 3


def test_it_is_public() -> None:
    assert reshard.open_checkpoint is open_checkpoint


def test_a_dcp_folder_and_each_of_its_files(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "saved")
    # What else lies there does not matter.
    torch.save({"other": torch.zeros(1)}, folder / "meta.pt")
    for place in (folder, folder / ".metadata", folder / "__0_0.distcp"):
        assert_is(place, "dcp", folder)
        assert_is(str(place), "dcp", folder)


def test_a_dcp_folder_without_its_metadata(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path)
    (folder / ".metadata").unlink()
    for place in (folder, folder / "__0_0.distcp"):
        with pytest.raises(CheckpointUnsound, match=r"\.metadata: missing; the save was not finished"):
            open_checkpoint(place)


def test_the_newest_committed_step_of_a_run(tmp_path: Path) -> None:
    for step in (5, 40, 9):
        save_dcp(tmp_path / f"step-{step}", step)
    save_dcp(tmp_path / ".staging-step-50-a", 50)
    save_dcp(tmp_path / "step-60.tmp", 60)
    torch.save({}, tmp_path / "args.pt")
    assert_is(tmp_path, "dcp", tmp_path / "step-40", 40)
    assert_is(tmp_path / "step-9", "dcp", tmp_path / "step-9", 9)
    assert_is(tmp_path / "step-60.tmp", "dcp", tmp_path / "step-60.tmp", 60)


def test_a_step_that_is_damaged_is_not_passed_over(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-5")
    save_dcp(tmp_path / "step-6")
    (tmp_path / "step-6" / ".metadata").unlink()
    with pytest.raises(CheckpointUnsound, match=r"step-6/\.metadata: missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "step-7").mkdir()
    with pytest.raises(CheckpointNotFound, match="step-7: an empty folder"):
        open_checkpoint(tmp_path)


def test_a_step_in_another_format(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "step-1" / "model.safetensors")
    assert_is(tmp_path, "safetensors", tmp_path / "step-1")


def test_only_leftovers(tmp_path: Path) -> None:
    for name in (".staging-step-5-a", "step-5.tmp", ".trash-step-1-b"):
        (tmp_path / name).mkdir()
    with pytest.raises(
        CheckpointNotFound, match=r"no committed checkpoint, only unfinished.*\.staging-step-5-a, .*5\.tmp"
    ):
        open_checkpoint(tmp_path)


def test_links_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dcp(tmp_path / "run" / "step-3")
    (tmp_path / "latest").symlink_to("run/step-3")
    assert_is(tmp_path / "latest", "dcp", tmp_path / "latest")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_is("~/run", "dcp", tmp_path / "run" / "step-3")
    # The cache of Hugging Face holds links to files named by their hash.
    save_file({"w": torch.ones(3)}, tmp_path / "0a1b")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../0a1b")
    assert_is(tmp_path / "snapshot", "safetensors", tmp_path / "snapshot")


@pytest.mark.parametrize("name", ["weights", "model.bin", "state.ckpt"])
def test_a_file_is_what_it_holds(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / name)
    assert_is(tmp_path / name, "torch", tmp_path / name)
    assert_is(tmp_path, "torch", tmp_path / name)
    save_file({"w": torch.ones(3)}, tmp_path / name)
    assert_is(tmp_path / name, "safetensors", tmp_path / name)
    # Whatever is no checkpoint does not count.
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert_is(tmp_path, "safetensors", tmp_path / name)


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    save_file({"w": torch.ones(3)}, tmp_path / "b.st")
    with pytest.raises(
        UsageError, match=r"several checkpoints: found a\.pt \(torch\), b\.st \(safetensors\); name one"
    ):
        open_checkpoint(tmp_path)
    for number in range(20):
        torch.save({}, tmp_path / f"c{number}.pt")
    with pytest.raises(UsageError, match="and 14 more; name one"):
        open_checkpoint(tmp_path)


def test_several_safetensors_files_are_one_checkpoint(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    save_file({"v": torch.ones(3)}, tmp_path / "y.safetensors")
    assert_is(tmp_path, "safetensors", tmp_path)


def test_a_trainer_folder_is_its_model(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    assert_is(tmp_path, "safetensors", tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    for place in (tmp_path / "no", tmp_path / "no" / "where", "", "a\0b"):
        if place == "":
            continue
        with pytest.raises(CheckpointNotFound, match="no such file or folder; check the path"):
            open_checkpoint(place)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointNotFound, match="link: a link to nothing"):
        open_checkpoint(tmp_path / "link")


def test_nothing_that_is_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="an empty folder; known are: a DCP folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello world")
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of a known format: found notes\.txt; known are"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"notes\.txt: no checkpoint .* begins with b'hello wo'; known are"):
        open_checkpoint(tmp_path / "notes.txt")


def test_the_only_checkpoint_below_is_entered(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run" / "checkpoints" / "inner")
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("hello world")
    assert_is(tmp_path, "dcp", tmp_path / "run" / "checkpoints" / "inner")
    save_dcp(tmp_path / "run" / "other")
    with pytest.raises(UsageError, match=r"several checkpoints: found checkpoints/inner, other; name one"):
        open_checkpoint(tmp_path)


def test_what_a_trainer_says_is_the_latest(tmp_path: Path) -> None:
    for step in (3, 10):
        save_dcp(tmp_path / f"global_step{step}", step)
    with pytest.raises(UsageError, match="several checkpoints"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("global_step3\n")
    assert_is(tmp_path, "dcp", tmp_path / "global_step3", 3)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointNotFound, match="latest: names a checkpoint that is not there: global_step7"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").rename(tmp_path / "latest_checkpointed_iteration.txt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "global_step3").rename(tmp_path / "iter_0000003")
    assert_is(tmp_path, "dcp", tmp_path / "iter_0000003", 3)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointNotFound, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")
    with pytest.raises(CheckpointNotFound, match="no checkpoint of a known format: found pipe"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(StorageError, match="permission denied"):
        open_checkpoint(tmp_path / "closed")


def test_further_folders_are_for_dcp(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a" / "__0_0.distcp", tmp_path / "b")
    with open_checkpoint(tmp_path / "a", also=[tmp_path / "b"]) as checkpoint:
        assert checkpoint.read("w").tolist() == [1.0] * 3
    save_file({"w": torch.ones(3)}, tmp_path / "file")
    with pytest.raises(UsageError, match="lies in one place, not in several folders"):
        open_checkpoint(tmp_path / "file", also=[tmp_path])


class Metadata:
    """As bytecheckpoint's: a ``.metadata`` of the same name with classes of its own."""


def test_metadata_of_another_tool(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata()))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
    with pytest.raises(UnsafePickle, match=r"\.metadata: the pickle names .*Metadata, which is not on the allow-list"):
        open_checkpoint(tmp_path)


def test_any_file_opens_or_raises_our_errors(tmp_path: Path) -> None:
    chance = random.Random(0)
    path = tmp_path / "file"
    heads = [b"", b"PK\3\4", b"\x80\2", b"{", bytes(8), (2).to_bytes(8, "little") + b"{}", b"PK\5\6" + bytes(18)]
    for turn in range(300):
        path.write_bytes(heads[turn % len(heads)] + chance.randbytes(chance.choice((0, 1, 8, 600))))
        for place in (path, tmp_path):
            try:
                open_checkpoint(place).close()
            except ReshardError as error:
                assert str(tmp_path) in str(error).splitlines()[0]


def test_the_index_of_a_folder(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "part")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part"}}))
    for place in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert_is(place, "safetensors", tmp_path)
