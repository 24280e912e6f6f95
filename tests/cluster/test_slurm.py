"""Runs on a real SLURM, preempted, cancelled, cut off, crashed: each goes on with the numbers of one never touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import NODES, PROGRAM, ROOT, STEPS, Cluster, Job, start, wait_until, why_not

README = (ROOT / "README.md").read_text()

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

# Nodes for the tests that run one after the other, and for the runs beside them.
HERE, ASIDE = "--exclude=n[5-10]", "n5"
TORCHRUN = f"srun --ntasks-per-node=1 reshard slurm wrap -- bash {ROOT}/scripts/launch.sh {{arguments}}"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    # munged wants its folder to be open to everybody, which pytest's are not.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.lab("start", str(NODES))
    except AssertionError as error:
        cluster.lab("stop", check=False)
        pytest.skip(f"SLURM does not start here: {error}")
    yield cluster
    cluster.lab("stop")
    shutil.rmtree(folder)


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    before = len(slurm.submitted)
    yield slurm
    slurm.clear(slurm.submitted[before:])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One rank, without SLURM, without a break."""
    folder = tmp_path_factory.mktemp("reference")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    subprocess.run([sys.executable, PROGRAM, folder, str(STEPS)], env={**os.environ, **variables}, check=True)
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def assert_same_run(job: Job, reference: list[dict[str, Any]], ranks: list[int]) -> None:
    """Every step that any attempt trained has the reference's loss, learning rate and samples, to the bit."""
    rows = job.trace
    expected = {row["step"]: [row[name] for name in ("loss", "lr", "samples")] for row in reference}
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    for row in rows:
        assert [row[name] for name in ("loss", "lr", "samples")] == expected[row["step"]], row
    seen = [row["ranks"] for row in rows]
    assert [count for i, count in enumerate(seen) if i == 0 or seen[i - 1] != count] == ranks


@dataclass
class Aside:
    """Runs of few ranks that mostly wait, on nodes of their own while the other tests go on."""

    out_of_time: Job
    buggy: Job
    poisoned: Job
    bereft: Job
    cut_off: Job


@pytest.fixture(scope="module", autouse=True)
def aside(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Aside:
    def begin(name: str, *sbatch: str, **options: Any) -> Job:
        return start(slurm, tmp_path_factory.mktemp(name) / "run", *sbatch, **options)

    return Aside(
        begin("time", "--nodes=1", "--nodelist=n5", "--time=1", slow_s=1.5),
        begin("bug", "--nodes=1", "--nodelist=n5", wrap=["--max-failures=2"], options=["interval=5", "bug=12"]),
        begin(
            "poison",
            "--nodes=1",
            "--nodelist=n5",
            wrap=["--max-failures=2", "--fall-back"],
            options=["interval=5", "first_bug=12", "poisoned=10"],
        ),
        begin("crash", "--nodes=2", "--exclude=n[1-5,9-10]", options=["interval=2"], slow_s=1.0),
        begin("cut", "--nodes=1", "--exclude=n[1-8]", options=["interval=2"], slow_s=4.0),
    )


def test_faults_of_nodes_begin(cluster: Cluster, aside: Aside) -> None:
    """What becomes of it is looked at further down, when SLURM has noticed."""
    aside.bereft.trains(0)
    aside.cut_off.trains(0)
    cluster.lab("crash", aside.bereft.show("BatchHost"))
    cluster.lab("cut", aside.cut_off.show("BatchHost"))


def test_preempted_and_resumed_on_fewer_and_on_more_nodes(
    cluster: Cluster, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    """3 -> 2 -> 4 nodes: a preemption with grace, then `scancel --batch --signal`."""
    blocker = cluster.occupy("n4")
    job = start(cluster, tmp_path / "run", "--nodes=2-4", HERE).trains(0)
    second = cluster.occupy("n3")
    job.trains(1)
    cluster.call("scancel", blocker, second)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.trains(2).finishes("COMPLETED")
    assert_same_run(job, reference, [3, 2, 4])
    assert reasons(job) == ["preempted", "SIGUSR1 to the batch script", "the command has finished"]
    assert [event["lost_steps"] for event in job.of("ended")] == [0, 0, 0]
    assert job.show("Restarts") == "2"
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == STEPS
    shown = README.partition("<!-- output of: a preemption on a real SLURM")[2].split("```")[1].strip().splitlines()
    assert {settled(line) for line in shown} <= {settled(line) for line in job.log.splitlines()}


def settled(line: str) -> str:
    """A line of the log without its times, numbers and nodes."""
    return re.sub(r"\d+", "#", re.sub(r"n\[[\d-]+\]|n\d+", "n#", line))


def test_the_readme_submits_a_job(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    command = "reshard slurm submit --config slurm/run.yaml"
    assert f"    {command}\n" in README
    # Its GPUs and hours are not to be had here.
    settings = tmp_path / "slurm" / "run.yaml"
    settings.write_text(settings.read_text().replace("node: 8 ", "node: 2 ").replace("4:00:00", "0:50:00"))
    printed = cluster.call("bash", "-c", f"cd '{tmp_path}' && {command}")
    job = Job(cluster, tmp_path / "runs" / "small", re.search(r"submitted job (\d+) ", printed)[1])
    cluster.submitted.append(job.id)
    assert job.show("Requeue") == "1"
    assert job.show("JobName") == "small"
    assert job.show("Command") == str(tmp_path / "runs" / "small" / "job.sbatch")


@pytest.mark.slow
def test_preempted_without_grace(cluster: Cluster, tmp_path: Path, reference: list[dict[str, Any]]) -> None:
    """SLURM requeues it by itself, and nobody does so again. torchrun here is not started by srun."""
    job = start(
        cluster,
        tmp_path / "run",
        "--partition=nograce",
        "--nodes=1",
        HERE,
        launch=f"bash {ROOT}/scripts/launch.sh --ranks 2 {{arguments}}",
    ).trains(0)
    cluster.occupy(job.show("NodeList"))
    job.trains(1).finishes("COMPLETED")
    assert_same_run(job, reference, [2])
    assert job.show("Restarts") == "1"
    assert reasons(job) == ["requeued by SLURM", "the command has finished"]
    assert job.of("ended")[0]["lost_steps"] == 0


def test_cancelled_by_its_user_it_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path / "run", "--nodes=1", HERE).trains(0)
    cluster.call("scancel", job.id)
    job.ends("CANCELLED")
    wait_until("the attempt has ended", lambda: job.of("ended"))
    assert job.state["state"] == "cancelled"
    assert job.state["committed_step"] >= 3
    assert not (tmp_path / "run" / "DONE").exists()
    assert job.show("Restarts") == "0"


@pytest.mark.slow
def test_nodes_with_different_numbers_of_gpus(
    cluster: Cluster, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    job = start(cluster, tmp_path / "run", "--nodes=2", HERE, "--gpus=3", launch=TORCHRUN).finishes("COMPLETED")
    assert_same_run(job, reference, [3])
    assert job.of("started")[0]["gpus"] == 3


SETTINGS = """
name: chain
run: {run}
command: bash {root}/scripts/launch.sh --ranks 1 {program} {run} {steps}
nodes: 1
time: "5:00"
requeue: false
env_file:
options: ["--exclude=n[5-10]"]
"""


def test_a_chain_where_requeueing_is_off(cluster: Cluster, tmp_path: Path, reference: list[dict[str, Any]]) -> None:
    """Submitted by `reshard slurm submit`: the second job goes on, the third has nothing to do."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "slow").write_text("0.2")
    (tmp_path / "run.yaml").write_text(SETTINGS.format(run=run, root=ROOT, program=PROGRAM, steps=STEPS))
    words = ["submit", "--config", str(tmp_path / "run.yaml"), "--chain", "3", "--json"]
    ids = json.loads(cluster.call("reshard", "slurm", *words))["jobs"]
    cluster.submitted += ids
    first, second, third = (Job(cluster, run, job_id) for job_id in ids)
    first.trains(0)
    cluster.call("scancel", "--signal=USR1", first.id)
    first.ends("FAILED")
    assert first.show("ExitCode") == "75:0"
    second.trains(0).finishes("COMPLETED")
    third.ends("COMPLETED")
    assert_same_run(second, reference, [1])
    assert reasons(second) == [f"SIGUSR1 to task {first.show('BatchHost')}-0", "the command has finished"]
    assert "nothing is left to do" in third.log


def test_a_node_that_dies(aside: Aside, reference: list[dict[str, Any]]) -> None:
    """The first node, so that the batch script dies too; it resumes without that node."""
    job = aside.bereft.trains(1).finishes("COMPLETED")
    assert_same_run(job, reference, [2])
    assert job.show("Restarts") == "1"
    dead = job.of("started")[0]["nodes"]
    assert job.of("started")[1]["nodes"] != dead
    lost = job.of("lost")[0]
    assert lost["lost_attempt"] == f"{job.id}.0"
    assert job.of("resumed")[1]["step"] % 2 == 0


def test_a_node_that_is_cut_off_trains_on_and_cannot_commit(aside: Aside, reference: list[dict[str, Any]]) -> None:
    job = aside.cut_off.trains(1)
    wait_until("the old attempt notices", lambda: "another attempt has" in job.log)
    job.finishes("COMPLETED")
    old, new = f"{job.id}.0", f"{job.id}.1"
    taken_over_s = next(event["time_s"] for event in job.of("started") if event["attempt"] == new)
    assert [event["event"] for event in job.events if event["attempt"] == old and event["time_s"] > taken_over_s] == []
    assert json.loads((job.folder / "DONE").read_text())["attempt"] == new
    manifests = (job.folder / "checkpoints").glob("step-*/reshard.json")
    assert {json.loads(path.read_text())["attempt"] for path in manifests} == {new}
    assert_same_run(job, reference, [1])


def test_the_time_limit(aside: Aside, reference: list[dict[str, Any]]) -> None:
    """It knows by itself when its time is up, and saves before."""
    job = aside.out_of_time.trains(1).finishes("COMPLETED")
    assert_same_run(job, reference, [1])
    assert reasons(job) == ["time limit", "the command has finished"]
    assert job.of("ended")[0]["lost_steps"] == 0
    assert job.show("Restarts") == "1"


def test_a_bug_is_not_tried_for_ever(aside: Aside) -> None:
    job = aside.buggy.ends("FAILED")
    assert job.show("Restarts") == "1"
    assert job.show("ExitCode") == "1:0"
    assert job.state["state"] == "failed"
    assert job.state["reason"] == "exit status 1, 2 times in a row without a newer step than 10"


def test_a_checkpoint_that_does_not_load(aside: Aside, reference: list[dict[str, Any]]) -> None:
    job = aside.poisoned.finishes("COMPLETED")
    assert_same_run(job, reference, [1])
    assert [event["step"] for event in job.of("resumed")] == [0, 5]
    assert len(list((job.folder / "checkpoints").glob("abandoned-step-10-*"))) == 1


def reasons(job: Job) -> list[str]:
    return [event["reason"] for event in job.of("ended")]
