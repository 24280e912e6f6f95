"""Stock torch as the oracle: it writes what we rewrite, on real ranks, and reads what we wrote, on other ones."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lab
import odd
import pytest
import rewriting
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from odd import assert_equal, optimizer_of, train, whole, wrapped
from ranks import run_ranks
from rewriting import assert_same, rewrite, stock_tensors
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from reshard.geometry.mesh import Mesh

PEERS = Path(__file__).resolve().parents[2].parent / "shared" / "peers"


class Wide(nn.Module):
    """For tensor parallelism: 13 rows over 2 and 2 ranks, 5 columns, a bias that is not cut along the second axis."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 5)
        self.norm = nn.LayerNorm(5)


def build(how: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with state."""
    if how in ("tp", "tp-fsdp2"):
        model: nn.Module = Wide(seed)
        if how == "tp":
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer
    if how.startswith("net "):
        torch.manual_seed(seed)
        # FSDP1, for which stock torch trips over the extra state of the odd model.
        model = lab.Net(dropout=0.0)
        model = lab.wrap_fsdp1(model) if how == "net fsdp1" else lab.wrap_fsdp2(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(lab.Points().x[:8]).square().mean().backward()
            optimizer.step()
        return model, optimizer
    mesh = None
    if how == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    model = wrapped(odd.Odd(seed), "fsdp2" if how == "hsdp" else how, mesh)
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }


def save(folder: str, how: str, flat: bool, options: dict[str, Any]) -> dict[str, Any]:
    """No function of ours is called here."""
    model, optimizer = build(how)
    state = state_of(model, optimizer, flat)
    if options.pop("in_process", False):
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        stock.async_save(state, checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
        if dist.get_rank() == 0:
            deadline = time.monotonic() + 60
            while not Path(folder, ".metadata").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        dist.barrier()
    else:
        stock.save(state, storage_writer=stock.FileSystemWriter(folder, **options))
    return whole(model, optimizer)


def load(folder: str, how: str, flat: bool) -> dict[str, Any]:
    """No function of ours is called here either; what is loaded is overwritten in full, as the seed is another one."""
    model, optimizer = build(how, seed=9)
    template = state_of(model, optimizer, flat)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    stock.load(template, checkpoint_id=folder, planner=planner)
    set_model_state_dict(model, template["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat, strict=False)
    set_optimizer_state_dict(model, optimizer, template["optim"], options=options)
    return whole(model, optimizer)


# name: how it is wrapped, ranks, flattened optimizer, options of the writer
WRITERS: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", 4, False, {}),
    "fsdp2 flat, threads": ("fsdp2", 3, True, {"thread_count": 3}),
    "fsdp1, files": ("net fsdp1", 2, False, {"single_file_per_rank": False}),
    "fsdp1 flat": ("net fsdp1", 4, True, {}),
    "hsdp": ("hsdp", 4, False, {"thread_count": 2}),
    "tp": ("tp", 4, False, {}),
    "tp flat": ("tp", 4, True, {}),
    "in a process": ("fsdp2", 2, False, {"in_process": True}),
    "plain": ("plain", 1, False, {}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes each checkpoint when it is first wanted: (folder, whole tensors)."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            how, world, flat, options = WRITERS[name]
            folder = tmp_path_factory.mktemp("stock") / "saved"
            made[name] = (folder, run_ranks(world, save, str(folder), how, flat, dict(options))[0])
        return made[name]

    return make


FAST = [
    ("fsdp2", Mesh(3), "fsdp2"),
    ("fsdp2 flat, threads", Mesh(2), "fsdp2"),
    ("fsdp1, files", Mesh(3), "fsdp2"),
    ("hsdp", Mesh(2), "fsdp2"),
    ("tp", Mesh(3), "tp-fsdp2"),
    ("in a process", Mesh(3), "plain"),
    ("plain", Mesh(2, 2), "hsdp"),
]
FULL = [
    (name, mesh, how)
    for name in WRITERS
    for mesh, how in (
        (Mesh(1), "fsdp2"),
        (Mesh(2), "fsdp2"),
        (Mesh(4), "fsdp2"),
        (Mesh(5), "fsdp2"),
        (Mesh(2, 2), "hsdp"),
    )
]


@pytest.mark.parametrize(
    ("name", "mesh", "how"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in FULL)], ids=str
)
def test_what_stock_wrote_is_rewritten_and_read_by_stock(
    tmp_path: Path, written: Any, name: str, mesh: Mesh, how: str
) -> None:
    source, expected = written(name)
    before = rewriting.file_bytes(source)
    rewrite(source, tmp_path / "made", mesh)
    assert rewriting.file_bytes(source) == before
    assert_same(stock_tensors(tmp_path / "made"), stock_tensors(source))
    assert rewriting.stock_objects(tmp_path / "made") == rewriting.stock_objects(source)
    assert rewriting.stock_metadata(tmp_path / "made").planner_data == rewriting.stock_metadata(source).planner_data
    if name.startswith("tp"):
        how = "tp-fsdp2"
    elif name.startswith("fsdp1"):
        # Stock torch cannot load a flattened optimizer into FSDP1 on CPU.
        how = "net fsdp1" if mesh.ranks == 2 and "flat" not in name else "net fsdp2"
    world = mesh.ranks if how != "plain" else 1
    loaded = run_ranks(world, load, str(tmp_path / "made"), how, WRITERS[name][2])[0]
    # The parameter that never got a gradient has state only where the wrapping gives it some.
    wanted = {key: value for key, value in expected.items() if "idle.unused." not in key}
    assert_equal({key: loaded[key] for key in wanted}, wanted)


def test_a_stock_folder_does_not_grow_when_it_is_rewritten(tmp_path: Path, written: Any) -> None:
    """Replicas are stored once: HSDP's copy is as large as FSDP's."""
    source, _ = written("hsdp")
    rewrite(source, tmp_path / "shards", 2)
    rewrite(source, tmp_path / "replicas", Mesh(2, 2))
    places = [rewriting.stock_metadata(tmp_path / name).storage_data for name in ("shards", "replicas")]
    assert places[0].keys() == places[1].keys()
    assert sum(i.length for i in places[0].values()) == sum(i.length for i in places[1].values())


@pytest.mark.skipif(not PEERS.is_dir(), reason="no checkpoints of other tools beside this repository")
@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "dcp_fsdp1_nested_w4", "dcp_fsdp2_flat_w4", "dcp_fsdp2_multifile_w4", "dcp_fsdp2_nested_w4", "dcp_fsdp2_tp_2x2",
        "dcp_hsdp_2x2", "old24_dcp_fsdp2_w4", "titan_w4", "titan_last_bf16_w4", "dcp_fsdp2_nocollectives_w4",
    ],
)  # fmt: skip
def test_what_others_wrote(tmp_path: Path, name: str, ranks: int) -> None:
    import safetensors.torch

    source = next((PEERS / name / "ckpt").rglob("*.distcp")).parent
    rewrite(source, tmp_path / "made", ranks)
    found = stock_tensors(tmp_path / "made")
    expected = safetensors.torch.load_file(PEERS / name / "expected.safetensors")
    checked = 0
    for key, tensor in expected.items():
        names = [key, key.replace("optim.", "optim.state.", 1), key.replace("optim.", "optimizer.state.", 1)]
        names += [key.removeprefix("model."), key.replace("optim.", "state.", 1)]
        name_found = next((candidate for candidate in names if candidate in found), None)
        if name_found is not None and found[name_found].dtype == tensor.dtype:
            assert_same({key: found[name_found]}, {key: tensor})
            checked += 1
    assert checked >= len(expected) * 0.9


def save_ours(folder: str, wrap: str) -> Any:
    setup = lab.Setup(wrap=wrap)
    run = lab.build(setup)
    rows = run.train(4)
    reshard.save_state(folder, run.state)
    digest = lab.digest(run)
    return rows, digest, run.train(8)


def resume_ours(folder: str, wrap: str, exact: bool = False) -> Any:
    run = lab.build(lab.Setup(wrap=wrap, exact=exact))
    report = reshard.load_state(folder, run.state)
    before = lab.digest(run)
    return report.line, report.warnings, before, run.train(8)


@pytest.mark.parametrize(
    ("world", "wrap", "mesh", "resumed_as"),
    [
        (2, "fsdp2", Mesh(3), "fsdp2"),
        (4, "hsdp", Mesh(2), "fsdp2"),
        (2, "fsdp1", Mesh(2, 2), "hsdp"),
        pytest.param(3, "fsdp2", Mesh(1), "fsdp2", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", Mesh(4), "fsdp1", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_our_own_step_resumes_on_the_ranks_it_was_rewritten_for(
    tmp_path: Path, world: int, wrap: str, mesh: Mesh, resumed_as: str
) -> None:
    _, digest, rows = run_ranks(world, save_ours, str(tmp_path / "run"), wrap)[0]
    rewrite(tmp_path / "run" / "step-4", tmp_path / "other" / "step-4", mesh)
    line, _, before, resumed = run_ranks(mesh.ranks, resume_ours, str(tmp_path / "other"), resumed_as)[0]
    assert "full state restored" in line
    # Rewritten for these ranks, it is as if they had saved it.
    assert line.startswith(f"resumed at step 4 (full state restored; {mesh.ranks} rank")
    assert f"{world} ->" not in line
    assert before == digest
    assert [row[0] for row in resumed] == [row[0] for row in rows]
    assert [row[2] for row in resumed] == [row[2] for row in rows]
    for (_, loss, _), (_, expected, _) in zip(resumed, rows, strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)


def resume_twice(folder: str, rewritten: str) -> Any:
    return resume_ours(folder, "fsdp2"), resume_ours(rewritten, "fsdp2")


def test_with_exact_bits_the_detour_changes_nothing(tmp_path: Path) -> None:
    """The same ranks resume from what was saved and from what was rewritten for them: the same losses, bit for bit."""
    run_ranks(2, save_ours, str(tmp_path / "run"), "fsdp2")
    rewrite(tmp_path / "run" / "step-4", tmp_path / "other" / "step-4", 3)
    straight, detour = run_ranks(3, resume_twice, str(tmp_path / "run"), str(tmp_path / "other"))[0]
    assert straight[2:] == detour[2:]
