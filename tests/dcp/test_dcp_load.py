"""``dcp.load``: what stock wrote, into every layout at other world sizes; what is refused, with nothing changed."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from layouts import assert_leaves, leaves, raw, state
from ranks import run_ranks
from sharded import places, write_sharded
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard import ReshardError, dcp
from reshard.errors import CheckpointUnsound, StateMismatch, UsageError
from reshard.index.dtypes import ITEM_BYTES

SAVED, LIVE = 3, 8  # seeds


def stock_save(folder: str, names: list[str]) -> None:
    for name in names:
        stock.save(state(name, SAVED), checkpoint_id=f"{folder}/{name}")


def ours_load(folder: str, pairs: layouts.Pairs) -> None:
    for source, target in pairs:
        live = state(target, LIVE)
        before = layouts.addresses(live)
        dcp.load(live, checkpoint_id=f"{folder}/{source}")
        assert_leaves(live, state(target, SAVED))
        assert layouts.addresses(live) == before


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> layouts.Written:
    return layouts.Written(tmp_path_factory.mktemp("by-stock"), stock_save)


@pytest.mark.parametrize(
    ("saved", "loaded", "pairs"),
    [*layouts.SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in layouts.ALL)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_what_stock_wrote_is_loaded_into_every_layout(
    written: layouts.Written, saved: int, loaded: int, pairs: layouts.Pairs
) -> None:
    run_ranks(loaded, ours_load, str(written(saved, pairs)), pairs, timeout_s=500)


# Kinds of tensors and of state.


def dtypes_of_torch() -> dict[str, torch.dtype]:
    return {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}


def any_bits(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """(5, 3) elements of random bits."""
    width = ITEM_BYTES[str(dtype).removeprefix("torch.")]
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (5 * 3 * width,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return bits.view(dtype).reshape(5, 3)


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = {name: any_bits(dtype, 1) for name, dtype in dtypes_of_torch().items()}
    assert len(saved) > 20
    # Stock does not know how wide these are.
    known = {name: tensor for name, tensor in saved.items() if not name.startswith("bits")}
    stock.save(dict(known), checkpoint_id=tmp_path / "stock", no_dist=True)
    dcp.save(dict(saved), checkpoint_id=tmp_path / "ours", no_dist=True)
    for name, expected in (("stock", known), ("ours", saved)):
        live = {key: any_bits(tensor.dtype, 2) for key, tensor in expected.items()}
        dcp.load(live, checkpoint_id=tmp_path / name)
        assert {key: raw(tensor) for key, tensor in live.items()} == {key: raw(t) for key, t in expected.items()}
    found = {key: any_bits(tensor.dtype, 2) for key, tensor in known.items()}
    stock.load(found, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert {key: raw(tensor) for key, tensor in found.items()} == {key: raw(t) for key, t in known.items()}


def test_a_chunk_that_was_saved_transposed(tmp_path: Path) -> None:
    """Stock keeps the strides of a plain tensor in its archive."""
    whole = torch.arange(60.0).reshape(5, 12)
    stock.save({"w": whole.t()}, checkpoint_id=tmp_path, no_dist=True)
    for live in (torch.zeros(12, 5), torch.zeros(5, 12).t(), torch.zeros(24, 10)[::2, ::2]):
        dcp.load({"w": live}, checkpoint_id=tmp_path)
        assert torch.equal(live, whole.t())


def test_a_conjugate_and_a_negated_view(tmp_path: Path) -> None:
    whole = torch.complex(torch.arange(6.0), -torch.arange(6.0))
    stock.save({"c": whole, "i": whole.imag.clone()}, checkpoint_id=tmp_path, no_dist=True)
    live = {"c": torch.zeros(6, dtype=torch.complex64).conj(), "i": torch.zeros(6, dtype=torch.complex64).conj().imag}
    assert live["c"].is_conj()
    assert live["i"].is_neg()
    dcp.load(live, checkpoint_id=tmp_path)
    assert torch.equal(live["c"].resolve_conj(), whole)
    assert torch.equal(live["i"].resolve_neg(), whole.imag)


class Counter:
    """A stateful object; says when its state was asked for and given."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.weight = torch.full((4,), float(value))
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self.value = state["value"]


def test_stateful_objects_are_loaded_through_themselves(tmp_path: Path) -> None:
    stock.save({"counter": Counter(5), "x": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    counter = Counter(1)
    live = {"counter": counter, "x": torch.zeros(2)}
    dcp.load(live, checkpoint_id=tmp_path)
    assert live["counter"] is counter
    assert (counter.value, len(counter.loaded)) == (5, 1)
    assert torch.equal(counter.weight, torch.full((4,), 5.0))
    assert torch.equal(live["x"], torch.ones(2))


def test_a_state_that_is_not_flattened(tmp_path: Path) -> None:
    saved = {"a": {"b": torch.arange(3)}, "n": [1, 2], "t": torch.ones(2)}
    stock.save(dict(saved), checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    live: dict[str, Any] = {"a": {"b": torch.zeros(3, dtype=torch.int64)}, "n": [], "t": torch.zeros(2)}
    dcp.load(live, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(live["a"]["b"], saved["a"]["b"])
    assert live["n"] == [1, 2]
    assert torch.equal(live["t"], torch.ones(2))


def test_a_partial_load_leaves_what_is_not_there(tmp_path: Path) -> None:
    stock.save({"a": torch.ones(3), "n": 4}, checkpoint_id=tmp_path, no_dist=True)
    live = {"a": torch.zeros(3), "b": torch.full((2,), 7.0), "n": 0, "m": "kept"}
    dcp.load(live, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(live["a"], torch.ones(3))
    assert torch.equal(live["b"], torch.full((2,), 7.0))
    assert (live["n"], live["m"]) == (4, "kept")
    with pytest.raises(StateMismatch, match=r"b: not in the checkpoint"):
        dcp.load(live, checkpoint_id=tmp_path)


def test_keys_that_are_numbers_and_what_is_tied(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    stock.save({0: shared, "tied": {"again": shared}}, checkpoint_id=tmp_path, no_dist=True)
    live_shared = torch.zeros(4)
    live: dict[Any, Any] = {0: live_shared, "tied": {"again": live_shared}}
    dcp.load(live, checkpoint_id=tmp_path)
    assert live[0] is live["tied"]["again"] is live_shared
    assert torch.equal(live_shared, shared)


def test_a_cast_that_loses_nothing_and_one_that_is_allowed(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1.0009765625, 999.0, -0.0])
    stock.save({"w": values, "h": values.bfloat16()}, checkpoint_id=tmp_path, no_dist=True)
    wide = {"h": torch.zeros(4, dtype=torch.float64)}
    dcp.load(wide, checkpoint_id=tmp_path)
    assert torch.equal(wide["h"], values.bfloat16().double())
    narrow = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.raises(StateMismatch, match=r"w: a lossy cast: expected bfloat16, found float32; .*allow_cast=True"):
        dcp.load(narrow, checkpoint_id=tmp_path)
    assert not narrow["w"].any()
    dcp.load(narrow, checkpoint_id=tmp_path, allow_cast=True)
    assert torch.equal(narrow["w"], values.bfloat16())


def load_in_part(folder: str) -> Any:
    """Two groups of two ranks load two checkpoints at once, then each rank by itself another."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    live = {"w": torch.zeros(10, 3)}
    dcp.load(live, checkpoint_id=f"{folder}/{rank % 2}", process_group=groups[rank % 2])
    alone = {"w": torch.zeros(10, 3)}
    if rank == 3:
        dcp.load(alone, checkpoint_id=f"{folder}/1", no_dist=True)
    return raw(live["w"]), raw(alone["w"])


def test_a_part_of_the_ranks_and_one_alone(tmp_path: Path) -> None:
    wholes = [torch.randn(10, 3) for _ in range(2)]
    for number, whole in enumerate(wholes):
        write_sharded(tmp_path / str(number), {"w": whole}, 3)
    found = run_ranks(4, load_in_part, str(tmp_path))
    assert [mine for mine, _ in found] == [raw(wholes[rank % 2]) for rank in range(4)]
    assert found[3][1] == raw(wholes[1])
    assert found[0][1] == raw(torch.zeros(10, 3))


def load_on_part_of_a_mesh(folder: str) -> Any:
    """Pipeline stages: a mesh of two of the four ranks holds a tensor; the others have it in their state as well."""
    live = {}
    for name, members in (("first", [0, 1]), ("second", [2, 3])):
        mesh = DeviceMesh("cpu", members)
        rows = torch.zeros(3, 3) if dist.get_rank() in members else torch.zeros(0)
        live[name] = DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 3)), stride=(3, 1)
        )
        number = torch.tensor(0.0) if dist.get_rank() in members else torch.zeros(0)
        live[f"{name} step"] = DTensor.from_local(
            number, mesh, [Replicate()], run_check=False, shape=torch.Size(()), stride=()
        )
    dcp.load(live, checkpoint_id=folder)
    again = f"{folder}/again"
    dcp.save(live, checkpoint_id=again)
    # Stock compares the memory of a tensor without dims, of which this rank has none, with its shape.
    stock.load({name: live[name] for name in ("first", "second")}, checkpoint_id=again)
    return [raw(tensor.to_local()) for tensor in live.values()]


def test_a_mesh_that_has_only_some_of_the_ranks(tmp_path: Path) -> None:
    first, second = torch.randn(6, 3), torch.randn(6, 3)
    steps = {"first step": torch.tensor(1.0), "second step": torch.tensor(2.0)}
    write_sharded(tmp_path, {"first": first, "second": second, **steps}, 2)
    found = run_ranks(4, load_on_part_of_a_mesh, str(tmp_path))
    assert [mine[0] for mine in found] == [raw(first[:3]), raw(first[3:]), b"", b""]
    assert [mine[2] for mine in found] == [b"", b"", raw(second[:3]), raw(second[3:])]
    one, two = (raw(step) for step in steps.values())
    assert [(mine[1], mine[3]) for mine in found] == [(one, b""), (one, b""), (b"", two), (b"", two)]


# What is refused: on one rank of three, and nothing is changed on any.


def _misfit(what: str, live: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (3,))
    if dist.get_rank() != 1:
        return
    spoilt = live["model"]
    if what == "missing":
        spoilt["other"] = torch.zeros(2)
    elif what == "shape":
        spoilt["three"] = torch.zeros(4)
    elif what == "shape of a shard":
        rows = torch.zeros(4, 3)
        spoilt["ten"] = DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((12, 3)), stride=(3, 1)
        )
    elif what == "dtype":
        spoilt["three"] = torch.zeros(3, dtype=torch.bfloat16)
    elif what == "partial":
        spoilt["three"] = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
    elif what == "meta":
        spoilt["three"] = torch.zeros(3, device="meta")
    elif what == "object":
        spoilt["three"] = 5
    elif what == "tensor":
        live["step"] = torch.tensor(5)
    elif what == "sparse":
        spoilt["three"] = torch.zeros(3).to_sparse()
    elif what == "two of one key":
        live["model.ten"] = torch.zeros(10, 3)
    elif what == "state that cannot be asked for":
        live["stateful"] = Failing()


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state to be had")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("was not asked for")


def load_misfits(folder: str) -> dict[str, tuple[str, str, bool]]:
    found = {}
    for what in MISFITS:
        live = state("shard0", LIVE)
        _misfit(what, live)
        before = _bytes(live)
        try:
            dcp.load(live, checkpoint_id=folder)
            found[what] = ("loaded", "", False)
        except ReshardError as fault:
            found[what] = (type(fault).__name__, str(fault), _bytes(live) == before)
    return found


def _bytes(live: dict[str, Any]) -> Any:
    return leaves({key: value for key, value in live["model"].items() if not _has_no_memory(value)})


def _has_no_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided)


MISFITS = {
    "missing": ("StateMismatch", r"model.other: rank 1: not in the checkpoint"),
    "shape": ("StateMismatch", r"model.three: rank 1: of another shape.*\(4,\), found \(3,\)"),
    "shape of a shard": ("StateMismatch", r"model.ten: rank 1: of another shape.*\(12, 3\), found \(10, 3\)"),
    "dtype": ("StateMismatch", r"model.three: rank 1: a lossy cast: expected bfloat16, found float32"),
    "partial": ("UsageError", r"model.three: rank 1: a partial sum.*redistribute"),
    "meta": ("UsageError", r"model.three: rank 1: .*meta device"),
    "object": ("StateMismatch", r"model.three: rank 1: of another kind.* an object, found a tensor"),
    "tensor": ("StateMismatch", r"step: rank 1: of another kind.* a tensor, found an object"),
    "sparse": ("UsageError", r"model.three: rank 1: .*sparse"),
    "two of one key": ("UsageError", r"model.ten: rank 1: two values"),
    "state that cannot be asked for": ("ReshardError", r"rank 1: ValueError: no state to be had"),
}


@pytest.fixture(scope="module")
def misfits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str, bool]]]:
    folder = tmp_path_factory.mktemp("sound")
    run_ranks(2, stock_save, str(folder), ["shard0"])
    return run_ranks(3, load_misfits, str(folder / "shard0"), timeout_s=60)


@pytest.mark.parametrize("what", MISFITS)
def test_a_misfit_on_one_rank_stops_all_and_changes_nothing(
    misfits: list[dict[str, tuple[str, str, bool]]], what: str
) -> None:
    kind, pattern = MISFITS[what]
    for found in misfits:
        name, text, is_unchanged = found[what]
        assert name == kind, text
        assert re.search(pattern, text.splitlines()[0]), text
        assert is_unchanged


def load_strided(folder: str) -> Any:
    """Two ranks, four stripes: no rank's rows follow one another."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    local = torch.cat([whole[dist.get_rank() * 2 :][:2], whole[4 + dist.get_rank() * 2 :][:2]])
    live = DTensor.from_local(
        torch.zeros_like(local), mesh, [_StridedShard(0, split_factor=2)], run_check=False,
        shape=torch.Size((8,)), stride=(1,),
    )  # fmt: skip
    try:
        dcp.load({"w": live}, checkpoint_id=folder)
    except UsageError as fault:
        return str(fault).splitlines()[0]
    return live.to_local().tolist() == local.tolist()


def test_stripes_are_loaded_right_or_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"w": torch.arange(8.0)}, 1)
    for found in run_ranks(2, load_strided, str(tmp_path)):
        assert found is True or "w" in found


def test_one_memory_for_several_elements_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"w": torch.arange(8.0)}, 1)
    live = torch.zeros(1).expand(8)
    with pytest.raises(ReshardError, match="w"):
        dcp.load({"w": live}, checkpoint_id=tmp_path)
    assert not live.any()


# Checkpoints that are not sound.


def spoil_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def load_weights(folder: str, options: dict[str, Any]) -> tuple[str, str, list[Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    live = {
        "whole": torch.zeros(12, 4),
        "rows": layouts._shard0(torch.zeros(12, 4), mesh),
        "n": -1,
    }
    assert rank < world
    try:
        dcp.load(live, checkpoint_id=folder, **options)
    except ReshardError as fault:
        return type(fault).__name__, str(fault), [raw(live["whole"]), raw(live["rows"].to_local()), live["n"]]
    return "loaded", "", [raw(live["whole"]), raw(live["rows"].to_local()), live["n"]]


def two_weights(folder: Path, objects: dict[str, Any] | None = None) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(12, 4, generator=generator) for name in ("whole", "rows")}
    return write_sharded(folder, tensors, 2, {"n": 7} if objects is None else objects)


def test_a_hole_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    folder = two_weights(tmp_path / "a")
    spoil_metadata(folder, lambda metadata: metadata.state_dict_metadata["rows"].chunks.pop())
    for kind, text, values in run_ranks(3, load_weights, str(folder), {}):
        assert kind == "CheckpointUnsound"
        assert "rows" in text.splitlines()[0]
        assert str(folder) in text.splitlines()[0]
        assert values == [bytes(192), bytes(len(values[1])), -1]


def flip(folder: Path, key: str, offsets: tuple[int, ...], element: int) -> str:
    """Flips a bit of a float32 of a chunk; the name of its file."""
    place = places(folder)[key, offsets]
    path = folder / place.relative_path
    content = bytearray(path.read_bytes())
    archive = bytes(content[place.offset : place.offset + place.length])
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        data = opened.read(next(name for name in opened.namelist() if name.endswith("data/0")))
    start = place.offset + archive.index(data)
    content[start + 4 * element + 3] ^= 0x40
    path.write_bytes(content)
    return place.relative_path


def test_a_flipped_byte_is_named_on_all_ranks(tmp_path: Path) -> None:
    folder = two_weights(tmp_path / "a")
    name = flip(folder, "whole", (6, 0), 5)
    for kind, text, values in run_ranks(3, load_weights, str(folder), {}):
        first = text.splitlines()[0]
        assert kind == "CheckpointUnsound"
        assert name in first
        assert "whole" in first
        assert "CRC-32" in first
        assert values[2] == -1
    assert {kind for kind, _, _ in run_ranks(2, load_weights, str(folder), {"verify": "never"})} == {"loaded"}


def load_replicas(folder: str) -> str:
    try:
        dcp.load({"w": torch.zeros(1024, 512)}, checkpoint_id=folder)
    except CheckpointUnsound as fault:
        return str(fault).splitlines()[0]
    return "loaded"


def test_a_flipped_byte_in_what_ranks_read_in_parts_is_found(tmp_path: Path) -> None:
    """Together they have read all of it."""
    folder = write_sharded(tmp_path / "a", {"w": torch.randn(1024, 512)}, 1)
    flip(folder, "w", (0, 0), 1000)
    assert all("CRC-32" in text for text in run_ranks(2, load_replicas, str(folder)))


def load_some_rows(folder: str, verify: Any, alone: bool) -> str:
    """Rank 0 needs the first rows of the chunk, rank 1 its last ones; nobody all of it."""
    mesh = init_device_mesh("cpu", (2,))
    live = {"rows": layouts._shard0(torch.zeros(12, 4), mesh)}
    try:
        dcp.load(live, checkpoint_id=folder, verify=verify, no_dist=alone)
    except CheckpointUnsound as fault:
        return str(fault).splitlines()[0]
    return "loaded"


@pytest.fixture
def flipped_in_the_last_rows(tmp_path: Path) -> str:
    whole = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    folder = write_sharded(tmp_path / "a", {"rows": whole}, 1)
    flip(folder, "rows", (0, 0), 47)
    return str(folder)


def test_a_flipped_byte_in_a_record_that_only_all_ranks_read_is_found(flipped_in_the_last_rows: str) -> None:
    for text in run_ranks(2, load_some_rows, flipped_in_the_last_rows, "whole", False):
        assert "rows: " in text
        assert "CRC-32" in text
    assert run_ranks(2, load_some_rows, flipped_in_the_last_rows, "never", False) == ["loaded", "loaded"]


def test_a_flipped_byte_beyond_what_is_read_is_found_by_always(flipped_in_the_last_rows: str) -> None:
    assert run_ranks(2, load_some_rows, flipped_in_the_last_rows, "whole", True) == ["loaded", "loaded"]
    for text in run_ranks(2, load_some_rows, flipped_in_the_last_rows, "always", True):
        assert "rows: " in text
        assert "CRC-32" in text


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.marker),))


def test_pickles_that_would_run_code_are_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = two_weights(tmp_path / "object", {"n": Bomb(str(marker))})
    for kind, text, values in run_ranks(2, load_weights, str(folder), {}):
        assert kind == "UnsafePickle"
        assert "n" in text.splitlines()[0]
        assert values[2] == -1
    folder = two_weights(tmp_path / "metadata")
    spoil_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Bomb(str(marker))))
    for kind, text, values in run_ranks(2, load_weights, str(folder), {}):
        assert kind == "UnsafePickle"
        assert ".metadata" in text.splitlines()[0]
        assert values[0] == bytes(192)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / ".metadata").unlink(), ".metadata: missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), ".metadata"),
        (lambda folder: (folder / ".metadata").write_text("version https://git-lfs.github.com/spec/v1\n"), ".metadata"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp: missing"),
        (lambda folder: (folder / "__1_0.distcp").write_bytes(b""), "__1_0.distcp"),
        (lambda folder: (folder / "__1_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes()[:300]), "__1_0"),
        (lambda folder: (folder / "reshard.json").write_text("{"), "loaded"),
    ],
    ids=["no metadata", "empty metadata", "LFS pointer", "no file", "empty file", "cut short", "broken manifest"],
)
def test_damaged_folders_are_refused_before_anything_changes(
    tmp_path: Path, damage: Callable[[Path], Any], what: str
) -> None:
    folder = two_weights(tmp_path / "a")
    damage(folder)
    for kind, text, values in run_ranks(3, load_weights, str(folder), {}):
        if what == "loaded":
            assert kind == "loaded"
            continue
        assert kind == "CheckpointUnsound"
        assert what in text.splitlines()[0]
        assert values == [bytes(192), bytes(len(values[1])), -1]


def test_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="checkpoint_id: no folder to load from"):
        dcp.load({"a": torch.zeros(2)})
    with pytest.raises(UsageError, match=r"not a folder of this machine.*FsspecReader"):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id="s3://bucket/a")
    with pytest.raises(ReshardError, match="nowhere"):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "nowhere")
