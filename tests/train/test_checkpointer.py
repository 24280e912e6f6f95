"""When a run saves, what it resumes from, and how it stops. The runs train for real, on one rank or two."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lab
import pytest
import torch.distributed as dist
from ranks import run_ranks

import reshard
from reshard.cluster.signals import StopSignal
from reshard.storage.commit import ATTEMPT_FILE, holder
from reshard.storage.steps import committed_steps
from reshard.train import heartbeat
from reshard.train.checkpointer import STOPPED_FILE, Checkpointer
from reshard.verify.structure import structure_faults

SETUP = lab.Setup(global_batch=4)


class Log(logging.Handler):
    """What the library says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("reshard")
        logger.setLevel(logging.INFO)
        logger.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def about(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]


def numbers(folder: str | Path) -> list[int]:
    return [step.step for step in committed_steps(folder)]


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def train(run: lab.Run, checkpointer: Checkpointer, steps: int, on_step: Callable[..., Any] | None = None) -> Any:
    return run.train(steps, on_step, done=checkpointer.step)


def start(folder: str | Path, steps: int = 0, resume: Any = "no", **options: Any) -> tuple[lab.Run, Checkpointer]:
    """A run with a checkpointer, resumed as asked, and trained up to ``steps``."""
    run = lab.build(SETUP)
    checkpointer = Checkpointer(folder, run.state, **{"interval": 2, **options})
    if resume != "no":
        checkpointer.resume(resume)
    train(run, checkpointer, steps)
    return run, checkpointer


def error_of(call: Callable[[], Any], kind: type[Exception] = reshard.ReshardError) -> str:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__} {error}"
    raise AssertionError("no error")


# Each function below runs on every rank; the test of the same name calls it.


def intervals(folder: str) -> Any:
    log = Log()
    _, checkpointer = start(folder, 7, interval=3, keep_latest_k=1)
    listed = numbers(folder)
    by_hand = checkpointer.save()
    count = len(log.about("saved step"))
    again = checkpointer.save()
    return listed, numbers(folder), by_hand == again == Path(folder) / "step-7", count, log.lines


def test_saves_at_the_interval_and_by_hand_once_a_step(tmp_path: Path) -> None:
    (before, after, is_step_7, count, lines), second = run_ranks(2, intervals, str(tmp_path))
    assert before == [6] and after == [7]
    assert is_step_7
    assert count == 3 and second[-1] == []
    assert lines[0].startswith(f"INFO saved step 3 to {tmp_path}/step-3 in ")
    assert names(tmp_path) == [ATTEMPT_FILE, "step-7"]


def damage(folder: Path) -> None:
    """B76: only step 10 of 10, 20, 30, 40 is whole, and a link points to 30."""
    (folder / "step-20/.metadata").unlink()
    shard = folder / "step-30/__1_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    (folder / "step-40").rename(folder / "step-40.tmp")
    (folder / "latest").symlink_to("step-30")


def half_written(folder: str) -> Any:
    start(folder, 40, interval=10, keep_latest_k=9)
    saved: dict[str, Any] = {}

    dist.barrier()
    if dist.get_rank() == 0:
        damage(Path(folder))
    dist.barrier()
    named = [error_of(lambda step=step: start(folder, resume=step)) for step in (20, 30, f"{folder}/latest", 40)]
    log = Log()
    run, checkpointer = start(folder, resume=None, interval=10, keep_latest_k=1)
    saved["step"] = run.state.step
    lines = list(log.lines)
    # The only good step stays until a newer one is whole, and re-reached steps are whole again.
    train(run, checkpointer, 19)
    saved["listed"] = numbers(folder)
    train(run, checkpointer, 20)
    saved["later"] = numbers(folder)
    saved["faults"] = structure_faults(f"{folder}/step-20")
    return named, lines, saved, log.lines[len(lines) :]


def test_half_written_steps_are_passed_over_and_told(tmp_path: Path) -> None:
    (named, lines, saved, further), (named_on_1, *_) = run_ranks(2, half_written, str(tmp_path))
    assert named == named_on_1
    assert named[0].startswith(f"CheckpointUnsound {tmp_path}/step-20: ") and ".metadata" in named[0]
    for text in named[1:3]:
        assert "__1_0.distcp: cut short: expected at least" in text.splitlines()[0]
        assert text.startswith("CheckpointUnsound ")
    assert named[3].startswith(f"CheckpointNotFound {tmp_path}/step-40: the step to resume from is not there")
    assert "there are steps [10, 20, 30]" in named[3]
    assert saved["step"] == 10
    passed = [line for line in lines if line.startswith("WARNING passed over ")]
    assert [line.split()[3].rstrip(":") for line in passed] == ["step-40.tmp", "step-30", "step-20"]
    assert "never committed" in passed[0]
    assert "__1_0.distcp: cut short" in passed[1]
    assert ".metadata" in passed[2]
    assert any(line.startswith("INFO resumed at step 10 (full state restored; 2 ranks") for line in lines)
    assert saved["listed"] == [10, 20, 30]
    assert saved["later"] == [20]
    assert saved["faults"] == []
    # The damaged step 30 is no longer taken for a step of this run, nor deleted.
    assert [line for line in further if "later than step 20, to which the run was set back: kept as" in line]
    assert len(list(tmp_path.glob("abandoned-step-30-*"))) == 1
    assert (tmp_path / "step-40.tmp").is_dir()


def nothing_whole(folder: str) -> Any:
    start(folder, 4)
    for step in (2, 4):
        os.truncate(f"{folder}/step-{step}/__0_0.distcp", 0)
    return error_of(lambda: start(folder, resume=None)), names(folder)


def test_where_no_step_is_whole_it_says_so_and_does_not_start_from_scratch(tmp_path: Path) -> None:
    ((text, left),) = run_ranks(1, nothing_whole, str(tmp_path))
    first, *details = text.splitlines()
    assert first.startswith(f"CheckpointUnsound {tmp_path}: no step there is whole; ")
    assert [detail.split(":")[0] for detail in details] == ["  step-4", "  step-2"]
    assert left == [ATTEMPT_FILE, "step-2", "step-4"]


def without_manifest(folder: str) -> Any:
    start(folder, 4)
    Path(folder, "step-4/reshard.json").unlink()
    log = Log()
    run, _ = start(folder, resume=None)
    return run.state.step, log.about("passed over"), error_of(lambda: start(folder, resume=4))


def test_a_step_that_lost_its_manifest_is_not_whole(tmp_path: Path) -> None:
    ((step, passed, named),) = run_ranks(1, without_manifest, str(tmp_path))
    assert step == 2
    assert passed == [
        f"WARNING passed over step-4: {tmp_path}/step-4/reshard.json: missing, so most of the run's state is"
    ]
    assert "reshard.json" in named.splitlines()[0]


def not_found(folder: str) -> Any:
    """B83 (i) to (iii)."""
    root = Path(folder)
    start(root / "other", 2)
    errors = [
        error_of(lambda: start(root / "missing", resume=root / "nowhere/step-3")),
        error_of(lambda: start(root / "other", resume=3)),
        error_of(lambda: start(root / "other", resume=-1)),
    ]
    (root / "half/step-5.tmp").mkdir(parents=True)
    fresh = []
    for name in ("empty", "half"):
        log = Log()
        run, _ = start(root / name, resume=None)
        fresh.append((run.state.step, log.lines))
    return errors, fresh


def test_what_is_not_found(tmp_path: Path) -> None:
    ((errors, fresh),) = run_ranks(1, not_found, str(tmp_path))
    assert errors[0] == (
        f"CheckpointNotFound {tmp_path}/nowhere/step-3: the step to resume from is not there; "
        "nothing is committed beside it either"
    )
    assert errors[1] == (
        f"CheckpointNotFound {tmp_path}/other/step-3: the step to resume from is not there; there are steps [2]"
    )
    assert errors[2].startswith("UsageError ") and "negative" in errors[2]
    scratch = "INFO no checkpoint in {}: starting from scratch"
    assert fresh[0] == (0, [scratch.format(tmp_path / "empty")])
    assert fresh[1] == (
        0,
        ["WARNING passed over step-5.tmp: it was never committed", scratch.format(tmp_path / "half")],
    )


def other_places(folder: str) -> Any:
    """By number, by path, by ``~``, by a link, by another run's folder; B83 (iv)."""
    root = Path(folder)
    os.environ["HOME"] = folder
    source, _ = start("~/source", 6, keep_latest_k=9)
    saved = lab.digest(source)
    (root / "link").symlink_to(root / "source/step-6")
    start(root / "own", 2)
    found = []
    for where in (6, "~/source/step-6", root / "link", root / "source", str(root / "source/step-6")):
        log = Log()
        own = "~/source" if where == 6 else root / "own"
        run, checkpointer = start(own, resume=where)
        found.append((run.state.step, lab.digest(run) == saved, log.about("as asked")))
    # What was resumed from elsewhere is not saved here yet.
    path = checkpointer.save()
    return found, path.is_dir(), numbers(root / "own"), [*root.glob("~*"), *Path().glob("~*")]


def test_resumes_from_wherever_it_is_told(tmp_path: Path) -> None:
    ((found, is_there, own, stray),) = run_ranks(1, other_places, str(tmp_path))
    assert [(step, same) for step, same, _ in found] == [(6, True)] * 5
    assert found[0][2] == []
    warnings = [lines for _, _, lines in found[1:]]
    where = ("source/step-6", "link", "source/step-6", "source/step-6")
    for name, lines in zip(where, warnings, strict=True):
        assert lines == [
            f"WARNING resuming from {tmp_path}/{name}, as asked, and not from {tmp_path}/own/step-2, "
            "the newest of this run"
        ]
    assert is_there
    assert own == [2, 6]
    assert stray == []


def another_runs_damaged_newest(folder: str) -> Any:
    root = Path(folder)
    start(root / "source", 6, keep_latest_k=9)
    os.truncate(root / "source/step-6/__0_0.distcp", 10)
    log = Log()
    run, _ = start(root / "own", resume=root / "source")
    return run.state.step, log.about("passed over step-6")


def test_of_another_runs_folder_the_newest_sound_step_is_taken(tmp_path: Path) -> None:
    ((step, passed),) = run_ranks(1, another_runs_damaged_newest, str(tmp_path))
    assert step == 4
    assert len(passed) == 1


def set_back(folder: str) -> Any:
    """Resumes at an older step and trains on: the next start must not take up the history that was left."""
    run, _ = start(folder, 8, keep_latest_k=9)
    old = {step: numbers_of(folder, step) for step in (4, 6, 8)}
    run, checkpointer = start(folder, resume=2, keep_latest_k=1)
    run.optimizer.param_groups[0]["lr"] = 1.0
    before = numbers(folder)
    log = Log()
    train(run, checkpointer, 4)
    listed = numbers(folder)
    digest = lab.digest(run)
    following, _ = start(folder, resume=None)
    kept = {int(path.name.split("-")[2]): path for path in Path(folder).glob("abandoned-*")}
    return (
        before,
        listed,
        following.state.step == 4 and lab.digest(following) == digest,
        {step: path.joinpath("reshard.json").read_bytes() == old[step] for step, path in kept.items()},
        log.about("set back"),
    )


def numbers_of(folder: str, step: int) -> bytes:
    return Path(folder, f"step-{step}/reshard.json").read_bytes()


def test_a_run_that_is_set_back_leaves_the_later_steps_behind(tmp_path: Path) -> None:
    ((before, listed, is_the_new_one, kept, told),) = run_ranks(1, set_back, str(tmp_path))
    assert before == [2, 4, 6, 8]
    assert listed == [4]
    assert is_the_new_one
    # Step 4 was re-reached and replaced; 6 and 8 are kept, whole, under a name that is no step.
    assert kept == {6: True, 8: True}
    assert len(told) == 2


def re_reach(folder: str) -> Any:
    """Killed after step 4 was saved, resumed at 2, and at 4 again: the save replaces what is there."""
    first, _ = start(folder, 4, keep_latest_k=9)
    Path(folder, "step-4/stale").write_text("of the former step 4")
    second, _ = start(folder, 4, resume=2)
    return numbers(folder), names(f"{folder}/step-4"), lab.digest(first) == lab.digest(second)


def test_a_step_that_is_reached_again_is_replaced(tmp_path: Path) -> None:
    ((listed, files, same),) = run_ranks(1, re_reach, str(tmp_path))
    assert listed == [2, 4]
    assert files == [".metadata", "__0_0.distcp", "reshard.json"]
    assert same


def forgets_to_advance(folder: str, forgetful: tuple[int, ...]) -> Any:
    run = lab.build(SETUP)
    checkpointer = Checkpointer(folder, run.state, interval=1)
    train(run, checkpointer, 1)
    run.sampler.samples += 0 if dist.get_rank() in forgetful else 4
    return error_of(checkpointer.step), numbers(folder)


@pytest.mark.parametrize("forgetful", [(0, 1), (1,)])
def test_a_sampler_that_was_not_advanced_is_an_error_on_all_ranks(tmp_path: Path, forgetful: tuple[int, ...]) -> None:
    results = run_ranks(2, forgets_to_advance, str(tmp_path), forgetful)
    text = (
        "UsageError data: the data position did not move in this step: expected more than 4 samples, found 4; "
        "pass sampler= to accumulate, or call sampler.advance() once a step, before checkpointer.step()"
    )
    assert results == [(text, [1])] * 2


def diverges(folder: str, what: str) -> Any:
    run = lab.build(SETUP)
    rank = dist.get_rank()
    if what == "interval":
        return error_of(lambda: Checkpointer(folder, run.state, interval=2 + rank))
    checkpointer = Checkpointer(folder, run.state, interval=10)
    train(run, checkpointer, 1)
    run.sampler.samples += 4 + (rank if what == "data" else 0)
    run.state.step += rank if what == "step" else 0
    return error_of(checkpointer.step)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("interval", "UsageError interval: the ranks would save at different steps: found [2, 3]"),
        ("step", "UsageError step: the ranks are at different steps: found 2 to 3; "),
        ("data", "UsageError data: the ranks are at different data positions: found 8 to 9 samples; "),
    ],
)
def test_ranks_that_disagree_are_told_and_do_not_hang(tmp_path: Path, what: str, text: str) -> None:
    results = run_ranks(2, diverges, str(tmp_path), what, timeout_s=60)
    assert results[0] == results[1]
    assert results[0].startswith(text)


def one_is_asked(folder: str, at: int, number: int) -> Any:
    """B92: the signal reaches rank 1 only."""
    log = Log()
    run = lab.build(SETUP)
    stop = StopSignal()
    checkpointer = Checkpointer(folder, run.state, interval=100, stop=stop, attempt="the-first")

    def on_step(run: lab.Run, loss: float) -> None:
        if dist.get_rank() == 1 and run.state.step == at:
            os.kill(os.getpid(), number)

    rows = train(run, checkpointer, 50, on_step)
    dist.barrier()
    marker = Path(folder, STOPPED_FILE).read_text()
    listed = numbers(folder)
    dist.barrier()
    run, checkpointer = start(folder, resume=None)
    return len(rows), marker, listed, names(folder), run.state.step, log.about("stop")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_at_the_same_step_when_one_is_asked(tmp_path: Path, number: signal.Signals) -> None:
    results = run_ranks(2, one_is_asked, str(tmp_path), 5, number, timeout_s=60)
    for steps, marker, listed, after, resumed, _ in results:
        assert steps == 6
        assert listed == [6]
        assert json.loads(marker) == {"step": 6, "reason": number.name, "attempt": "the-first"}
        # The marker tells how the last attempt ended: the next one takes it away.
        assert after == [ATTEMPT_FILE, "step-6"]
        assert resumed == 6
    first, *_, last = [line for line in results[0][-1] if " holds " not in line]
    assert first == "INFO asked to stop: saving step 6"
    assert last == f"INFO stopped at step 6 on {number.name}"


def stop_at_a_save(folder: str) -> Any:
    run = lab.build(SETUP)
    checkpointer = Checkpointer(folder, run.state, interval=3, stop=lambda: run.state.step == 3)
    log = Log()
    rows = train(run, checkpointer, 50)
    return len(rows), log.about("saved step"), json.loads(Path(folder, STOPPED_FILE).read_text())


def test_a_stop_on_a_step_that_is_saved_anyway_saves_once(tmp_path: Path) -> None:
    ((steps, saved, marker),) = run_ranks(1, stop_at_a_save, str(tmp_path))
    assert steps == 3
    assert len(saved) == 1
    assert marker["step"] == 3 and marker["reason"] is None


def two_attempts(folder: str) -> Any:
    old, older = start(folder, 2, interval=2, attempt="old", keep_latest_k=9)
    new, newer = start(folder, 4, resume=None, attempt="new", keep_latest_k=9)
    before = names(folder)
    fenced = []
    for step in (3, 6):
        # Nor may it rename the steps of its successor that are later than its own.
        old.state.step = step
        fenced.append(error_of(older.save))
    after = names(folder)
    train(new, newer, 6)
    return fenced, before == after, numbers(folder), holder(folder)


def test_an_older_attempt_can_save_no_more_and_the_new_one_can(tmp_path: Path) -> None:
    results = run_ranks(2, two_attempts, str(tmp_path))
    for fenced, untouched, listed, owner in results:
        for text in fenced:
            expected = f"Fenced {tmp_path}/{ATTEMPT_FILE}: another attempt has claimed the run: expected old, found new"
            assert text.startswith(expected)
        assert untouched
        assert listed == [2, 4, 6]
        assert owner == "new"


def own_name(folder: str) -> Any:
    run, checkpointer = start(folder, 2)
    run.state.step = 3
    reshard.save_state(folder, run.state)
    return numbers(folder), json.loads(numbers_of(folder, 3))["attempt"] == checkpointer.attempt


def test_a_process_may_save_by_hand_what_it_has_claimed(tmp_path: Path) -> None:
    assert run_ranks(2, own_name, str(tmp_path)) == [([2, 3], True)] * 2


def reads_along(folder: str) -> Any:
    """A thread that lists and checks all the time, as another process would."""
    run = lab.build(SETUP)
    checkpointer = Checkpointer(folder, run.state, interval=1, keep_latest_k=2)
    done, faults, seen = threading.Event(), [], set()

    def read() -> None:
        while not done.is_set():
            for step in committed_steps(folder):
                found = structure_faults(step.path)
                if found and step.path.exists():
                    faults.append(found)
                seen.add(step.step)

    reader = threading.Thread(target=read)
    reader.start()
    train(run, checkpointer, 12)
    done.set()
    reader.join()
    return faults, len(seen)


def test_a_reader_sees_whole_steps_only_during_a_run(tmp_path: Path) -> None:
    ((faults, seen),) = run_ranks(1, reads_along, str(tmp_path))
    assert faults == []
    assert seen >= 4


def refused(folder: str, what: str) -> Any:
    run, checkpointer = start(folder, 4, keep_latest_k=1)
    log = Log()
    if what == "prune":
        real = os.unlink

        def unlink(path: Any, *args: Any, **options: Any) -> None:
            if options.get("dir_fd") is not None:
                raise PermissionError(13, "Permission denied", path)
            real(path, *args, **options)

        os.unlink = unlink
    train(run, checkpointer, 6)
    return run.state.step, numbers(folder), log.about("older steps are kept")


def test_a_step_that_cannot_be_deleted_does_not_end_the_run(tmp_path: Path) -> None:
    results = run_ranks(2, refused, str(tmp_path), "prune")
    assert [(step, listed) for step, listed, _ in results] == [(6, [6])] * 2
    assert "WARNING older steps are kept for now: " in results[0][2][0]


@pytest.mark.parametrize("options", [{"interval": 0}, {"interval": 1, "keep_latest_k": 0}])
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(
        reshard.ReshardError, match=r"(interval|keep_latest_k): not a count: expected an int of at least 1, found 0"
    ):
        Checkpointer(tmp_path, reshard.TrainState(lab.Net()), **options)
    assert names(tmp_path) == []


def moves(folder: str) -> Any:
    os.chdir(folder)
    run = lab.build(SETUP)
    checkpointer = Checkpointer("run", run.state, interval=1)
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    train(run, checkpointer, 1)
    return numbers(f"{folder}/run")


def test_a_change_of_the_working_directory_does_not_move_the_run(tmp_path: Path) -> None:
    assert run_ranks(1, moves, str(tmp_path)) == [[1]]


def slow_file_system(folder: str, delay_s: float) -> Any:
    """B96: rank 0's storage takes longer than the process group lets a collective wait."""
    log = Log()
    heartbeat.INTERVAL_S = 1.0
    rank = dist.get_rank()
    dist.destroy_process_group()
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=2))
    run = lab.build(SETUP)
    checkpointer = Checkpointer(f"{folder}/run", run.state, interval=2, keep_latest_k=1)
    slow = {"fsync": delay_s, "rename": delay_s}
    waited = []
    for name in slow:
        real = getattr(os, name)

        def slowly(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            if rank == 0 and slow.get(name):
                waited.append(name)
                time.sleep(slow.pop(name))
            return real(*args, **options)

        setattr(os, name, slowly)
    train(run, checkpointer, 3)
    saved = lab.digest(run)
    slow["rename"] = delay_s
    train(run, checkpointer, 4)
    return log.about("still"), waited, numbers(f"{folder}/run"), run.state.step, bool(saved)


def test_a_slow_file_system_is_waited_for(tmp_path: Path) -> None:
    results = run_ranks(2, slow_file_system, str(tmp_path), 3.5)
    said, waited, *outcome = results[0]
    assert waited == ["fsync", "rename", "rename"]
    assert outcome == list(results[1][2:]) == [[4], 4, True]
    assert said[0] == "INFO still saving step 2, after 1 s"
    assert {line.partition(",")[0] for line in said} == {f"INFO still saving step {step}" for step in (2, 4)}
    assert results[1][0] == []


def stops_an_evaluation(folder: str) -> Any:
    """B93: the signal reaches one rank, in the middle of something long."""
    run = lab.build(SETUP)
    stop = StopSignal()
    checkpointer = Checkpointer(folder, run.state, interval=100, stop=stop)
    parts = []

    def on_step(run: lab.Run, loss: float) -> None:
        for part in range(50):
            if run.state.step == 2 and part == 7 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if checkpointer.must_stop():
                break
            parts.append(part)

    rows = train(run, checkpointer, 10, on_step)
    return len(rows), numbers(folder), parts


def test_an_evaluation_can_be_cut_short(tmp_path: Path) -> None:
    for steps, saved, parts in run_ranks(2, stops_an_evaluation, str(tmp_path), timeout_s=60):
        assert (steps, saved) == (3, [3])
        assert parts == [*range(50), *range(7)]
