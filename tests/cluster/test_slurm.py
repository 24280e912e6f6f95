"""Runs on a real SLURM, preempted, cancelled, cut off, crashed: each goes on with the numbers of one never touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import PROGRAM, ROOT, STEPS, Cluster, Job, wait_until, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

TORCHRUN = (
    f"srun --ntasks-per-node=1 reshard slurm wrap -- bash {ROOT}/scripts/launch.sh --ranks {{ranks}} {{{{arguments}}}}"
)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    # munged wants its folder to be open to everybody, which pytest's are not.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.lab("start", "4")
    except AssertionError as error:
        cluster.lab("stop", check=False)
        pytest.skip(f"SLURM does not start here: {error}")
    yield cluster
    cluster.lab("stop")
    shutil.copytree(folder / "log", "/opt/rs/w/slurmlog", dirs_exist_ok=True)
    shutil.rmtree(folder)


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    yield slurm
    slurm.clear()


@pytest.fixture(scope="session")
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


def test_preempted_and_resumed_on_fewer_and_on_more_nodes(
    cluster: Cluster, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    """3 -> 2 -> 4 nodes under torchrun: a preemption with grace, then `scancel --batch --signal`."""
    blocker = cluster.occupy("n4")
    job = Job(cluster, tmp_path / "run", "--nodes=2-4", launch=TORCHRUN.format(ranks=1)).trains(0)
    second = cluster.occupy("n3")
    job.trains(1)
    cluster.call("scancel", blocker, second)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.trains(2).finishes("COMPLETED")
    assert_same_run(job, reference, [3, 2, 4])
    assert [event["reason"] for event in job.of("ended")] == [
        "preempted",
        "SIGUSR1 to the batch script",
        "the command has finished",
    ]
    assert [event["lost_steps"] for event in job.of("ended")] == [0, 0, 0]
    assert job.show("Restarts") == "2"
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == STEPS
