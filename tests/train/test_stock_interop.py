"""Stock ``torch.distributed.checkpoint`` reads what we write, without our code; we read what it wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lab
import odd
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from odd import assert_equal, optimizer_of, train, whole, wrapped
from ranks import RankFailed, run_ranks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import reshard
from reshard import ReshardError, TrainState


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Hyperparameters that no default is equal to."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": parameters[::2], "weight_decay": 0.07, "lr": 1 / 3},
            {"params": parameters[1::2], "weight_decay": 0.0, "betas": (0.8, 0.877), "eps": 3e-7},
        ],
        lr=0.0123456789012345678,
        amsgrad=True,
    )


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def save_ours(folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model = wrapped(odd.Odd(), "fsdp2")
    optimizer = two_groups(model)
    train(model, optimizer)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97).step()
    extra = {"streams": reshard.SlotStreams(5), "ema": _Average(model)}
    reshard.save_state(folder, TrainState(model, optimizer, extra=extra, step=3))
    return whole(model, optimizer), hyperparameters(optimizer)


class _Average:
    """The shadow of the weights that many runs keep."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "decay": 0.99}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def load_with_stock(folder: str, how: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """No function of ours is called here."""
    model = wrapped(odd.Odd(seed=1), how)
    optimizer = two_groups(model)
    # Stock loads only what the template has, and initial_lr comes with a schedule.
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    template = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    stock.load(
        template,
        checkpoint_id=f"{folder}/step-3",
        # The parameter that never got a gradient has no state in the checkpoint.
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    set_model_state_dict(model, template["model"])
    set_optimizer_state_dict(model, optimizer, template["optim"])
    return whole(model, optimizer), hyperparameters(optimizer)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("ours"))
    return (folder, *run_ranks(2, save_ours, folder)[0])


@pytest.mark.parametrize("world", [2, 3, 1])
def test_stock_reads_ours(ours: tuple[str, dict[str, Any], list[dict[str, Any]]], world: int) -> None:
    folder, saved, groups = ours
    loaded, loaded_groups = run_ranks(world, load_with_stock, folder, "fsdp2")[0]
    assert_equal({name: value for name, value in loaded.items() if "idle.unused." not in name}, saved)
    assert loaded_groups == groups
    assert "initial_lr" in groups[0]
    assert loaded["optim.embed.weight.step"] == 3


def test_stock_reads_ours_in_one_process(ours: tuple[str, dict[str, Any], list[dict[str, Any]]]) -> None:
    folder, saved, groups = ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, loaded_groups = load_with_stock(folder, "plain")
    assert_equal({name: value for name, value in loaded.items() if "idle.unused." not in name}, saved)
    assert loaded_groups == groups


def test_the_keys_are_those_of_the_contract(ours: tuple[str, dict[str, Any], list[dict[str, Any]]]) -> None:
    folder, saved, groups = ours
    found = set(stock.FileSystemReader(f"{folder}/step-3").read_metadata().state_dict_metadata)
    names = [name for name in saved if name.startswith("model.") and "_extra_state" not in name]
    expected = {
        *names,
        *(f"model.meter._extra_state.{name}" for name in ("calls", "peak", "history.recipe", "history.window")),
        *(name.replace("optim.", "optim.state.", 1) for name in saved if name.startswith("optim.")),
        *(f"optim.param_groups.{i}.{name}" for i in (0, 1) for name in [*groups[i], "params"]),
        *(f"rng.rank_{rank}.{name}" for rank in (0, 1) for name in ("python", "numpy", "torch")),
    }
    average = {key for key in found if key.startswith("extra.ema.weights.")}
    assert len(average) == len(dict(odd.Odd().named_parameters()))
    assert found - average == {key for key in expected if "cuda" not in key}


# The other direction.


def save_with_stock(folder: str, wrap: str, flatten: bool, kind: str) -> dict[str, Any]:
    model, optimizer = _net(wrap, kind, seed=0)
    _train_net(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }
        stock.save(state, checkpoint_id=folder)
    return {**whole(model, optimizer), "groups": hyperparameters(optimizer)}


def _net(wrap: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = lab.Net(dropout=0.0)
    if wrap == "fsdp2":
        model = lab.wrap_fsdp2(model)
    elif wrap.startswith("fsdp1"):
        model = lab.wrap_fsdp1(model, use_orig_params=wrap == "fsdp1")
    return model, optimizer_of(model, kind)


def _train_net(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = lab.Points(8)[list(range(8))]
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()


def load_stocks(folder: str, wrap: str, kind: str, allow_missing: list[str]) -> dict[str, Any]:
    model, optimizer = _net(wrap, kind, seed=1)
    state = TrainState(model, optimizer, step=17)
    report = reshard.load_state(folder, state, allow_missing=allow_missing)
    assert state.step == 17, "stock records no step"
    return {**whole(model, optimizer), "groups": hyperparameters(optimizer), "missing": sorted(report.missing)}


def refusal(folder: str, wrap: str, kind: str) -> str:
    model, optimizer = _net(wrap, kind, seed=1)
    before = whole(model, optimizer)
    try:
        reshard.load_state(folder, TrainState(model, optimizer))
    except ReshardError as fault:
        assert_equal(whole(model, optimizer), before)
        return str(fault)
    raise AssertionError("loaded what lacks parts of the state")


STOCK_FORMS = [
    ("fsdp2", False, "adamw", 2, 3, "fsdp2"),
    ("fsdp2", True, "adamw", 2, 3, "fsdp2"),
    ("fsdp1", False, "adamw", 2, 3, "fsdp1"),
    ("fsdp2", True, "sgd", 2, 1, "plain"),
    ("fsdp1-flat", False, "sgd", 2, 2, "fsdp2"),
]


@pytest.mark.parametrize(("wrap", "flatten", "kind", "before", "after", "loaded_as"), STOCK_FORMS)
def test_we_read_what_stock_wrote(
    tmp_path: Path, wrap: str, flatten: bool, kind: str, before: int, after: int, loaded_as: str
) -> None:
    folder = str(tmp_path / "stock")
    saved = run_ranks(before, save_with_stock, folder, wrap, flatten, kind)[0]
    loaded = run_ranks(after, load_stocks, folder, loaded_as, kind, ["rng", "step"])[0]
    assert loaded.pop("missing") == ["rng", "step"]
    assert loaded.pop("groups") == saved.pop("groups")
    assert_equal(loaded, saved)


def test_what_stock_did_not_save_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "stock")
    run_ranks(2, save_with_stock, folder, "fsdp2", False, "adamw")
    first_line = run_ranks(2, refusal, folder, "fsdp2", "adamw")[1].splitlines()[0]
    assert "reshard.json" in first_line
    assert "rng, step" in first_line
    assert "allow_missing=['rng', 'step']" in first_line
    with pytest.raises(RankFailed, match="lacks rng"):
        run_ranks(2, load_stocks, folder, "fsdp2", "adamw", ["step"])


def save_numpy_rate(folder: str) -> None:
    model, optimizer = _net("fsdp2", "adamw", seed=0)
    import numpy as np

    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(0.3 * step)).step()
    _train_net(model, optimizer)
    assert type(optimizer.param_groups[0]["lr"]) is np.float64
    reshard.save_state(folder, TrainState(model, optimizer, step=2))


def load_numpy_rate(folder: str) -> float:
    model, optimizer = _net("fsdp2", "adamw", seed=1)
    reshard.load_state(folder, TrainState(model, optimizer))
    assert dist.get_world_size() == 1
    return float(optimizer.param_groups[0]["lr"])


def test_a_rate_that_numpy_computed_comes_back(tmp_path: Path) -> None:
    import numpy as np

    run_ranks(2, save_numpy_rate, str(tmp_path))
    assert run_ranks(1, load_numpy_rate, str(tmp_path))[0] == 3e-2 * np.cos(0.3)
