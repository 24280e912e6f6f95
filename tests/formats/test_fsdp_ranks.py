"""Files of single ranks, converted and read back by stock torch: bit for bit what the unsharded run had."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from legacy import sharded, write_ranks
from ranks import run_ranks
from rewriting import assert_same, stock_tensors
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import reshard
from reshard.errors import CheckpointUnsound, StateMismatch, UsageError
from reshard.verify.check.run import check

pytestmark = pytest.mark.filterwarnings("ignore")

Cut = Callable[[torch.Tensor, DeviceMesh], Any]
FORMATS = ["dcp", "safetensors", "torch"]


class Model(nn.Module):
    """Equal shapes, a frozen layer among them, fewer rows than ranks, and every kind of number."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 3)
        self.p1 = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.p2 = nn.Linear(4, 4)
        self.head = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.tensor([1.0009765625]))
        self.register_buffer("count", torch.tensor(16777217))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor([1.0009765625, 3.0]))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trainable if parameter.ndim == 1], "weight_decay": 0.0},
    ]


# In the order in which the optimizer counts them: not that of the model.
ORDER = [
    ["emb.weight", "p1.weight", "p2.weight", "head.weight"],
    ["one", "p1.bias", "p2.bias", "head.bias"],
]


def trained(model: nn.Module, steps: int = 3) -> torch.optim.AdamW:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


class Run:
    """The unsharded run, and what each rank saves of it."""

    def __init__(self, make: Callable[[], nn.Module] = Model) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = trained(self.model)
        self.buffers = dict(self.model.named_buffers())

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """As a run of ours names it."""
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optim.state.{name}.{slot}"] = value
        return found

    def weights(self, cut: Cut, mesh: DeviceMesh) -> dict[str, Any]:
        return {
            name: tensor if name in self.buffers else cut(tensor, mesh)
            for name, tensor in self.model.state_dict().items()
        }

    def moments(self, cut: Cut, mesh: DeviceMesh) -> dict[str, Any]:
        content = self.optimizer.state_dict()
        state = {
            number: {slot: value if slot == "step" else cut(value, mesh) for slot, value in slots.items()}
            for number, slots in content["state"].items()
        }
        return {**content, "state": state}

    def verl(self, folder: Path, world: int, cut: Cut | None = None, axes: Sequence[int] = ()) -> Path:
        """As verl names the files."""
        cut = cut or by_rows

        def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
            return {
                "model_world_size_{world}_rank_{rank}.pt": self.weights(cut, mesh),
                "optim_world_size_{world}_rank_{rank}.pt": self.moments(cut, mesh),
                "extra_state_world_size_{world}_rank_{rank}.pt": extra_state(rank),
            }

        write_ranks(folder, world, content, axes)
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
        return folder


def by_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return sharded(tensor, mesh, [Shard(0)])


def extra_state(rank: int) -> dict[str, Any]:
    return {
        "lr_scheduler": {"base_lrs": [0.01, 0.01], "last_epoch": 3, "_last_lr": [0.01, 0.01]},
        "rng": {
            "cpu": torch.Generator().manual_seed(rank).get_state(),
            "numpy": np.random.RandomState(rank).get_state(),
            "random": random.Random(rank).getstate(),
        },
    }


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


@pytest.fixture
def order(tmp_path: Path) -> Path:
    path = tmp_path / "order.json"
    path.write_text(json.dumps(ORDER))
    return path


def converted(source: Path, to: str = "dcp", **options: Any) -> dict[str, torch.Tensor]:
    """What stock torch reads from a conversion."""
    destination = source.parent / f"{source.name}-{to}"
    reshard.convert(source, destination, to=to, **options)
    if to == "dcp":
        return stock_tensors(destination)
    if to == "safetensors":
        return load_file(destination / "model.safetensors")
    content = torch.load(destination / "pytorch_model.bin", weights_only=True)
    return {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}


def but_rng(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("rng.")}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("world", [1, 3, 5])
def test_verl(tmp_path: Path, run: Run, order: Path, world: int, to: str) -> None:
    source = run.verl(tmp_path / "actor", world)
    found = converted(source, to, param_order=order, world_size=2 if to == "dcp" else None)
    assert_same(but_rng(found), run.expected)
    assert sum(key.startswith("rng.") for key in found) == 3 * world
    with reshard.open_checkpoint(source) as checkpoint:
        assert checkpoint.format == "fsdp-ranks"


def test_stock_torch_resumes_from_it(tmp_path: Path, run: Run, order: Path) -> None:
    reshard.convert(run.verl(tmp_path / "actor", 3), tmp_path / "made", param_order=order)
    model = Model()
    optimizer = trained(model, steps=1)
    for group in optimizer.param_groups:
        group.update(lr=0.5, weight_decay=0.5)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=tmp_path / "made", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same(model.state_dict(), run.model.state_dict())
    for (name, ours), theirs in zip(model.named_parameters(), run.model.parameters(), strict=True):
        assert (ours in optimizer.state) == (theirs in run.optimizer.state) == ours.requires_grad, name
        if ours.requires_grad:
            assert_same(optimizer.state[ours], run.optimizer.state[theirs])
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.01, 0.1), (0.01, 0.0)]


def test_the_manifest(tmp_path: Path, run: Run, order: Path) -> None:
    source = run.verl(tmp_path / "actor", 3)
    found = converted(source, param_order=order)
    manifest = json.loads((tmp_path / "actor-dcp" / "reshard.json").read_text())
    assert manifest["step"] == 3
    assert manifest["lr"] == [0.01, 0.01]
    assert manifest["schedulers"] == {"scheduler": extra_state(0)["lr_scheduler"]}
    assert manifest["rng"] == {"ranks": 3}
    assert set(manifest["parts"]) == {"model", "optimizer", "scheduler", "rng", "step"}
    for rank in range(3):
        states = extra_state(rank)["rng"]
        assert torch.equal(found[f"rng.rank_{rank}.torch"], states["cpu"])
        version, internal, gauss = json.loads(bytes(found[f"rng.rank_{rank}.python"].tolist()))
        generator = random.Random()
        generator.setstate((version, tuple(internal), gauss))
        assert generator.random() == random.Random(rank).random()
        numpy_state = np.random.RandomState()
        numpy_state.set_state(tuple(json.loads(bytes(found[f"rng.rank_{rank}.numpy"].tolist()))))
        assert numpy_state.rand() == np.random.RandomState(rank).rand()


def test_ids_that_could_be_of_several_parameters_are_refused(tmp_path: Path, run: Run) -> None:
    source = run.verl(tmp_path / "actor", 2)
    with pytest.raises(UsageError, match="several assignments to the parameters fit") as raised:
        reshard.convert(source, tmp_path / "made")
    message = str(raised.value)
    assert "1, 2 of (4, 4): any of p1.weight, frozen.weight, p2.weight" in message
    assert "5, 6 of (4,): any of p1.bias, frozen.bias, p2.bias" in message
    assert "--param-order" in message
    assert not (tmp_path / "made").exists()


def test_looking_at_it_needs_no_order(tmp_path: Path, run: Run) -> None:
    with reshard.open_checkpoint(run.verl(tmp_path / "actor", 2)) as checkpoint:
        moment = run.optimizer.state[run.model.p2.weight]["exp_avg"]
        assert torch.equal(checkpoint.read("optim.state.2.exp_avg"), moment)
        assert torch.equal(
            checkpoint.read("optim.state.emb.weight.exp_avg"), run.optimizer.state[run.model.emb.weight]["exp_avg"]
        )
    assert check(tmp_path / "actor", deep=True).faults == []


def test_an_order_that_swaps_equal_shapes_is_obeyed(tmp_path: Path, run: Run) -> None:
    """Nothing but the names can tell: so the test above would see it if ids were matched in any other way."""
    path = tmp_path / "order.json"
    path.write_text(json.dumps([["emb.weight", "p2.weight", "p1.weight", "head.weight"], ORDER[1]]))
    found = converted(run.verl(tmp_path / "actor", 2), param_order=path)
    moment = run.optimizer.state[run.model.p2.weight]["exp_avg"]
    assert torch.equal(found["optim.state.p1.weight.exp_avg"], moment)


def test_distinct_shapes_need_no_order(tmp_path: Path) -> None:
    run = Run(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    assert_same(but_rng(converted(run.verl(tmp_path / "actor", 3))), run.expected)


@pytest.mark.parametrize("to", FORMATS)
def test_only_the_model_needs_no_order(tmp_path: Path, run: Run, to: str) -> None:
    found = converted(run.verl(tmp_path / "actor", 3), to, only="model")
    prefix = "model." if to == "dcp" else ""
    assert_same(found, {prefix + name: tensor for name, tensor in run.model.state_dict().items()})


def test_the_dtype_of_weights_alone_is_changed_and_only_if_asked_for(tmp_path: Path, run: Run, order: Path) -> None:
    source = run.verl(tmp_path / "actor", 2)
    kept = converted(source, "torch", param_order=order)
    assert kept["model.one"].dtype == torch.float32
    assert kept["model.head.weight"].dtype == torch.bfloat16
    assert kept["optim.state.head.weight.exp_avg"].dtype == torch.bfloat16
    assert (kept["model.count"].item(), kept["model.mask"].tolist()) == (16777217, [True, False, True])
    cast = converted(source, "safetensors", param_order=order, dtype="bf16")
    assert torch.equal(cast["model.one"], run.model.one.detach().bfloat16())
    assert (cast["model.count"].dtype, cast["model.count"].item()) == (torch.int64, 16777217)
    assert cast["model.mask"].dtype == torch.bool
    assert cast["optim.state.one.step"].dtype == torch.float32


def test_replicas_are_one_copy(tmp_path: Path, run: Run, order: Path) -> None:
    def cut(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return sharded(tensor, mesh, [Replicate(), Shard(0)])

    source = run.verl(tmp_path / "actor", 4, cut, axes=(2, 2))
    assert_same(but_rng(converted(source, param_order=order)), run.expected)
    assert_same(but_rng(converted(source, "safetensors", param_order=order)), run.expected)
    with reshard.open_checkpoint(source) as checkpoint:
        number = checkpoint.index.number["model.emb.weight"]
        assert (checkpoint.index.owner == number).sum() == 2
    assert check(source, deep=True).faults == []


def test_a_replica_that_differs_is_found(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(6, 2)

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        other = weight.clone()
        other[5, 1] += 1e-3 if rank == 3 else 0
        return {"model_rank_{rank}.pt": {"w": sharded(other, mesh, [Replicate(), Shard(0)])}}

    folder = write_ranks(tmp_path / "x", 4, content, axes=(2, 2))
    assert check(folder).faults == []
    (fault,) = check(folder, deep=True).faults
    assert fault.key == "model.w" and "0.001" in str(fault)


B17 = [8, 5, 6, 3, 7]


def strided(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """FSDP on the first axis, of what tensor parallelism cut on the second."""
    return sharded(tensor, mesh, [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)])


@pytest.mark.parametrize("axes", [(2, 2), (3, 2)])
def test_fsdp_over_tensor_parallel_rows(tmp_path: Path, axes: tuple[int, int]) -> None:
    weights = {f"of_{length}": torch.arange(float(length)) for length in B17}
    weights |= {f"{name}_wide": torch.stack([w, -w], 1) for name, w in weights.items()}

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {"model_rank_{rank}.pt": {name: strided(weight, mesh) for name, weight in weights.items()}}

    folder = write_ranks(tmp_path / "x", axes[0] * axes[1], content, axes)
    assert_same(converted(folder, only="model"), {f"model.{name}": weight for name, weight in weights.items()})


def test_two_dims_cut_by_two_axes(tmp_path: Path) -> None:
    weight, row = torch.randn(5, 7), torch.randn(3)

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {
            "model_rank_{rank}.pt": {
                "both": sharded(weight, mesh, [Shard(0), Shard(1)]),
                "last": sharded(weight, mesh, [Replicate(), Shard(1)]),
                "plain": sharded(weight, mesh, [Shard(0), Shard(0)]),
                "row": sharded(row, mesh, [Shard(0), Replicate()]),
                "everywhere": sharded(row, mesh, [Replicate(), Replicate()]),
            }
        }

    folder = write_ranks(tmp_path / "x", 6, content, (2, 3))
    expected = {"both": weight, "last": weight, "plain": weight, "row": row, "everywhere": row}
    assert_same(converted(folder, "safetensors", only="model"), expected)


def test_a_partial_sum_is_refused_by_key(tmp_path: Path) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        return {"model_rank_{rank}.pt": {"fine": sharded(torch.ones(4), mesh, [Shard(0)]), "lin.w": partial}}

    folder = write_ranks(tmp_path / "x", 2, content)
    with pytest.raises(CheckpointUnsound, match="a placement Partial, of which no rank has the values") as raised:
        reshard.open_checkpoint(folder)
    assert (raised.value.key, Path(str(raised.value.path)).name) == ("model.lin.w", "model_rank_0.pt")


@pytest.mark.parametrize("local", [torch.ones(2, 2), torch.ones(3, 1), torch.ones(0, 2)])
def test_a_part_that_is_not_that_of_its_placements(tmp_path: Path, local: torch.Tensor) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 2)), stride=(2, 1))
        return {"model_rank_{rank}.pt": {"w": part}}

    folder = write_ranks(tmp_path / "x", 2, content)
    with pytest.raises(CheckpointUnsound, match=r"where its placements give this rank \(3, 2\)") as raised:
        reshard.open_checkpoint(folder)
    assert raised.value.key == "model.w"


def test_a_rank_outside_the_mesh_holds_nothing(tmp_path: Path) -> None:
    weight = torch.arange(5.0)

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        of_two = DeviceMesh("cpu", torch.arange(2))
        if rank < 2:
            return {"model_rank_{rank}.pt": {"w": sharded(weight, of_two, [Shard(0)])}}
        nothing = DTensor.from_local(weight[:0].clone(), of_two, [Shard(0)], run_check=False, shape=weight.shape,
                                     stride=weight.stride())  # fmt: skip
        return {"model_rank_{rank}.pt": {"w": nothing}}

    assert_same(converted(write_ranks(tmp_path / "x", 3, content), only="model"), {"model.w": weight})


@pytest.mark.parametrize(
    ("other", "what"), [(torch.ones(4, 3), r"\(4, 3\)"), (torch.ones(4, 2, dtype=torch.float64), "float64")]
)
def test_ranks_that_disagree(tmp_path: Path, other: torch.Tensor, what: str) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {"model_rank_{rank}.pt": {"w": sharded(other if rank == 1 else torch.ones(4, 2), mesh, [Shard(0)])}}

    folder = write_ranks(tmp_path / "x", 2, content)
    with pytest.raises(CheckpointUnsound, match=f"the ranks disagree on this tensor.*{what}") as raised:
        reshard.open_checkpoint(folder)
    assert raised.value.key == "model.w"


def test_a_rank_without_a_tensor_leaves_a_hole(tmp_path: Path) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        model = {"w": sharded(torch.ones(4), mesh, [Shard(0)]), "v": sharded(torch.ones(4), mesh, [Shard(0)])}
        if rank == 1:
            del model["w"]
        return {"model_rank_{rank}.pt": model}

    folder = write_ranks(tmp_path / "x", 2, content)
    with pytest.raises(CheckpointUnsound, match=r"model\.w"):
        reshard.convert(folder, tmp_path / "made", only="model")
    assert not (tmp_path / "made").exists()
    assert [fault.key for fault in check(folder).faults] == ["model.w"]


def with_rank_0s_optimizer(run: Run, folder: Path) -> Path:
    """What a script leaves that saves the optimizer on rank 0 alone."""

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        part = {"optimizer": run.moments(by_rows, mesh)} if rank == 0 else {}
        return {"state_rank{rank}_of_{world}.pt": {"model": run.weights(by_rows, mesh), **part, "epoch": 2}}

    return write_ranks(folder, 3, content)


def test_the_optimizer_of_rank_0_alone_is_refused(tmp_path: Path, run: Run, order: Path) -> None:
    folder = with_rank_0s_optimizer(run, tmp_path / "x")
    with pytest.raises(CheckpointUnsound, match="an optimizer that not every rank saved") as raised:
        reshard.convert(folder, tmp_path / "made", param_order=order)
    assert "1, 2" in str(raised.value) and "--only model" in str(raised.value)
    assert_same(converted(folder, "torch", only="model"), run.model.state_dict())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module._orig_mod."])
def test_wrappers_are_dropped_from_model_and_optimizer(tmp_path: Path, wrapper: str) -> None:
    weights = {"layers.0.w": torch.randn(5, 2), "my_module.w": torch.randn(3), "decoder.module.w": torch.randn(2, 2)}

    def spelled(name: str) -> str:
        return wrapper + name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.")

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        state = {spelled(name): {"exp_avg": sharded(weight * 2, mesh, [Shard(0)])} for name, weight in weights.items()}
        groups = [{"lr": 0.1, "params": [spelled(name) for name in weights]}]
        model = {spelled(name): sharded(weight, mesh, [Shard(0)]) for name, weight in weights.items()}
        return {"ckpt_rank_{rank}.pt": {"state_dict": model, "optimizer": {"state": state, "param_groups": groups}}}

    expected = {f"model.{name}": weight for name, weight in weights.items()}
    expected |= {f"optim.state.{name}.exp_avg": weight * 2 for name, weight in weights.items()}
    assert_same(converted(write_ranks(tmp_path / "x", 2, content)), expected)


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {"m_rank_{rank}.pt": {"a._orig_mod.w": torch.ones(2), "a.w": torch.zeros(2)}}

    folder = write_ranks(tmp_path / "x", 2, content)
    with pytest.raises(StateMismatch, match=r"a\._orig_mod\.w and a\.w"):
        reshard.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("place", "step"), [("global_step_40/actor", 40), ("step-7", 7), ("run3/final", 0), ("iter_0000012", 12)]
)
def test_the_step_of_a_model_alone_is_in_the_name_of_a_folder(tmp_path: Path, place: str, step: int) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        return {"model_world_size_{world}_rank_{rank}.pt": {"w": sharded(torch.ones(4), mesh, [Shard(0)])}}

    with reshard.open_checkpoint(write_ranks(tmp_path / place, 2, content)) as checkpoint:
        assert checkpoint.manifest is not None and checkpoint.manifest.step == step


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.five = nn.Parameter(torch.randn(5, 3))
        self.single = nn.Parameter(torch.randn(1, 5))
        self.register_buffer("seen", torch.tensor([3, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.five.T @ self.single.T).square().sum()


def step_on_one_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def save_fsdp1(folder: str) -> dict[str, int]:
    """Runs on every rank; the number of local shards of each tensor."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Rows(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_on_one_batch(model, optimizer)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    weights = model.state_dict()
    state = {"model": weights, "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save(state, f"{folder}/shard_rank{rank}_of_{world}.pt")
    return {name: len(weights[name].local_shards()) for name in ("five", "single")}


def unsharded_rows() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_on_one_batch(model, optimizer)
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        expected |= {f"optim.state.{name}.{slot}": value for slot, value in optimizer.state[parameter].items()}
    return expected


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_tensors_of_fsdp1(tmp_path: Path, world: int) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    shards = run_ranks(world, save_fsdp1, str(folder))
    assert [counts["single"] for counts in shards] == [1] + [0] * (world - 1)
    expected = unsharded_rows()
    for to in FORMATS:
        assert_same(converted(folder, to), expected)
    assert check(folder, deep=True).faults == []


def save_fsdp2(folder: str) -> dict[str, torch.Tensor]:
    """Runs on every rank; what torch gathers."""
    torch.manual_seed(0)
    model = Rows()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_on_one_batch(model, optimizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save(model.state_dict(), f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), f"{folder}/optim_world_size_{world}_rank_{rank}.pt")
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        expected |= {f"optim.state.{name}.{slot}": value for slot, value in optimizer.state[parameter].items()}
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for key, value in expected.items()
    }


@pytest.mark.parametrize("world", [1, 3])
def test_dtensors_of_fsdp2(tmp_path: Path, world: int) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    expected = run_ranks(world, save_fsdp2, str(folder))[0]
    for to in FORMATS:
        assert_same(converted(folder, to), expected)
    # Nothing is left of where it was read.
    assert {path.name for path in folder.iterdir()} == {
        f"{kind}_world_size_{world}_rank_{rank}.pt" for kind in ("model", "optim") for rank in range(world)
    }


class Average:
    """As a run of ours has one among its extra objects."""

    def __init__(self, shapes: Mapping[str, torch.Tensor]) -> None:
        self.state = {"decay": 0.0, "num_updates": 0, "shadow": {n: torch.zeros_like(t) for n, t in shapes.items()}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("is_in_its_own_file", [True, False])
def test_a_moving_average_comes_along(tmp_path: Path, run: Run, is_in_its_own_file: bool) -> None:
    weights = dict(run.model.named_parameters())
    averaged = {name: tensor.detach() / 3 for name, tensor in weights.items() if name != "p2.bias"}

    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        average = {
            "decay": 0.999,
            "num_updates": 7,
            "shadow": {name: by_rows(tensor, mesh) for name, tensor in averaged.items()},
        }
        model = run.weights(by_rows, mesh)
        if is_in_its_own_file:
            return {"model_world_size_{world}_rank_{rank}.pt": model, "ema_world_size_{world}_rank_{rank}.pt": average}
        return {"all_world_size_{world}_rank_{rank}.pt": {"model": model, "ema": average}}

    source = write_ranks(tmp_path / "ranks", 2, content)
    with reshard.open_checkpoint(source) as checkpoint:
        assert any("without a moving average: p2.bias" in note for note in checkpoint.notes)
    found = converted(source, world_size=3)
    model = {key: tensor for key, tensor in run.expected.items() if key.startswith("model.")}
    assert_same(found, model | {f"extra.ema.shadow.{name}": tensor for name, tensor in averaged.items()})
    average = Average(averaged)
    state = reshard.TrainState(model=Model(), optimizer=None, extra={"ema": average})
    reshard.load_state(tmp_path / "ranks-dcp", state, allow_missing=["rng"])
    assert (average.state["decay"], average.state["num_updates"]) == (0.999, 7)
    assert_same(average.state["shadow"], averaged)


def test_a_lora_run_of_verl_is_read_from_the_files_of_the_ranks(tmp_path: Path) -> None:
    """The folder beside them has the adapter once more, for PEFT."""
    torch.manual_seed(0)
    base = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{base}.base_layer.weight": torch.rand(6, 4),
        f"{base}.lora_A.default.weight": torch.rand(2, 4),
        f"{base}.lora_B.default.weight": torch.rand(6, 2),
    }
    source = write_ranks(
        tmp_path / "actor",
        4,
        lambda mesh, rank: {
            "model_world_size_{world}_rank_{rank}.pt": {n: by_rows(t, mesh) for n, t in weights.items()}
        },
    )
    (source / "lora_adapter").mkdir()
    adapter = {n.replace(".default", ""): t for n, t in weights.items() if "lora_" in n}
    save_file(adapter, source / "lora_adapter" / "adapter_model.safetensors")
    (source / "lora_adapter" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
    (source / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}))
    expected = {f"model.{name}": tensor for name, tensor in weights.items()}
    assert_same(converted(source, world_size=3), expected)
    reshard.convert(source / "model_world_size_4_rank_2.pt", tmp_path / "of-a-file")
    assert_same(stock_tensors(tmp_path / "of-a-file"), expected)
    reshard.convert(source / "lora_adapter", tmp_path / "adapter")
    assert_same(stock_tensors(tmp_path / "adapter"), {f"model.{name}": tensor for name, tensor in adapter.items()})
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == {"r": 2, "lora_alpha": 8}


def test_an_average_without_a_model_beside_it_is_the_model(tmp_path: Path, run: Run) -> None:
    source = write_ranks(
        tmp_path / "ranks",
        2,
        lambda mesh, rank: {"model_ema_world_size_{world}_rank_{rank}.pt": run.weights(by_rows, mesh)},
    )
    assert_same(converted(source), {key: tensor for key, tensor in run.expected.items() if key.startswith("model.")})


def test_a_run_whose_files_are_named_after_an_average_keeps_model_and_optimizer(
    tmp_path: Path, run: Run, order: Path
) -> None:
    def content(mesh: DeviceMesh, rank: int) -> Mapping[str, Any]:
        parts = {"model": run.weights(by_rows, mesh), "optimizer": run.moments(by_rows, mesh)}
        return {"run-ema-world_size_{world}_rank_{rank}.pt": parts}

    source = write_ranks(tmp_path / "ranks", 2, content)
    assert_same(converted(source, param_order=order), run.expected)
