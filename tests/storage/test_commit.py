import errno
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from faults import REFUSED, in_child

from reshard.errors import CheckpointUnsound, Fenced, StorageError, UsageError
from reshard.storage import commit
from reshard.storage.commit import ATTEMPT_FILE, Stage, abandon_later, claim, commit_file, holder
from reshard.storage.durable import exchange_durably
from reshard.storage.retention import Retention, prune
from reshard.storage.steps import committed_steps, uncommitted

# Every operation that changes or lists a file system, as Python reports it, whichever of its functions was called.
WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


def files_of(step, version):
    """A step's files: enough to notice a missing, stale or mixed one."""
    return {"__0_0.distcp": f"{step} {version} a" * 100, "__1_0.distcp": f"{step} {version} b", "rng/0": f"{version}"}


def write_step(folder, step, version):
    for name, text in files_of(step, version).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def commit_step(run, step, version, attempt, replace=False):
    stage = Stage.open(run, step, attempt)
    write_step(stage.path, step, version)
    return stage.commit(replace=replace)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def numbers(run):
    return [folder.step for folder in committed_steps(run)]


class Faults:
    """Calls `strike` before the Nth storage operation of this process (and, if `lasting`, before all later ones).

    Only for a forked child: an audit hook cannot be taken out again.
    """

    def __init__(self, run, at, strike, lasting=False):
        self.run, self.at, self.strike, self.lasting = str(run), at, strike, lasting
        self.count = 0
        self.armed = True
        sys.addaudithook(self.hook)
        for call in ("fsync", "write"):
            setattr(os, call, self.watching(getattr(os, call)))

    def watching(self, real):
        def watched(*args):
            self.step()
            return real(*args)

        return watched

    def hook(self, event, args):
        if self.armed and event in WATCHED and self.concerns_run(args[0]):
            self.step()

    def concerns_run(self, place):
        # Descriptors and relative names are those of a tree being walked; modules being imported are elsewhere.
        return isinstance(place, int) or not Path(place).is_absolute() or os.fspath(place).startswith(self.run)

    def step(self):
        if self.armed:
            self.count += 1
            if self.count == self.at or (self.lasting and self.count > self.at):
                self.strike()


def save_step_30(run, replace, faults):
    claim(run, "second")
    stage = Stage.open(run, 30, "second")
    faults.armed = False
    write_step(stage.path, 30, "new")
    faults.armed = True
    stage.commit(replace=replace)
    prune(run, Retention(2), lambda path: True)


def strike_with_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def strike_with_full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def run_before_the_fault(run, replace):
    """Steps 10 and 20 (and 30 where it is to be replaced), and what a dead attempt left of a larger save of 30."""
    claim(run, "first")
    for step in (10, 20, 30) if replace else (10, 20):
        commit_step(run, step, "old", "first")
    for attempt in ("first", "second"):
        stage = Stage(run, 30, attempt)
        write_step(stage.path, 30, "dead")
        (stage.path / "__2_0.distcp").write_text("of a third rank")
    (run / ".trash-step-5-ff").mkdir()
    (run / ".trash-step-5-ff/shard").write_text("half deleted")


def check_after_the_fault(run, replace):
    listed = {folder.step: content(folder.path) for folder in committed_steps(run)}
    assert listed.keys() <= {10, 20, 30}
    assert listed[20] == files_of(20, "old")
    assert listed.get(10, files_of(10, "old")) == files_of(10, "old")
    if replace:
        claim(run, "third")
        listed = {folder.step: content(folder.path) for folder in committed_steps(run)}
        assert listed[30] in (files_of(30, "old"), files_of(30, "new"))
    else:
        assert listed.get(30, files_of(30, "new")) == files_of(30, "new")


def check_that_the_run_goes_on(run):
    claim(run, "fourth")
    assert uncommitted(run) == []
    assert content(commit_step(run, 30, "newest", "fourth", replace=True)) == files_of(30, "newest")
    assert content(commit_step(run, 40, "newest", "fourth")) == files_of(40, "newest")
    prune(run, Retention(2), lambda path: True)
    assert names(run) == [ATTEMPT_FILE, "step-30", "step-40"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("replace", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("fault", ["kill", "full disk once", "full disk from then on"])
def test_a_fault_at_every_operation_of_a_commit(tmp_path, fault, replace):
    strike = strike_with_kill if fault == "kill" else strike_with_full_disk
    for at in range(1, 1000):
        run = tmp_path / str(at)
        run_before_the_fault(run, replace)

        def save(run=run, at=at):
            save_step_30(run, replace, Faults(run, at, strike, lasting=fault.endswith("then on")))

        status = in_child(save)
        check_after_the_fault(run, replace)
        if status == 0:
            assert numbers(run) == [20, 30] and content(run / "step-30") == files_of(30, "new")
            break
        expected = signal.SIGKILL if fault == "kill" else REFUSED << 8
        assert status == expected, f"operation {at}"
        check_that_the_run_goes_on(run)
    # Claim, sweep, stage, flush, rename and prune come to far more: fewer would mean that faults were not injected.
    assert 40 < at < 999


def test_every_byte_is_flushed_before_the_step_gets_its_name(tmp_path, monkeypatch):
    log = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real_fsync(descriptor)

    def rename(src, dst):
        log.append("rename")
        return real_rename(src, dst)

    stage = Stage.open(tmp_path, 30, "a")
    write_step(stage.path, 30, "new")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    stage.commit()
    entries = {stage.path, stage.path / "rng", *(stage.path / name for name in files_of(30, "new"))}
    assert set(log[: log.index("rename")]) == entries
    assert log[log.index("rename") :] == ["rename", tmp_path]


def test_commit_returns_the_step_and_leaves_nothing_else(tmp_path):
    claim(tmp_path / "run", "a")
    final = commit_step(tmp_path / "run", 30, "new", "a")
    assert final == tmp_path / "run/step-30"
    assert content(final) == files_of(30, "new")
    assert names(tmp_path / "run") == [ATTEMPT_FILE, "step-30"]


def test_a_stage_is_not_a_step(tmp_path):
    stage = Stage.open(tmp_path, 30, "a")
    write_step(stage.path, 30, "new")
    assert stage.path == tmp_path / ".staging-step-30-a" == Stage(tmp_path, 30, "a").path
    assert committed_steps(tmp_path) == []
    stage.discard()
    stage.discard()
    assert names(tmp_path) == []


def test_an_earlier_larger_save_leaves_nothing_in_a_new_stage(tmp_path):
    (Stage.open(tmp_path, 30, "a").path / "__7_0.distcp").write_text("of an eighth rank")
    assert content(commit_step(tmp_path, 30, "new", "a")) == files_of(30, "new")


def test_a_stage_that_was_never_opened_commits_nothing(tmp_path):
    with pytest.raises(StorageError, match="no such file or folder"):
        Stage(tmp_path, 30, "a").commit()
    assert committed_steps(tmp_path) == []


@pytest.mark.parametrize("is_empty", [False, True])
def test_an_existing_step_is_not_overwritten(tmp_path, is_empty):
    (tmp_path / "step-30").mkdir()
    if not is_empty:
        write_step(tmp_path / "step-30", 30, "old")
    with pytest.raises(StorageError, match=r"step-30: the step is already there; .*replaced"):
        commit_step(tmp_path, 30, "new", "a")
    assert content(tmp_path / "step-30") == ({} if is_empty else files_of(30, "old"))


def test_replace_puts_the_new_step_in_place_and_clears_the_old_away(tmp_path):
    commit_step(tmp_path, 30, "old", "a")
    final = commit_step(tmp_path, 30, "new", "a", replace=True)
    assert content(final) == files_of(30, "new")
    assert names(tmp_path) == ["step-30"]


def test_replace_is_not_stopped_by_what_an_earlier_replacement_of_the_attempt_left(tmp_path):
    write_step(tmp_path / ".replaced-step-30-a", 30, "older")
    write_step(tmp_path / "step-30", 30, "old")
    assert content(commit_step(tmp_path, 30, "new", "a", replace=True)) == files_of(30, "new")
    assert names(tmp_path) == ["step-30"]


def test_replace_of_a_step_that_is_not_there_is_a_plain_commit(tmp_path):
    assert content(commit_step(tmp_path, 30, "new", "a", replace=True)) == files_of(30, "new")


def test_replace_of_a_linked_step_leaves_what_the_link_points_to(tmp_path):
    archived, run = tmp_path / "archive", tmp_path / "run"
    run.mkdir()
    write_step(archived, 30, "old")
    (run / "step-30").symlink_to(archived)
    commit_step(run, 30, "new", "a", replace=True)
    assert content(run / "step-30") == files_of(30, "new") and not (run / "step-30").is_symlink()
    assert content(archived) == files_of(30, "old")


def test_a_replacement_that_fails_puts_the_old_step_back(tmp_path, monkeypatch):
    commit_step(tmp_path, 30, "old", "a")
    real = Path.rename

    def rename(src, dst):
        if ".staging-" in str(src):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(src, dst)

    # As on a file system that cannot swap two names.
    monkeypatch.setattr(commit, "exchange_durably", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError, match="quota"):
        commit_step(tmp_path, 30, "new", "a", replace=True)
    assert content(tmp_path / "step-30") == files_of(30, "old")


def test_claim_restores_a_step_that_was_set_aside_and_never_replaced(tmp_path):
    write_step(tmp_path / ".replaced-step-30-dead-1", 30, "old")
    claim(tmp_path, "b")
    assert content(tmp_path / "step-30") == files_of(30, "old")
    assert uncommitted(tmp_path) == []


def test_claim_deletes_a_replaced_step_whose_replacement_is_there(tmp_path):
    write_step(tmp_path / ".replaced-step-30-dead", 30, "old")
    write_step(tmp_path / "step-30", 30, "new")
    claim(tmp_path, "b")
    assert content(tmp_path / "step-30") == files_of(30, "new")
    assert uncommitted(tmp_path) == []


def test_claim_restores_the_newest_of_several(tmp_path):
    for attempt, version in (("z", "older"), ("a", "old")):
        write_step(tmp_path / "step-30", 30, version)
        (tmp_path / "step-30").rename(tmp_path / f".replaced-step-30-{attempt}")
        # The clock of a file system ticks in milliseconds.
        threading.Event().wait(0.02)
    claim(tmp_path, "b")
    assert content(tmp_path / "step-30") == files_of(30, "old")
    assert uncommitted(tmp_path) == []


def test_claim_makes_the_run_directory_and_names_the_attempt(tmp_path):
    run = tmp_path / "runs/7b"
    assert holder(run) is None
    claim(run, "1234.0")
    assert json.loads((run / ATTEMPT_FILE).read_text()) == {"attempt": "1234.0"}
    claim(run, "1234.1")
    assert holder(run) == "1234.1"


def test_claim_sweeps_what_dead_attempts_left_and_nothing_else(tmp_path):
    write_step(tmp_path / "step-20", 20, "old")
    dead = [".staging-step-30-a", ".staging-step-30-b", ".trash-step-10-ff"]
    kept = ["step-40.tmp", "step-040", "logs", ".hidden"]
    for name in dead + kept:
        write_step(tmp_path / name, 30, "dead")
    (tmp_path / f".{ATTEMPT_FILE}.0123abcd.tmp").write_text("{")
    (tmp_path / ".trace.jsonl.0123abcd.tmp").write_text("someone may be writing it")
    claim(tmp_path, "b")
    assert names(tmp_path) == sorted([*kept, ".trace.jsonl.0123abcd.tmp", ATTEMPT_FILE, "step-20"])


def test_an_attempt_that_lost_the_run_cannot_commit(tmp_path):
    claim(tmp_path, "a")
    stage = Stage.open(tmp_path, 30, "a")
    claim(tmp_path, "b")
    with pytest.raises(Fenced, match="another attempt has claimed the run: expected a, found b") as caught:
        stage.commit()
    assert caught.value.path == str(tmp_path / ATTEMPT_FILE)
    with pytest.raises(Fenced):
        commit_step(tmp_path, 30, "new", "a")
    assert committed_steps(tmp_path) == []
    commit_step(tmp_path, 30, "new", "b")
    # The loser learns that it lost, not merely that the name is taken, and before it writes anything.
    with pytest.raises(Fenced):
        Stage.open(tmp_path, 31, "a")
    assert uncommitted(tmp_path) == []
    with pytest.raises(Fenced):
        commit_step(tmp_path, 30, "new", "a")


@pytest.mark.parametrize(
    ("replace", "swaps"), [(False, True), (True, False), (True, True)], ids=["new", "replace", "swap"]
)
def test_a_claim_between_fence_and_rename_still_wins(tmp_path, monkeypatch, replace, swaps):
    claim(tmp_path, "a")
    if replace:
        commit_step(tmp_path, 30, "old", "a")
    stage = Stage.open(tmp_path, 30, "a")
    write_step(stage.path, 30, "new")
    real = Path.rename

    def rename(src, dst):
        if src == stage.path:
            monkeypatch.setattr(Path, "rename", real)
            claim(tmp_path, "b")
        return real(src, dst)

    def swap(first, second):
        claim(tmp_path, "b")
        return exchange_durably(first, second)

    if replace and swaps:
        monkeypatch.setattr(commit, "exchange_durably", swap)
    else:
        monkeypatch.setattr(commit, "exchange_durably", lambda first, second: False)
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Fenced, match="expected a, found b"):
        stage.commit(replace=replace)
    assert [content(folder.path) for folder in committed_steps(tmp_path)] == ([files_of(30, "old")] if replace else [])
    assert uncommitted(tmp_path) == []


def test_a_claim_between_the_fence_of_a_file_and_its_rename_still_wins(tmp_path, monkeypatch):
    claim(tmp_path, "7.0")
    commit_file(tmp_path, "DONE", b"old", "7.0")
    real = Path.rename

    def rename(src, dst):
        if src.name == ".staging-DONE-7.0":
            monkeypatch.setattr(Path, "rename", real)
            claim(tmp_path, "7.1")
        return real(src, dst)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Fenced, match=r"expected 7\.0, found 7\.1"):
        commit_file(tmp_path, "DONE", b"new", "7.0")
    assert (tmp_path / "DONE").read_bytes() == b"old"
    with pytest.raises(Fenced):
        commit_file(tmp_path, "DONE", b"new", "7.0")
    commit_file(tmp_path, "DONE", b"newer", "7.1")
    claim(tmp_path, "7.2")
    assert names(tmp_path) == [ATTEMPT_FILE, "DONE"]
    assert (tmp_path / "DONE").read_bytes() == b"newer"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("fault", ["kill", "full disk once", "full disk from then on"])
def test_a_fault_at_every_operation_on_a_file_of_the_run(tmp_path, fault):
    strike = strike_with_kill if fault == "kill" else strike_with_full_disk
    for at in range(1, 100):
        run = tmp_path / str(at)
        claim(run, "7.0")
        commit_file(run, "state.json", b"old", "7.0")

        def write(run=run, at=at):
            Faults(run, at, strike, lasting=fault.endswith("then on"))
            commit_file(run, "state.json", b"new", "7.0")

        status = in_child(write)
        assert (run / "state.json").read_bytes() in (b"old", b"new")
        if status == 0:
            assert (run / "state.json").read_bytes() == b"new"
            break
        assert status == (signal.SIGKILL if fault == "kill" else REFUSED << 8), f"operation {at}"
        claim(run, "7.1")
        assert names(run) == [ATTEMPT_FILE, "state.json"]
    assert 6 < at < 99


@pytest.mark.parametrize(
    ("owner", "late", "refused"),
    [
        ("7.1", "7.0", True),
        ("7.10", "7.9", True),
        ("7.1.ab12", "7.0.cd34", True),
        ("7.0", "7.1", False),
        ("7.1", "7.1", False),
        ("7.1.ab12", "7.1.cd34", False),
        # Of two jobs, nobody knows which is the later one.
        ("7.1", "8.0", False),
        ("8.0", "7.1", False),
        ("by-hand", "7.0", False),
    ],
)
def test_an_attempt_that_begins_after_its_successor_cannot_claim(tmp_path, owner, late, refused):
    """A node that is cut off may start its ranks when the job is elsewhere already."""
    claim(tmp_path, owner)
    if refused:
        with pytest.raises(Fenced, match=f"a later attempt of this job has claimed the run: expected {late}"):
            claim(tmp_path, late)
        assert holder(tmp_path) == owner
    else:
        claim(tmp_path, late)
        assert holder(tmp_path) == late


def test_claim_takes_a_stage_away_before_it_deletes_the_first_file(tmp_path, monkeypatch):
    stage = Stage.open(tmp_path, 30, "a")
    write_step(stage.path, 30, "new")
    real, deleted = os.unlink, []

    def unlink(path, **kwargs):
        # What an attempt that is past its fence would do next: it must not get half a stage.
        with pytest.raises(FileNotFoundError):
            stage.path.rename(tmp_path / "step-30")
        deleted.append(path)
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    claim(tmp_path, "b")
    assert len(deleted) == 3
    assert names(tmp_path) == [ATTEMPT_FILE]


def test_later_steps_of_a_history_left_behind_are_kept_under_another_name(tmp_path):
    claim(tmp_path, "a")
    for step in (10, 20, 30):
        commit_step(tmp_path, step, "old", "a")
    renamed = abandon_later(tmp_path, 15, "a")
    assert numbers(tmp_path) == [10]
    assert [re.sub("[0-9a-f]{8}$", "*", path.name) for path in renamed] == [
        "abandoned-step-20-*",
        "abandoned-step-30-*",
    ]
    assert [content(path) for path in renamed] == [files_of(20, "old"), files_of(30, "old")]
    assert uncommitted(tmp_path) == []
    assert abandon_later(tmp_path, 15, "a") == abandon_later(tmp_path, 10, "a") == []
    claim(tmp_path, "b")
    assert all(path.is_dir() for path in renamed)


def test_a_fenced_attempt_leaves_the_later_steps_of_its_successor_alone(tmp_path):
    claim(tmp_path, "b")
    commit_step(tmp_path, 20, "new", "b")
    with pytest.raises(Fenced):
        abandon_later(tmp_path, 10, "a")
    assert numbers(tmp_path) == [20]


def test_a_run_that_nobody_claimed_has_no_fence(tmp_path):
    commit_step(tmp_path, 30, "new", "a")
    assert numbers(tmp_path) == [30]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"attempt": 3}', "null", "\udcff"])
def test_a_damaged_attempt_file_is_reported(tmp_path, text):
    (tmp_path / ATTEMPT_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointUnsound, match=r"not an attempt file: expected .*; delete it"):
        holder(tmp_path)
    claim(tmp_path, "b")
    assert holder(tmp_path) == "b"


@pytest.mark.parametrize("attempt", ["", "a/b", "../a", "a b", "a\n", "ä", "x" * 129])
def test_attempts_that_cannot_be_part_of_a_file_name(tmp_path, attempt):
    for call in (lambda: claim(tmp_path, attempt), lambda: Stage.open(tmp_path, 30, attempt)):
        with pytest.raises(UsageError, match="not a usable attempt token"):
            call()
    assert names(tmp_path) == []


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(UsageError, match="negative"):
        Stage.open(tmp_path, -1, "a")


def test_the_longest_attempt_and_step_fit_into_a_file_name(tmp_path):
    step = 10**19
    for replace in (False, True):
        commit_step(tmp_path, step, "new", "x" * 128, replace=replace)
    assert numbers(tmp_path) == [step]


def test_a_reader_sees_whole_steps_only_while_others_commit_and_prune(tmp_path):
    done, faults, whole = threading.Event(), [], set()

    def read():
        try:
            while not done.is_set():
                for folder in committed_steps(tmp_path):
                    found = content_or_none(folder.path)
                    if found == files_of(folder.step, "new"):
                        whole.add(folder.step)
                    elif found is not None:
                        faults.append((folder, found))
        except Exception as error:
            faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(50):
            commit_step(tmp_path, step, "new", "a")
            prune(tmp_path, Retention(2), lambda path: True)
    finally:
        done.set()
        reader.join()
    assert faults == []
    assert len(whole) > 5
    assert numbers(tmp_path) == [48, 49]


def content_or_none(folder):
    """The content of a step; None where it was pruned while being read."""
    try:
        found = content(folder)
    except FileNotFoundError:
        found = None
    # A walk may end early, without an error, in a folder that loses its name.
    return found if folder.exists() else None
