"""Attempts at a run without a SLURM: batch scripts under bash, with stand-ins for SLURM's commands on the PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import wait_until

from reshard.cluster.render import render
from reshard.cluster.run_config import RunConfig
from reshard.storage.commit import claim
from reshard.storage.run_files import State, write_state

PROGRAM = Path(__file__).parent.parent / "data" / "plain_run.py"

JOB = (
    "JobId=71 JobName=run JobState={state} Reason={reason} Requeue={requeue} Restarts={restarts} TimeLimit=01:00:00 "
    "EndTime={end_time} PreemptEligibleTime=1796038903 PreemptTime={preempt_time} NodeList=n1 BatchHost=n1 NumNodes=1"
)

# SLURM ends the batch script of a job that it requeues.
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> "$STAND_INS/calls"
[[ -e $STAND_INS/down ]] && { echo "Unable to contact slurm controller" >&2; exit 1; }
case "$*" in
    *"show job"*) cat "$STAND_INS/job" ;;
    *hostnames*) echo n1 ;;
    requeue*) kill -TERM "$PPID" ;;
esac
"""

# As srun: options, then the command; on SIGTERM the command gets a second, then SIGKILL (B91).
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 "$@" &
trap 'sleep 1; kill -KILL $!' TERM
while kill -0 $! 2> /dev/null; do wait $! && status=0 || status=$?; done
exit "$status"
"""


class Slurm:
    """What SLURM would say, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.steps = folder / "checkpoints"
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.job()

    def job(self, **fields: Any) -> None:
        usual = {
            "state": "RUNNING",
            "reason": "None",
            "requeue": 1,
            "restarts": 0,
            "end_time": int(time.time()) + 3600,
            "preempt_time": "None",
        }
        fresh = self.folder / "job.new"
        fresh.write_text(JOB.format(**{**usual, **fields}))
        fresh.replace(self.folder / "job")

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def requeues(self) -> int:
        return sum(call.startswith("requeue") for call in self.calls)

    def start(
        self, *options: str, wrap: str = "--poll-s=0.5", restarts: int = 0, script: str | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        path = self.folder / "job.sh"
        if script is None:
            command = f"'{sys.executable}' '{PROGRAM}' '{self.steps}' 1000 {' '.join(options)}"
            script = f"exec reshard slurm wrap --run '{self.run}' {wrap} -- {command}\n"
        path.write_text(script)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RESHARD"))}
        environment |= {
            "PATH": f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STAND_INS": str(self.folder),
            "SLURM_JOB_ID": "71",
            "SLURM_JOB_NAME": "run",
            "SLURM_JOB_NUM_NODES": "1",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **variables,
        }
        return subprocess.Popen(
            ["bash", path], cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def finish(self, *options: str, **more: Any) -> tuple[int, str]:
        """The exit code and the log of an attempt that ends by itself."""
        job = self.start(*options, **more)
        _, log = job.communicate(timeout=60)
        return job.returncode, log

    def trains(self) -> None:
        wait_until("it trains", lambda: (self.progress or {}).get("resumed_at") is not None)

    def _json(self, *parts: str) -> Any:
        path = self.run.joinpath(*parts)
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def state(self) -> Any:
        return self._json("state.json")

    @property
    def progress(self) -> Any:
        return self._json("attempts", "71.0", "progress.json")

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    @property
    def newest(self) -> int:
        return max(int(path.name.removeprefix("step-")) for path in self.steps.glob("step-*"))


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    _, log = job.communicate(timeout=60)
    return job.returncode, log


def test_a_signal_to_the_batch_script_saves_and_requeues_once(slurm: Slurm) -> None:
    """B90, B91: the whole script that `render` makes; a save that takes longer than the launcher would wait."""
    config = RunConfig(
        name="run",
        run=str(slurm.run),
        command=(sys.executable, str(PROGRAM), str(slurm.steps), "1000", "save_s=2"),
        time="1:00:00",
        time_s=3600,
    )
    job = slurm.start(script=render(config, warn_s=60))
    slurm.trains()
    job.send_signal(signal.SIGUSR1)
    status, log = end(job)
    assert status == 75
    assert slurm.requeues == 1
    assert slurm.state["state"] == "waiting"
    assert slurm.state["committed_step"] == slurm.newest
    assert slurm.progress["stopped_at"] == slurm.newest
    assert slurm.state["save_s"] >= 2
    assert [event["event"] for event in slurm.events] == ["started", "resumed", "asked", "saved", "ended"]
    assert "to be continued: SIGUSR1 to the batch script" in log


def test_a_preemption_that_nobody_signals_is_seen_in_the_queue(slurm: Slurm) -> None:
    job = slurm.start()
    slurm.trains()
    slurm.job(preempt_time=int(time.time()))
    status, _ = end(job)
    assert (status, slurm.requeues) == (75, 1)
    assert slurm.events[-1]["reason"] == "preempted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_its_user_cancels_saves_and_stays_cancelled(slurm: Slurm, number: signal.Signals) -> None:
    job = slurm.start()
    slurm.trains()
    slurm.job(state="COMPLETING")
    job.send_signal(number)
    wait_until("written before the run has ended", lambda: slurm.state["state"] == "cancelled")
    status, _ = end(job)
    assert (status, slurm.requeues) == (77, 0)
    assert slurm.state["state"] == "cancelled"
    assert slurm.progress["stopped_at"] == slurm.newest


def test_a_job_that_slurm_requeues_itself_is_not_requeued_again(slurm: Slurm) -> None:
    job = slurm.start()
    slurm.trains()
    slurm.job(state="COMPLETING", restarts=1)
    job.send_signal(signal.SIGTERM)
    status, _ = end(job)
    assert (status, slurm.requeues) == (75, 0)
    assert slurm.state["state"] == "waiting"


def test_the_end_of_the_job_is_known_and_may_move(slurm: Slurm) -> None:
    job = slurm.start()
    slurm.trains()
    slurm.job(end_time=int(time.time()) + 5)
    status, _ = end(job)
    assert (status, slurm.requeues) == (75, 1)
    assert slurm.events[-1]["reason"] == "time limit"
    assert "asked" not in [event["event"] for event in slurm.events]


def test_a_run_that_ends_is_done_and_is_not_started_again(slurm: Slurm) -> None:
    script = f"exec reshard slurm wrap --run run -- '{sys.executable}' '{PROGRAM}' checkpoints 5\n"
    assert slurm.finish(script=script)[0] == 0
    assert json.loads((slurm.run / "DONE").read_text())["step"] == 5
    assert slurm.requeues == 0
    status, log = slurm.finish(script=script, restarts=1)
    assert status == 0
    assert "DONE: nothing is left to do" in log
    assert [event["event"] for event in slurm.events].count("started") == 1


def test_a_crash_before_anything_is_saved_is_not_tried_again(slurm: Slurm) -> None:
    status, log = slurm.finish("bug=3")
    assert (status, slurm.requeues) == (1, 0)
    assert slurm.state["state"] == "failed"
    assert "FAILED: exit status 1 before a step was saved" in log


def test_a_checkpoint_that_never_loads_ends_the_run_by_name(slurm: Slurm) -> None:
    """B94."""
    slurm.steps.mkdir()
    (slurm.steps / "step-20").mkdir()
    (slurm.steps / "step-40").mkdir()
    codes = []
    for restarts in range(3):
        slurm.job(restarts=restarts)
        codes.append(slurm.finish("load_bug", restarts=restarts)[0])
    assert codes == [75, 75, 1]
    assert slurm.requeues == 2
    assert slurm.state["reason"] == "exit status 1, 3 times in a row without a newer step than 40"
    assert sorted(path.name for path in slurm.steps.glob("*step-*")) == ["step-20", "step-40"]


def test_a_checkpoint_that_never_loads_is_set_aside_only_if_allowed(slurm: Slurm) -> None:
    """B94. And what fails on the earlier one, too, does not go round in circles."""
    slurm.steps.mkdir()
    for step in (20, 40):
        (slurm.steps / f"step-{step}").mkdir()
    wrap = "--max-failures=2 --fall-back"
    codes = []
    for restarts in range(4):
        slurm.job(restarts=restarts)
        codes.append(slurm.finish("load_bug", wrap=wrap, restarts=restarts)[0])
    assert codes == [75, 75, 75, 1]
    names = sorted(path.name for path in slurm.steps.glob("*step-*"))
    assert names[0].startswith("abandoned-step-40-")
    assert names[1:] == ["step-20"]
    assert slurm.state["reason"] == "exit status 1, 2 times in a row without a newer step than 20"


def test_failures_are_counted_and_preemptions_are_not(slurm: Slurm) -> None:
    slurm.steps.mkdir()
    (slurm.steps / "step-10").mkdir()
    for restarts, preempt_time in enumerate(["None", int(time.time()), int(time.time()), "None"]):
        slurm.job(restarts=restarts, preempt_time=preempt_time)
        assert slurm.finish("load_bug", wrap="--poll-s=60", restarts=restarts)[0] == 75
    assert slurm.state["failures"] == 2


def test_where_requeueing_is_off_a_chain_goes_on_until_it_is_cancelled(slurm: Slurm) -> None:
    chain = {"RESHARD_CHAIN": "c1"}
    slurm.job(requeue=0)
    job = slurm.start(**chain)
    slurm.trains()
    job.send_signal(signal.SIGUSR1)
    status, log = end(job)
    assert (status, slurm.requeues) == (75, 0)
    assert "the next job of the chain goes on" in log

    second = slurm.start(SLURM_JOB_ID="72", **chain)
    wait_until("the second trains", lambda: slurm.state["attempt"] == "72.0")
    wait_until("it does", lambda: [event["event"] for event in slurm.events].count("resumed") == 2)
    slurm.job(requeue=0, state="COMPLETING")
    second.send_signal(signal.SIGTERM)
    assert end(second)[0] == 77
    status, log = slurm.finish(SLURM_JOB_ID="73", **chain)
    assert status == 1
    assert "the chain ends here: cancelled" in log
    # One that is submitted anew goes on.
    slurm.job(requeue=0, preempt_time=int(time.time()))
    assert slurm.finish(SLURM_JOB_ID="74")[0] == 75


@pytest.mark.slow
def test_without_an_answer_from_slurm_it_trains_and_says_what_to_do(slurm: Slurm) -> None:
    job = slurm.start()
    slurm.trains()
    (slurm.folder / "down").touch()
    job.send_signal(signal.SIGUSR1)
    status, log = end(job)
    assert status == 75
    assert log.count("cannot requeue, trying again: ") == 1
    assert "SLURM refused: found Unable to contact slurm controller" in log
    assert "not requeued; what is saved is safe: submit the job again to go on" in log
    assert slurm.state["committed_step"] == slurm.newest


@pytest.mark.slow
def test_a_controller_that_comes_back_is_waited_for(slurm: Slurm) -> None:
    job = slurm.start(wrap="--poll-s=2")
    slurm.trains()
    (slurm.folder / "down").touch()
    job.send_signal(signal.SIGUSR1)
    wait_until("it wants to requeue", lambda: slurm.state["state"] == "waiting", 60)
    assert slurm.progress["stopped_at"] is not None
    (slurm.folder / "down").unlink()
    assert (end(job)[0], slurm.requeues) == (75, 1)


def test_a_job_that_is_cancelled_before_it_can_be_requeued_stays_so(slurm: Slurm) -> None:
    job = slurm.start(wrap="--poll-s=2")
    slurm.trains()
    (slurm.folder / "down").touch()
    job.send_signal(signal.SIGUSR1)
    wait_until("it wants to requeue", lambda: slurm.state["state"] == "waiting", 60)
    slurm.job(state="COMPLETING")
    (slurm.folder / "down").unlink()
    _, log = end(job)
    assert slurm.requeues == 0
    assert "cancelled by its user meanwhile: not requeued" in log
    assert slurm.state["state"] == "cancelled"


def test_a_command_that_does_not_end_in_time_is_not_waited_for(slurm: Slurm) -> None:
    """KillWait ends the batch script as well, and then nobody would requeue the job."""
    job = slurm.start(script="exec reshard slurm wrap --run run --poll-s=0.5 -- sleep 100.5\n")
    wait_until("it runs", lambda: slurm.state is not None)
    slurm.job(state="COMPLETING", reason="TimeLimit")
    job.send_signal(signal.SIGTERM)
    wait_until("requeued", lambda: slurm.requeues, 15)
    assert slurm.state["state"] == "waiting"
    subprocess.run(["pkill", "-KILL", "-f", "^sleep 100.5$"], check=True)
    end(job)


def test_a_crash_before_the_run_says_a_word_is_a_failure_like_others(slurm: Slurm) -> None:
    """A rendezvous that fails, say, of a run that had got on before."""
    assert slurm.finish("interval=2", "bug=5")[0] == 75
    script = "exec reshard slurm wrap --run run -- false\n"
    for restarts, status in ((1, 75), (2, 1)):
        slurm.job(restarts=restarts)
        assert slurm.finish(script=script, restarts=restarts)[0] == status
    assert slurm.state["reason"] == "exit status 1, 3 times in a row without a newer step than 4"
    # Who submits it again has seen to it.
    slurm.job()
    assert slurm.finish(script=script, SLURM_JOB_ID="72")[0] == 75
    assert slurm.state["failures"] == 1


def test_the_environment_of_the_job_that_submitted_this_one_is_not_taken_for_its_own(slurm: Slurm) -> None:
    parent = slurm.folder / "parent"
    parent.mkdir()
    trainer = f"'{sys.executable}' '{PROGRAM}' checkpoints 3"
    (slurm.folder / "train.sh").write_text(f"env > seen; {trainer}\n")
    leaked = {
        "RESHARD_ATTEMPT": "70.2",
        "RESHARD_ATTEMPT_FOLDER": str(parent),
        "RESHARD_ATTEMPT_JOB": "70",
        "MASTER_ADDR": "elsewhere",
    }
    script = "exec reshard slurm wrap --run run -- bash train.sh\n"
    assert slurm.finish(script=script, restarts=2, **leaked)[0] == 0
    assert list(parent.iterdir()) == []
    assert slurm.state["attempt"] == "71.0"
    seen = dict(line.split("=", 1) for line in (slurm.folder / "seen").read_text().splitlines() if "=" in line)
    assert (seen["RESHARD_ATTEMPT"], seen["RESHARD_ATTEMPT_JOB"], seen["MASTER_ADDR"]) == ("71.0", "71", "n1")
    # And one that is not wrapped itself does not report to its parent.
    environment = {**os.environ, **leaked, "SLURM_JOB_ID": "72"}
    subprocess.run([sys.executable, PROGRAM, slurm.folder / "other", "3"], env=environment, check=True)
    assert list(parent.iterdir()) == []


def test_jobs_that_the_run_submits_outlive_it(slurm: Slurm) -> None:
    (slurm.folder / "command.sh").write_text("setsid env SLURM_JOB_ID=99 sleep 20.5 &\nsetsid sleep 21.5 &\n")
    script = "exec reshard slurm wrap --run run -- bash command.sh 2> log\n"
    assert slurm.finish(script=script)[0] == 0
    left = subprocess.run(["pgrep", "-f", "^sleep 2[01].5$", "-a"], capture_output=True, text=True).stdout
    subprocess.run(["pkill", "-f", "^sleep 20.5$"], check=True)
    assert "sleep 20.5" in left and "sleep 21.5" not in left


def test_a_task_of_an_array_is_requeued_alone(slurm: Slurm) -> None:
    script = f"exec reshard slurm wrap --poll-s=0.5 -- '{sys.executable}' '{PROGRAM}' checkpoints 1000\n"
    job = slurm.start(script=script, SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="1")
    wait_until("it trains", (slurm.folder / "runs/run-1/attempts/70_1.0/progress.json").exists)
    slurm.job(preempt_time=int(time.time()))
    assert end(job)[0] == 75
    assert [call for call in slurm.calls if call.startswith("requeue")] == ["requeue 70_1"]


def test_neither_a_full_log_nor_an_unreadable_claim_ends_the_run(slurm: Slurm) -> None:
    command = f"'{sys.executable}' '{PROGRAM}' '{slurm.steps}' 160"
    job = slurm.start(script=f"exec reshard slurm wrap --run run -- {command} 2> /dev/full\n")
    slurm.trains()
    # As a network file system that does not answer for a while.
    (slurm.run / "ATTEMPT").rename(slurm.run / "away")
    (slurm.run / "ATTEMPT").mkdir()
    time.sleep(6)
    assert job.poll() is None
    (slurm.run / "ATTEMPT").rmdir()
    (slurm.run / "away").rename(slurm.run / "ATTEMPT")
    assert end(job)[0] == 0


def test_an_attempt_that_was_replaced_does_and_says_nothing_more(slurm: Slurm) -> None:
    job = slurm.start()
    slurm.trains()
    claim(slurm.run, "71.1")
    before = slurm.events
    status, log = end(job)
    assert (status, slurm.requeues) == (76, 0)
    assert "another attempt has taken over" in log
    assert slurm.events == before
    assert slurm.state["state"] == "running"
    # And it cannot come back.
    status, log = slurm.finish()
    assert status == 76
    assert "a later attempt of this job has claimed the run" in log


def test_what_a_killed_attempt_lost_is_told_by_the_next(slurm: Slurm) -> None:
    job = slurm.start("interval=4", "step_s=0.02")
    wait_until("it saves", lambda: slurm.steps.exists() and len(list(slurm.steps.glob("step-*"))) > 2)
    # With the command, which is in a session of its own.
    subprocess.run(["pkill", "-KILL", "-f", str(slurm.steps)], check=True)
    end(job)
    left = slurm.progress
    slurm.job(restarts=1, preempt_time=int(time.time()))
    status, log = slurm.finish(restarts=1)
    assert status == 75
    lost = next(event for event in slurm.events if event["event"] == "lost")
    assert lost["lost_attempt"] == "71.0"
    assert lost["step"] >= left["step"]
    assert "attempt 71.0 ended without a word" in log


def test_a_run_whose_folder_cannot_be_written_is_told_as_soon_as_it_can(slurm: Slurm) -> None:
    job = slurm.start()
    slurm.trains()
    # Names that are taken by folders stand for a full disk, which root's files would not meet.
    control = slurm.run / "attempts" / "71.0" / "control.json"
    for path in (control, slurm.run / "events.jsonl"):
        path.unlink()
        path.mkdir()
    job.send_signal(signal.SIGUSR1)
    time.sleep(2)
    assert job.poll() is None
    control.rmdir()
    status, log = end(job)
    assert (status, slurm.requeues) == (75, 1)
    assert slurm.progress["stopped_at"] == slurm.newest
    assert log.count("cannot reach the run") == 1
    assert "not recorded: asked: " in log
    assert "Traceback" not in log


@pytest.mark.parametrize("is_failure", [False, True])
def test_a_state_that_cannot_be_written(slurm: Slurm, is_failure: bool) -> None:
    """A failure that is not counted might be tried for ever; a preemption is nothing to remember."""
    job = slurm.start("interval=1", "step_s=0.3", *(["bug=8"] if is_failure else []))
    slurm.trains()
    (slurm.run / "state.json").unlink()
    (slurm.run / "state.json").mkdir()
    if not is_failure:
        job.send_signal(signal.SIGUSR1)
    status, log = end(job)
    assert "cannot write what the run is at: " in log
    assert (status, slurm.requeues) == ((2, 0) if is_failure else (75, 1))


# Saves for longer than torchrun's 30 s would be too slow to test: here its own patience is 1 s.
SAVES = """
import signal, time
asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
open("started", "w").close()
while not asked:
    time.sleep(0.05)
time.sleep(3)
open("saved", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", ["", "1"])
def test_torchrun_hands_signals_on_and_waits_although_nothing_shields_it(slurm: Slurm, own: str) -> None:
    """By its PET_ variables; those that its user has set win."""
    (slurm.folder / "saves.py").write_text(SAVES)
    torchrun = f"'{sys.executable}' -m torch.distributed.run --standalone --nproc-per-node=1 saves.py"
    variables = {"PET_SHUTDOWN_TIMEOUT": own} if own else {}
    job = slurm.start(script=f"exec reshard slurm wrap --run run -- {torchrun}\n", **variables)
    wait_until("it runs", (slurm.folder / "started").exists)
    found = subprocess.run(
        ["pgrep", "-f", "^[^ ]* -m torch.distributed.run .* saves.py$"], capture_output=True, text=True
    )
    pid = int(found.stdout.split()[0])
    os.kill(pid, signal.SIGUSR1)
    end(job)
    assert (slurm.folder / "saved").exists() == (not own)


def test_a_command_that_cannot_be_started(slurm: Slurm) -> None:
    status, log = slurm.finish(script="exec reshard slurm wrap --run run -- no-such-program\n")
    assert status == 2
    assert "no-such-program: cannot be started: No such file or directory" in log
    assert slurm.state["state"] == "failed"


def test_a_run_of_another_job_goes_on_where_it_was_left(slurm: Slurm) -> None:
    claim(slurm.run, "9.4")
    write_state(slurm.run, State("failed", "a bug", "9.4", None, checkpoints=str(slurm.steps), failures=2))
    assert slurm.finish("bug=2", "interval=1")[0] == 75
    assert slurm.state["failures"] == 1


@pytest.mark.parametrize(
    ("script", "variables", "said"),
    [
        ("reshard slurm wrap -- true", {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: not in a SLURM job"),
        ("reshard slurm wrap -- true", {"SLURM_STEP_ID": "0"}, "a task without a wrapped batch script"),
        ("reshard slurm wrap --run '' -- true", {}, "--run: not a folder for a run"),
        ("reshard slurm wrap --max-failures 0 -- true", {}, "--max-failures"),
        ("reshard slurm wrap --poll-s 0 -- true", {}, "--poll-s"),
    ],
)
def test_what_it_refuses(slurm: Slurm, script: str, variables: dict[str, str], said: str) -> None:
    status, log = slurm.finish(script=script, **variables)
    assert status == 2
    assert said in log.splitlines()[-1]
    assert "Traceback" not in log
