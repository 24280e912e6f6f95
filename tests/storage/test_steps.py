import os
from pathlib import Path

import pytest

from reshard.errors import StorageError, UsageError
from reshard.storage.steps import StepFolder, committed_steps, move_to_trash, step_number, step_path, uncommitted


def make_step(run: Path, step: int) -> Path:
    folder = run / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "shard").write_text(str(step))
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def numbers(run):
    return [folder.step for folder in committed_steps(run)]


def test_steps_are_ordered_by_number(tmp_path):
    for step in (1000, 9, 999, 0, 10_000):
        make_step(tmp_path, step)
    assert numbers(tmp_path) == [0, 9, 999, 1000, 10_000]
    assert committed_steps(tmp_path)[0] == StepFolder(0, tmp_path / "step-0")


@pytest.mark.parametrize(
    "name",
    [
        "step-40.tmp",
        "step-040",
        "step-",
        "step--1",
        "step-+1",
        "step-4e1",
        "step-٤٠",
        "step-40\n",
        "STEP-40",
        "xstep-40",
    ],
)
def test_names_that_are_not_steps(tmp_path, name):
    (tmp_path / name).mkdir()
    assert step_number(name) is None
    assert committed_steps(tmp_path) == []


def test_files_are_not_steps(tmp_path):
    (tmp_path / "step-40").write_text("a file")
    assert committed_steps(tmp_path) == []


def test_links_to_folders_are_steps(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-40").symlink_to(make_step(tmp_path / "archive", 40))
    (run / "step-50").symlink_to(tmp_path / "nowhere")
    assert committed_steps(run) == [StepFolder(40, run / "step-40")]
    assert uncommitted(run) == [run / "step-50"]


def test_an_absent_run_has_no_steps(tmp_path):
    assert committed_steps(tmp_path / "absent") == []
    assert uncommitted(tmp_path / "absent") == []


def test_a_run_directory_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="cannot list the run directory: a part of the path is not a folder"):
        committed_steps(tmp_path / "run")


def test_a_step_whose_link_turns_in_a_circle_is_not_passed_over_in_silence(tmp_path):
    (tmp_path / "step-40").symlink_to(tmp_path / "step-40")
    with pytest.raises(StorageError) as caught:
        committed_steps(tmp_path)
    assert caught.value.path == str(tmp_path / "step-40")


def test_uncommitted_names_leftovers_and_lookalikes_only(tmp_path):
    make_step(tmp_path, 40)
    left = [".replaced-step-1-a", ".staging-step-2-a", ".trash-step-3-ff", "step-040", "step-40.tmp"]
    for name in [*left, "logs", ".hidden"]:
        (tmp_path / name).mkdir()
    (tmp_path / ".ATTEMPT.0123abcd.tmp").write_text("")
    (tmp_path / "step-9").write_text("a file")
    (tmp_path / "trace.jsonl").write_text("")
    assert [path.name for path in uncommitted(tmp_path)] == sorted([*left, ".ATTEMPT.0123abcd.tmp", "step-9"])


def test_step_path_and_its_refusal(tmp_path):
    assert step_path(tmp_path, 40) == tmp_path / "step-40"
    with pytest.raises(UsageError, match="negative"):
        step_path(tmp_path, -1)


def test_move_to_trash_is_fine_with_a_loser_of_a_race(tmp_path):
    move_to_trash(tmp_path / "step-40")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["step-40", ".staging-step-40-a", ".replaced-step-40-a"])
def test_what_is_deleted_has_a_trash_name_before_its_first_file_goes(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "shard").write_text("x")
    seen = []
    real = os.unlink

    def unlink(path, **kwargs):
        seen.extend(names(tmp_path))
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    move_to_trash(tmp_path / name)
    (trash,) = seen
    assert trash.startswith(".trash-step-40-")
    assert names(tmp_path) == []
