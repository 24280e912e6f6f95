"""What becomes of a run, case by case: how the attempt ended, what SLURM says, what may be tried."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from reshard.cluster.job import Job
from reshard.cluster.policy import Attempt, Decision, History, Limits, decide

RUNNING = Job("7", "RUNNING", "None", 0, True, None, 2000.0, "n[1-2]", 2)
PREEMPTED = dataclasses.replace(RUNNING, preempt_time_s=1000.0)
ENDING = dataclasses.replace(RUNNING, state="COMPLETING")
REQUEUED = dataclasses.replace(ENDING, restarts=1)
OUT_OF_TIME = dataclasses.replace(ENDING, reason="TimeLimit")

CLEAN = Attempt(0, 0, steps=(5, 10), best_step=5)
STOPPED = dataclasses.replace(CLEAN, asked="preempted", stopped_at=10)
CRASHED = dataclasses.replace(CLEAN, status=1)
STUCK = dataclasses.replace(CRASHED, best_step=10)
UNSAVED = Attempt(0, 1)
# Of a program that says nothing of itself.
MUTE = Attempt(0, 0, reports=False)
# srun has ended the tasks that were left after one had crashed.
HEARSAY = dataclasses.replace(UNSAVED, asked="SIGTERM to task n2-1", is_hearsay=True)


@pytest.mark.parametrize(
    ("attempt", "job", "state", "requeue"),
    [
        (CLEAN, RUNNING, "done", False),
        (CLEAN, None, "done", False),
        # Done just when something else happened.
        (CLEAN, ENDING, "done", False),
        (dataclasses.replace(CLEAN, asked="preempted"), PREEMPTED, "done", False),
        # A program of somebody else's may have stopped because it was asked to.
        (MUTE, RUNNING, "done", False),
        (dataclasses.replace(MUTE, asked="preempted"), PREEMPTED, "waiting", True),
        (dataclasses.replace(MUTE, asked="time limit", status=143), RUNNING, "waiting", True),
        (dataclasses.replace(MUTE, status=1), RUNNING, "failed", False),
        (dataclasses.replace(MUTE, status=1, asked="SIGTERM to task n1-0", is_hearsay=True), RUNNING, "failed", False),
        (STOPPED, PREEMPTED, "waiting", True),
        (STOPPED, None, "waiting", True),
        (dataclasses.replace(STOPPED, asked="SIGUSR1 to the batch script"), RUNNING, "waiting", True),
        # SLURM's own requeueing, and its user's cancelling.
        (STOPPED, REQUEUED, "waiting", False),
        (CRASHED, REQUEUED, "waiting", False),
        (STOPPED, ENDING, "cancelled", False),
        (CRASHED, ENDING, "cancelled", False),
        # Cancelled during the grace of a preemption, or killed at the end of it where preemption cancels: not revived.
        (STOPPED, dataclasses.replace(ENDING, preempt_time_s=1000.0), "waiting", False),
        # Cancelled by SLURM itself, to preempt it, and at once.
        (STOPPED, dataclasses.replace(ENDING, preempt_time_s=2000.0), "waiting", True),
        (CRASHED, dataclasses.replace(ENDING, state="PREEMPTED"), "waiting", True),
        (CRASHED, dataclasses.replace(ENDING, state="NODE_FAIL"), "waiting", True),
        (dataclasses.replace(CRASHED, lost_nodes=("n2",)), ENDING, "waiting", True),
        (CRASHED, dataclasses.replace(ENDING, state="CANCELLED"), "cancelled", False),
        (dataclasses.replace(UNSAVED, status=-9), dataclasses.replace(ENDING, state="OUT_OF_MEMORY"), "failed", False),
        (dataclasses.replace(STOPPED, asked="cancelled"), None, "cancelled", False),
        # By a stop= of its own that nobody asked: it would stop again at once.
        (dataclasses.replace(STOPPED, asked=None), RUNNING, "waiting", False),
        # Killed in the middle of a save, by a preemption or with a node.
        (STUCK, PREEMPTED, "waiting", True),
        (dataclasses.replace(STUCK, lost_nodes=("n2",)), RUNNING, "waiting", True),
        (dataclasses.replace(UNSAVED, lost_nodes=("n2",)), RUNNING, "waiting", True),
        # The time limit is no failure for a run that gets on.
        (dataclasses.replace(STOPPED, asked="time limit"), RUNNING, "waiting", True),
        (dataclasses.replace(CRASHED, asked="time limit"), OUT_OF_TIME, "waiting", True),
        (CRASHED, OUT_OF_TIME, "waiting", True),
        (UNSAVED, OUT_OF_TIME, "failed", False),
        (dataclasses.replace(UNSAVED, asked="time limit"), RUNNING, "failed", False),
        (dataclasses.replace(UNSAVED, asked="SIGUSR1 to the batch script"), RUNNING, "failed", False),
        # Crashes.
        (UNSAVED, RUNNING, "failed", False),
        (HEARSAY, RUNNING, "failed", False),
        (dataclasses.replace(HEARSAY, stopped_at=3, steps=(3,)), RUNNING, "waiting", True),
        (CRASHED, RUNNING, "waiting", True),
        (CRASHED, None, "waiting", True),
    ],
)
def test_what_becomes_of_it(attempt: Attempt, job: Job | None, state: str, requeue: bool) -> None:
    decision = decide(attempt, job, History(), Limits())
    assert (decision.state, decision.requeue) == (state, requeue), decision.reason


def after(attempt: Attempt, times: int, **limits: Any) -> list[Decision]:
    """The decisions after the same end, again and again."""
    history, decisions = History(), []
    for _ in range(times):
        decisions.append(decide(attempt, RUNNING, history, Limits(**limits)))
        history = decisions[-1].history
    return decisions


def test_failures_in_a_row_end_the_run_with_its_step_named() -> None:
    first, second, third = after(STUCK, 3)
    assert [first.requeue, second.requeue, third.requeue] == [True, True, False]
    assert third.state == "failed"
    assert third.reason == "exit status 1, 3 times in a row without a newer step than 10"


@pytest.mark.parametrize("ending", [STOPPED, dataclasses.replace(STUCK, lost_nodes=("n1",))])
def test_interruptions_are_not_counted(ending: Attempt) -> None:
    history = History(failures=2)
    attempt = dataclasses.replace(ending, best_step=10)
    assert decide(attempt, RUNNING, history, Limits()).history == history


def test_a_newer_step_begins_the_count_anew() -> None:
    assert decide(CRASHED, RUNNING, History(2), Limits()).history == History(1)
    assert decide(STOPPED, RUNNING, History(2), Limits()).history == History(0)


def test_the_limit_holds_for_the_first_failure_too() -> None:
    (decision,) = after(CRASHED, 1, max_failures=1)
    assert (decision.state, decision.reason) == ("failed", "exit status 1 at step 10")


def test_falling_back_goes_further_each_time_and_ends() -> None:
    """A run that crashes at once whatever it resumes from: the steps that are set aside are gone, the best remains."""
    steps, history = (10, 20, 30), History()
    targets = []
    for _ in range(20):
        attempt = Attempt(0, 1, best_step=30, steps=steps)
        decision = decide(attempt, RUNNING, history, Limits(2, fall_back=True))
        history = decision.history
        if decision.fall_back_to is not None:
            targets.append(decision.fall_back_to)
            steps = tuple(step for step in steps if step <= decision.fall_back_to)
        if decision.state == "failed":
            break
    assert decision.state == "failed"
    assert targets == [20, 10]


def test_falling_back_does_not_go_in_circles() -> None:
    """A run that saves the same steps again and then crashes where it did before."""
    history, decisions = History(), []
    for _ in range(6):
        attempt = Attempt(0, 1, best_step=30, steps=(10, 20, 30))
        decisions.append(decide(attempt, RUNNING, history, Limits(2, fall_back=True)))
        history = decisions[-1].history
    assert [decision.fall_back_to for decision in decisions] == [None, 20, None, 10, None, None]
    assert [decision.state for decision in decisions] == ["waiting"] * 5 + ["failed"]


def test_no_end_is_without_a_decision_that_ends() -> None:
    """Whatever goes wrong: no run is started for ever that does not get on by itself."""
    stuck = [
        dataclasses.replace(STUCK, status=status, asked=asked, is_hearsay=asked is not None)
        for status, asked in itertools.product((1, -9, 137), (None, "SIGTERM to task n1-0"))
    ]
    stuck += [dataclasses.replace(STUCK, asked=asked) for asked in ("time limit", "SIGUSR1 to the batch script")]
    for attempt, job in itertools.product(stuck, (RUNNING, None)):
        history = History()
        for _ in range(3):
            decision = decide(attempt, job, history, Limits())
            history = decision.history
        assert decision.state == "failed", attempt


def test_exit_codes() -> None:
    codes = {state: Decision(state, "", False, History()).exit_code for state in ("done", "failed", "waiting")}
    assert codes == {"done": 0, "failed": 1, "waiting": 75}
    assert Decision("cancelled", "", False, History()).exit_code == 77
