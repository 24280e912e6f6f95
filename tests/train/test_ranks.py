"""How ranks agree, and how they learn of each other's failures."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from reshard.dcp.ranks import all_ranks
from reshard.errors import CheckpointUnsound, ReshardError, StorageError


class Awkward(Exception):
    """Its text is all that can travel: it cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("a text")
        self.lock = open(os.devnull)  # noqa: SIM115, PTH123


# What the two kinds say to do where nothing better is known.
COPY, CHECK = CheckpointUnsound.usual_hint, StorageError.usual_hint


def describe(error: ReshardError) -> tuple[Any, ...]:
    return type(error).__name__, str(error), error.exit_code


def fail_on(failures: dict[int, Exception | str]) -> Any:
    """What each rank sees, and whether the next collective still works."""
    ranks = all_ranks()
    seen = None
    try:
        with ranks.together():
            failure = failures.get(ranks.rank)
            if failure == "awkward":
                raise Awkward
            if failure == "awkward value":
                raise CheckpointUnsound("wrong value", found=Awkward(), expected=Path("x"))
            if isinstance(failure, Exception):
                raise failure
    except ReshardError as error:
        seen = describe(error)
    return seen, ranks.gather(ranks.rank)


@pytest.mark.parametrize("world", [1, 3])
def test_nobody_fails(world: int) -> None:
    assert run_ranks(world, fail_on, {}) == [(None, list(range(world)))] * world


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (CheckpointUnsound("torn", path="/x/y", hint="do this"), "CheckpointUnsound", "/x/y: rank 1: torn; do this"),
        (
            OSError(28, "No space left on device", "/x/y"),
            "StorageError",
            f"/x/y: rank 1: No space left on device; {CHECK}",
        ),
        (ValueError("odd"), "ReshardError", "rank 1: ValueError: odd"),
        ("awkward", "ReshardError", "rank 1: Awkward: a text"),
        ("awkward value", "CheckpointUnsound", f"rank 1: wrong value: expected x, found a text; {COPY}"),
    ],
    ids=["ours", "os", "other", "unpicklable", "unpicklable value"],
)
def test_one_rank_fails_and_all_raise_the_same(failure: Exception | str, kind: str, text: str) -> None:
    results = run_ranks(3, fail_on, {1: failure})
    expected = {"CheckpointUnsound": 1, "StorageError": StorageError.exit_code, "ReshardError": 1}[kind]
    assert results == [((kind, text, expected), [0, 1, 2])] * 3


def test_what_rank_0_does_for_all_names_no_rank() -> None:
    results = run_ranks(2, fail_on, {0: CheckpointUnsound("torn", path="/x")})
    assert [seen for seen, _ in results] == [("CheckpointUnsound", f"/x: torn; {COPY}", 1)] * 2


def test_several_ranks_fail_and_each_is_named_once() -> None:
    results = run_ranks(4, fail_on, {1: ValueError("one"), 2: CheckpointUnsound("two"), 3: ValueError("three")})
    text = f"rank 1: ValueError: one\n  also: rank 2: two; {COPY}\n  also: rank 3: ValueError: three"
    assert [seen for seen, _ in results] == [("ReshardError", text, 1)] * 4


def test_the_same_fault_on_all_ranks_is_told_once() -> None:
    results = run_ranks(3, fail_on, dict.fromkeys(range(3), CheckpointUnsound("torn", path="/x")))
    assert {seen[1].splitlines()[0] for seen, _ in results} == {f"/x: torn; {COPY}"}
    assert {len(seen[1].splitlines()) for seen, _ in results} == {1}


def test_without_a_process_group_there_is_one_rank() -> None:
    assert not dist.is_initialized()
    ranks = all_ranks()
    assert (ranks.size, ranks.rank, ranks.group) == (1, 0, None)
    assert ranks.gather("x") == ["x"]
    assert ranks.broadcast("x") == "x"
    assert ranks.gather_numbers([1, 2.5]) == [[1, 2.5]]
    assert ranks.maxima([1, -2.5]) == [1, -2.5]
    with pytest.raises(ReshardError, match=r"^rank 0: KeyError: 'x'$") as caught, ranks.together():
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    fault = CheckpointUnsound("torn")
    with pytest.raises(CheckpointUnsound) as caught, ranks.together():
        raise fault
    assert caught.value is fault
    assert caught.value.__cause__ is None


def exchange() -> Any:
    ranks = all_ranks()
    mine = ranks.rank
    return (
        ranks.gather({"rank": mine}),
        ranks.broadcast(f"from {mine}"),
        ranks.gather_numbers([mine, 0.1 + mine, 2.0**60 + 2.0**10]),
        ranks.maxima([mine, -mine, 0.1]),
    )


def test_messages() -> None:
    expected = (
        [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "from 0",
        [[rank, 0.1 + rank, 2.0**60 + 2.0**10] for rank in range(3)],
        [2, 0, 0.1],
    )
    assert run_ranks(3, exchange) == [expected] * 3


def reopen(folder: str) -> Any:
    ranks, rank = all_ranks(), dist.get_rank()
    first, sums = ranks.group, [sum(ranks.gather(rank))]
    dist.destroy_process_group()
    alone = (ranks.size, ranks.group, ranks.gather("x"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    sums.append(sum(ranks.gather(rank)))
    return alone, sums, ranks.group is first, ranks.group is ranks.group is all_ranks().group


def test_the_group_is_opened_anew_for_another_default_group(tmp_path: Path) -> None:
    assert run_ranks(2, reopen, str(tmp_path)) == [((1, None, ["x"]), [1, 1], False, True)] * 2


def slow_rank(folder: str, delay_s: float) -> Any:
    """Ranks that meet after longer than the default group would wait."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    init = f"file://{folder}/short"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    ranks = all_ranks()
    ranks.gather(0)
    with ranks.together():
        if rank == 0:
            time.sleep(delay_s)
    met = ranks.broadcast(f"after {delay_s}")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return met, tensor.item()


def test_a_slow_rank_is_waited_for_longer_than_a_training_step_may_take(tmp_path: Path) -> None:
    assert run_ranks(2, slow_rank, str(tmp_path), 3.0) == [("after 3.0", 2.0)] * 2


def with_timeout(timeout: str) -> Any:
    os.environ["RESHARD_TIMEOUT_S"] = timeout
    ranks = all_ranks()
    try:
        ranks.gather(0)
        began = time.monotonic()
        if ranks.rank == 0:
            time.sleep(3)
            return None
        ranks.gather(0)
    except ReshardError as error:
        return describe(error), timeout == "1" and time.monotonic() - began < 2.5
    return None


def test_how_long_to_wait_can_be_set() -> None:
    _, ((kind, text, _), in_time) = run_ranks(2, with_timeout, "1")
    assert kind == "ReshardError"
    assert text.startswith("rank 1: lost contact with the other ranks; one of them ended or hangs")
    assert in_time


def test_a_time_that_is_none_is_refused() -> None:
    results = run_ranks(2, with_timeout, "soon")
    text = "RESHARD_TIMEOUT_S: not a time: expected a number of seconds above 0, found 'soon'"
    assert results == [(("UsageError", text, 2), False)] * 2


def lose_a_rank() -> Any:
    ranks = all_ranks()
    ranks.gather(0)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with ranks.together():
            pass
    except ReshardError as error:
        # Not by way of the helper's own barrier, which would miss the dead rank.
        dist.barrier = dist.destroy_process_group = lambda: None
        return str(error).splitlines()[0]
    return None


def test_a_rank_that_died_is_noticed_at_once() -> None:
    first, second = run_ranks(2, lose_a_rank, timeout_s=30)
    assert second is None
    assert first.startswith("rank 0: lost contact with the other ranks; one of them ended or hangs")
