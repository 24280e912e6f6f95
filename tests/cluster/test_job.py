"""Jobs as SLURM describes them.

The texts in data/ that begin with 22.05 were printed by a SLURM 22.05.8 of ours. The others have the fields, the order
and the oddities of what other versions printed, as seen in public documentation, tests of other programs and issue
threads, with names, numbers and paths of our own; where their version was not told, it is the one of that time. Of the
preempted one only states and exit code were seen.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from reshard.cluster.job import duration_s, parse_fields, parse_job
from reshard.errors import UsageError

DATA = Path(__file__).parent / "data"
JOBS = sorted(DATA.glob("job-*.txt"))


def local(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


# What is worth a look in each; the rest is what a job is that just runs.
EXPECTED: dict[str, dict[str, Any]] = {
    "2018-array-cancelled": {
        "job_id": "810012",
        "state": "CANCELLED",
        "is_ending": True,
        "nodes": "node45",
        "end_time_s": local("2018-05-30T20:02:07"),
    },
    "19.05-gpu-without-a-count": {"job_id": "2420059", "gpus": 1, "may_requeue": False},
    "20.11-nodes": {"state": "COMPLETED", "is_ending": True, "nodes": "n[3227-3233]", "node_count": 7, "gpus": None},
    "21.08-two-kinds-of-gres": {"gpus": 2, "node_count": 2, "may_requeue": False},
    "22.05-exclusive": {"gpus": 6, "node_count": 2, "end_time_s": 1796039659.0},
    "22.05-gpus": {"gpus": 3, "node_count": 2},
    # Its end is that of the grace time by then.
    "22.05-preempting": {"preempt_time_s": 1796039364.0, "end_time_s": 1796039384.0, "gpus": 6, "node_count": 2},
    "22.05-preempting-local-time": {
        "preempt_time_s": local("2026-11-30T11:49:24"),
        "end_time_s": local("2026-11-30T11:49:44"),
        "gpus": 6,
    },
    "22.05-requeued": {"state": "COMPLETING", "is_ending": True, "restarts": 1},
    "22.05-requeued-later": {"state": "COMPLETING", "is_ending": True, "restarts": 1, "end_time_s": None},
    "22.05-cancelled": {"state": "COMPLETING", "is_ending": True},
    "22.05-cancelled-while-requeued": {"state": "COMPLETING", "is_ending": True, "restarts": 1},
    "22.05-time-limit": {"state": "COMPLETING", "is_ending": True, "reason": "TimeLimit", "hit_time_limit": True},
    "23.02-time-limit": {"state": "TIMEOUT", "is_ending": True, "reason": "TimeLimit", "hit_time_limit": True},
    "23.11-requeued-pending": {
        "state": "PENDING",
        "reason": "BeginTime",
        "restarts": 16,
        "nodes": "",
        "node_count": 1,
    },
    "24.05-tres-per-task": {"nodes": "node-17", "gpus": None, "end_time_s": local("2025-01-27T16:47:16")},
    "25.05-gpus-in-tres-only": {
        "nodes": "gpu-[11,13]",
        "node_count": 2,
        "gpus": 3,
        "restarts": 0,
        "may_requeue": False,
    },
    "25.05-held": {
        "state": "PENDING",
        "reason": "JobHeldUser",
        "nodes": "",
        "node_count": 3,
        "gpus": None,
        "end_time_s": None,
        "may_requeue": False,
    },
    "25.11-no-time-limit": {"end_time_s": None, "nodes": "n01"},
    "25.11-preempted": {
        "state": "PREEMPTED",
        "is_ending": True,
        "preempt_time_s": 1790000061.0,
        "end_time_s": 1790000071.0,
    },
}
USUAL = {"restarts": 0, "may_requeue": True, "is_ending": False, "hit_time_limit": False, "reason": "None"}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_of_any_version(path: Path) -> None:
    expected = {**USUAL, "state": "RUNNING", "preempt_time_s": None, **EXPECTED[path.stem.removeprefix("job-")]}
    job = parse_job(path.read_text())
    assert {name: getattr(job, name) for name in expected} == expected
    assert job.is_running == (expected["state"] == "RUNNING")


def test_every_expectation_has_its_file() -> None:
    assert {f"job-{name}.txt" for name in EXPECTED} == {path.name for path in JOBS}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_one_line_or_many_is_the_same(path: Path) -> None:
    text = path.read_text()
    assert parse_job(" ".join(text.split())) == parse_job(text)


def test_values_may_hold_blanks_and_equals_signs() -> None:
    fields = parse_fields((DATA / "job-25.05-gpus-in-tres-only.txt").read_text())
    assert fields["AllocTRES"] == "cpu=32,mem=128G,node=2,billing=38,gres/gpu=3,gres/gpu:rtx30=3"
    assert fields["SubmitLine"].startswith("sbatch --gpus=3 --export=ALL,RUN=a train.sbatch")
    # The end of the line that its user typed looks like fields; those that were there before win.
    assert fields["Restarts"] == "0" and fields["NodeList"] == "gpu-[11,13]"
    assert parse_fields("JobState=PENDING Reason=Nodes required for job are DOWN, DRAINED Dependency=(null)") == {
        "JobState": "PENDING",
        "Reason": "Nodes required for job are DOWN, DRAINED",
        "Dependency": "(null)",
    }


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2(IDX:0-1)", 2),
        ("gpu:a100:4(IDX:0-3)", 4),
        ("gpu:h100:1(IDX:0),gpu:6000pro_maxq:2(IDX:1-2)", 3),
        ("gpu:a100_1g.5gb:7(IDX:0-6)", 7),
        ("craynetwork:1,gpu:4(IDX:0-3)", 4),
        ("nvme:1", None),
        ("", None),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: int | None) -> None:
    text = (
        f"JobId=1 JobState=RUNNING NodeList=n1 NumNodes=1 JOB_GRES=x Nodes=n1 CPU_IDs=0-7 Mem=0 GRES={gres} MinCPUs=1"
    )
    assert parse_job(text).gpus == gpus


@pytest.mark.parametrize(
    ("nodes", "count"),
    [("n1", 1), ("n[1-3]", 3), ("n[1-3,7]", 4), ("n[01-02],m1", 3), ("rack1-n[1,4],rack2-n[08-11]", 6), ("a,b,c", 3)],
)
def test_gpus_of_several_nodes_on_one_line(nodes: str, count: int) -> None:
    text = f"JobId=1 JobState=RUNNING Nodes={nodes} CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)"
    assert parse_job(text).gpus == 2 * count


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "FAILED", "CANCELLED"])
def test_ends_of_a_job(state: str) -> None:
    assert parse_job(f"JobId=1 JobState={state} Reason=NodeDown").is_ending


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobId=7", "JobState=RUNNING"])
def test_what_is_no_job(text: str) -> None:
    with pytest.raises(UsageError, match="not the description of a job"):
        parse_job(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:00", 5400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:05", 217805),
        ("0", 0),
        ("7-00:00:00", 604800),
        ("UNLIMITED", None),
        ("infinite", None),
        ("(null)", None),
    ],
)
def test_durations(text: str, expected: float | None) -> None:
    assert duration_s(text) == expected


@pytest.mark.parametrize("text", ["a day", "1h", "1.5", "-5", "1:2:3:4", "3-", "Partition_Limit", "1:30 "])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="not a time"):
        duration_s(text)
