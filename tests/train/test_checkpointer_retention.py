"""Which steps a run keeps, and the metrics that it keeps them by; on one process, and on two ranks where they agree."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import lab
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small import Small, edit_manifest

import reshard
from reshard.cli.main import main
from reshard.errors import CheckpointNotFound, CheckpointUnsound, UsageError
from reshard.formats import manifest
from reshard.storage.retention import pin
from reshard.storage.steps import committed_steps
from reshard.train.checkpointer import Checkpointer


def numbers(folder: str | Path) -> list[int]:
    return [step.step for step in committed_steps(folder)]


def metrics_of(folder: str | Path, step: int) -> dict[str, float | None] | None:
    return json.loads(Path(folder, f"step-{step}/reshard.json").read_text()).get("metrics")


def start(folder: str | Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder, Small().state, **{"interval": 1, **options})


def save(checkpointer: Checkpointer, step: int, **metrics: Any) -> None:
    checkpointer.state.step = step
    checkpointer.save(metrics or None)


def advance(checkpointer: Checkpointer, step: int, **metrics: Any) -> None:
    """Up to the end of a step, as a loop would come there."""
    checkpointer.state.step = step - 1
    checkpointer.state.data.samples += 8
    checkpointer.step(metrics or None)


def test_steps_are_kept_as_newest_as_multiples_as_best_and_pinned(tmp_path: Path) -> None:
    checkpointer = start(tmp_path, keep_latest_k=2, keep_every=4, keep_best=("loss", 2))
    listed = {}
    for step, loss in enumerate([9.0, 3.0, 8.0, 7.0, math.nan, 2.0, 6.0, 5.0, math.inf, 1.0, 0.5], start=1):
        advance(checkpointer, step, loss=loss)
        if step == 3:
            checkpointer.pin(3)
        listed[step] = numbers(tmp_path)
    assert listed == {
        1: [1],
        2: [1, 2],
        3: [2, 3],
        4: [2, 3, 4],
        5: [2, 3, 4, 5],
        6: [2, 3, 4, 5, 6],
        7: [2, 3, 4, 6, 7],
        8: [2, 3, 4, 6, 7, 8],
        9: [2, 3, 4, 6, 8, 9],
        10: [3, 4, 6, 8, 9, 10],
        11: [3, 4, 8, 10, 11],
    }
    assert all(reshard.load_state(entry.path, Small().state).step == entry.step for entry in committed_steps(tmp_path))


def test_the_largest_may_be_best(tmp_path: Path) -> None:
    checkpointer = start(tmp_path, keep_latest_k=1, keep_best=("accuracy", 1, "max"))
    for step, accuracy in enumerate([0.5, 0.9, 0.7], start=1):
        save(checkpointer, step, accuracy=accuracy)
    assert numbers(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep_latest_k": 0}, "keep_latest_k: not a count: expected an int of at least 1, found 0"),
        ({"keep_every": 0}, "keep_every: not a count: expected an int of at least 1, found 0"),
        ({"keep_every": 2.0}, "keep_every: not a count: expected an int of at least 1, found 2.0"),
        ({"keep_best": "loss"}, "keep_best: not a metric and how many steps to keep by it: expected (metric, count)"),
        ({"keep_best": ("loss", 2, "least")}, "keep_best: not a metric and how many steps to keep by it"),
    ],
)
def test_what_cannot_be_kept_by_is_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        start(tmp_path / "run", **options)
    assert str(caught.value).startswith(told)
    assert not (tmp_path / "run").exists()


# Pins


def pins(folder: str) -> Any:
    """On two ranks: pinned together, and refused together."""
    run = lab.build(lab.Setup(global_batch=4))
    checkpointer = Checkpointer(folder, run.state, interval=1, keep_latest_k=1)
    run.train(2, done=checkpointer.step)
    checkpointer.pin(2)
    errors = []
    for step in (1, -2):
        try:
            checkpointer.pin(step)
        except reshard.ReshardError as error:
            errors.append(f"{type(error).__name__} {error}")
    run.train(4, done=checkpointer.step)
    return errors, numbers(folder)


def test_a_pin_is_of_all_ranks_and_so_is_its_refusal(tmp_path: Path) -> None:
    first, second = run_ranks(2, pins, str(tmp_path))
    assert first == second
    errors, listed = first
    assert errors[0] == f"CheckpointNotFound {tmp_path}/step-1: the step to keep is not there; there are steps [2]"
    assert errors[1].startswith(f"UsageError {tmp_path}: a step must not be negative")
    assert listed == [2, 4]


def test_a_pin_outlives_the_run_and_holds_for_every_process(tmp_path: Path) -> None:
    save(start(tmp_path), 1)
    start(tmp_path).pin(1)
    later = start(tmp_path, keep_latest_k=1)
    later.resume()
    for step in (2, 3):
        save(later, step)
    assert numbers(tmp_path) == [1, 3]
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert numbers(tmp_path) == [1, 3]
    later.unpin(1)
    save(later, 4)
    assert numbers(tmp_path) == [4]


# The step that a run resumed from


def test_the_step_that_a_run_was_set_back_to_stays_until_it_has_saved_another(tmp_path: Path) -> None:
    first = start(tmp_path, keep_latest_k=9)
    for step in (10, 20, 30, 40):
        save(first, step)
    second = start(tmp_path, keep_latest_k=1)
    assert second.resume(20).step == 20
    # By hand, from another process, while the run is on its way to its next save.
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert numbers(tmp_path) == [20, 40]
    # Nothing has changed since, so this saves nothing, and the step is as much needed as before.
    second.save()
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert numbers(tmp_path) == [20, 40]
    save(second, 25)
    assert numbers(tmp_path) == [25]
    assert not list(tmp_path.glob("RESUMED-*"))


def test_a_run_that_goes_on_from_the_newest_step_leaves_no_mark(tmp_path: Path) -> None:
    first = start(tmp_path, keep_latest_k=9)
    for step in (10, 20, 30):
        save(first, step)
    start(tmp_path).resume(10)
    assert [path.name for path in tmp_path.glob("RESUMED-*")] == ["RESUMED-step-10"]
    # That attempt died before it saved; this one goes on from the newest.
    assert start(tmp_path).resume().step == 30
    assert not list(tmp_path.glob("RESUMED-*"))


def test_the_step_that_was_resumed_from_outlives_unsound_newer_ones(tmp_path: Path) -> None:
    first = start(tmp_path, keep_latest_k=9)
    for step in (10, 20, 30):
        save(first, step)
    for step in (20, 30):
        (tmp_path / f"step-{step}/reshard.json").unlink()
    second = start(tmp_path, keep_latest_k=1)
    assert second.resume().step == 10
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert numbers(tmp_path) == [10, 30]
    assert start(tmp_path).resume().step == 10


# Metrics


def records(folder: str) -> Any:
    run = lab.build(lab.Setup(global_batch=4))
    rank = dist.get_rank()
    checkpointer = Checkpointer(folder, run.state, interval=2)
    run.train(1, done=lambda: checkpointer.step({"loss": 1.0}))
    run.train(2, done=lambda: checkpointer.step({"loss": 2.0 + rank}))
    seen = [metrics_of(folder, 2)]
    # The same again, which is saved already; and one more, which is not.
    before = Path(folder, "step-2").stat().st_ino
    checkpointer.save({"loss": 2.0 + rank})
    seen.append(Path(folder, "step-2").stat().st_ino == before)
    checkpointer.save({"accuracy": torch.tensor(0.5)})
    seen.append(metrics_of(folder, 2))
    dist.barrier()
    try:
        checkpointer.save({"loss": "low" if rank else 1.0})
    except reshard.ReshardError as error:
        seen.append(f"{type(error).__name__} {error}")
    return seen, metrics_of(folder, 2)


def test_the_first_ranks_values_are_recorded_and_wrong_ones_refused_by_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, records, str(tmp_path))
    assert first == second
    (one, is_same_folder, both, error), last = first
    assert one == {"loss": 2.0}
    assert is_same_folder
    assert both == last == {"loss": 2.0, "accuracy": 0.5}
    assert error == (
        "UsageError metrics['loss']: rank 1: not a metric: "
        """expected numbers by name, such as {"loss": 1.2}, found 'low'"""
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {}),
        ({"a": 1, "b": True}, {"a": 1.0, "b": 1.0}),
        ({"a": np.float32(0.5), "b": torch.tensor([2], dtype=torch.bfloat16)}, {"a": 0.5, "b": 2.0}),
        ({"a": math.nan, "b": -math.inf, "c": torch.tensor(math.inf), "d": None}, dict.fromkeys("abcd")),
    ],
)
def test_values_that_are_numbers(tmp_path: Path, given: dict[str, Any], kept: dict[str, float | None]) -> None:
    folder = reshard.save_state(tmp_path, Small().state, metrics=given)
    assert manifest.read(folder).metrics == (kept or None)
    assert [manifest.metric(folder, name) for name in kept] == list(kept.values())


@pytest.mark.parametrize(
    "given", [{"a": "1"}, {"a": torch.ones(2)}, {"a": [1.0]}, {1: 1.0}, [("a", 1.0)], 0.5, {"a": 10**400}]
)
def test_values_that_are_not_numbers(tmp_path: Path, given: Any) -> None:
    with pytest.raises(UsageError, match=r"^metrics.*expected numbers by name, such as .* found "):
        reshard.save_state(tmp_path, Small().state, metrics=given)
    assert numbers(tmp_path) == []


@pytest.mark.parametrize("found", [[], "x", {"loss": "1"}, {"loss": [1.0]}, {"loss": True}])
def test_a_manifest_with_other_metrics_is_damaged(tmp_path: Path, found: Any) -> None:
    folder = reshard.save_state(tmp_path, Small().state, metrics={"loss": 1.0})
    edit_manifest(folder, metrics=lambda _: found)
    with pytest.raises(CheckpointUnsound, match="metrics: a field of the wrong type"):
        manifest.read(folder)
    # Retention has no value to go by then, and no reason to fail.
    assert manifest.metric(folder, "loss") is None


def test_a_step_without_metrics_has_no_such_field(tmp_path: Path) -> None:
    folder = reshard.save_state(tmp_path, Small().state)
    assert "metrics" not in json.loads((folder / "reshard.json").read_text())
    assert manifest.metric(folder, "loss") is None
    shutil.rmtree(folder)
    assert manifest.metric(folder, "loss") is None


def test_metrics_outlive_a_resume_and_a_second_save_of_the_step(tmp_path: Path) -> None:
    first = start(tmp_path)
    save(first, 5, loss=1.5, accuracy=math.nan)
    first.state.scheduler.base_lrs[0] = 0.25
    first.save()
    assert metrics_of(tmp_path, 5) == {"loss": 1.5, "accuracy": None}
    second = start(tmp_path)
    second.resume()
    second.state.scheduler.base_lrs[0] = 0.125
    second.save()
    assert metrics_of(tmp_path, 5) == {"loss": 1.5, "accuracy": None}
    # They are of that step, and not of the next.
    save(second, 6)
    assert metrics_of(tmp_path, 6) is None


def test_metrics_are_carried_through_an_offline_rewrite(tmp_path: Path) -> None:
    save(start(tmp_path / "run"), 5, loss=1.5)
    assert main(["offline", str(tmp_path / "run"), str(tmp_path / "for-2/step-5"), "--world-size", "2"]) == 0
    assert metrics_of(tmp_path / "for-2", 5) == {"loss": 1.5}
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "for-2")]) == 0


def test_a_metric_that_is_never_given_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = start(tmp_path, keep_best=("loss", 2))
    with caplog.at_level(logging.WARNING, "reshard"):
        for step in (1, 2, 3):
            save(checkpointer, step, accuracy=0.5)
    told = [record.getMessage() for record in caplog.records if "to keep the best by" in record.getMessage()]
    assert told == ["no step has a value of 'loss' to keep the best by: call step(metrics={'loss': ...})"]


def test_retention_goes_on_where_a_step_cannot_be_kept_by_its_metric(tmp_path: Path) -> None:
    checkpointer = start(tmp_path, keep_latest_k=1, keep_best=("loss", 1))
    save(checkpointer, 1, loss=0.5)
    save(checkpointer, 2, loss=1.0)
    (tmp_path / "step-1/reshard.json").write_text("{")
    save(checkpointer, 3, loss=2.0)
    assert numbers(tmp_path) == [2, 3]


def test_pinning_what_is_not_saved_says_what_is(tmp_path: Path) -> None:
    checkpointer = start(tmp_path)
    with pytest.raises(CheckpointNotFound, match="save it first: nothing is committed there"):
        checkpointer.pin(1)
    save(checkpointer, 1)
    pin(tmp_path, 1)
    checkpointer.unpin(2)
    assert [path.name for path in tmp_path.glob("PINNED-*")] == ["PINNED-step-1"]
