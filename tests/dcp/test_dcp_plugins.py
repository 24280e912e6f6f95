"""``RangeReader`` and ``RangeWriter`` under stock's own functions, and what ours leaves to stock."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from faults import Faults, no_space
from layouts import assert_leaves, raw, state
from ranks import run_ranks
from sharded import places, write_sharded
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh

from reshard import dcp
from reshard.errors import CheckpointUnsound, UnsafePickle, UsageError

SAVED, LIVE = 3, 8  # seeds


def cross_save(folder: str, chosen: list[str]) -> None:
    for name in chosen:
        stock.save(state(name, SAVED), storage_writer=dcp.RangeWriter(f"{folder}/ours/{name}"))
        stock.save(state(name, SAVED), checkpoint_id=f"{folder}/stock/{name}")


def cross_load(folder: str, pairs: layouts.Pairs) -> None:
    """What our writer wrote by stock's reader, and what stock's wrote by ours."""
    for source, target in pairs:
        planner = layouts.stock_planner(target)
        expected = state(target, SAVED)
        live = state(target, LIVE)
        stock.load(live, checkpoint_id=f"{folder}/ours/{source}", planner=planner)
        assert_leaves(live, expected)
        live = state(target, LIVE)
        before = layouts.addresses(live)
        stock.load(live, storage_reader=dcp.RangeReader(f"{folder}/stock/{source}"), planner=planner)
        assert_leaves(live, expected)
        assert layouts.addresses(live) == before


@pytest.mark.parametrize(
    ("saved", "loaded", "pairs"),
    [*layouts.SOME[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in layouts.ALL)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_stock_reads_and_writes_through_ours(tmp_path: Path, saved: int, loaded: int, pairs: layouts.Pairs) -> None:
    run_ranks(saved, cross_save, str(tmp_path), sorted({source for source, _ in pairs}), timeout_s=240)
    run_ranks(loaded, cross_load, str(tmp_path), pairs, timeout_s=500)


def asynchronously(folder: str) -> None:
    """Stock's own async_save stages the state and calls our writer in a thread."""
    group = dist.group.WORLD
    saving = stock.async_save(state("shard0", SAVED), storage_writer=dcp.RangeWriter(folder), process_group=group)
    saving.result()  # type: ignore[union-attr]
    dist.barrier()
    live = state("shard0", LIVE)
    stock.load(live, checkpoint_id=folder)
    assert_leaves(live, state("shard0", SAVED))


def test_stock_saves_in_the_background_through_ours(tmp_path: Path) -> None:
    run_ranks(2, asynchronously, str(tmp_path / "a"))


class Renaming(DefaultLoadPlanner):
    """A planner of somebody's own: it looks for other keys, and doubles what it commits."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"old_{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


class Doubling(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


class SlowReader(stock.FileSystemReader):
    """A reader of somebody's own."""

    asked = 0

    def read_metadata(self, *args: Any, **options: Any) -> Any:
        type(self).asked += 1
        return super().read_metadata(*args, **options)


class OwnWriter(stock.FileSystemWriter):
    asked = 0

    def finish(self, metadata: Any, results: Any) -> None:
        type(self).asked += 1
        super().finish(metadata, results)


def use_own_parts(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(20.0).reshape(10, 2)
    dcp.save({"old_w": layouts._shard0(values, mesh)}, checkpoint_id=f"{folder}/a", planner=Doubling())
    live = {"w": torch.zeros(10, 2)}
    dcp.load(live, checkpoint_id=f"{folder}/a", planner=Renaming())
    assert torch.equal(live["w"], values * 4)
    live = {"old_w": torch.zeros(10, 2)}
    dcp.load(live, storage_reader=SlowReader(f"{folder}/a"))
    assert torch.equal(live["old_w"], values * 2)
    assert SlowReader.asked == 1
    dcp.save(live, storage_writer=OwnWriter(f"{folder}/b"))
    assert OwnWriter.asked == (1 if dist.get_rank() == 0 else 0)
    found = {"old_w": torch.zeros(10, 2)}
    dcp.load(found, storage_reader=dcp.RangeReader(f"{folder}/b"))
    assert torch.equal(found["old_w"], values * 2)


def test_planners_readers_and_writers_of_ones_own_are_used(tmp_path: Path) -> None:
    run_ranks(2, use_own_parts, str(tmp_path))


class Masked(StreamTransformExtension):
    """Encryption, for the sake of the example."""

    @staticmethod
    def from_descriptor(version: str) -> Masked:
        return Masked()

    @staticmethod
    def registry_name() -> str:
        return "stream.masked"

    def get_descriptor(self) -> str:
        return "stream.masked/1"

    def transform_to(self, output: Any) -> Any:
        class Stream(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(bytes(byte ^ 0x55 for byte in memoryview(data).cast("B")))
                return len(data)

        return Stream()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(byte ^ 0x55 for byte in input.read()))


def test_what_is_to_be_transformed_is_not_written_plainly(tmp_path: Path) -> None:
    secret = torch.full((64,), 1.5)
    writer = stock.FileSystemWriter(tmp_path, _extensions=[Masked()])
    dcp.save({"w": secret}, storage_writer=writer, no_dist=True)
    content = b"".join(path.read_bytes() for path in tmp_path.glob("*.distcp"))
    assert content
    assert raw(secret) not in content
    with pytest.raises(CheckpointUnsound, match="stream transforms"):
        dcp.load({"w": torch.zeros(64)}, checkpoint_id=tmp_path)


# Faults, which stock hands on as an exception that is none of Python's `Exception`.


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.marker),))


def load_through_reader(folder: str, options: dict[str, Any]) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    live = {"rows": layouts._shard0(torch.zeros(12, 4), mesh), "n": -1}
    try:
        stock.load(live, storage_reader=dcp.RangeReader(folder, **options))
    except CheckpointException as fault:
        return [f"{type(theirs).__name__} {theirs}" for theirs, _ in fault.failures.values()]
    return ["loaded", raw(live["rows"].to_local()).hex(), live["n"]]


def rows_of(folder: Path, objects: dict[str, Any] | None = None) -> torch.Tensor:
    whole = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    write_sharded(folder, {"rows": whole}, 2, {"n": 7} if objects is None else objects)
    return whole


def test_a_pickle_that_would_run_code_is_not_run_by_stock_either(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    rows_of(tmp_path / "object", {"n": Bomb(str(marker))})
    for texts in run_ranks(2, load_through_reader, str(tmp_path / "object"), {}):
        assert all(text.startswith("UnsafePickle") and "n: " in text for text in texts), texts
    rows_of(tmp_path / "metadata")
    path = tmp_path / "metadata" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Bomb(str(marker))
    path.write_bytes(pickle.dumps(metadata))
    for texts in run_ranks(2, load_through_reader, str(tmp_path / "metadata"), {}):
        assert all("not on the allow-list; it was not run" in text and ".metadata" in text for text in texts), texts
    with pytest.raises(UnsafePickle):
        dcp.RangeReader(tmp_path / "metadata").read_metadata()
    assert not marker.exists()


@pytest.mark.parametrize("verify", ["whole", "always", "never"])
def test_a_flipped_byte_is_found_by_the_reader(tmp_path: Path, verify: str) -> None:
    whole = rows_of(tmp_path / "a")
    place = places(tmp_path / "a")["rows", (0, 0)]
    path = tmp_path / "a" / place.relative_path
    content = bytearray(path.read_bytes())
    content[content.index(raw(whole[:1]))] ^= 1
    path.write_bytes(content)
    # Three ranks, four rows each; the chunks have six: only "always" reads the rest of what is damaged.
    for world, is_found in ((2, verify != "never"), (3, verify == "always")):
        for texts in run_ranks(world, load_through_reader, str(tmp_path / "a"), {"verify": verify}):
            if not is_found:
                assert texts[0] == "loaded"
                continue
            assert all(text.startswith("CheckpointUnsound") for text in texts)
            assert any(place.relative_path in text and "rows: " in text for text in texts)


def test_our_load_heeds_the_reader_that_it_is_given(tmp_path: Path) -> None:
    whole = rows_of(tmp_path / "a")
    path = tmp_path / "a" / places(tmp_path / "a")["rows", (6, 0)].relative_path
    content = bytearray(path.read_bytes())
    content[content.index(raw(whole[6:7]))] ^= 1
    path.write_bytes(content)
    live = {"rows": torch.zeros(12, 4)}
    dcp.load(live, storage_reader=dcp.RangeReader(tmp_path / "a", "never"))
    with pytest.raises(CheckpointUnsound, match="CRC-32"):
        dcp.load(live, storage_reader=dcp.RangeReader(tmp_path / "a"))


def write_with_faults(folder: str) -> Any:
    """Each storage call of rank 1 fails in turn, under stock's save; what was there before is still loaded."""
    run, mesh = Path(folder), init_device_mesh("cpu", (2,))

    def tensor(value: float) -> dict[str, Any]:
        return {"w": layouts._shard0(torch.full((10, 300), value), mesh), "n": value}

    stock.save(tensor(1.0), storage_writer=dcp.RangeWriter(run))
    faults = Faults(run)
    seen: list[str] = []
    at = 1
    while True:
        is_met = [False]
        try:
            with faults.armed(at if dist.get_rank() == 1 else 1 << 30, no_space):
                stock.save(tensor(2.0), storage_writer=dcp.RangeWriter(run))
            outcome = "saved"
        except CheckpointException as fault:
            outcome = str(next(iter(fault.failures.values()))[0]).splitlines()[0]
        is_met[0] = bool(faults.struck)
        dist.broadcast_object_list(is_met, src=1)
        live = tensor(0.0)
        dcp.load(live, checkpoint_id=run)
        assert_leaves(live, tensor(2.0 if outcome == "saved" else 1.0))
        dist.barrier()
        if not is_met[0]:
            assert outcome == "saved"
            assert len(list(run.iterdir())) == 3
            return seen
        seen.append(outcome)
        at += 1


def test_a_write_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    for seen in run_ranks(2, write_with_faults, str(tmp_path / "run")):
        assert len(seen) > 5
        assert all("no space left" in text and str(tmp_path) in text for text in seen), seen


def without_collectives(folder: str, seed: float) -> None:
    mesh = init_device_mesh("cpu", (2,))
    live = {"w": layouts._shard0(torch.full((6, 2), seed), mesh)}
    stock.save(live, storage_writer=dcp.RangeWriter(folder), use_collectives=False)
    dist.barrier()
    for reader in (stock.FileSystemReader(folder), dcp.RangeReader(folder)):
        found = {"w": layouts._shard0(torch.zeros(6, 2), mesh)}
        stock.load(found, storage_reader=reader)
        assert_leaves(found, live)


@pytest.mark.parametrize("seeds", [(1.0,), (1.0, 2.0)], ids=["once", "twice"])
def test_ranks_that_write_metadata_of_their_own(tmp_path: Path, seeds: tuple[float, ...]) -> None:
    import reshard

    for seed in seeds:
        run_ranks(2, without_collectives, str(tmp_path / "a"), seed)
    with reshard.open_checkpoint(tmp_path / "a") as opened:
        assert torch.equal(opened.read("w"), torch.full((6, 2), seeds[-1]))


def over_a_checkpoint(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    live = {"w": layouts._shard0(torch.ones(6, 2), mesh)}
    stock.save(live, storage_writer=dcp.RangeWriter(folder))
    dist.barrier()
    with pytest.raises(UsageError, match=r"\.metadata.*no rank alone can replace it"):
        stock.save(live, storage_writer=dcp.RangeWriter(folder), use_collectives=False)
    dist.barrier()
    found = {"w": layouts._shard0(torch.zeros(6, 2), mesh)}
    stock.load(found, checkpoint_id=folder)
    assert_leaves(found, live)


def test_ranks_that_write_alone_do_not_hide_behind_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    run_ranks(2, over_a_checkpoint, str(tmp_path / "a"))


class Watching(DefaultLoadPlanner):
    """Looks at everybody's plan, as planners that spread the reading do."""

    seen: list[list[ReadItem]]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.seen = [list(plan.items) for plan in global_plan]
        assert [plan.items[0] for plan in global_plan] == [items[0] for items in self.seen]
        assert [list(plan.items[1:]) for plan in global_plan] == [items[1:] for items in self.seen]
        return [LoadPlan(list(plan.items)) for plan in global_plan]


def plans_on_rank_0(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    live = {"w": layouts._shard0(torch.arange(12.0).reshape(6, 2), mesh), "n": 3}
    stock.save(live, checkpoint_id=folder)
    seen = []
    for reader in (dcp.RangeReader(folder), stock.FileSystemReader(folder)):
        found = {"w": layouts._shard0(torch.zeros(6, 2), mesh), "n": 0}
        planner = Watching()
        stock.load(found, storage_reader=reader, planner=planner)
        assert_leaves(found, live)
        seen.append(getattr(planner, "seen", None))
    assert seen[0] == seen[1]
    assert (seen[0] is not None) == (dist.get_rank() == 0)


def test_planners_see_the_items_that_stock_would_show_them(tmp_path: Path) -> None:
    run_ranks(2, plans_on_rank_0, str(tmp_path / "a"))


def test_paths_and_resets() -> None:
    assert dcp.RangeReader.validate_checkpoint_id("/a/b")
    assert not dcp.RangeReader.validate_checkpoint_id("s3://a/b")
    checks: list[Callable[[Any], bool]] = [dcp.RangeWriter.validate_checkpoint_id]
    assert [check("gs://x") for check in checks] == [False]
    reader = dcp.RangeReader("/a")
    reader.reset("/b")
    reader.reset()
    assert reader.path == Path("/b")
