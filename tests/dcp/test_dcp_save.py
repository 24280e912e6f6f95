"""``dcp.save``: stock loads what it writes, at any world size; what it refuses; and what a failure leaves behind."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from faults import Faults, die, no_space
from layouts import assert_leaves, leaves, raw, state
from ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import reshard
from reshard import ReshardError, dcp
from reshard.dcp.ranks import Ranks

SAVED, LIVE = 3, 8  # seeds


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


# Stock loads what ours wrote.


def save_both(folder: str, chosen: list[str]) -> None:
    for name in chosen:
        dcp.save(state(name, SAVED), checkpoint_id=f"{folder}/ours/{name}")
        stock.save(state(name, SAVED), checkpoint_id=f"{folder}/stock/{name}")


def load_ours(folder: str, pairs: layouts.Pairs) -> None:
    """Stock and ours load what ours wrote."""
    for source, target in pairs:
        expected = state(target, SAVED)
        for load in (stock.load, dcp.load):
            live = state(target, LIVE)
            load(live, checkpoint_id=f"{folder}/ours/{source}", planner=layouts.stock_planner(target))
            assert_leaves(live, expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> layouts.Written:
    return layouts.Written(tmp_path_factory.mktemp("by-ours-and-by-stock"), save_both)


@pytest.mark.parametrize(
    ("saved", "loaded", "pairs"),
    [*layouts.SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in layouts.ALL)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_stock_loads_what_ours_wrote(written: layouts.Written, saved: int, loaded: int, pairs: layouts.Pairs) -> None:
    run_ranks(loaded, load_ours, str(written(saved, pairs)), pairs, timeout_s=500)


@pytest.mark.parametrize("world", [4, 3])
def test_the_metadata_says_what_stock_would(written: layouts.Written, world: int) -> None:
    pairs = next(pairs for saved, _, pairs in layouts.SOME if saved == world)
    folder = written(world, pairs)
    for name, _ in pairs:
        ours, theirs = metadata_of(folder / "ours" / name), metadata_of(folder / "stock" / name)
        assert ours.planner_data == theirs.planner_data
        assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
        for key, entry in theirs.state_dict_metadata.items():
            mine = ours.state_dict_metadata[key]
            assert type(mine) is type(entry), key
            if hasattr(entry, "size"):
                assert (mine.size, mine.properties.dtype) == (entry.size, entry.properties.dtype), key
                boxes = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in mine.chunks if 0 not in chunk.sizes}
                assert boxes == {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if 0 not in c.sizes}, key
        assert {place.relative_path for place in ours.storage_data.values()} == {
            path for path in names(folder / "ours" / name) if path != ".metadata"
        }


def test_states_of_one_process(tmp_path: Path) -> None:
    """Not flattened, stateful, with numbers for keys, empty, and without a tensor."""
    whole = torch.arange(6.0).reshape(2, 3)
    nested = {"a": {"b": whole}, "n": [1, 2], "t": whole.t()}
    dcp.save(dict(nested), checkpoint_id=tmp_path / "nested", planner=DefaultSavePlanner(flatten_state_dict=False))
    live: dict[str, Any] = {"a": None, "n": None, "t": torch.zeros(3, 2)}
    # Stock's loads objects into a copy of the state else.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    stock.load(live, checkpoint_id=tmp_path / "nested", planner=planner, no_dist=True)
    assert torch.equal(live["a"]["b"], whole)
    assert (live["n"], live["t"].tolist()) == ([1, 2], whole.t().tolist())

    linear = torch.nn.Linear(3, 2)
    dcp.save({0: whole, 1: linear}, checkpoint_id=str(tmp_path / "stateful"))
    other: dict[Any, Any] = {0: torch.zeros(2, 3), 1: torch.nn.Linear(3, 2)}
    stock.load(other, checkpoint_id=tmp_path / "stateful", no_dist=True)
    assert torch.equal(other[0], whole)
    assert torch.equal(other[1].weight, linear.weight)

    for name, kept in (("empty", {}), ("objects", {"n": 1, "none": None})):
        dcp.save(dict(kept), checkpoint_id=tmp_path / name)
        found = dict.fromkeys(kept, "other")
        stock.load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert found == kept


def save_with_views(folder: str) -> None:
    wide = torch.arange(32.0).reshape(4, 8)
    number = torch.complex(torch.arange(4.0), -torch.arange(4.0))
    dcp.save(
        {"rows": wide[1:3], "columns": wide[:, 2:5], "spread": torch.ones(1).expand(9), "conjugate": number.conj(),
         "negated": number.conj().imag, "parameter": torch.nn.Parameter(wide)},
        checkpoint_id=folder,
    )  # fmt: skip


def test_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    run_ranks(2, save_with_views, str(tmp_path))
    wide = torch.arange(32.0).reshape(4, 8)
    live = {
        "rows": torch.zeros(2, 8), "columns": torch.zeros(4, 3), "spread": torch.zeros(9), "negated": torch.zeros(4),
        "conjugate": torch.zeros(4, dtype=torch.complex64), "parameter": torch.zeros(4, 8),
    }  # fmt: skip
    stock.load(live, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(live["rows"], wide[1:3])
    assert torch.equal(live["columns"], wide[:, 2:5])
    assert torch.equal(live["spread"], torch.ones(9))
    assert torch.equal(live["conjugate"], torch.complex(torch.arange(4.0), torch.arange(4.0)))
    assert torch.equal(live["negated"], torch.arange(4.0))
    assert torch.equal(live["parameter"], wide)


def save_by_groups(folder: str) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh("cpu", (2, 2))
    rows = torch.full((3, 2), float(rank))
    placements = [Shard(0), Replicate()]
    tensor = DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size((6, 2)), stride=(2, 1))
    dcp.save({"w": tensor}, checkpoint_id=f"{folder}/{rank % 2}", process_group=groups[rank % 2])
    if rank == 3:
        dcp.save({"rank": torch.tensor(rank)}, checkpoint_id=f"{folder}/alone", no_dist=True)


def test_a_part_of_the_ranks_and_one_alone(tmp_path: Path) -> None:
    run_ranks(4, save_by_groups, str(tmp_path))
    for number in (0, 1):
        live = {"w": torch.zeros(6, 2)}
        stock.load(live, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert live["w"][:, 0].tolist() == [number] * 3 + [number + 2] * 3
    alone = {"rank": torch.tensor(-1)}
    stock.load(alone, checkpoint_id=tmp_path / "alone", no_dist=True)
    assert alone["rank"] == 3


# What ranks disagree about.


def save_from_rank_0(folder: str) -> dict[str, Any]:
    """The whole state on rank 0 and nothing on the others, as a full state dict is gathered."""
    live = {"w": torch.full((600, 512), 3.0), "n": {"step": 7}} if dist.get_rank() == 0 else {}
    dcp.save(dict(live), checkpoint_id=folder)
    found: dict[str, Any] = {"w": torch.zeros(600, 512), "n": {"step": 0}} if dist.get_rank() == 0 else {}
    dcp.load(found, checkpoint_id=folder)
    assert_leaves(found, live)
    return found


def test_a_state_that_only_one_rank_has(tmp_path: Path) -> None:
    assert run_ranks(3, save_from_rank_0, str(tmp_path / "a"))[1:] == [{}, {}]
    live = {"w": torch.zeros(600, 512), "n": {"step": 0}}
    stock.load(live, checkpoint_id=tmp_path / "a", no_dist=True)
    assert (float(live["w"].min()), live["n"]) == (3.0, {"step": 7})


def save_what_differs(folder: str) -> None:
    rank = dist.get_rank()
    live = {"note": f"rank {rank}", "small": torch.full((5,), rank), "only": {f"of {rank}": torch.full((2,), rank)}}
    if rank:
        live["late"] = f"from {rank}"
    dcp.save(live, checkpoint_id=folder)


def test_the_lowest_rank_speaks_for_small_tensors_and_objects(tmp_path: Path) -> None:
    run_ranks(3, save_what_differs, str(tmp_path))
    only = {f"of {rank}": torch.full((2,), -1) for rank in range(3)}
    live = {"note": "", "small": torch.full((5,), -1), "only": only, "late": ""}
    stock.load(live, checkpoint_id=tmp_path, no_dist=True)
    assert (live["note"], live["late"], live["small"].tolist()) == ("rank 0", "from 1", [0] * 5)
    assert [tensor.tolist() for tensor in live["only"].values()] == [[0, 0], [1, 1], [2, 2]]


class Opaque:
    """Plain to pickle, and not to be read back without running what the pickle says."""

    def __reduce__(self) -> Any:
        return (print, ("ran",))


def _spoil(what: str, live: dict[str, Any]) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
    if what == "another shape of a large tensor":
        live["w"] = torch.zeros(1000 + rank, 512)
    elif what == "another shape of a small tensor":
        live["w"] = torch.zeros(3 + rank)
    elif what == "another dtype":
        live["w"] = torch.zeros(3, dtype=torch.float64 if rank == 2 else torch.float32)
    elif what == "an object and a tensor":
        live["w"] = 5 if rank == 1 else torch.zeros(3)
    elif what == "a tensor and an object":
        live["w"] = torch.zeros(3) if rank == 1 else 5
    elif what == "a hole":
        if rank != 1:
            live["w"] = layouts._shard0(torch.zeros(6, 2), mesh)
        else:
            layouts._shard0(torch.zeros(6, 2), mesh)
    elif rank != 1:
        return
    elif what == "code":
        live["note"] = Opaque()
    elif what == "partial":
        live["w"] = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
    elif what == "meta":
        live["w"] = torch.zeros(3, device="meta")
    elif what == "two of one key":
        live["a.b"], live["a"] = 1, {"b": 1}
    elif what == "quantised":
        live["w"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


SPOILT = {
    "another shape of a large tensor": ("UsageError", "w: "),
    "another shape of a small tensor": ("UsageError", "w: "),
    "another dtype": ("UsageError", "w: "),
    "an object and a tensor": ("UsageError", "w: "),
    "a tensor and an object": ("UsageError", "w: "),
    "a hole": ("UsageError", "does not make up whole tensors"),
    "code": ("UsageError", "note: rank 1: an object that could not be loaded again"),
    "partial": ("UsageError", "w: rank 1: a partial sum"),
    "meta": ("UsageError", "w: rank 1: "),
    "two of one key": ("UsageError", "a.b: rank 1: two values"),
    "quantised": ("UsageError", "w: rank 1: "),
}


def save_spoilt(folder: str) -> dict[str, tuple[str, str]]:
    """Each of them over a checkpoint that is there."""
    found = {}
    for what in SPOILT:
        place = f"{folder}/{what}"
        dcp.save({"kept": torch.arange(5)}, checkpoint_id=place)
        # Only where a rank has it: what all would write of "code" is rank 0's.
        live: dict[str, Any] = {"kept": torch.zeros(5)} if what != "code" else {}
        _spoil(what, live)
        try:
            dcp.save(live, checkpoint_id=place)
            found[what] = ("saved", "")
        except ReshardError as fault:
            found[what] = (type(fault).__name__, str(fault))
    return found


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("spoilt")
    return folder, run_ranks(3, save_spoilt, str(folder))


@pytest.mark.parametrize("what", SPOILT)
def test_what_cannot_be_saved_is_refused_on_all_ranks(spoilt: tuple[Path, list[Any]], what: str) -> None:
    folder, found = spoilt
    kind, text = SPOILT[what]
    for mine in found:
        assert mine[what][0] == kind, mine[what]
        assert text in mine[what][1], mine[what]
    live = {"kept": torch.zeros(5, dtype=torch.int64)}
    stock.load(live, checkpoint_id=folder / what, no_dist=True)
    assert torch.equal(live["kept"], torch.arange(5))
    assert names(folder / what) == [".metadata", "__0_0.distcp"]


def save_without_overwriting(folder: str) -> list[str]:
    texts = []
    for seed in (1, 2):
        try:
            dcp.save({"w": torch.full((4,), seed)}, storage_writer=stock.FileSystemWriter(folder, overwrite=False))
        except ReshardError as fault:
            texts.append(str(fault).splitlines()[0])
    return texts


def test_a_checkpoint_that_is_not_to_be_overwritten(tmp_path: Path) -> None:
    for texts in run_ranks(2, save_without_overwriting, str(tmp_path / "a")):
        assert len(texts) == 1
        assert "there is a checkpoint already" in texts[0]
    live = {"w": torch.zeros(4)}
    dcp.load(live, checkpoint_id=tmp_path / "a", allow_cast=True)
    assert live["w"].tolist() == [1] * 4


# What is counted.


def count_plans(folder: str) -> Any:
    """How often the ranks plan, by the collective that only planning calls; and that each save is right."""
    calls = [0]
    hand_out = Ranks.hand_out

    def counted(self: Ranks, values: Any) -> Any:
        calls[0] += 1
        return hand_out(self, values)

    Ranks.hand_out = counted  # type: ignore[method-assign]
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    seen, number = [], 0

    def save(place: str, **live: torch.Tensor) -> None:
        nonlocal number
        number += 1
        calls[0] = 0
        tensors = {name: layouts._shard0(tensor + number, mesh) for name, tensor in live.items()}
        dcp.save(dict(tensors), checkpoint_id=place)
        seen.append(calls[0])
        fresh = {name: layouts._shard0(torch.zeros_like(tensor), mesh) for name, tensor in live.items()}
        dcp.load(fresh, checkpoint_id=place)
        assert_leaves(fresh, tensors)

    six, ten = torch.zeros(6, 2), torch.zeros(10, 3)
    save(f"{folder}/0", a=six, b=ten)
    save(f"{folder}/1", a=six, b=ten)
    # The same folder again and again, as "latest".
    save(f"{folder}/1", a=six, b=ten)
    save(f"{folder}/1", a=six, b=ten)
    # Two layouts in turn.
    for step in range(2, 5):
        save(f"{folder}/{step}a", a=six, b=ten)
        save(f"{folder}/{step}b", a=six)
    # One that differs on one rank alone, and back.
    more = {"mine": torch.full((2,), rank)} if rank == 1 else {}
    for place, extra in (("5", more), ("6", {})):
        calls[0] = 0
        dcp.save({"a": layouts._shard0(six, mesh), **extra}, checkpoint_id=f"{folder}/{place}")
        seen.append(calls[0])
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_a_layout_is_planned_once(tmp_path: Path, world: int) -> None:
    """On rank 3 of 4, six rows leave nothing: what it holds is the same with them and without."""
    for seen in run_ranks(world, count_plans, str(tmp_path)):
        assert seen == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]


# Failures: the folder holds what it held, or what was to be saved, whole.


def _states(seed: int) -> dict[str, Any]:
    mesh = layouts.LAYOUTS["shard0"][1]() if dist.is_initialized() else None
    rows = torch.full((10, 3), float(seed))
    return {
        "large": torch.full((600, 512), float(seed)),
        "model": {"rows": layouts._shard0(rows, mesh), "small": torch.full((4,), seed)},
        "step": seed,
    }


def _loaded(folder: Path) -> int:
    """The seed of the checkpoint in a folder, all of whose values are its own."""
    live = _states(LIVE)
    dcp.load(live, checkpoint_id=folder, verify="always")
    assert_leaves(live, _states(live["step"]))
    return live["step"]


def fail_each_call(folder: str, victim: int, lasting: bool, stride: int) -> Any:
    """Saves over a checkpoint, and lets the victim's Nth storage call fail, for every N."""
    run, base, rank = Path(folder, "run"), Path(folder, "base"), dist.get_rank()
    dcp.save(_states(1), checkpoint_id=base)
    faults = Faults(run)
    outcomes = []
    at = 1
    while True:
        if rank == 0:
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(base, run)
        dist.barrier()
        error = None
        try:
            with faults.armed(at if rank == victim else 1 << 30, no_space, lasting):
                dcp.save(_states(2), checkpoint_id=run)
        except ReshardError as fault:
            error = str(fault)
        dist.barrier()
        found = _loaded(run)
        left = names(run)
        dist.barrier()
        outcomes.append((faults.struck[:1], error, found, left))
        if rank == victim and not faults.struck:
            over = [True]
        else:
            over = [False]
        dist.broadcast_object_list(over, src=victim)
        # A save that meets no fault brings everything in order.
        dcp.save(_states(5), checkpoint_id=run)
        assert _loaded(run) == 5
        after = names(run)
        assert len(after) == 1 + dist.get_world_size(), after
        assert not {name.rsplit(".", 1)[-1] for name in after} - {"metadata", "distcp"}, after
        dist.barrier()
        if over[0]:
            return outcomes
        at += stride


@pytest.mark.parametrize(
    ("victim", "lasting", "stride"),
    [
        (0, False, 1),
        (1, False, 1),
        (0, True, 3),
        pytest.param(0, True, 1, marks=pytest.mark.slow),
        pytest.param(1, True, 1, marks=pytest.mark.slow),
        pytest.param(2, True, 1, marks=pytest.mark.slow),
    ],
)
def test_every_storage_call_fails_in_turn(tmp_path: Path, victim: int, lasting: bool, stride: int) -> None:
    everybodys = run_ranks(3, fail_each_call, str(tmp_path), victim, lasting, stride)
    struck = [mine[0][0] for mine in everybodys[victim][:-1]]
    # Listing, creating, writing, flushing and cutting come to as many; the metadata as well on rank 0.
    assert len(struck) * stride >= (16 if victim == 0 else 7), struck
    for outcomes in zip(*everybodys, strict=True):
        errors = {error for _, error, _, _ in outcomes}
        assert len(errors) == 1
        (error,), found, left = errors, outcomes[0][2], outcomes[0][3]
        what = f"{outcomes[victim][0]}: {error}"
        if error is None:
            assert found == 2, what
        else:
            assert "o space left on" in error.splitlines()[0], what
            assert str(tmp_path / "run") in error.splitlines()[0], what
            # The last flush fails when the new one is there already.
            assert found in (1, 2), what
            if found == 1 and not lasting:
                assert left == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"], what
    last = everybodys[victim][-1]
    assert (last[1], last[2]) == (None, 2)


def save_and_die(folder: str, victim: int, at: int) -> str:
    run = Path(folder)
    dcp.save(_states(1), checkpoint_id=run)
    faults = Faults(run)
    try:
        with faults.armed(at if dist.get_rank() == victim else 1 << 30, die):
            dcp.save(_states(2), checkpoint_id=run)
    except ReshardError as fault:
        # The helper's own barrier would miss the dead rank.
        dist.barrier = dist.destroy_process_group = lambda *args: None
        return str(fault).splitlines()[0]
    return "saved"


def load_and_go_on(folder: str) -> tuple[int, list[str]]:
    found = _loaded(Path(folder))
    dcp.save(_states(4), checkpoint_id=folder)
    assert _loaded(Path(folder)) == 4
    return found, names(Path(folder))


@pytest.mark.parametrize(
    ("victim", "at"),
    [
        (1, 3),
        (0, 12),
        *[pytest.param(0, at, marks=pytest.mark.slow) for at in range(1, 18)],
        *[pytest.param(1, at, marks=pytest.mark.slow) for at in range(1, 8)],
    ],
)
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path, victim: int, at: int) -> None:
    seen = run_ranks(3, save_and_die, str(tmp_path / "run"), victim, at, timeout_s=60)
    assert seen[victim] is None
    for rank, text in enumerate(seen):
        assert rank == victim or "lost contact" in text, text
    found, left = run_ranks(2, load_and_go_on, str(tmp_path / "run"))[0]
    assert found == 1
    assert left == sorted([".metadata", *[name for name in left if name.endswith(".distcp")]])
    assert len(left) == 3


def fill_up(folder: str) -> list[Any]:
    dcp.save(_states(1), checkpoint_id=folder)
    before = names(Path(folder))
    seen = []
    # Of tensors the size is known beforehand; of objects it is not.
    for extra in ({"much": torch.zeros(2 << 20)}, {"much": "x" * (5 << 20)}):
        try:
            dcp.save({**_states(2), **extra}, checkpoint_id=folder)
            seen.append("saved")
        except ReshardError as fault:
            seen.append(str(fault).splitlines()[0])
    dist.barrier()
    return [seen, names(Path(folder)) == before, _loaded(Path(folder))]


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.strip()}")
    try:
        found = run_ranks(2, fill_up, str(tmp_path / "run"))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    for (beforehand, late), is_clean, step in found:
        assert "not enough space" in beforehand
        assert "no space left on the file system" in late
        assert str(tmp_path) in late
        assert is_clean
        assert step == 1


def save_twice(folder: str) -> None:
    dcp.save(_states(dist.get_world_size()), checkpoint_id=folder)


def test_files_of_a_larger_save_before_do_not_stay(tmp_path: Path) -> None:
    run_ranks(4, save_twice, str(tmp_path))
    run_ranks(2, save_twice, str(tmp_path))
    assert names(tmp_path) == [".metadata", "__0_1.distcp", "__1_1.distcp"]
    live = {"large": torch.zeros(600, 512)}
    stock.load(live, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(live["large"], torch.full((600, 512), 2.0))
    with reshard.open_checkpoint(tmp_path) as opened:
        assert raw(opened.read("large")) == raw(live["large"])
    assert leaves({"large": live["large"]})
