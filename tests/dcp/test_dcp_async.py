"""``dcp.async_save``: what is written is the state of the moment of the call, whatever happens to it afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from faults import Faults, no_space
from layouts import assert_leaves, state
from ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh

from reshard import ReshardError, dcp

SAVED, LIVE = 3, 8  # seeds


def spoil(live: Any) -> None:
    """Overwrites every tensor and object in place, as the steps after a save do."""
    entries = live.items() if isinstance(live, dict) else enumerate(live)
    for key, value in list(entries):
        if isinstance(value, (dict, list)):
            spoil(value)
        elif isinstance(value, torch.Tensor):
            for local in layouts.local_tensors(value):
                local.zero_()
        else:
            live[key] = "spoilt"


def change_right_after(folder: str, layout: str) -> None:
    live = state(layout, SAVED)
    saving = dcp.async_save(live, checkpoint_id=folder)
    spoil(live)
    saving.result(60)
    dist.barrier()
    for load in (stock.load, dcp.load):
        found = state(layout, LIVE)
        load(found, checkpoint_id=folder, planner=layouts.stock_planner(layout))
        assert_leaves(found, state(layout, SAVED))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "plain"),
        (3, "transposed"),
        (4, "hsdp"),
        *[pytest.param(world, layout, marks=pytest.mark.slow) for world in (1, 2, 4) for layout in layouts.LAYOUTS
          if layout in layouts.layouts_at(world)],
    ],
)  # fmt: skip
def test_the_moment_of_the_call_is_saved(tmp_path: Path, world: int, layout: str) -> None:
    run_ranks(world, change_right_after, str(tmp_path / "a"), layout)


def several_in_a_row(folder: str) -> Any:
    """Of other shapes in between, so that the memory of the copies is used again and is not; over one folder."""
    mesh = init_device_mesh("cpu", (2,))
    order: list[Any] = []
    place = f"{folder}/latest"
    savings = []
    for number, rows in enumerate((400, 400, 700, 5, 400)):
        live = {"w": layouts._shard0(torch.full((rows, 300), float(number)), mesh), "n": number}
        savings.append(dcp.async_save(live, checkpoint_id=place))
        # The one before is done by then.
        order.append([saving.done() for saving in savings[:-1]])
        spoil(live)
    savings[-1].result(60)
    dist.barrier()
    found = {"w": layouts._shard0(torch.zeros(400, 300), mesh), "n": -1}
    dcp.load(found, checkpoint_id=place)
    assert_leaves(found, {"w": layouts._shard0(torch.full((400, 300), 4.0), mesh), "n": 4})
    return order, len(list(Path(place).iterdir()))


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    for order, files in run_ranks(2, several_in_a_row, str(tmp_path)):
        assert order == [[True] * number for number in range(5)]
        assert files == 3


def saved_and_then_saved(folder: str) -> Any:
    """A save that does not go to the background, into the same folder, right behind one that does."""
    mesh = init_device_mesh("cpu", (2,))

    def live(value: float) -> dict[str, Any]:
        return {f"w{n}": layouts._shard0(torch.full((2000, 500), value + n), mesh) for n in range(4)}

    for number in range(3):
        saving = dcp.async_save(live(10.0 * number), checkpoint_id=folder)
        dcp.save(live(10.0 * number + 100), checkpoint_id=folder)
        saving.result(60)
        dist.barrier()
        found = live(-1.0)
        dcp.load(found, checkpoint_id=folder)
        assert_leaves(found, live(10.0 * number + 100))


def test_a_save_does_not_overtake_the_one_in_the_background(tmp_path: Path) -> None:
    run_ranks(2, saved_and_then_saved, str(tmp_path / "a"))


def fail_in_the_background(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    run = Path(folder)

    def live(value: float) -> dict[str, Any]:
        return {"w": layouts._shard0(torch.full((50, 3), value), mesh)}

    dcp.save(live(1.0), checkpoint_id=run)
    faults = Faults(run)
    seen = []
    with faults.armed(4 if dist.get_rank() == 1 else 1 << 30, no_space):
        saving = dcp.async_save(live(2.0), checkpoint_id=run)
        try:
            saving.result(60)
        except ReshardError as fault:
            seen.append(str(fault).splitlines()[0])
    dist.barrier()
    try:
        dcp.async_save(live(3.0), checkpoint_id=run)
    except ReshardError as fault:
        seen.append(str(fault))
    found = live(0.0)
    dcp.load(found, checkpoint_id=run)
    assert_leaves(found, live(1.0))
    dist.barrier()
    # Told once; the one after is saved.
    dcp.async_save(live(4.0), checkpoint_id=run).result(60)
    dist.barrier()
    dcp.load(found, checkpoint_id=run)
    assert_leaves(found, live(4.0))
    return seen


def test_a_failure_is_told_by_its_result_and_by_the_next_call(tmp_path: Path) -> None:
    for result, following in run_ranks(2, fail_in_the_background, str(tmp_path / "run")):
        assert "no space left" in result
        assert "no space left" in following.splitlines()[0]
        assert "started before, in the background" in following


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("is not to be copied")


def refuse_at_the_call(folder: str) -> list[str]:
    rank = dist.get_rank()
    seen = []
    for spoilt in ({"m": torch.zeros(3, device="meta")}, {"o": Uncopyable()}):
        live = {"w": torch.ones(3), **(spoilt if rank == 1 else {})}
        try:
            dcp.async_save(live, checkpoint_id=folder)
        except ReshardError as fault:
            seen.append(str(fault).splitlines()[0])
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id=folder).result(60)
    return seen


def test_what_cannot_be_copied_is_refused_by_the_call_on_all_ranks(tmp_path: Path) -> None:
    for meta, uncopyable in run_ranks(3, refuse_at_the_call, str(tmp_path / "a"), timeout_s=60):
        assert "m: rank 1: " in meta
        assert "rank 1" in uncopyable
        assert "is not to be copied" in uncopyable


def use_collectives_meanwhile(folder: str) -> None:
    """The step loop goes on with collectives of its own, and opens groups, while a save is under way."""
    rank, total = dist.get_rank(), 0
    large = {f"w{number}": torch.full((500, 300), float(number)) for number in range(8)}
    saving = dcp.async_save(dict(large), checkpoint_id=folder)
    while True:
        number = torch.tensor(rank)
        dist.all_reduce(number)
        assert number == 3
        # All ranks stop at once.
        done = torch.tensor(int(saving.done() and total >= 50))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        total += 1
        if done:
            break
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(group)
    saving.result(10)
    dist.barrier()
    found = {name: torch.zeros_like(tensor) for name, tensor in large.items()}
    stock.load(found, checkpoint_id=folder)
    assert_leaves(found, large)


def test_the_step_loop_goes_on(tmp_path: Path) -> None:
    run_ranks(3, use_collectives_meanwhile, str(tmp_path / "a"), timeout_s=60)


def of_parts_and_alone(folder: str) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    savings = [
        dcp.async_save({"w": torch.full((3,), float(rank % 2))}, checkpoint_id=f"{folder}/{rank % 2}",
                       process_group=group),
        dcp.async_save({"w": torch.full((3,), float(rank))}, checkpoint_id=f"{folder}/alone{rank}", no_dist=True),
        dcp.async_save({"w": torch.ones(3), "n": {"deep": [1, 2]}}, checkpoint_id=f"{folder}/flat",
                       planner=DefaultSavePlanner(flatten_state_dict=False)),
    ]  # fmt: skip
    for saving in savings:
        saving.result(60)
    dist.barrier()
    for name, value in ((str(rank % 2), rank % 2), (f"alone{rank}", rank), ("flat", 1)):
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=f"{folder}/{name}", no_dist=True)
        assert found["w"].tolist() == [value] * 3


def test_a_part_of_the_ranks_one_alone_and_all_at_once(tmp_path: Path) -> None:
    run_ranks(4, of_parts_and_alone, str(tmp_path), timeout_s=60)


class OwnPlanner(DefaultSavePlanner):
    """Left to stock, whose options are taken."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data + 1 if isinstance(data, torch.Tensor) else data


def leave_to_stock(folder: str) -> None:
    saving = dcp.async_save({"w": torch.zeros(3)}, checkpoint_id=folder, planner=OwnPlanner())
    saving.result(60)
    dist.barrier()
    found = {"w": torch.zeros(3)}
    dcp.load(found, checkpoint_id=folder)
    assert found["w"].tolist() == [1.0] * 3


def test_a_planner_of_ones_own_is_left_to_stock(tmp_path: Path) -> None:
    run_ranks(2, leave_to_stock, str(tmp_path / "a"))


def test_threads_end_with_the_save(tmp_path: Path) -> None:
    before = threading.active_count()
    for number in range(3):
        dcp.async_save({"w": torch.ones(30)}, checkpoint_id=tmp_path / str(number)).result(60)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
