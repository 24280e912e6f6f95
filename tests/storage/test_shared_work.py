"""Several processes and one folder: who leads, who fails, who is gone, and what a launch before has left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import CheckpointUnsound, ReshardError, StorageError, UsageError
from reshard.storage.launch import FailedElsewhere
from reshard.storage.shared_work import SharedWork

Act = Callable[[SharedWork], Any]


def enter(
    place: Path, rank: int, ranks: int, job: str = "job", launch: str = "launch", timeout_s: float = 20.0
) -> SharedWork:
    return SharedWork(place / "made", job, rank, ranks, launch, timeout_s)


def write_part(work: SharedWork) -> Any:
    """What every rank of a launch does: its part, noted; then the first one collects and all commit."""
    (work.folder / f"part-{work.launch.rank}").write_text(f"of {work.launch.rank}")
    work.note({"part": work.launch.rank})
    work.launch.tell("written", work.launch.rank * 10)
    told = work.launch.gather("written") if work.launch.rank == 0 else None
    parts = sorted(entry["part"] for entry in work.noted()) if work.launch.rank == 0 else None
    work.commit()
    return [work.continued, told, parts]


def launch(place: Path, acts: list[Act], delays_s: tuple[float, ...] = (), **options: Any) -> list[Any]:
    """Runs a process for each rank: what each returned, or the error as (class, text, rank, exit code), or a signal."""
    outcomes = place.parent / "outcomes"
    shutil.rmtree(outcomes, ignore_errors=True)
    outcomes.mkdir()
    children = []
    for rank, act in enumerate(acts):
        child = os.fork()
        if not child:
            try:
                time.sleep(delays_s[rank] if delays_s else 0)
                outcome: Any
                try:
                    with enter(place, rank, len(acts), **options) as work:
                        outcome = act(work)
                except ReshardError as error:
                    outcome = [type(error).__name__, str(error), error.rank, error.exit_code, error.is_shared]
                (outcomes / str(rank)).write_text(json.dumps(outcome))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return [
        json.loads((outcomes / str(rank)).read_text()) if status == 0 else -status
        for rank, status in enumerate(statuses)
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_write_and_one_commits(place: Path, ranks: int) -> None:
    outcomes = launch(place, [write_part] * ranks)
    assert outcomes[0] == [False, [rank * 10 for rank in range(ranks)], list(range(ranks))]
    assert outcomes[1:] == [[False, None, None]] * (ranks - 1)
    assert names(place) == ["made"]
    assert names(place / "made") == [f"part-{rank}" for rank in range(ranks)]


def unsound(work: SharedWork) -> None:
    raise CheckpointUnsound("cut short", path="/some/file", key="w", details=["another fault"])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_every_rank_learns_which_one_failed(place: Path, failing: int) -> None:
    started = time.monotonic()
    acts: list[Act] = [write_part] * 3
    acts[failing] = unsound
    outcomes = launch(place, acts)
    for rank, (kind, text, named, code, is_shared) in enumerate(outcomes):
        assert code == 1
        assert "/some/file" in text.splitlines()[0] and "cut short" in text.splitlines()[0]
        assert "another fault" in text.splitlines()[1]
        if rank != failing:
            assert (kind, named, is_shared) == ("FailedElsewhere", failing, True)
        else:
            # The first rank speaks for all; it has heard, or it is the one.
            assert (kind, is_shared) == ("CheckpointUnsound", rank != 0)
    assert time.monotonic() - started < 8
    assert not (place / "made").exists()


def bug(work: SharedWork) -> None:
    raise KeyError("ours")


def test_a_bug_of_one_rank_is_a_bug_for_all(place: Path) -> None:
    first, second = launch(place, [write_part, bug])
    assert first[0] == "FailedElsewhere" and "KeyError" in first[1] and first[2:4] == [1, 3]
    assert second < 0


def die(work: SharedWork) -> None:
    work.note({"part": work.launch.rank})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_named(place: Path, gone: int) -> None:
    acts: list[Act] = [write_part] * 2
    acts[gone] = die
    outcomes = launch(place, acts, timeout_s=3.0)
    assert outcomes[gone] == -signal.SIGKILL
    kind, text, named, code, _ = outcomes[1 - gone]
    assert (kind, named, code) == ("StorageError", gone, 2)
    assert "no sign of life" in text
    assert not (place / "made").exists()


def slow(work: SharedWork) -> Any:
    time.sleep(5)
    return write_part(work)


def test_a_slow_rank_is_waited_for(place: Path) -> None:
    """Longer than the time-out: its heart beats."""
    assert launch(place, [write_part, slow], timeout_s=3.0)[1] == [False, None, None]
    assert names(place) == ["made"]


def test_a_launch_goes_on_from_the_notes_of_one_that_died(place: Path) -> None:
    def first(work: SharedWork) -> None:
        (work.folder / "part-7").write_text("of the first")
        work.note({"part": 7})
        die(work)

    assert launch(place, [first], launch="one") == [-signal.SIGKILL]
    outcomes = launch(place, [write_part] * 3, launch="two")
    assert [outcome[0] for outcome in outcomes] == [True] * 3
    assert outcomes[0][2] == [0, 0, 1, 2, 7]
    assert names(place / "made") == ["part-0", "part-1", "part-2", "part-7"]


def test_another_job_begins_anew(place: Path) -> None:
    def first(work: SharedWork) -> None:
        (work.folder / "part-7").write_text("of the first")
        work.note({"part": 7})
        die(work)

    launch(place, [first], job="one")
    outcomes = launch(place, [write_part] * 2, job="two")
    assert [outcome[0] for outcome in outcomes] == [False] * 2
    assert outcomes[0][2] == [0, 1]
    assert names(place / "made") == ["part-0", "part-1"]


# torchrun gives launches one after the other the same names: run id "none", port 29500.


@pytest.mark.parametrize("job", ["job", "another job"])
@pytest.mark.parametrize("end", ["failed", "killed", "killed at the end"])
def test_a_launch_is_not_misled_by_what_one_of_the_same_name_left(place: Path, end: str, job: str) -> None:
    """The follower comes first, and finds a folder full of events of its own launch, as it seems."""

    def killed_at_the_end(work: SharedWork) -> None:
        (work.folder / "stale").write_text("")
        work.launch.tell("may write")
        work.launch.tell("written")
        work.launch.tell("committed")
        die(work)

    acts: dict[str, list[Act]] = {
        "failed": [write_part, unsound],
        "killed": [die, die],
        "killed at the end": [killed_at_the_end, killed_at_the_end],
    }
    launch(place, acts[end], timeout_s=5.0)
    # What a new launch of other ranks and of the same name makes of it.
    outcomes = launch(place, [write_part] * 3, delays_s=(1.0, 0.0, 0.5), job=job, timeout_s=8.0)
    # A source at fault leaves nothing to go on from.
    assert [outcome[0] for outcome in outcomes] == [job == "job" and end != "failed"] * 3, outcomes
    assert {"part-0", "part-1", "part-2"} <= set(names(place / "made"))
    assert names(place) == ["made"]


def test_one_at_a_time(place: Path) -> None:
    with enter(place, 0, 1) as work:
        for job in ("job", "another"):
            with pytest.raises(UsageError, match="another process"), enter(place, 0, 1, job=job):
                pass
        work.note({"part": 0})
        (work.folder / "part").write_text("")
        work.commit()
    assert names(place) == ["made"]


def test_what_is_there_is_replaced_at_once(place: Path) -> None:
    (place / "made").mkdir(parents=True)
    (place / "made" / "old").write_text("")
    with enter(place, 0, 1) as work:
        (work.folder / "new").write_text("")
        assert names(place / "made") == ["old"]
        work.commit()
    assert names(place) == ["made"] and names(place / "made") == ["new"]


def test_an_error_of_the_file_system_comes_alone(place: Path) -> None:
    """A journal that cannot be written does not raise a second time when it is closed."""
    with pytest.raises(StorageError, match="o space left"), enter(place, 0, 1) as work:
        (work.root / "work" / "journal-0.jsonl").symlink_to("/dev/full")
        work.note({"part": 0})


def test_failed_elsewhere_reads_as_the_error_itself() -> None:
    error = FailedElsewhere({"text": "file: cut short\n  more", "code": 2}, 3)
    assert str(error) == "rank 3: file: cut short\n  more"
    assert (error.exit_code, error.is_shared, error.rank) == (2, True, 3)
