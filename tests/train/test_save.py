"""What ``save_state`` writes and, as much, what it leaves alone."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import lab
import numpy as np
import odd
import pytest
import torch
import torch.distributed as dist
from odd import assert_equal, same, whole
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import reshard
from reshard import BatchPlan, ReshardError, TrainState
from reshard.storage.steps import committed_steps


def manifest_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"step-{step}" / "reshard.json").read_text())


def keys_of(folder: Path, step: int) -> set[str]:
    return set(FileSystemReader(folder / f"step-{step}").read_metadata().state_dict_metadata)


def nothing_left(folder: Path) -> bool:
    return not folder.exists() or not [path for path in folder.iterdir() if "step" in path.name]


def one_process(**parts: Any) -> TrainState:
    """A model that was trained for a step, in this process, without any process group."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(model, **{"optimizer": optimizer, "step": 1, **parts})


# The manifest.


def full_run(folder: str) -> None:
    run = lab.build(lab.Setup(wrap="fsdp2"))
    run.train(2)
    run.state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    reshard.save_state(folder, run.state, attempt="job-7.2")


def test_the_manifest_says_what_the_run_was(tmp_path: Path) -> None:
    run_ranks(3, full_run, str(tmp_path))
    manifest = manifest_of(tmp_path, 2)
    assert manifest["format"] == 2
    assert (manifest["step"], manifest["attempt"]) == (2, "job-7.2")
    assert manifest["world"] == {"ranks": 3, "nodes": 1, "gpus_per_node": 0, "mesh": {"dp": 3}}
    saved = ("model", "optimizer", "scheduler", "scaler", "rng", "data", "batch", "step", "extra.streams")
    assert manifest["parts"] == dict.fromkeys(saved, "saved")
    assert manifest["batch"] == {"global_batch": 12, "micro_batch": 1, "ranks": 3, "accumulation": 4}
    cosine = 3e-2 * (1 + math.cos(math.pi * 2 / 20)) / 2
    assert manifest["lr"] == [pytest.approx(cosine, abs=1e-15)]
    count = len(dict(lab.Net().named_parameters()))
    assert manifest["optimizers"] == {
        "optimizer": {"class": "AdamW", "groups": [0], "parameters": count, "with_state": count, "empty": []}
    }
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"].keys() == {"reshard", "torch", "numpy", "python"}
    assert manifest["scaler"]["scale"] == 1024.0
    assert manifest["rng"] == {"ranks": 3}
    assert "shared" in manifest["data"]


def test_parts_that_the_run_does_not_have(tmp_path: Path) -> None:
    reshard.save_state(tmp_path, one_process(optimizer=None))
    manifest = manifest_of(tmp_path, 1)
    none = {part for part, kept in manifest["parts"].items() if kept == "none"}
    assert none == {"optimizer", "scheduler", "scaler", "data", "batch"}
    assert (manifest["lr"], manifest["optimizers"], manifest["batch"], manifest["scaler"]) == ([], {}, None, None)
    assert not any(key.startswith("optim") for key in keys_of(tmp_path, 1))


def test_several_optimizers_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = {
        "body": torch.optim.AdamW(model[0].parameters(), lr=0.1),
        "head": torch.optim.SGD([{"params": [model[1].weight]}, {"params": [model[1].bias]}], lr=0.2, momentum=0.9),
    }
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    reshard.save_state(tmp_path, TrainState(model, optimizers, step=1))
    manifest = manifest_of(tmp_path, 1)
    assert manifest["lr"] == [0.1, 0.2, 0.2]
    assert manifest["optimizers"] == {
        "body": {"class": "AdamW", "groups": [0], "parameters": 2, "with_state": 2, "empty": []},
        "head": {"class": "SGD", "groups": [1, 2], "parameters": 2, "with_state": 2, "empty": []},
    }
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    again = {
        "body": torch.optim.AdamW(fresh[0].parameters(), lr=0.1),
        "head": torch.optim.SGD([{"params": [fresh[1].weight]}, {"params": [fresh[1].bias]}], lr=0.2, momentum=0.9),
    }
    reshard.load_state(tmp_path, TrainState(fresh, again))
    for name, optimizer in optimizers.items():
        for mine, its in zip(optimizer.state.values(), again[name].state.values(), strict=True):
            assert same(mine, its)


def test_one_parameter_in_two_optimizers_is_refused(tmp_path: Path) -> None:
    state = one_process()
    optimizers = {"a": state.optimizer, "b": torch.optim.SGD([state.model.bias], lr=0.1)}
    with pytest.raises(ReshardError, match="bias: two optimizers hold the same parameter"):
        reshard.save_state(tmp_path, TrainState(state.model, optimizers, step=1))
    assert nothing_left(tmp_path)


# Values that are out of the ordinary.


def test_learning_rate_as_a_tensor(tmp_path: Path) -> None:
    def state(lr: Any, seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=lr, foreach=False), step=1)

    reshard.save_state(tmp_path, state(torch.tensor(0.1), 0))
    assert manifest_of(tmp_path, 1)["lr"] == [float(torch.tensor(0.1))]
    as_tensor, as_float = state(torch.tensor(0.5), 1), state(0.5, 1)
    live = as_tensor.optimizer.param_groups[0]["lr"]
    reshard.load_state(tmp_path, as_tensor)
    assert as_tensor.optimizer.param_groups[0]["lr"] is live
    assert live == torch.tensor(0.1)
    reshard.load_state(tmp_path, as_float)
    assert as_float.optimizer.param_groups[0]["lr"] == float(torch.tensor(0.1))
    assert type(as_float.optimizer.param_groups[0]["lr"]) is float


class Strange(torch.optim.Optimizer):
    """State that is nested, listed and empty, as in Shampoo and SOAP; no learning rate, as in some of the rest."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "options": {"warm": [1, 2]}})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.tensor(3.0),
                    "nothing": None,
                    "count": 5,
                    "factors": [parameter.detach() * 2, parameter.detach() * 3],
                    "block": {"left": {"root": parameter.detach() * 4}},
                }


def test_nested_listed_and_empty_state(tmp_path: Path) -> None:
    state = one_process()
    state.optimizer = Strange(state.model.parameters())
    state.optimizer.step()
    reshard.save_state(tmp_path, state)
    assert manifest_of(tmp_path, 1)["lr"] == [None]
    other = one_process()
    other.optimizer = Strange(other.model.parameters())
    other.optimizer.param_groups[0].update(betas=(torch.tensor(0.0), torch.tensor(0.0)), options={"warm": []})
    reshard.load_state(tmp_path, other)
    for mine, its in zip(state.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert mine.keys() == its.keys()
        assert same(mine["block"], its["block"])
        assert (its["nothing"], its["count"]) == (None, 5)
        assert isinstance(its["factors"], list)
        assert all(map(same, mine["factors"], its["factors"]))
    group = other.optimizer.param_groups[0]
    assert [float(beta) for beta in group["betas"]] == [float(torch.tensor(beta)) for beta in (0.9, 0.99)]
    assert type(group["betas"]) is tuple
    assert group["options"] == {"warm": [1, 2]}
    assert group.keys() == state.optimizer.param_groups[0].keys()


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_rate_or_scale_that_is_not_finite_is_saved_all_the_same(tmp_path: Path, rate: float) -> None:
    """A run that diverged is the one whose state somebody will want to look at."""
    scaler = torch.amp.GradScaler("cpu", init_scale=math.inf)
    state = one_process(scaler=scaler)
    state.optimizer.param_groups[0]["lr"] = rate
    reshard.save_state(tmp_path, state)
    assert manifest_of(tmp_path, 1)["lr"] == [None]
    other = one_process(scaler=torch.amp.GradScaler("cpu"))
    reshard.load_state(tmp_path, other)
    found = other.optimizer.param_groups[0]["lr"]
    assert found == rate or (math.isnan(found) and math.isnan(rate))
    assert other.scaler.state_dict()["scale"] == math.inf


class Box:
    """Any object with state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_paths_that_dots_make_equal(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "a.b#2": torch.full((2,), 7.0)}
    reshard.save_state(tmp_path, one_process(extra={"box": Box(state)}))
    box = Box({"a": {"b": torch.rand(2)}, "a.b": torch.rand(2), "a.b#2": torch.rand(2)})
    reshard.load_state(tmp_path, one_process(extra={"box": box}))
    assert same(box.state["a"], state["a"])
    assert same(box.state["a.b"], state["a.b"])
    assert same(box.state["a.b#2"], state["a.b#2"])


# What ranks disagree about.


def save_disagreeing(folder: str) -> None:
    rank = dist.get_rank()
    model = nn.BatchNorm1d(50)
    for tensor in model.buffers():
        tensor.fill_(rank)
    meter = odd.Meter()
    meter.calls = 100 + rank
    model.add_module("meter", meter)
    box = Box({f"t{i}": torch.full((3,), rank) for i in range(6)} | {"rank": rank})
    reshard.save_state(folder, TrainState(model, step=1, extra={"box": box}))


def load_disagreeing(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model = nn.BatchNorm1d(50)
    model.add_module("meter", odd.Meter())
    box = Box({f"t{i}": torch.full((3,), -1) for i in range(6)} | {"rank": -1})
    reshard.load_state(folder, TrainState(model, extra={"box": box}))
    return dict(model.state_dict()), box.state


def test_rank_zero_speaks_for_all(tmp_path: Path) -> None:
    """Stock spreads replicas over the ranks, so that a running mean would go with another rank's variance."""
    run_ranks(3, save_disagreeing, str(tmp_path))
    for model, box in run_ranks(2, load_disagreeing, str(tmp_path)):
        assert {name: float(model[name].max()) for name in ("running_mean", "running_var")} == {
            "running_mean": 0.0,
            "running_var": 0.0,
        }
        assert model["num_batches_tracked"] == 0
        assert model["meter._extra_state"]["calls"] == 100
        assert box["rank"] == 0
        assert all(int(value.max()) == 0 for name, value in box.items() if name != "rank")


# What a save leaves alone.


def before_and_after(folder: str) -> None:
    """Gradients are set, RNGs are somewhere, and all of it is the same afterwards."""
    run = lab.build(lab.Setup(wrap="fsdp2", bf16=True))
    run.train(2)
    x, y = lab.Points(4)[[0, 1, 2, 3]]
    run.model.train()
    nn.functional.mse_loss(run.model(x).float(), y).backward()
    steps = _counted(type(run.optimizer)), _counted(type(run.state.scheduler))
    _seed()
    expected = random.random(), np.random.rand(), torch.rand(2).tolist()
    _seed()
    gradients = {name: p.grad.to_local().clone() for name, p in run.model.named_parameters()}
    objects = {name: id(p) for name, p in run.model.named_parameters()}
    state = whole(run.model, run.optimizer)
    reshard.save_state(folder, run.state)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected
    assert steps == ([0], [0])
    assert {name: id(p) for name, p in run.model.named_parameters()} == objects
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter.grad.to_local(), gradients[name])
    assert_equal(whole(run.model, run.optimizer), state)


def _seed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def _counted(kind: Any) -> list[int]:
    calls, step = [0], kind.step

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return step(*args, **kwargs)

    kind.step = counting
    return calls


def test_gradients_rng_and_counters_are_untouched(tmp_path: Path) -> None:
    run_ranks(2, before_and_after, str(tmp_path))
    described = manifest_of(tmp_path, 2)["optimizers"]["optimizer"]
    assert described["with_state"] == described["parameters"] > 0


def after_evaluation(folder: str, wrap: str) -> None:
    run = lab.build(lab.Setup(wrap=wrap, bf16=wrap == "fsdp2", dropout=0.0))
    run.train(1)
    reshard.save_state(f"{folder}/a", run.state)
    run.model.eval()
    with torch.no_grad():
        run.model(torch.ones(2, lab.FEATURES))
    reshard.save_state(f"{folder}/b", run.state)
    run.model(torch.ones(2, lab.FEATURES))  # With gradients, whose backward never comes.
    reshard.save_state(f"{folder}/c", run.state)


@pytest.mark.parametrize(("wrap", "world"), [("fsdp2", 2), ("fsdp1", 2), ("fsdp1", 1)])
def test_an_evaluation_before_the_save_changes_nothing(tmp_path: Path, wrap: str, world: int) -> None:
    """After a forward FSDP2 holds the root's parameters whole, in bf16, and unknown to the optimizer."""
    run_ranks(world, after_evaluation, str(tmp_path), wrap)
    first = _all_tensors(tmp_path / "a" / "step-1")
    assert any(value.dtype == torch.float32 for value in first.values())
    for other in ("b", "c"):
        assert_equal(_all_tensors(tmp_path / other / "step-1"), first)


def _all_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor but the random states, read by stock."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    room = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if not isinstance(entry, BytesStorageMetadata) and not key.startswith("rng")
    }
    torch.distributed.checkpoint.load(room, checkpoint_id=folder, no_dist=True)
    return room


def test_no_state_at_all_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1, bias=False)
    model(torch.ones(1, 1)).backward()
    reshard.save_state(tmp_path, TrainState(model, torch.optim.AdamW(model.parameters())))
    assert "0 of 1 parameters have optimizer state" in caplog.text
    described = manifest_of(tmp_path, 0)["optimizers"]["optimizer"]
    assert (described["parameters"], described["with_state"]) == (1, 0)


# A save that fails.


class Raises:
    def state_dict(self) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("the tokenizer's socket is closed")
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Unknown:
    pass


def failing(folder: str, how: str) -> str:
    run = lab.build(lab.Setup(wrap="fsdp2"))
    run.train(1)
    if how == "raises on rank 1":
        run.state.extra = {"tokenizer": Raises()}
    elif how == "no JSON":
        run.state.extra = {"box": Box({"deep": [1, Unknown()]})}
    elif how == "no state_dict" and dist.get_rank() == 1:
        run.state.extra = {"box": Unknown()}
    elif how == "hyperparameter" or (how == "rank 2's hyperparameter" and dist.get_rank() == 2):
        run.optimizer.param_groups[0]["hook"] = Unknown()
    try:
        reshard.save_state(folder, run.state)
    except ReshardError as fault:
        run.state.extra = {}
        run.optimizer.param_groups[0].pop("hook", None)
        # The ranks are still in step with each other.
        assert reshard.save_state(f"{folder}-again", run.state).name == "step-1"
        return f"{type(fault).__name__}: {fault}"
    raise AssertionError("saved what cannot be saved")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises on rank 1", ["rank 1", "ValueError: the tokenizer's socket is closed"]),
        ("no JSON", ["extra.box.deep.1", "Unknown"]),
        ("no state_dict", ["extra.box", "state_dict", "Unknown"]),
        ("hyperparameter", ["optim.param_groups.0.hook", "could not be loaded again", "Unknown"]),
        ("rank 2's hyperparameter", ["optim.param_groups.0.hook", "could not be loaded again"]),
    ],
)
def test_every_rank_raises_what_one_met(tmp_path: Path, how: str, words: list[str]) -> None:
    folder = tmp_path / "run"
    messages = run_ranks(3, failing, str(folder), how)
    assert len(set(messages)) == 1, messages
    first_line = messages[0].splitlines()[0]
    assert all(word in first_line for word in words), first_line
    assert nothing_left(folder)
    assert [folder.step for folder in committed_steps(Path(f"{folder}-again"))] == [1]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    messages = run_ranks(3, failing_there, str(tmp_path / "run"))
    assert len(set(messages)) == 1
    assert str(tmp_path / "run") in messages[0].splitlines()[0]
    assert (tmp_path / "run").read_text() == "a file"


def failing_there(folder: str) -> str:
    run = lab.build(lab.Setup(wrap="fsdp2"))
    try:
        reshard.save_state(folder, run.state)
    except ReshardError as fault:
        return str(fault)
    raise AssertionError("saved into a file")


# No pickle.


def test_pickle_only_where_stock_needs_it(tmp_path: Path) -> None:
    box = Box({"tuple": (1, 2.5), "numbers": {3: "three"}, "array": np.arange(3), "tensor": torch.ones(2)})
    state = one_process(extra={"box": box}, plan=BatchPlan(4, 2, 1))
    state.scheduler = torch.optim.lr_scheduler.OneCycleLR(state.optimizer, 0.1, total_steps=10)
    reshard.save_state(tmp_path, state)
    folder = tmp_path / "step-1"
    text = (folder / "reshard.json").read_text()
    assert "pickle" not in text
    assert json.loads(text)["extra"]["box"]["tensor"] == {"!stored": "extra.box.tensor"}
    metadata = FileSystemReader(folder).read_metadata()
    objects = [key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    assert objects
    assert all(key.startswith("optim.param_groups.0.") for key in objects)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "reshard.json"]


def test_tensors_are_aligned_zip_records(tmp_path: Path) -> None:
    """What lets a later reader take a slice of a tensor by its place in the file."""
    reshard.save_state(tmp_path, one_process())
    folder = tmp_path / "step-1"
    places = FileSystemReader(folder).read_metadata().storage_data
    for index, place in places.items():
        content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        part = tmp_path / "part"
        part.write_bytes(content)
        with zipfile.ZipFile(part) as archive:
            assert all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist()), index
            assert archive.testzip() is None


LOAD_AND_LIST = """
import sys, torch
from torch import nn
import reshard
model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
reshard.load_state(sys.argv[1], reshard.TrainState(model, optimizer))
print([list(entries) for entries in optimizer.state.values()])
"""


def test_restored_state_is_in_one_order_on_every_rank(tmp_path: Path) -> None:
    """Ranks are processes that hash differently; a collective for each entry must not meet another entry."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    reshard.save_state(tmp_path, TrainState(model, optimizer, step=1))
    listed = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOAD_AND_LIST, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(reshard.__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(listed) == 1


def _save_after_an_evaluation(folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

    for wrapper in ("fsdp1", "fsdp2"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if wrapper == "fsdp1":
            precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            cpu = torch.device("cpu")
            sharded = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True, mixed_precision=precision)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            sharded = fully_shard(model, mp_policy=policy)
        state = reshard.TrainState(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
        sharded.eval()
        with torch.no_grad():
            sharded(torch.ones(2, 7))
        path = reshard.save_state(f"{folder}/{wrapper}", state)
        dist.barrier()
        with reshard.open_checkpoint(path) as checkpoint:
            for name, tensor in before.items():
                saved = torch.as_tensor(checkpoint.read(f"model.{name}"))
                assert saved.dtype == tensor.dtype
                assert torch.equal(saved, tensor), (wrapper, name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_low_precision_evaluation_before_a_save_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    """B62."""
    run_ranks(2, _save_after_an_evaluation, str(tmp_path))
