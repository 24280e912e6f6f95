"""What `describe` says of checkpoints that stock code and a run of ours wrote, whole and damaged."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import save_file
from small import Small, edit_manifest

import reshard
from reshard.errors import CheckpointNotFound, CheckpointUnsound
from reshard.verify.describe.checklist import MISSING, NONE, PRESENT, allowed_missing
from reshard.verify.describe.describe import Description, describe


def save(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def adam(parameters: dict[str, torch.Tensor], lacks: tuple[str, ...] = ()) -> dict[str, Any]:
    state = {
        f"{name}/{entry}": tensor
        for name, weight in parameters.items()
        for entry, tensor in (("step", torch.tensor(3.0)), ("exp_avg", weight * 2), ("exp_avg_sq", weight * 3))
    }
    nested: dict[str, Any] = {}
    for key, tensor in state.items():
        name, entry = key.split("/")
        if f"{name}.{entry}" not in lacks:
            nested.setdefault(name, {})[entry] = tensor
    return {"state": nested, "param_groups": [{"lr": 0.1, "params": list(parameters)}]}


def save_sharded(folder: Path, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    weights = {"embed.weight": torch.arange(30.0).reshape(10, 3), "scale": torch.ones(1)}
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights.items()}
    dcp.save({"model": sharded, "optim": adam(sharded)}, checkpoint_id=folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 10 over 4 ranks: 3, 3, 3, 1."""
    folder = tmp_path_factory.mktemp("four") / "ckpt"
    run_ranks(4, save_sharded, folder, 4)
    return folder


@pytest.fixture
def copy(four: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(four, tmp_path / "ckpt"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    small = Small()
    for step in (2, 4):
        small.train(step)
        reshard.save_state(folder, small.state)
    return folder


def parts(found: Description) -> dict[str, str]:
    return {part.name: part.status for part in found.parts}


def test_b15_a_stock_checkpoint_of_uneven_rows(four: Path) -> None:
    found = describe(four)
    assert found.faults == [] and found.checkpoint.index.shapes[0] == (10, 3)
    assert (found.ranks, found.ranks_from, found.step) == (4, "file names", None)
    assert found.checkpoint.version == "1.0.0"
    kinds = {total.kind: (total.tensors, total.elements, total.length_bytes) for total in found.kinds}
    assert kinds == {"weights": (2, 31, 124), "moments": (4, 62, 248), "counters": (2, 2, 8)}
    assert (found.parameters, found.payload_bytes) == (31, 380)
    assert found.disk_bytes == sum(path.stat().st_size for path in four.glob("*.distcp"))
    assert (found.absent, found.unreferenced, len(found.present)) == ([], [], 4)
    assert parts(found) == {
        "model": PRESENT, "optimizer": PRESENT, "step counters": PRESENT, "scheduler": MISSING, "scaler": MISSING,
        "rng": MISSING, "data": MISSING, "step": MISSING, "batch": MISSING,
    }  # fmt: skip
    assert allowed_missing(found.parts) == ["scheduler", "scaler", "rng", "data", "step", "batch"]


def test_a_run_of_ours_has_everything(run: Path) -> None:
    found = describe(run)
    assert found.run is not None and (found.run.steps, found.run.passed_over) == ([2, 4], [])
    assert (found.step, found.ranks, found.ranks_from, found.faults) == (4, 1, "manifest", [])
    assert set(parts(found).values()) == {PRESENT}
    assert {"extra.ema", "extra.streams"} <= parts(found).keys()
    details = {part.name: part.detail for part in found.parts}
    assert details["optimizer"] == "state of 4 of 4 parameters; 2 parameter groups"
    assert details["batch"] == "global batch 8: micro-batch 2, accumulation 4, ranks 1"
    assert "samples 32" in details["data"] and "scheduler at 4" in details["scheduler"]


def test_what_the_run_had_not_is_told_from_what_is_missing(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run / "step-4", tmp_path / "step-4"))
    edit_manifest(folder, data=lambda _: False)
    assert parts(describe(folder))["data"] == MISSING
    small = Small(parts={"scaler": None, "scheduler": None})
    plain = reshard.save_state(tmp_path / "plain", small.state)
    found = parts(describe(plain))
    # Nothing was trained, so there were no moments either.
    assert (found["scaler"], found["scheduler"], found["optimizer"]) == (NONE, NONE, NONE)
    edit_manifest(plain, optimizers=lambda each: {name: {**entry, "with_state": 4} for name, entry in each.items()})
    assert parts(describe(plain))["optimizer"] == MISSING


def test_random_states_of_fewer_ranks_than_were_saved(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run / "step-4", tmp_path / "step-4"))
    edit_manifest(folder, rng={"ranks": 3})
    assert describe(folder).faults == [f"{folder}: rng: random states of 3 ranks were saved, those of 1 are here"]


def test_b01_a_parameter_without_state_is_named_and_one_with_a_part_of_it_is_a_fault(tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "unused": torch.ones(2), "n": torch.tensor(1)}
    trained = {name: weights[name] for name in ("a.weight", "a.bias")}
    found = describe(save(tmp_path / "whole", {"model": weights, "optim": adam(trained)}))
    assert (found.faults, found.optimizer.without) == ([], ["model.unused"])
    assert "state of 2 of 3 weights; none for model.unused" in found.parts[1].detail
    lacking = adam(trained, lacks=("a.weight.exp_avg_sq",))
    found = describe(save(tmp_path / "part", {"model": weights, "optim": lacking}))
    assert found.optimizer.gaps == [("model.a.weight", ["exp_avg", "step"], ["exp_avg_sq"])]
    (fault,) = found.faults
    assert "model.a.weight" in fault and "lacks exp_avg_sq" in fault


def test_parameters_of_two_optimizers_are_no_gap(tmp_path: Path) -> None:
    weights = {name: torch.ones(2) for name in ("m0", "m1", "m2", "a0")}
    optim = adam({"a0": weights["a0"]})
    optim["state"].update({name: {"momentum_buffer": weights[name]} for name in ("m0", "m1", "m2")})
    assert describe(save(tmp_path / "x", {"model": weights, "optim": optim})).faults == []


@pytest.mark.parametrize(
    ("content", "per_parameter"),
    [
        # Lightning, torchtitan, Megatron
        ({"state_dict.net.w": 1, "optimizer_0.state.net.w.exp_avg": 1, "optimizer_0.state.net.w.step": 0}, 1),
        ({"w": 1, "optimizer.state.w.exp_avg": 1, "optimizer.state.w.step": 0}, 1),
        ({"w": 1, "optimizer.state.exp_avg.w": 1}, 1),
    ],
)
def test_the_layouts_of_others(tmp_path: Path, content: dict[str, int], per_parameter: int) -> None:
    tensors = {key: torch.ones(4) if dims else torch.tensor(1.0) for key, dims in content.items()}
    found = describe(save(tmp_path / "x", tensors))
    assert {total.kind: total.elements for total in found.kinds}["moments"] == 4 * per_parameter
    assert (found.parameters, list(found.optimizer.by_parameter)) == (4, [next(iter(content))])
    assert found.optimizer.without == []


def test_objects_of_one_rank_each_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"w": torch.ones(2), "dataloader": {"dp_rank_0": b"x", "dp_rank_3": b"y"}, "lr": 1})
    found = describe(folder)
    assert found.per_rank_objects == ["dataloader.dp_rank_0", "dataloader.dp_rank_3"]
    assert parts(found)["data"] == PRESENT and "data" in allowed_missing(found.parts)


def test_b80_files_of_an_earlier_larger_save(copy: Path) -> None:
    for rank in (4, 5):
        (copy / f"__{rank}_0.distcp").write_bytes(b"x" * 10 * rank)
    found = describe(copy)
    assert found.unreferenced == [("__4_0.distcp", 40), ("__5_0.distcp", 50)]
    assert found.faults == []


def test_b84_files_on_other_nodes(four: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "node0", tmp_path / "node1"
    for node, names in ((first, [".metadata", "__0_0.distcp"]), (second, ["__1_0.distcp", "__2_0.distcp"])):
        node.mkdir()
        for name in names:
            shutil.copy(four / name, node)
    found = describe(first)
    assert (found.absent, found.present) == (["__1_0.distcp", "__2_0.distcp", "__3_0.distcp"], ["__0_0.distcp"])
    assert all("missing: expected" in fault for fault in found.faults) and len(found.faults) == 3
    assert describe(first, [second]).absent == ["__3_0.distcp"]
    shutil.copy(four / "__3_0.distcp", second)
    assert describe(first, [second]).faults == []


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "empty (0 bytes)"), (b"x" * 100, "cut short"), (b"version https://git-lfs.github.com/spec/v1\n", "LFS")],
)
def test_broken_files_are_faults_and_the_rest_is_told(copy: Path, content: bytes, what: str) -> None:
    (copy / "__2_0.distcp").write_bytes(content)
    found = describe(copy)
    (fault,) = found.faults
    assert fault.startswith(f"{copy / '__2_0.distcp'}: ") and what in fault and "lost: " in fault
    assert (found.parameters, found.absent) == (31, [])


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "empty"), (b"\x80\x04garbage", "not a readable pickle"), (b"version https://git-lfs", "Git LFS pointer")],
)
def test_metadata_that_cannot_be_read(copy: Path, content: bytes, what: str) -> None:
    (copy / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointUnsound, match=what) as error:
        describe(copy)
    assert str(error.value).startswith(f"{copy / '.metadata'}: ")


def test_b76_the_newest_step_and_what_was_passed_over(run: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        shutil.copytree(run / "step-4", tmp_path / f"step-{step}")
        edit_manifest(tmp_path / f"step-{step}", step=step)
    (tmp_path / "step-40").mkdir()
    (tmp_path / "step-40" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "step-50.tmp").mkdir()
    (tmp_path / ".staging-step-50-abc").mkdir()
    os.truncate(tmp_path / "step-30" / "__0_0.distcp", 1000)
    found = describe(tmp_path)
    assert found.run is not None and found.run.steps == [10, 20, 30, 40]
    assert [name for name, _ in found.run.passed_over] == [".staging-step-50-abc", "step-40", "step-50.tmp"]
    assert found.step == 30
    assert "cut short" in found.faults[0]
    assert describe(tmp_path / "step-10").faults == []


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        describe(tmp_path)
    with pytest.raises(CheckpointNotFound):
        describe(tmp_path / "nowhere")


def test_files_of_other_formats(tmp_path: Path) -> None:
    weights = {"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    torch.save({"model": weights, "optim": adam({"a": weights["a"]}), "lr": 0.1}, tmp_path / "whole.pt")
    for name, format in (("model.safetensors", "safetensors"), ("whole.pt", "torch")):
        found = describe(tmp_path / name)
        assert (found.checkpoint.format, found.parameters, found.faults) == (format, 6, [])
        assert found.kinds[0].dtypes == {"bfloat16": 8, "float32": 8}
        assert found.disk_bytes == (tmp_path / name).stat().st_size


def test_nothing_is_read_but_what_describes_it(copy: Path) -> None:
    assert describe(copy).checkpoint.files.bytes_read == 0


def test_an_optimizer_that_keeps_no_state_lacks_none(tmp_path: Path) -> None:
    """Plain SGD."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2)).backward()
    optimizer.step()
    folder = reshard.save_state(tmp_path, reshard.TrainState(model, optimizer))
    found = parts(describe(folder))
    assert (found["optimizer"], found["step counters"]) == (NONE, NONE)
    assert describe(folder).faults == []
