"""What retention keeps and removes, and that marks hold against removals that run at the same time."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import REFUSED, in_child
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import CheckpointNotFound, UsageError
from reshard.storage.commit import Stage, abandon_later, claim
from reshard.storage.retention import (
    Best,
    Retention,
    pin,
    plan_retention,
    prune,
    reasons_to_stay,
    record_resumed,
    remove,
    unpin,
)
from reshard.storage.steps import committed_steps, uncommitted


def make_step(run: Path, step: int) -> Path:
    folder = run / f"step-{step}"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / name).write_text(f"{step} {name}")
    return folder


def is_whole(folder: Path) -> bool:
    step = folder.name.removeprefix("step-")
    return {path.name: path.read_text() for path in folder.iterdir()} == {name: f"{step} {name}" for name in "ab"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbers(run: Path) -> list[int]:
    return [folder.step for folder in committed_steps(run)]


class Soundness:
    """Answers for the steps given and remembers in which order it was asked."""

    def __init__(self, *sound: int) -> None:
        self.sound = sound
        self.asked: list[int] = []

    def __call__(self, path: Path) -> bool:
        step = int(path.name.removeprefix("step-"))
        self.asked.append(step)
        return step in self.sound


def all_sound(_: Path) -> bool:
    return True


# The decision


STEPS = st.sets(st.integers(0, 60), max_size=12)
VALUES = st.dictionaries(st.integers(0, 60), st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf, math.nan]))
BESTS = st.none() | st.builds(Best, st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"]))
RETENTIONS = st.builds(Retention, st.integers(1, 5), st.none() | st.integers(1, 20), BESTS)


def staying(steps: set[int], retention: Retention, sound: set[int], **known: Any) -> set[int]:
    return {step for step, found in reasons_to_stay(steps, retention, sound.__contains__, **known).items() if found}


def is_better(a: float, b: float, best: Best) -> bool:
    return a < b if best.direction == "min" else a > b


@given(STEPS, RETENTIONS, STEPS, VALUES, STEPS, STEPS)
def test_a_step_stays_for_one_of_six_reasons_and_no_other(
    steps: set[int],
    retention: Retention,
    sound: set[int],
    values: dict[int, float],
    pinned: set[int],
    resumed: set[int],
) -> None:
    finite = {step: value for step, value in values.items() if step in steps and math.isfinite(value)}
    expected = set()
    for step in steps:
        newer = [other for other in steps if other > step]
        every, best = retention.keep_every, retention.keep_best
        beaten_by = [
            other
            for other, value in finite.items()
            if best
            and step in finite
            and (is_better(value, finite[step], best) or (value == finite[step] and other > step))
        ]
        if (
            len(newer) < retention.keep_latest_k
            or (every and step % every == 0)
            or (best and step in finite and len(beaten_by) < best.count)
            or step in pinned | resumed
            or (step in sound and not sound.intersection(newer))
            or not sound & steps
        ):
            expected.add(step)
    assert staying(steps, retention, sound, values=values, pinned=pinned, resumed=resumed) == expected


@given(STEPS, RETENTIONS, STEPS, VALUES, STEPS)
def test_keeping_more_never_removes_more(
    steps: set[int], retention: Retention, sound: set[int], values: dict[int, float], pinned: set[int]
) -> None:
    kept = staying(steps, retention, sound, values=values, pinned=pinned)
    larger = Retention(retention.keep_latest_k + 1, retention.keep_every, retention.keep_best)
    assert kept <= staying(steps, larger, sound, values=values, pinned=pinned)
    assert kept <= staying(steps, retention, sound, values=values, pinned=pinned | {7, 13})
    # What never goes: where it is asked for, and the newest sound step in any case.
    assert steps & pinned <= kept
    assert {max(steps & sound)} <= kept if steps & sound else kept == steps


@given(STEPS, RETENTIONS, STEPS, VALUES, STEPS)
def test_what_stays_once_stays_again(
    steps: set[int], retention: Retention, sound: set[int], values: dict[int, float], pinned: set[int]
) -> None:
    kept = staying(steps, retention, sound, values=values, pinned=pinned)
    assert staying(kept, retention, sound, values=values, pinned=pinned) == kept


def test_every_reason_is_named() -> None:
    values = {100: 3.5, 150: 1.25, 170: math.nan, 200: 2.0}
    reasons = reasons_to_stay(
        [100, 150, 160, 170, 200, 250, 300, 350],
        Retention(1, 100, Best("loss", 2)),
        lambda step: step <= 300,
        values=values,
        pinned=[160, 300, 999],
        resumed=[250],
    )
    assert reasons == {
        100: ("every 100",),
        150: ("best loss 1.25",),
        160: ("pinned",),
        170: (),
        200: ("every 100", "best loss 2"),
        250: ("resumed from",),
        300: ("every 100", "pinned", "newest sound"),
        350: ("latest",),
    }


def test_best_may_be_the_largest_and_of_equals_is_the_newer() -> None:
    values = {10: 0.5, 20: 0.9, 30: 0.9, 40: 0.1}
    kept = {
        direction: staying({10, 20, 30, 40, 50}, Retention(1, None, Best("x", 1, direction)), {50}, values=values)
        for direction in ("min", "max")
    }
    assert kept == {"min": {40, 50}, "max": {30, 50}}


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3"])
@pytest.mark.parametrize("key", ["keep_latest_k", "keep_every"])
def test_counts_are_of_at_least_1(key: str, count: Any) -> None:
    with pytest.raises(UsageError, match=f"^{key}: not a count: expected an int of at least 1, found {count!r}; "):
        Retention(**{"keep_latest_k": 1, key: count})


@pytest.mark.parametrize(
    "given",
    ["loss", ("loss",), ("loss", 0), ("loss", "2"), ("", 2), (2, "loss"), ("loss", 2, "small"), ("a", 1, "max", 2)],
)
def test_what_is_not_a_metric_and_a_count(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^keep_best: not a metric.*expected \(metric, count\).*found .*; such as"):
        Best.of(given)
    assert Best.of(("loss", 2)) == Best.of(["loss", 2, "min"]) == Best("loss", 2)


# The removal


def test_prune_keeps_the_newest_k_by_number(tmp_path: Path) -> None:
    for step in (990, 1000, 999, 1010):
        make_step(tmp_path, step)
    sound = Soundness(990, 999, 1000, 1010)
    assert prune(tmp_path, Retention(2), sound) == [990, 999]
    assert numbers(tmp_path) == [1000, 1010]
    assert sound.asked == [1010]
    assert names(tmp_path) == ["step-1000", "step-1010"]


@pytest.mark.parametrize(
    ("sound", "asked", "removed", "left"),
    [
        ((10, 20, 30, 40, 50), [50], [10, 20, 30], [40, 50]),
        ((10, 20, 30, 40), [50, 40], [10, 20, 30], [40, 50]),
        ((10, 20, 30), [50, 40, 30], [10, 20], [30, 40, 50]),
        ((10,), [50, 40, 30, 20, 10], [20, 30], [10, 40, 50]),
        ((), [50, 40, 30, 20, 10], [], [10, 20, 30, 40, 50]),
    ],
)
def test_prune_never_removes_the_newest_sound_step(
    tmp_path: Path, sound: tuple[int, ...], asked: list[int], removed: list[int], left: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        make_step(tmp_path, step)
    soundness = Soundness(*sound)
    assert prune(tmp_path, Retention(2), soundness) == removed
    assert numbers(tmp_path) == left
    assert soundness.asked == asked


def test_prune_asks_nothing_where_nothing_is_to_go(tmp_path: Path) -> None:
    for step in (10, 20):
        make_step(tmp_path, step)
    sound = Soundness()
    assert prune(tmp_path, Retention(2), sound) == prune(tmp_path, Retention(1, 10), sound) == []
    assert prune(tmp_path / "absent", Retention(1), sound) == []
    assert sound.asked == []
    assert numbers(tmp_path) == [10, 20]


def test_prune_asks_for_the_metric_that_it_keeps_by_and_only_then(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make_step(tmp_path, step)
    asked = []

    def value_of(path: Path, metric: str) -> float | None:
        asked.append((path.name, metric))
        return {"step-10": 0.5, "step-20": 0.25, "step-30": None, "step-40": 1.0}[path.name]

    assert prune(tmp_path, Retention(4), all_sound, value_of) == [] and asked == []
    assert prune(tmp_path, Retention(1, None, Best("loss", 1)), all_sound, value_of) == [10, 30]
    assert asked == [(f"step-{step}", "loss") for step in (10, 20, 30, 40)]


def test_prune_leaves_what_is_not_a_committed_step(tmp_path: Path) -> None:
    for step in (10, 20):
        make_step(tmp_path, step)
    for name in ("step-5.tmp", ".staging-step-30-a", "logs", "abandoned-step-2-ff"):
        (tmp_path / name).mkdir()
    assert prune(tmp_path, Retention(1), Soundness(20)) == [10]
    assert names(tmp_path) == [".staging-step-30-a", "abandoned-step-2-ff", "logs", "step-20", "step-5.tmp"]


def test_prune_of_a_linked_step_takes_the_link(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_step(run, 20)
    archived = make_step(tmp_path / "archive", 10)
    (run / "step-10").symlink_to(archived)
    assert prune(run, Retention(1), Soundness(20)) == [10]
    assert names(run) == ["step-20"]
    assert is_whole(archived)


def test_a_plan_is_carried_out_as_far_as_it_still_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30, 40):
        make_step(tmp_path, step)
    plan = plan_retention(tmp_path, Retention(1), all_sound)
    assert plan.going == [10, 20, 30]
    pin(tmp_path, 20)
    (tmp_path / "step-30").rename(tmp_path / "elsewhere")
    renamed = []
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        renamed.append(path.name)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert remove(plan) == [10]
    assert numbers(tmp_path) == [20, 40]
    # Nor was 20 out of sight for a moment: whoever pinned it may be reading it.
    assert renamed[0] == "step-10" and "step-20" not in renamed


# Marks


def test_a_pinned_step_stays_until_it_is_not_pinned(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_step(tmp_path, step)
    pin(tmp_path, 10)
    pin(tmp_path, 10)
    assert names(tmp_path) == ["PINNED-step-10", "step-10", "step-20", "step-30"]
    # It is neither a step nor what could be mistaken for one.
    assert numbers(tmp_path) == [10, 20, 30] and uncommitted(tmp_path) == []
    claim(tmp_path, "another")
    assert prune(tmp_path, Retention(1), all_sound) == [20]
    unpin(tmp_path, 10)
    unpin(tmp_path, 10)
    assert prune(tmp_path, Retention(1), all_sound) == [10]
    assert names(tmp_path) == ["ATTEMPT", "step-30"]


def test_a_step_that_is_not_there_cannot_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing is committed there"):
        pin(tmp_path / "absent", 40)
    make_step(tmp_path, 40)
    (tmp_path / "step-50").write_text("a file")
    for step in (4, 50):
        with pytest.raises(CheckpointNotFound) as caught:
            pin(tmp_path, step)
        line = f"{tmp_path}/step-{step}: the step to keep is not there; there are steps [40]"
        assert str(caught.value) == line
    for call in (pin, unpin):
        with pytest.raises(UsageError, match="negative"):
            call(tmp_path, -1)
    assert names(tmp_path) == ["step-40", "step-50"]


def test_names_that_are_no_marks(tmp_path: Path) -> None:
    for step in (10, 20):
        make_step(tmp_path, step)
    for name in ("PINNED-step-010", "PINNED-10", "pinned-step-10", "xPINNED-step-10", "PINNED-step-10.bak"):
        (tmp_path / name).write_text("")
    assert prune(tmp_path, Retention(1), all_sound) == [10]


def test_the_step_that_a_run_was_set_back_to_stays_until_that_is_over(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make_step(tmp_path, step)
    record_resumed(tmp_path, 10)
    (tmp_path / ".RESUMED-step-10.0123abcd.tmp").write_text("")
    record_resumed(tmp_path, 20)
    assert names(tmp_path)[0] == "RESUMED-step-20"
    assert prune(tmp_path, Retention(1), all_sound) == [10, 30]
    with pytest.raises(CheckpointNotFound):
        record_resumed(tmp_path, 30)
    record_resumed(tmp_path, None)
    assert prune(tmp_path, Retention(1), all_sound) == [20]
    assert names(tmp_path) == ["step-40"]


# At the same time


# Every operation that changes or lists a file system, as Python reports it, whichever of its functions was called.
WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


def before_operation(run: Path, at: int, *strikes: Callable[[], None]) -> None:
    """Calls the first of `strikes` before the Nth storage operation of this process, the next before the next.

    For a child that ends soon, as hooks stay.
    """
    count = 0
    is_striking = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count, is_striking
        # Descriptors and relative names are those of a tree being walked; modules being imported are elsewhere.
        place = args[0] if event in WATCHED else "/"
        if isinstance(place, int) or not Path(place).is_absolute() or os.fspath(place).startswith(str(run)):
            # A strike's own operations do not count.
            if is_striking:
                return
            count += 1
            if at <= count < at + len(strikes):
                is_striking = True
                strikes[count - at]()
                is_striking = False

    sys.addaudithook(hook)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("strike", [die, no_space])
def test_a_fault_at_every_operation_of_a_removal(tmp_path: Path, strike: Callable[[], None]) -> None:
    left = set()
    for at in range(1, 1000):
        run = tmp_path / str(at)
        for step in (10, 20, 30, 40):
            make_step(run, step)
        pin(run, 20)

        def action(run: Path = run, at: int = at) -> None:
            before_operation(run, at, strike)
            prune(run, Retention(1), all_sound)

        status = in_child(action)
        found = numbers(run)
        left.add(tuple(found))
        assert {20, 40} <= set(found) <= {10, 20, 30, 40}
        assert all(is_whole(folder.path) for folder in committed_steps(run))
        if status == 0:
            assert names(run) == ["PINNED-step-20", "step-20", "step-40"]
            break
        assert status == (signal.SIGKILL if strike is die else REFUSED << 8), f"operation {at}"
        claim(run, "next")
        assert uncommitted(run) == []
        assert all(is_whole(folder.path) for folder in committed_steps(run))
        prune(run, Retention(1), all_sound)
        assert names(run) == ["ATTEMPT", "PINNED-step-20", "step-20", "step-40"]
    assert 20 < at < 999
    # Between two removals, too.
    assert left >= {(10, 20, 30, 40), (20, 30, 40), (20, 40)}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mark", [pin, record_resumed])
def test_a_step_that_is_marked_at_any_moment_of_a_removal_stays(tmp_path: Path, mark: Callable[..., None]) -> None:
    outcomes = []
    for at in range(1, 1000):
        run = tmp_path / str(at)
        for step in (10, 20, 30):
            make_step(run, step)
        report = tmp_path / f"{at}.txt"

        def strike(run: Path = run, report: Path = report) -> None:
            try:
                mark(run, 10)
            except CheckpointNotFound:
                report.write_text("gone")
            else:
                report.write_text("marked")

        def action(run: Path = run, at: int = at, strike: Callable[[], None] = strike) -> None:
            before_operation(run, at, strike)
            prune(run, Retention(1), all_sound)

        assert in_child(action) == 0
        if not report.exists():
            break
        outcomes.append(report.read_text())
        marked = outcomes[-1] == "marked"
        assert numbers(run) == ([10, 30] if marked else [30]), f"operation {at}"
        assert is_whole(run / "step-30") and (not marked or is_whole(run / "step-10"))
        assert uncommitted(run) == []
    assert set(outcomes) == {"marked", "gone"}
    assert 15 < at < 999


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("later", [0, 1])
def test_a_crash_right_after_that_leaves_the_marked_step_to_the_next_claim(tmp_path: Path, later: int) -> None:
    outcomes = []
    for at in range(1, 1000):
        run = tmp_path / str(at)
        for step in (10, 20, 30):
            make_step(run, step)

        def strike(run: Path = run) -> None:
            with contextlib.suppress(CheckpointNotFound):
                pin(run, 10)
                (run / "was-pinned").touch()

        def action(run: Path = run, at: int = at, strike: Callable[[], None] = strike) -> None:
            before_operation(run, at, strike, *[lambda: None] * later, die)
            prune(run, Retention(1), all_sound)

        if in_child(action) == 0:
            break
        was_pinned = (run / "was-pinned").exists()
        outcomes.append((was_pinned, 10 in numbers(run)))
        claim(run, "next")
        assert uncommitted(run) == []
        assert is_whole(run / "step-30") and (not was_pinned or is_whole(run / "step-10")), f"operation {at}"
    assert at > 15
    # Some of the crashes caught the step between two names.
    assert (True, True) in outcomes and (True, False) in outcomes


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_removal_at_any_moment_of_a_pin(tmp_path: Path) -> None:
    outcomes = set()
    for at in range(1, 1000):
        run = tmp_path / str(at)
        for step in (10, 20):
            make_step(run, step)
        report = tmp_path / f"{at}.txt"

        def action(run: Path = run, at: int = at, report: Path = report) -> None:
            before_operation(run, at, lambda: report.write_text(str(prune(run, Retention(1), all_sound))))
            pin(run, 10)

        status = in_child(action)
        stays = 10 in numbers(run)
        if not report.exists():
            assert status == 0
            break
        # Either the removal came first and the pin fails, or the pin did and the step stays.
        assert status == (0 if stays else REFUSED << 8), f"operation {at}"
        outcomes.add(stays)
        assert uncommitted(run) == []
    assert outcomes == {True, False}


def test_runs_that_commit_prune_and_pin_at_once(tmp_path: Path) -> None:
    """A run, two removals by hand and two who pin; a reader sees whole steps, and what was pinned is there."""
    done, faults, pinned = threading.Event(), [], set()

    def repeatedly(act: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while not done.is_set():
                    act()
            except BaseException as error:
                faults.append(error)

        return threading.Thread(target=loop)

    def pin_an_old_one() -> None:
        old = [step for step in numbers(tmp_path)[:-1] if step not in pinned]
        if old and len(pinned) < 8:
            with contextlib.suppress(CheckpointNotFound):
                pin(tmp_path, old[0])
                pinned.add(old[0])

    def read() -> None:
        for folder in committed_steps(tmp_path):
            try:
                if not is_whole(folder.path) and folder.path.exists():
                    faults.append(folder)
            except FileNotFoundError:
                continue

    by_hand = [repeatedly(lambda: prune(tmp_path, Retention(1), all_sound)) for _ in range(2)]
    threads = [*by_hand, *(repeatedly(pin_an_old_one) for _ in range(2)), repeatedly(read)]
    for thread in threads:
        thread.start()
    try:
        for step in range(60):
            stage = Stage.open(tmp_path, step, "a")
            for name in ("a", "b"):
                (stage.path / name).write_text(f"{step} {name}")
            stage.commit()
            prune(tmp_path, Retention(3), all_sound)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert faults == []
    prune(tmp_path, Retention(1), all_sound)
    assert pinned and pinned | {59} <= set(numbers(tmp_path))
    assert all(is_whole(folder.path) for folder in committed_steps(tmp_path))
    assert uncommitted(tmp_path) == []


def test_a_pin_outlives_the_history_that_it_was_made_in(tmp_path: Path) -> None:
    claim(tmp_path, "a")
    for step in (10, 20):
        make_step(tmp_path, step)
    pin(tmp_path, 20)
    (abandoned,) = abandon_later(tmp_path, 10, "a")
    assert prune(tmp_path, Retention(1), all_sound) == []
    assert abandoned.is_dir() and plan_retention(tmp_path, Retention(1), all_sound).pinned == {20}
