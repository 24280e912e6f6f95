"""The laws of a rewrite, on generated checkpoints; what is read back is read by stock torch."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewriting import DTYPES, any_bits, assert_same, bits, rewrite, rows_of, stock_chunks, stock_tensors, write_boxes
from small import Small, edit_manifest

import reshard
from reshard.errors import BatchError, CheckpointUnsound, UsageError
from reshard.geometry.mesh import Mesh
from reshard.rewrite.prepare import prepare

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*TypedStorage")

STATE = {
    "model.a": any_bits((5, 3), torch.float32, 1),
    "model.half": any_bits((9, 4), torch.bfloat16, 2),
    "model.turned": any_bits((6, 7), torch.float32, 3).t(),
    "optim.state.a.exp_avg": any_bits((5, 3), torch.float32, 4),
    "optim.state.a.exp_avg_sq": any_bits((5, 3), torch.float32, 5),
    "optim.state.a.step": torch.tensor(10000.0),
    "rng.rank_0.torch": any_bits((40,), torch.uint8, 6),
}
OBJECTS = {"optim.param_groups.g.lr": 0.25, "extra": {"nested": [1, "two"]}}


def write_rows(folder: Path, state: dict[str, torch.Tensor], parts: int, objects: Any = None) -> Path:
    """As FSDP2 shards it; what has no dims, and random states, in one chunk."""
    tiled = {key: (tensor, rows_of(tensor, 1 if key.startswith("rng") else parts)) for key, tensor in state.items()}
    return write_boxes(folder, tiled, objects, files=parts)


@st.composite
def tiled_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, Any]:
    """A tensor of any dtype and odd shape, dense or transposed, cut into rows or into a grid along all dims."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    tensor = any_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    if draw(st.booleans()):
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if draw(st.booleans()) or tensor.numel() == 0:
        return tensor, rows_of(tensor, draw(st.integers(1, 9)))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in tensor.shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
        edges = list(zip([0, *cuts], [*cuts, size], strict=True))
        boxes = [((*low, start), (*sizes, end - start)) for low, sizes in boxes for start, end in edges]
    return tensor, draw(st.permutations(boxes))


@given(
    st.dictionaries(st.sampled_from([f"model.p{n}" for n in range(9)]), tiled_tensors(), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 9),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_n_to_m_to_n_keeps_every_tensor(tensors: dict[str, Any], first: int, second: int) -> None:
    expected = {key: tensor for key, (tensor, _) in tensors.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_boxes(folder / "source", tensors, {"note": [1, 2]})
        rewrite(source, folder / "n", first)
        rewrite(folder / "n", folder / "m", second)
        rewrite(folder / "m", folder / "again", first)
        for made in ("n", "m", "again"):
            assert_same(stock_tensors(folder / made), expected)
        chunks = stock_chunks(folder / "n")
        if second > 1 and len(chunks) > len(expected):
            # Where it began, down to the chunk. (One rank has everything whole, buffers or not.)
            assert_same(stock_chunks(folder / "again"), chunks)
        assert rewriting.stock_objects(folder / "again") == rewriting.stock_objects(source)


def shards_by_torch(tensor: torch.Tensor, shards: int) -> dict[tuple[int, ...], torch.Tensor]:
    """The parts with rows that ``torch.chunk`` makes, by offset; the whole where there are none."""
    rest = (0,) * (tensor.dim() - 1)
    if not tensor.dim():
        return {(): tensor}
    if not len(tensor):
        return {(0, *rest): tensor}
    parts = tensor.chunk(shards)
    starts = np.cumsum([0, *map(len, parts)])
    return {(int(start), *rest): part for start, part in zip(starts, parts, strict=False)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_shards_are_those_of_fsdp2_and_lie_with_their_ranks(tmp_path: Path, ranks: int) -> None:
    source = write_rows(tmp_path / "source", STATE, 4, OBJECTS)
    rewrite(source, tmp_path / "made", ranks)
    chunks = stock_chunks(tmp_path / "made")
    for key, tensor in STATE.items():
        shards = {0: tensor} if tensor.dim() == 0 else None
        expected = shards_by_torch(tensor, 1 if key.startswith("rng") or shards else ranks)
        found = {offset: part for (name, offset), part in chunks.items() if name == key}
        assert_same({str(k): v for k, v in found.items()}, {str(k): v for k, v in expected.items()})
    places = rewriting.stock_metadata(tmp_path / "made").storage_data
    for place, info in places.items():
        tensor = STATE.get(place.fqn)
        if tensor is not None and tensor.dim() and not place.fqn.startswith("rng"):
            rank = place.offset[0] // -(-len(tensor) // ranks)
            assert info.relative_path == f"__{rank}_0.distcp"
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))}


def shape_cases() -> dict[str, tuple[int, ...]]:
    return {"scalar": (), "empty": (0, 4), "inner empty": (3, 0), "row": (1, 7), "odd": (5, 3, 2), "long": (130,)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_every_dtype_in_every_shape(tmp_path: Path, dtype: torch.dtype, parts: int) -> None:
    state = {f"model.{name}": any_bits(shape, dtype, 7) for name, shape in shape_cases().items()}
    state["model.turned"] = any_bits((6, 5), dtype, 8).t()
    state["model.turned cube"] = any_bits((4, 3, 5), dtype, 9).permute(1, 2, 0)
    source = write_rows(tmp_path / "source", state, parts)
    assert_same(stock_tensors(source), state)
    rewrite(source, tmp_path / "made", 4)
    assert_same(stock_tensors(tmp_path / "made"), state)
    with reshard.open_checkpoint(tmp_path / "made") as checkpoint:
        assert_same({key: checkpoint.read(key) for key in checkpoint.keys}, state)


B14 = {"five": (5, 3), "three": (3,), "one": (1, 7), "six": (6, 2)}


@pytest.mark.parametrize(("before", "after"), [(2, 8), (8, 2), (4, 4), (1, 8)])
def test_more_ranks_than_rows(tmp_path: Path, before: int, after: int) -> None:
    state = {}
    for seed, (name, shape) in enumerate(B14.items()):
        for kind in (f"model.{name}", f"optim.state.{name}.exp_avg", f"optim.state.{name}.exp_avg_sq"):
            state[kind] = any_bits(shape, torch.float32, seed + len(kind))
        state[f"optim.state.{name}.step"] = torch.tensor(3.0 + seed)
    source = write_rows(tmp_path / "source", state, before)
    rewrite(source, tmp_path / "made", after)
    assert_same(stock_tensors(tmp_path / "made"), state)
    # Six rows over four ranks: two, two, two and none.
    rows = {
        offset[0]: len(part) for (key, offset), part in stock_chunks(tmp_path / "made").items() if "model.six" in key
    }
    assert rows == {8: dict.fromkeys(range(6), 1), 4: {0: 2, 2: 2, 4: 2}, 2: {0: 3, 3: 3}}[after]


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(4, 2), Mesh(1, 3), Mesh(3, 4)], ids=str)
def test_hsdp_writes_one_copy_spread_over_all_ranks(tmp_path: Path, mesh: Mesh) -> None:
    state = {f"model.p{n}": any_bits((48, 16), torch.float32, n) for n in range(12)}
    source = write_rows(tmp_path / "source", state, 2)
    rewrite(source, tmp_path / "made", mesh)
    assert_same(stock_tensors(tmp_path / "made"), state)
    places = rewriting.stock_metadata(tmp_path / "made").storage_data
    payload = [0] * mesh.ranks
    for place, info in places.items():
        rank = int(info.relative_path.split("_")[2])
        # A shard is written by one of the ranks that hold it.
        assert place.offset[0] // (48 // mesh.shard) == rank % mesh.shard
        payload[rank] += info.length
    assert len(places) == 12 * mesh.shard
    assert max(payload) <= 1.5 * sum(payload) / mesh.ranks


def test_objects_paths_and_whole_tensors_are_carried_over(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "source", STATE, 4, OBJECTS)
    before = rewriting.stock_metadata(source)
    rewrite(source, tmp_path / "made", 3)
    after = rewriting.stock_metadata(tmp_path / "made")
    assert rewriting.stock_objects(tmp_path / "made") == rewriting.stock_objects(source)
    assert after.planner_data == before.planner_data
    for key, entry in before.state_dict_metadata.items():
        found = after.state_dict_metadata[key]
        assert type(found) is type(entry)
        assert getattr(found, "properties", None) == getattr(entry, "properties", None)
        assert getattr(found, "size", None) == getattr(entry, "size", None)


def test_only_the_model(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "source", STATE, 4, OBJECTS)
    rewrite(source, tmp_path / "made", 3, only="model")
    assert_same(stock_tensors(tmp_path / "made"), {key: t for key, t in STATE.items() if key.startswith("model.")})
    assert rewriting.stock_objects(tmp_path / "made") == {}


SPECIAL = [
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    1e-45,
    1e-40,
    65504.0,
    65519.9,
    65520.0,
    3.3895e38,
    3.4e38,
]


def assert_cast(found: torch.Tensor, stored: torch.Tensor) -> None:
    """Bit for bit as torch casts; of a NaN torch's own bits depend on its place in a vector, so that it is one."""
    expected = stored.to(found.dtype)
    is_nan = stored.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert bits(found[~is_nan]) == bits(expected[~is_nan])


@pytest.mark.parametrize("short", ["bf16", "fp16", "fp32", "fp64"])
def test_a_cast_is_torchs_and_of_weights_alone(tmp_path: Path, short: str) -> None:
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[short]
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    weights = {}
    for number, dtype in enumerate(floats):
        special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
        halves = (torch.arange(1, 400, dtype=torch.float64) * (1 + 2.0**-11) + 2.0**-40).to(dtype)
        weights[f"model.w{number}"] = torch.cat([any_bits((5000,), dtype, number), special, halves])
        weights[f"model.m{number}"] = any_bits((9, 8), dtype, number).t()
    kept = {
        "model.mask": any_bits((7,), torch.bool),
        "model.count": any_bits((), torch.int64),
        "optim.state.w1.exp_avg": any_bits((400,), torch.float32, 11),
        "optim.state.w1.step": torch.tensor(10001.0),
        "optim.state.w2.exp_avg_sq": any_bits((9, 3), torch.bfloat16, 12),
        "rng.rank_0.torch": any_bits((16,), torch.uint8, 13),
    }
    source = write_rows(tmp_path / "source", {**weights, **kept}, 2)
    rewrite(source, tmp_path / "made", 3, dtype=short)
    found = stock_tensors(tmp_path / "made")
    assert_same({key: found[key] for key in kept}, kept)
    assert found.keys() == {*weights, *kept}
    for key, tensor in weights.items():
        assert found[key].dtype == wanted
        assert_cast(found[key], tensor)


def test_what_belongs_to_single_ranks_is_named_and_kept_or_dropped(tmp_path: Path) -> None:
    objects = {**OBJECTS, **{f"dataloader.dp_rank_{rank}": b"state" for rank in range(4)}, "rank": 1, "crank_3x": 2}
    source = write_rows(tmp_path / "source", STATE, 4, objects)
    prepared = prepare(source, Mesh(2))
    prepared.checkpoint.close()
    assert prepared.selection.of_one_rank == [f"dataloader.dp_rank_{rank}" for rank in range(4)]
    rewrite(source, tmp_path / "kept", 2)
    assert rewriting.stock_objects(tmp_path / "kept") == rewriting.stock_objects(source)
    rewrite(source, tmp_path / "dropped", 2, drop=["dataloader.", "optim.state.a.exp"])
    found = rewriting.stock_objects(tmp_path / "dropped")
    assert found.keys() == {*OBJECTS, "rank", "crank_3x"}
    expected = {key: tensor for key, tensor in STATE.items() if not key.startswith("optim.state.a.exp")}
    assert_same(stock_tensors(tmp_path / "dropped"), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ["nothing"]}, "nothing to drop begins so"),
        ({"drop": [""]}, "nothing is left"),
        ({"only": "optim"}, "only the model"),
        ({"dtype": "int8"}, "cannot be cast"),
        ({"memory_bytes": 1 << 20}, "too little memory"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = write_rows(tmp_path / "source", STATE, 2)
    before = rewriting.file_bytes(tmp_path)
    with pytest.raises(UsageError, match=message):
        prepare(source, Mesh(2), **options)
    assert rewriting.file_bytes(tmp_path) == before


def test_a_tensor_that_is_dropped_need_not_be_whole(tmp_path: Path) -> None:
    wanted = any_bits((8, 2), torch.float32)
    tensors = {
        "a.bad": (torch.zeros(40, 2), [((0, 0), (40, 2))]),
        "b.good": (wanted, rows_of(wanted, 4)),
        "c.holed": (torch.zeros(9), [((0,), (4,))]),
    }
    source = write_boxes(tmp_path / "source", tensors)
    shrink(source, "a.bad", (10, 2))
    with pytest.raises(CheckpointUnsound, match="sticks out"):
        prepare(source, Mesh(2))
    rewrite(source, tmp_path / "made", 2, drop=["a.", "c."])
    assert_same(stock_tensors(tmp_path / "made"), {"b.good": wanted})


def shrink(folder: Path, key: str, shape: tuple[int, ...]) -> None:
    """Changes what the metadata says of a tensor's shape."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata[key].size = torch.Size(shape)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole training state, as `save_state` writes it."""
    folder = tmp_path_factory.mktemp("run")
    run = Small()
    run.train(3)
    reshard.save_state(folder, run.state)
    return folder / "step-3"


@pytest.mark.parametrize(
    ("mesh", "world", "accumulation"),
    [
        (Mesh(3), {"ranks": 3, "nodes": 3, "gpus_per_node": 0, "mesh": {"dp_shard": 3}}, 2),
        (Mesh(2, 2), {"ranks": 4, "nodes": 4, "gpus_per_node": 0, "mesh": {"dp_replicate": 2, "dp_shard": 2}}, 1),
        (Mesh(1), {"ranks": 1, "nodes": 1, "gpus_per_node": 0, "mesh": {"dp_shard": 1}}, 4),
    ],
    ids=str,
)
def test_the_manifest_follows(tmp_path: Path, step: Path, mesh: Mesh, world: Any, accumulation: int) -> None:
    rewrite(step, tmp_path / "step-3", mesh)
    before, after = (json.loads((folder / "reshard.json").read_text()) for folder in (step, tmp_path / "step-3"))
    assert after["world"] == world
    assert after["batch"] == {**before["batch"], "ranks": mesh.ranks, "accumulation": accumulation}
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert changed <= {"world", "batch", "files"}


def test_the_manifest_of_a_model_alone_promises_nothing_else(tmp_path: Path, step: Path) -> None:
    rewrite(step, tmp_path / "made", 2, only="model")
    after = json.loads((tmp_path / "made" / "reshard.json").read_text())
    assert after["parts"] == {"model": "saved"}
    assert (after["batch"], after["rng"], after["data"], after["schedulers"], after["lr"]) == (None, None, None, {}, [])
    assert all(key.startswith("model.") for key in stock_tensors(tmp_path / "made"))


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        ({"ranks": 8, "nodes": 2, "gpus_per_node": 4}, 8, (2, 4)),
        ({"ranks": 8, "nodes": 2, "gpus_per_node": 4}, 6, (2, 4)),
        ({"ranks": 8, "nodes": 2, "gpus_per_node": 4}, 2, (1, 2)),
        ({"ranks": 4, "nodes": 1, "gpus_per_node": 0}, 3, (1, 0)),
        ({"ranks": 4, "nodes": 1, "gpus_per_node": 4}, 32, (8, 4)),
    ],
)
def test_nodes_keep_their_number_of_gpus(
    tmp_path: Path, step: Path, before: dict[str, int], ranks: int, after: tuple[int, int]
) -> None:
    shutil.copytree(step, tmp_path / "step-3")
    edit_manifest(tmp_path / "step-3", world=lambda world: {**world, **before})
    rewrite(tmp_path / "step-3", tmp_path / "made", ranks)
    world = json.loads((tmp_path / "made" / "reshard.json").read_text())["world"]
    assert (world["nodes"], world["gpus_per_node"]) == after


@pytest.mark.parametrize("batch", [{}, {"global_batch": 8}, {"global_batch": "8", "micro_batch": 2}])
def test_a_batch_plan_that_is_none(tmp_path: Path, step: Path, batch: dict[str, Any]) -> None:
    shutil.copytree(step, tmp_path / "step-3")
    edit_manifest(tmp_path / "step-3", batch=batch)
    with pytest.raises((CheckpointUnsound, BatchError)):
        prepare(tmp_path / "step-3", Mesh(2))


def test_a_rewritten_step_resumes_as_the_first_one_does(tmp_path: Path, step: Path) -> None:
    rewrite(step, tmp_path / "step-3", 3)
    rewrite(tmp_path / "step-3", tmp_path / "back" / "step-3", 1)
    rows, reports = [], []
    for folder in (step.parent, tmp_path, tmp_path / "back"):
        run = Small(seed=5)
        reports.append(reshard.load_state(folder, run.state))
        rows.append((run.train(7), run.state.step))
    assert rows[0] == rows[1] == rows[2]
    assert [report.step for report in reports] == [3, 3, 3]
    assert all("full state restored" in report.line for report in reports)
