"""Names across a resume: wrapper prefixes (B52) and tied weights (B56 of CASES.md).

Wrapped models are made by torch itself: compile, FSDP1, activation checkpointing, DataParallel.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from reshard import ReshardError, TrainState, load_state, save_state
from reshard.errors import StateMismatch
from reshard.index.names import canonical_names

STOCK_LACKS = ["rng", "step"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["_orig_mod.module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w"],
            ["layers.0.w"],
        ),
        (["module._orig_mod.w"], ["w"]),
        (["_orig_mod.w", "_orig_mod.b"], ["w", "b"]),
        (["layers.0._orig_mod.w", "layers.1.w"], ["layers.0.w", "layers.1.w"]),
        (["_forward_module.w", "_forward_module.module.b"], ["w", "module.b"]),
        (["_forward_module.module.w", "_forward_module.module.b"], ["w", "b"]),
        (["_checkpoint_wrapped_module._fsdp_wrapped_module._orig_mod.w"], ["w"]),
        (
            ["my_module.w", "module_list.0.w", "decoder.module.w"],
            ["my_module.w", "module_list.0.w", "decoder.module.w"],
        ),
        (["module.w", "head.w"], ["module.w", "head.w"]),
        (["module"], ["module"]),
        (["module.w", "module"], ["module.w", "module"]),
        (["my_orig_mod.w", "_orig_mod2.w"], ["my_orig_mod.w", "_orig_mod2.w"]),
        ([], []),
    ],
)
def test_canonical_names(names: list[str], expected: list[str]) -> None:
    assert list(canonical_names(names).values()) == expected


def test_two_names_that_become_one_are_both_named() -> None:
    with pytest.raises(StateMismatch) as refusal:
        canonical_names(["a._orig_mod.w", "a.w"])
    assert "a._orig_mod.w and a.w" in str(refusal.value).splitlines()[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh() * self.scale


class Net(nn.Module):
    """Legit names on purpose: ``my_module``, ``module_list``, a ``module`` below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.my_module = nn.Linear(3, 3)
        self.module_list = nn.ModuleList([nn.Linear(3, 3)])
        self.decoder = nn.ModuleDict({"module": nn.Linear(3, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.decoder["module"](self.module_list[0](self.my_module(x)))


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_layers(model: nn.Module) -> nn.Module:
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="eager")
    return model


def recomputed_layers(model: nn.Module) -> nn.Module:
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return model


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def everything(model: nn.Module) -> nn.Module:
    model.layers[0] = torch.compile(checkpoint_wrapper(model.layers[0]), backend="eager")
    return torch.compile(nn.DataParallel(recomputed_layers(model)), backend="eager")


WRAPS = [plain, compiled, compiled_layers, recomputed_layers, data_parallel, everything]


def build(wrap: Any, seed: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    bare = Net()
    model = wrap(bare)
    return bare, model, torch.optim.AdamW(model.parameters(), lr=0.1)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """In the order of construction, which no wrapper changes."""
    values: list[Any] = [p.tolist() for p in model.parameters()]
    values += [b.tolist() for b in model.buffers()]
    for parameter in model.parameters():
        values.append({name: value.tolist() for name, value in optimizer.state[parameter].items()})
    return values


@pytest.mark.parametrize(("saved", "loaded"), [(a, b) for i, a in enumerate(WRAPS) for b in (WRAPS[i - 1], plain)])
def test_saved_under_one_wrap_and_loaded_under_another(tmp_path: Path, saved: Any, loaded: Any) -> None:
    bare, model, optimizer = build(saved, 1)
    bare(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    path = save_state(tmp_path, TrainState(model, optimizer))
    keys = set(stock.FileSystemReader(path).read_metadata().state_dict_metadata)
    assert {key.split("model.", 1)[1] for key in keys if key.startswith("model.")} == set(Net().state_dict())
    _, other, target = build(loaded, 2)
    load_state(path, TrainState(other, target))
    assert tensors(other, target) == tensors(model, optimizer)


@pytest.mark.parametrize("loaded", [plain, everything])
@pytest.mark.parametrize("saved", [compiled, everything, data_parallel])
def test_raw_wrapped_names_that_stock_wrote(tmp_path: Path, saved: Any, loaded: Any) -> None:
    """Not through get_model_state_dict, which strips some itself: model and optimizer under the names as they are."""
    bare, model, optimizer = build(saved, 1)
    bare(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    packed = optimizer.state_dict()
    state = {names[number]: entries for number, entries in packed["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in packed["param_groups"]]
    tree = {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}
    stock.save(tree, checkpoint_id=tmp_path / "s", no_dist=True)
    _, other, target = build(loaded, 2)
    load_state(tmp_path / "s", TrainState(other, target), allow_missing=STOCK_LACKS)
    assert tensors(other, target) == tensors(model, optimizer)


def test_stored_names_that_collide_are_refused(tmp_path: Path) -> None:
    tree = {"model": {"a.w": torch.zeros(2), "a._orig_mod.w": torch.ones(2)}}
    stock.save(tree, checkpoint_id=tmp_path / "s", no_dist=True)
    model = nn.Module()
    model.a = nn.Module()
    model.a.w = nn.Parameter(torch.full((2,), 7.0))
    with pytest.raises(StateMismatch) as refusal:
        load_state(tmp_path / "s", TrainState(model), allow_missing=STOCK_LACKS)
    assert "a._orig_mod.w" in str(refusal.value).splitlines()[0] and model.a.w.tolist() == [7, 7]


def wrapped_on_ranks(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if kind == "fsdp1":
        options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
        for number, layer in enumerate(model.layers):
            model.layers[number] = FullyShardedDataParallel(checkpoint_wrapper(layer), **options)
        model = torch.compile(FullyShardedDataParallel(model, **options), backend="eager")
    else:
        for number, layer in enumerate(model.layers):
            model.layers[number] = fully_shard(torch.compile(checkpoint_wrapper(layer), backend="eager"))
        model = fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save_wrapped(kind: str, folder: str) -> None:
    model, optimizer = wrapped_on_ranks(kind, 1)
    inner = getattr(model, "_orig_mod", model)
    inner(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save_state(folder, TrainState(model, optimizer))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_sharded_and_wrapped_loads_into_a_bare_model(tmp_path: Path, kind: str) -> None:
    run_ranks(2, save_wrapped, kind, str(tmp_path))
    torch.manual_seed(1)
    expected = Net()
    reference = torch.optim.AdamW(expected.parameters(), lr=0.1)
    expected(torch.ones(2, 3)).sum().backward()
    reference.step()
    _, model, optimizer = build(plain, 2)
    load_state(tmp_path, TrainState(model, optimizer), allow_missing=["rng"])
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert torch.allclose(optimizer.state[mine]["exp_avg"], reference.state[theirs]["exp_avg"], atol=1e-6)


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.embed(x)))


def tied_on_ranks(folder: str, load: bool) -> Any:
    torch.manual_seed(int(load))
    model = fully_shard(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer)
    if load:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_state(folder, state)
    else:
        model(torch.arange(5)).sum().backward()
        optimizer.step()
        save_state(folder, state)
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    moments = [whole(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
    return model.lm_head.weight is model.embed.weight, weights, moments


def whole(tensor: torch.Tensor) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


class TestTied:
    """B56."""

    def test_a_tied_model_at_another_world_size_is_still_tied(self, tmp_path: Path) -> None:
        saved = run_ranks(2, tied_on_ranks, str(tmp_path), False)[0]
        assert run_ranks(3, tied_on_ranks, str(tmp_path), True)[0] == saved
        assert saved[0] and saved[1]["lm_head.weight"] == saved[1]["embed.weight"]

    def stored(self, folder: Path, **changed: torch.Tensor | None) -> Path:
        torch.manual_seed(0)
        weights = dict(Tied().state_dict())
        for name, tensor in changed.items():
            key = f"{name}.weight"
            if tensor is None:
                del weights[key]
            else:
                weights[key] = tensor
        stock.save({"model": weights}, checkpoint_id=folder / "s", no_dist=True)
        return folder / "s"

    def test_untied_weights_under_a_tied_flag_are_both_restored_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Tied(tied=False)
        model.config = type("Config", (), {"tie_word_embeddings": True})()
        head, embed = model.lm_head.weight.tolist(), model.embed.weight.tolist()
        path = save_state(tmp_path, TrainState(model))
        other = Tied(tied=False)
        other.config = model.config
        load_state(path, TrainState(other))
        assert (other.lm_head.weight.tolist(), other.embed.weight.tolist()) == (head, embed) and head != embed
        assert any("tie_word_embeddings" in record.getMessage() for record in caplog.records)

    def test_untied_weights_do_not_fit_a_tied_model(self, tmp_path: Path) -> None:
        path = self.stored(tmp_path, lm_head=torch.ones(5, 4))
        with pytest.raises(ReshardError) as refusal:
            load_state(path, TrainState(Tied()), allow_missing=STOCK_LACKS)
        first = str(refusal.value).splitlines()[0]
        assert "lm_head.weight" in first and "embed.weight" in first and "another value" in first

    @pytest.mark.parametrize("lost", ["lm_head", "embed"])
    def test_a_missing_partner_is_filled_where_the_model_is_tied(self, tmp_path: Path, lost: str) -> None:
        path = self.stored(tmp_path, **{lost: None})
        torch.manual_seed(0)
        expected = Tied().embed.weight
        torch.manual_seed(5)
        model = Tied()
        load_state(path, TrainState(model), allow_missing=STOCK_LACKS)
        assert model.lm_head.weight is model.embed.weight and torch.equal(model.embed.weight, expected)

    def test_a_missing_partner_is_refused_where_the_model_is_not_tied(self, tmp_path: Path) -> None:
        path = self.stored(tmp_path, lm_head=None)
        model = Tied(tied=False)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(StateMismatch, match=r"model.lm_head.weight: not in the checkpoint"):
            load_state(path, TrainState(model), allow_missing=STOCK_LACKS)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
