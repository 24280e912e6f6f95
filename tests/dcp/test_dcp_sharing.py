"""What several ranks hold is read and written once: who takes what, and how many bytes each of them moves."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import assert_leaves, megabytes, raw
from ranks import run_ranks
from sharded import write_sharded
from torch.distributed.device_mesh import init_device_mesh

import reshard.dcp.api
from reshard import ReshardError, dcp
from reshard.dcp.filling import open_on, plan_filling
from reshard.dcp.ranks import all_ranks, alone
from reshard.dcp.sharing import CUT_BYTES, Held, _dealt, part_rows, share
from reshard.dcp.writing import STAGING_BYTES
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp import open_dcp

MIB = 1 << 20

# Who takes what.


@settings(max_examples=200, deadline=None)
@given(
    everybodys=st.lists(st.lists(st.integers(0, 11), unique=True, max_size=12), min_size=1, max_size=5),
    lengths=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    rows=st.lists(st.integers(1, 6), min_size=12, max_size=12),
    dealt=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_each_box_is_taken_once(
    everybodys: list[list[int]], lengths: list[int], rows: list[int], dealt: list[bool]
) -> None:
    """By one of its holders, or by all of them in parts that make up all of its rows; and all agree on it."""
    length_bytes = [length * CUT_BYTES // 2 for length in lengths]
    held = [
        Held.of([str(box) for box in boxes], [length_bytes[box] for box in boxes], [rows[box] for box in boxes],
                [dealt[box] for box in boxes])
        for boxes in everybodys
    ]  # fmt: skip
    everybody = _dealt(held)
    for wanted in range(12):
        holders = [rank for rank, boxes in enumerate(everybodys) if wanted in boxes]
        takers = set()
        for rank in holders:
            shares, position = everybody[rank], everybodys[rank].index(wanted)
            takers.add(int(shares.taker[position]))
            group = int(shares.group[position])
            assert (tuple(holders) == shares.groups[group]) if len(holders) > 1 else group == -1
        if not holders:
            continue
        assert len(takers) == 1
        (taker,) = takers
        if taker >= 0:
            assert taker in holders
            assert dealt[wanted] or taker == holders[0]
        else:
            assert dealt[wanted]
            parts = [part_rows(rows[wanted], part, len(holders)) for part in range(len(holders))]
            assert [low for low, _ in parts] + [rows[wanted]] == [0] + [high for _, high in parts]
            assert all(low < high for low, high in parts)
    # The groups that two ranks are both in come in one order on both: else each would wait for the other.
    for one in everybody:
        for other in everybody:
            assert [g for g in one.groups if g in other.groups] == [g for g in other.groups if g in one.groups]


def test_what_one_process_holds_is_its_own() -> None:
    shares = share(Held.of(["a", "b"], [4, 8], [1, 2], [True, True]), alone())
    assert (shares.taker.tolist(), shares.group.tolist(), shares.groups) == ([0, 0], [-1, -1], [])


def test_replicas_are_dealt_out_evenly() -> None:
    """Large ones, small ones, and ones with fewer rows than holders."""
    generator = np.random.default_rng(0)
    count, world = 400, 8
    lengths = (2 ** generator.uniform(8, 26, count)).astype(np.int64)
    rows = generator.integers(1, 40, count)
    held = Held.of(map(str, range(count)), lengths.tolist(), rows.tolist(), [True] * count)
    load = np.zeros(world)
    for rank, shares in enumerate(_dealt([held] * world)):
        load[rank] = lengths[shares.taker == rank].sum()
        for which in np.flatnonzero(shares.taker == -1).tolist():
            first, last = part_rows(int(rows[which]), rank, world)
            load[rank] += lengths[which] * (last - first) / rows[which]
    assert load.sum() == pytest.approx(lengths.sum())
    assert load.max() / load.mean() <= 1.25


# Bytes read.


class Opened:
    """What `dcp.load` has opened, to be asked when it is done; nothing about it is changed."""

    def __init__(self) -> None:
        self.sources: list[Checkpoint] = []
        real = reshard.dcp.api.open_on

        def noting(*args: Any, **options: Any) -> Checkpoint:
            source = real(*args, **options)
            self.sources.append(source)
            return source

        reshard.dcp.api.open_on = noting

    def take(self) -> tuple[int, list[str]]:
        """Bytes that were read, and the files that they came from."""
        sources, self.sources = self.sources, []
        return sum(source.files.bytes_read for source in sources), [
            source.files.paths[file].name for source in sources for file in source.files._users
        ]


def read_in_layouts(folder: str) -> dict[str, tuple[int, int, list[str], str]]:
    """Layout -> bytes needed and read here, files opened, and what came of it."""
    opened = Opened()
    found = {}
    expected = megabytes(3, 4, seed=0)
    for layout in ("shard0", "shard1", "hsdp", "plain"):
        place, make_mesh = layouts.LAYOUTS[layout]
        mesh = make_mesh()
        live = {name: place(torch.zeros_like(tensor), mesh) for name, tensor in expected.items()}
        dcp.load(live, checkpoint_id=folder)
        assert_leaves(live, {name: place(tensor, mesh) for name, tensor in expected.items()})
        needed = sum(tensor.nbytes for value in live.values() for tensor in layouts.local_tensors(value))
        found[layout] = (needed, *opened.take(), "")
    return found


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = write_sharded(tmp_path_factory.mktemp("reads") / "a", megabytes(3, 4, seed=0), 5)
    return run_ranks(4, read_in_layouts, str(folder))


@pytest.mark.parametrize("layout", ["shard0", "shard1"])
def test_a_rank_reads_what_it_needs(reads: list[Any], layout: str) -> None:
    for found in reads:
        needed, read, _, _ = found[layout]
        # A column of every row is too short to be read alone: neighbours come with it.
        assert needed <= read <= needed * (1.02 if layout == "shard0" else 1.10), (layout, read / needed)


def test_a_rank_opens_only_the_files_of_its_rows(reads: list[Any]) -> None:
    """A quarter of the rows lies in two or three of five files."""
    assert all(len(set(found["shard0"][2])) <= 3 for found in reads)


@pytest.mark.parametrize(("layout", "copies"), [("hsdp", 2), ("plain", 4)])
def test_replicas_are_read_once_on_a_machine(reads: list[Any], layout: str, copies: int) -> None:
    needed, read = (sum(found[layout][column] for found in reads) for column in (0, 1))
    assert read <= needed / copies * 1.02
    each = [found[layout][1] for found in reads]
    assert max(each) / (sum(each) / len(each)) <= 1.05


def locate_in_a_job(folder: str) -> tuple[int, int, set[str]]:
    """Bytes that this rank reads to find its chunks, that one process reads to find all, and the files opened."""
    values = {name: layouts._shard0(torch.zeros_like(tensor), init_device_mesh("cpu", (dist.get_world_size(),)))
              for name, tensor in megabytes(6, 4, seed=0).items()}  # fmt: skip
    with open_on(Path(folder), all_ranks()) as source:
        plan_filling(values, source, all_ranks())
        opened = {source.files.paths[file].name for file in source.files._users}
        read = source.files.bytes_read
    with open_dcp(Path(folder)) as whole:
        whole.locate(np.arange(len(whole.index.file)))
        return read, whole.files.bytes_read, opened


def test_the_ends_of_archives_are_read_once_in_a_job(tmp_path: Path) -> None:
    """Of two ranks that wrote, each chunk is wanted by four of the eight that load."""
    folder = write_sharded(tmp_path / "a", megabytes(6, 4, seed=0), 2)
    found = run_ranks(8, locate_in_a_job, str(folder))
    assert sum(read for read, _, _ in found) <= 1.1 * found[0][1]
    assert all(len(opened) <= 1 for _, _, opened in found)


def load_one_of_two(folder: str) -> str:
    live = {"w0": layouts._shard0(torch.zeros_like(megabytes(2, 4, seed=0)["w0"]), init_device_mesh("cpu", (8,)))}
    dcp.load(live, checkpoint_id=folder)
    assert torch.equal(live["w0"].full_tensor(), megabytes(2, 4, seed=0)["w0"])
    try:
        dcp.load({"w1": megabytes(2, 4, seed=0)["w1"]}, checkpoint_id=folder)
    except ReshardError as fault:
        return str(fault)
    return "loaded"


def test_a_damaged_archive_is_the_affair_of_who_wants_it(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", megabytes(2, 4, seed=0), 2)
    with reshard.open_checkpoint(folder) as opened:
        chunk = opened.index.tensor("w1").chunks[0]
    with (folder / chunk.file).open("r+b") as file:
        file.seek(chunk.start_bytes + chunk.length_bytes - 22)
        file.write(bytes(22))
    for text in run_ranks(8, load_one_of_two, str(folder)):
        assert "w1" in text and chunk.file in text


def read_on_two_nodes(folder: str) -> tuple[int, bytes]:
    """Ranks 0 and 1 on one machine, 2 and 3 on another."""
    name = f"node{dist.get_rank() // 2}"
    socket.gethostname = lambda: name
    opened = Opened()
    live = {name: torch.zeros_like(tensor) for name, tensor in megabytes(2, 4, seed=0).items()}
    dcp.load(live, checkpoint_id=folder)
    return opened.take()[0], raw(live["w1"])


def test_each_machine_reads_once(tmp_path: Path) -> None:
    whole = megabytes(2, 4, seed=0)
    folder = write_sharded(tmp_path / "a", whole, 2)
    found = run_ranks(4, read_on_two_nodes, str(folder))
    total = sum(tensor.nbytes for tensor in whole.values())
    for node in (found[:2], found[2:]):
        assert total <= sum(read for read, _ in node) <= total * 1.02
    assert {content for _, content in found} == {raw(whole["w1"])}


def load_odd_replicas(folder: str) -> None:
    """Replicas that are transposed, tiny, of one row, views, converted, or held by some ranks only."""
    rank = dist.get_rank()
    whole = odd_replicas()
    live: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    live["turned"] = torch.zeros(400, 900).t()
    live["spread"] = torch.zeros(900, 800)[:, ::2]
    live["cast"] = torch.zeros(900, 400, dtype=torch.float64)
    live["conjugate"] = torch.zeros(9, dtype=torch.complex64).conj()
    live["negated"] = torch.zeros(9, dtype=torch.complex64).conj().imag
    if rank == 1:
        del live["some"], live["cast"]
    if rank == 2:
        live["turned"] = torch.zeros(900, 400)
    dcp.load(live, checkpoint_id=folder)
    for name, tensor in live.items():
        assert torch.equal(tensor, whole[name].to(tensor.dtype)), name


def odd_replicas() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = {name: torch.randn(900, 400, generator=generator) for name in ("turned", "spread", "cast", "some")}
    small = {f"t{number}": torch.randn(number, 3, generator=generator) for number in range(20)}
    return {
        **large, **small, "one_row": torch.randn(1, 500_000, generator=generator), "scalar": torch.tensor(4.0),
        "conjugate": torch.complex(torch.arange(9.0), -torch.arange(9.0)), "negated": torch.arange(9.0),
        "bytes": torch.arange(7, dtype=torch.uint8), "halves": torch.randn(9, generator=generator).bfloat16(),
    }  # fmt: skip


@pytest.mark.parametrize("world", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_replicas_of_all_kinds(tmp_path: Path, world: int) -> None:
    folder = write_sharded(tmp_path / "a", odd_replicas(), 2)
    run_ranks(world, load_odd_replicas, str(folder))


# Bytes written.


def save_replicas(folder: str) -> None:
    mesh = layouts.LAYOUTS["hsdp"][1]()
    whole = megabytes(3, 4, seed=0)
    small = {f"s{number}": torch.full((40, 25), float(number)) for number in range(64)}
    dcp.save(dict(whole), checkpoint_id=f"{folder}/plain")
    dcp.save(
        {name: layouts._hsdp(tensor, mesh) for name, tensor in (whole | small).items()}, checkpoint_id=f"{folder}/hsdp"
    )


def test_replicas_are_written_once_and_by_all(tmp_path: Path) -> None:
    run_ranks(4, save_replicas, str(tmp_path))
    total = sum(tensor.nbytes for tensor in megabytes(3, 4, seed=0).values())
    for name, extra in (("plain", 0), ("hsdp", 64 * 4000)):
        lengths = [path.stat().st_size for path in (tmp_path / name).glob("*.distcp")]
        assert len(lengths) == 4
        assert total + extra <= sum(lengths) <= (total + extra) * 1.2
        assert max(lengths) / (sum(lengths) / 4) <= 1.05
        live = {key: torch.zeros_like(tensor) for key, tensor in megabytes(3, 4, seed=0).items()}
        dcp.load(live, checkpoint_id=tmp_path / name)
        assert_leaves(live, megabytes(3, 4, seed=0))


# Memory.


def peak_bytes(folder: str, what: str) -> int:
    """How much a save or a load of 256 MiB adds to the most that this process has ever held."""
    live = {f"w{number}": torch.full((64, MIB // 4), float(number)) for number in range(4)}
    # A first one, small, brings in what is imported and opened once.
    dcp.save({"x": torch.zeros(3)}, checkpoint_id=f"{folder}/small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if what == "save":
        dcp.save(live, checkpoint_id=f"{folder}/large")
    else:
        dcp.load(live, checkpoint_id=f"{folder}/large")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before


@pytest.mark.parametrize("world", [1, 2])
def test_little_memory_is_needed_beside_the_state(tmp_path: Path, world: int) -> None:
    for what in ("save", "load"):
        for added in run_ranks(world, peak_bytes, str(tmp_path), what):
            assert added <= STAGING_BYTES + 16 * MIB, (what, added >> 20)


def save_while_looking_away(folder: str) -> Any:
    """A rank that holds nothing of a group that others share, between groups that it does share."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3,))
    live: dict[str, Any] = {"all": torch.full((600, 600), 1.0), "cut": layouts._shard0(torch.ones(7, 3), mesh)}
    for pair in ((0, 1), (1, 2), (0, 2)):
        if rank in pair:
            live[f"of {pair}"] = torch.full((600, 600), float(sum(pair)))
    dcp.save(live, checkpoint_id=folder)
    found = {key: torch.zeros(600, 600) if key != "cut" else layouts._shard0(torch.zeros(7, 3), mesh) for key in live}
    dcp.load(found, checkpoint_id=folder)
    assert_leaves(found, live)


def test_groups_that_overlap(tmp_path: Path) -> None:
    run_ranks(3, save_while_looking_away, str(tmp_path))
