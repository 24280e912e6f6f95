"""What `diff` finds, held against torch and numpy, over formats and shardings that stock code wrote."""

from __future__ import annotations

import os
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ranks import run_ranks
from safetensors.torch import save_file
from small import Small, edit_manifest

import reshard
from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.opening import open_checkpoint
from reshard.index.dtypes import raw
from reshard.verify.diff.elements import Tally, Tolerance, compare
from reshard.verify.diff.run import Diff, diff

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint64, torch.bool,
]  # fmt: skip
Changes = dict[str, Any]


def state() -> Changes:
    """One state that every format and sharding here holds; odd sizes, every kind of type."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(13, 6, generator=generator)
    moments = torch.rand(13, 6, generator=generator).to(torch.bfloat16)
    tensors = {"w": weights, "bf": moments, "step": torch.tensor(3.0), "none": torch.zeros(0, 4)}
    tensors["count"] = torch.tensor([2**53 + 1, -5, 7])
    return {"model": tensors, "train": {"lr": 0.1, "names": ["a", ("b", None)], "flag": True}}


def save(folder: Path, content: Changes, planner: dcp.SavePlanner | None = None) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, planner=planner, no_dist=True)
    return folder


def save_sharded(folder: Path) -> None:
    """On four ranks: by rows, and as a grid with the second dim cut as well."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    content = state()
    for name, shape, placements in (("rows", (4,), [Shard(0)]), ("grid", (2, 2), [Shard(0), Shard(1)])):
        mesh = init_device_mesh("cpu", shape)
        sharded = {
            key: distribute_tensor(tensor, mesh, placements if tensor.ndim == 2 else [Replicate()] * len(shape))
            for key, tensor in content["model"].items()
        }
        dcp.save({"model": sharded, "train": content["train"]}, checkpoint_id=folder / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state as `rows`, `grid`, `whole` (DCP), `file.pt` and `model.safetensors` (weights only)."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, save_sharded, folder)
    save(folder / "whole", state())
    torch.save(state(), folder / "file.pt")
    save_file(state()["model"], folder / "model.safetensors")
    return folder


def found(a: Path, b: Path, **options: Any) -> Diff:
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        return diff(first, second, **options)


@pytest.mark.parametrize("a", ["rows", "grid", "whole", "file.pt"])
@pytest.mark.parametrize("b", ["rows", "grid", "whole", "file.pt"])
def test_shardings_and_formats_of_one_state_are_equal(saved: Path, a: str, b: str) -> None:
    result = found(saved / a, saved / b)
    assert result.is_empty, result
    assert (result.same, result.same_objects) == (5, 3)
    assert result.same_bytes == 13 * 6 * 6 + 4 + 24


def test_bare_names_are_compared_under_model(saved: Path) -> None:
    for a, b, side in (("grid", "model.safetensors", "b"), ("model.safetensors", "rows", "a")):
        result = found(saved / a, saved / b)
        assert (result.prefixed, result.same, result.different_tensors) == (side, 5, 0)
        only = (result.only_objects_a, result.only_objects_b)
        assert sorted(map(len, only)) == [0, 3]
    both = found(saved / "model.safetensors", saved / "model.safetensors")
    assert (both.prefixed, both.is_empty) == (None, True)


def test_names_of_hugging_face_that_begin_with_model_are_bare_all_the_same(tmp_path: Path) -> None:
    weights = {"model.layers.0.w": torch.ones(3), "lm_head.w": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    result = found(save(tmp_path / "dcp", {"model": weights}), tmp_path / "model.safetensors")
    assert (result.is_empty, result.prefixed, result.same) == (True, "b", 2)


@pytest.mark.parametrize("a", ["rows", "grid", "whole", "file.pt"])
def test_a_difference_is_found_where_it_is(saved: Path, tmp_path: Path, a: str) -> None:
    content = state()
    content["model"]["w"][11, 4] += 2.0
    content["model"]["w"][2, 5] -= 0.5
    content["model"]["count"][0] += 1
    result = found(saved / a, save(tmp_path / "b", content))
    first, second = result.different
    assert (first.key, first.where, first.tally and first.tally.unequal) == ("model.w", (11, 4), 2)
    assert first.tally is not None and first.tally.max_abs == pytest.approx(2.0)
    # As float64, 2**53 + 1 and 2**53 + 2 are the same number.
    assert (second.key, second.where, second.tally and second.tally.max_abs) == ("model.count", (0,), 1)
    assert (result.same, result.different_tensors) == (3, 2)


def test_what_only_one_side_has_and_other_shapes(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"model": {"x": torch.ones(2, 3), "y": torch.ones(2), "step": torch.ones(())}, "lr": 1})
    b = save(tmp_path / "b", {"model": {"x": torch.ones(3, 2), "z": torch.ones(2), "step": torch.ones(1)}, "wd": 1})
    result = found(a, b)
    assert (result.only_a, result.only_b) == (["model.y"], ["model.z"])
    assert result.shapes == [("model.step", (), (1,)), ("model.x", (2, 3), (3, 2))]
    assert (result.only_objects_a, result.only_objects_b) == (["lr"], ["wd"])
    assert (result.different_tensors, result.tensors, result.is_empty) == (4, 4, False)


def test_another_dtype_is_a_difference_and_its_values_are_compared(tmp_path: Path) -> None:
    exact = torch.arange(6.0).reshape(2, 3)
    a = save(tmp_path / "a", {"x": exact, "y": exact + 0.001, "n": torch.tensor([2**53 + 1, 4])})
    b = save(tmp_path / "b", {"x": exact.bfloat16(), "y": exact.bfloat16(), "n": torch.tensor([2.0**53, 4.0]).double()})
    n, x, y = found(a, b).dtypes
    assert (x.a_dtype, x.b_dtype, x.tally and x.tally.unequal) == ("float32", "bfloat16", 0)
    assert (y.tally and y.tally.unequal) == 6
    assert (n.tally and n.tally.unequal, n.where) == (1, (0,))
    assert not found(a, b, atol=1.0).is_empty


def test_a_transposed_tensor_equals_its_copy(tmp_path: Path) -> None:
    x = torch.randn(700, 900)
    transposed = x.T.contiguous().T
    assert not transposed.is_contiguous()
    torch.save({"x": transposed}, tmp_path / "a.pt")
    torch.save({"x": x}, tmp_path / "b.pt")
    with open_checkpoint(tmp_path / "a.pt") as a, open_checkpoint(tmp_path / "b.pt") as b:
        assert diff(a, b).is_empty and diff(b, a).is_empty
    x[699, 899] += 1
    torch.save({"x": x}, tmp_path / "b.pt")
    assert found(tmp_path / "a.pt", tmp_path / "b.pt").different[0].where == (699, 899)


def elements(tensor: torch.Tensor) -> tuple[NDArray[Any], str]:
    name = str(tensor.dtype).removeprefix("torch.")
    content = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return content.view(raw(name)).reshape(tensor.shape), name


def tally(a: torch.Tensor, b: torch.Tensor, **options: float) -> Tally:
    (first, a_name), (second, b_name) = elements(a), elements(b)
    return compare(first, second, a_name, b_name, Tolerance(**options))


def wide(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy()
    return tensor.to(torch.float64).numpy() if tensor.is_floating_point() else tensor.numpy().astype(object)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_elements_that_differ_are_those_that_torch_finds(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    a = (torch.rand(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
    b = a.clone()
    for place in data.draw(st.lists(st.integers(0, max(0, a.numel() - 1)), max_size=5) if a.numel() else st.just([])):
        b.view(-1)[place] = torch.tensor(data.draw(st.integers(0, 60))).to(dtype)
    plain = torch.float64 if "float8" in str(dtype) else dtype
    differ = torch.ne(a.to(plain), b.to(plain)).flatten().numpy()
    result = tally(a, b)
    assert (result.unequal, result.outside, result.elements) == (differ.sum(), differ.sum(), a.numel())
    if differ.any():
        distance = np.abs(wide(a) - wide(b)).flatten()
        assert result.max_abs == distance.max()
        assert result.where is not None and distance[result.where] == distance.max()
    else:
        assert (result.max_abs, result.where) == (None, None)


@settings(max_examples=100, deadline=None)
@given(
    a=st.lists(st.floats(width=32), min_size=1, max_size=8),
    noise=st.lists(st.sampled_from([0.0, 1e-6, 0.1, -1.0, float("inf"), float("nan")]), min_size=8, max_size=8),
    atol=st.sampled_from([0.0, 1e-5, 0.5]),
    rtol=st.sampled_from([1e-6, 0.2]),
)
def test_a_tolerance_is_that_of_numpy(a: list[float], noise: list[float], atol: float, rtol: float) -> None:
    first = np.array(a, dtype=np.float32)
    with np.errstate(all="ignore"):
        second = first + np.array(noise[: len(a)], dtype=np.float32)
        close = np.isclose(first.astype(np.float64), second.astype(np.float64), atol=atol, rtol=rtol, equal_nan=True)
    assert tally(torch.tensor(first), torch.tensor(second), atol=atol, rtol=rtol).outside == (~close).sum()


def test_nan_equals_nan_and_zero_differs_from_minus_zero_by_nothing() -> None:
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, -1]).to(torch.int32).view(torch.float32)
    assert tally(payloads, payloads.flip(0)).unequal == 0
    zeros = tally(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (zeros.unequal, zeros.max_abs, zeros.max_rel, zeros.where) == (1, 0.0, 0.0, 0)
    assert tally(torch.tensor([0.0]), torch.tensor([-0.0]), atol=1e-9).outside == 0
    one_side = tally(torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([1.0, 1.0, float("nan")]), atol=1e9)
    assert (one_side.unequal, one_side.outside, one_side.nan_a, one_side.nan_b) == (2, 2, 1, 1)
    assert (one_side.max_abs, one_side.where) == (None, 1)


def test_the_two_parts_of_complex_numbers_are_compared_each() -> None:
    nan = float("nan")
    a = torch.tensor([complex(nan, 1), complex(nan, 1), complex(0.0, 1), 1 + 1j])
    b = torch.tensor([complex(nan, 1), complex(nan, 2), complex(-0.0, 1), 1 + 1j])
    assert tally(a, a.clone()).unequal == 0
    for kind in (torch.complex64, torch.complex128):
        assert tally(a.to(kind), b.to(kind)).unequal == 2


def test_integers_are_exact_to_their_ends() -> None:
    ends = torch.tensor([torch.iinfo(torch.int64).min, 2**62], dtype=torch.int64)
    assert tally(ends, ends.flip(0)).max_abs == 2**63 + 2**62
    assert tally(ends, torch.tensor([-(2.0**63), 2.0**62]).double()).unequal == 0
    large = torch.tensor([2**63, 2**64 - 1], dtype=torch.uint64)
    assert tally(large, torch.tensor([2.0**63, 2.0**64]).double()).unequal == 1
    assert tally(large, torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64)).max_abs == 2**63 - 1
    assert tally(large, torch.tensor([-(2**63), -1])).unequal == 2
    assert tally(torch.tensor([True, False]), torch.tensor([1, 1])).unequal == 1


def test_blocks_and_pieces_add_up(tmp_path: Path) -> None:
    """A tensor of many pieces, with differences at the ends of some."""
    x = torch.zeros(1 << 21, dtype=torch.int8).reshape(1 << 10, -1)
    y = x.clone()
    places = [0, (1 << 16) - 1, 1 << 16, (1 << 19) - 1, 1 << 19, (1 << 21) - 1]
    y.view(-1)[places] = torch.tensor([1, 2, 3, 4, 5, 99], dtype=torch.int8)
    (result,) = found(save(tmp_path / "a", {"x": x}), save(tmp_path / "b", {"x": y})).different
    assert result.tally is not None
    assert (result.tally.unequal, result.tally.elements, result.where) == (6, 1 << 21, (1023, 2047))


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    x = torch.zeros(24 << 20)
    a = save(tmp_path / "a", {"x": x})
    x[:: 1 << 10] = 1.0
    b = save(tmp_path / "b", {"x": x})
    tracemalloc.start()
    try:
        (result,) = found(a, b).different
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.tally is not None and result.tally.unequal == (24 << 20) >> 10
    assert peak_bytes < 48 << 20


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_each_byte_is_read_once(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = {"x": torch.randn(1024, 512), "y": torch.randn(700, 300), "t": torch.randn(300, 500).T}
    run_ranks(4, save_rows_or_grid, tmp_path / "a", whole, shape)
    save(tmp_path / "b", whole)
    payload = sum(tensor.numel() * 4 for tensor in whole.values())
    counted: list[int] = []
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        assert diff(a, b, on_bytes=counted.append).is_empty
        for checkpoint in (a, b):
            assert payload <= checkpoint.files.bytes_read <= 1.02 * payload + 4096 * len(checkpoint.index.file)
    assert sum(counted) == 2 * payload


def save_rows_or_grid(folder: Path, tensors: dict[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape)
    placements = [Shard(dim) for dim in range(len(shape))]
    dcp.save({key: distribute_tensor(x, mesh, placements) for key, x in tensors.items()}, checkpoint_id=folder)


def test_objects_that_other_releases_would_write_otherwise_are_equal(tmp_path: Path) -> None:
    content = {"names": ["a", {"b": (1, 2.5)}], "inner": {1, 2}, "at": [torch.arange(3), torch.Size([1, 2])]}
    a = save(tmp_path / "a", {"o": [content]})
    torch.serialization.set_crc32_options(False)
    try:
        b = save(tmp_path / "b", {"o": [content]})
    finally:
        torch.serialization.set_crc32_options(True)
    assert (a / "__0_0.distcp").read_bytes() != (b / "__0_0.distcp").read_bytes()
    assert found(a, b).is_empty


@pytest.mark.parametrize(
    ("a", "b", "where", "shown"),
    [
        (0.1, 0.2, "", ("0.1", "0.2")),
        (1, True, "", ("1", "True")),
        (0.0, -0.0, "", ("0.0", "-0.0")),
        ((1, 2), [1, 2], "", ("(1, 2)", "[1, 2]")),
        ({"k": [1, {"x": 2}]}, {"k": [1, {"x": 3}]}, "k[1].x", ("2", "3")),
        ([{4: "b", 3: "a"}], [{4: "b"}], "[0].3", ("'a'", None)),
        ({1, 2}, {1, 3}, "", ("{1, 2}", "{1, 3}")),
    ],
)
def test_objects_that_differ_say_where(tmp_path: Path, a: Any, b: Any, where: str, shown: tuple[str, str]) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    folders = [save(tmp_path / name, {"o": value}, planner) for name, value in (("a", a), ("b", b))]
    (difference,) = found(*folders).objects["o"]
    assert difference == (where, *shown)


class Opaque:
    """Nothing that the allow-list knows."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_objects_that_are_not_decoded_are_compared_by_their_pickles(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"o": Opaque(1)})
    torch.serialization.set_crc32_options(False)
    try:
        b = save(tmp_path / "b", {"o": Opaque(1)})
    finally:
        torch.serialization.set_crc32_options(True)
    c = save(tmp_path / "c", {"o": Opaque(2)})
    assert found(a, b).is_empty
    ((difference,),) = found(a, c).objects.values()
    assert difference.a is not None and "Opaque" in difference.a


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    small = Small()
    small.train(2)
    reshard.save_state(folder, small.state)
    return folder / "step-2"


def test_manifests_are_compared_for_what_describes_the_training(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "step-2"))
    edit_manifest(
        other,
        world=lambda world: {**world, "ranks": 7, "mesh": {"dp": 7}},
        batch=lambda batch: {**batch, "ranks": 7},
        versions={"torch": "9.9"},
        attempt="another",
        saved_at="2000-01-01T00:00:00+00:00",
    )
    assert found(run, other).is_empty
    edit_manifest(other, step=3, data=lambda data: {"shared": {**data["shared"], "epoch": 9}}, scaler={"scale": 1.0})
    places = {difference.where: (difference.a, difference.b) for difference in found(run, other).manifest}
    assert places["step"] == ("2", "3")
    assert places["data.shared.epoch"][1] == "9"
    assert places["scaler._growth_tracker"][1] is None


def test_a_manifest_on_one_side_only(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "step-2"))
    (other / "reshard.json").unlink()
    assert not found(run, other).is_empty
    assert [(entry.a, entry.b) for entry in found(other, run).manifest] == [(None, "there")]
    weights = {"w": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    folder = save(tmp_path / "step-4", {"model": weights})
    shutil.copy(run / "reshard.json", folder / "reshard.json")
    edit_manifest(folder, step=4)
    result = found(folder, tmp_path / "model.safetensors")
    assert result.is_empty
    assert result.notes == ["only A has a manifest; the other's format, safetensors, has no place for one"]


def cut_short(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def remove(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


@pytest.mark.parametrize(("damage", "what"), [(cut_short, "cut short"), (remove, "missing")])
def test_the_same_checkpoint_twice_is_read_all_the_same(
    tmp_path: Path, damage: Callable[[Path], None], what: str
) -> None:
    folder = save(tmp_path / "a", {"x": torch.randn(1000, 300), "y": torch.randn(1000, 300)})
    assert found(folder, folder).is_empty
    damage(folder)
    with pytest.raises(CheckpointUnsound, match=rf"__0_0.distcp: .*{what}"):
        found(folder, folder)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none(saved: Path, value: float) -> None:
    with pytest.raises(UsageError, match="--rtol"):
        found(saved / "whole", saved / "whole", rtol=value)
