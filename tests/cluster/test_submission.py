"""What is looked at before a job is submitted, and what is then asked of SLURM; a stub stands in for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.cluster import scheduler, submission
from reshard.cluster.job import parse_fields
from reshard.cluster.run_config import RunConfig
from reshard.cluster.scheduler import SchedulerError
from reshard.errors import StorageError, UsageError
from reshard.storage.run_files import State

DATA = Path(__file__).parent / "data"
HOUR = RunConfig("small", "runs/small", ("train",), "1:00:00", 3600.0)

Answer = Callable[[list[str]], str]


class Slurm:
    """Answers as told, by the first two words of a command, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.jobs = 100
        self.partition = (DATA / "partition-22.05.txt").read_text()
        self.against: str | None = None
        self.full_after = 99

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(list(command))
        if command[0] == "scontrol":
            return " ".join(self.partition.split())
        if "--test-only" in command:
            if self.against is not None:
                raise SchedulerError("SLURM refused", found=self.against)
            return ""
        self.jobs += 1
        if self.jobs > 100 + self.full_after:
            raise SchedulerError("SLURM refused", found="Job violates accounting/QOS policy")
        return f"{self.jobs}\n"

    @property
    def submitted(self) -> list[list[str]]:
        return [command for command in self.asked if "--parsable" in command]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    stub = Slurm()
    monkeypatch.setattr(scheduler, "call", stub)
    monkeypatch.chdir(tmp_path)
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return stub


def partition(version: str) -> dict[str, str]:
    return parse_fields((DATA / f"partition-{version}.txt").read_text())


@pytest.mark.parametrize(
    ("version", "time_s", "nodes", "said"),
    [
        ("20.11", 5 * 86400.0, 3, None),
        ("20.11", 5 * 86400.0 + 60, 1, "time: over the limit of partition p: expected at most 5-00:00:00"),
        ("20.11", 60.0, 4, "nodes: more nodes than in a job of partition p: expected at most 3, found 4"),
        ("22.05", 3600.0, 4, None),
        ("22.05", 7200.0, 1, "expected at most 01:00:00"),
        ("22.05", 60.0, 5, "expected at most 4, found 5"),
        ("23.11-down", 60.0, 1, "partition: closed: partition p: expected UP, found DOWN"),
        ("24.11", 1e9, 7, None),
        ("25.05", 6.25 * 86400, 1, None),
        ("25.05", 7 * 86400.0, 1, "expected at most 6-06:00:00"),
    ],
)
def test_a_partition_of_any_version(version: str, time_s: float, nodes: int, said: str | None) -> None:
    config = dataclasses.replace(HOUR, time_s=time_s, min_nodes=nodes, max_nodes=nodes + 1)
    fault = submission.partition_fault(config, "p", partition(version))
    assert fault is None if said is None else fault is not None and said in str(fault)


def test_a_range_of_nodes_needs_room_for_its_smallest(slurm: Slurm) -> None:
    submission.prepare(dataclasses.replace(HOUR, min_nodes=4, max_nodes=100))
    with pytest.raises(UsageError, match="more nodes"):
        submission.prepare(dataclasses.replace(HOUR, min_nodes=5, max_nodes=100))


def test_the_partition_is_the_run_s_or_the_site_s_or_the_default(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_for(config: RunConfig) -> list[str]:
        slurm.asked.clear()
        submission.prepare(config)
        return [" ".join(command[3:]) for command in slurm.asked if command[0] == "scontrol"]

    assert asked_for(HOUR) == ["partition", "partition low"]
    monkeypatch.setenv("SBATCH_PARTITION", "a,b")
    assert asked_for(HOUR) == ["partition a", "partition b"]
    assert asked_for(dataclasses.replace(HOUR, partition="c")) == ["partition c"]


def test_one_of_several_partitions_will_do(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"a": partition("23.11-down"), "b": partition("22.05")}
    monkeypatch.setattr(scheduler, "show_partition", fields.__getitem__)
    submission.prepare(dataclasses.replace(HOUR, partition="a,b"))
    with pytest.raises(UsageError, match="closed: partition a"):
        submission.prepare(dataclasses.replace(HOUR, partition="a,a"))


def test_time_to_train(slurm: Slurm) -> None:
    submission.prepare(dataclasses.replace(HOUR, warn_s=1799))
    with pytest.raises(UsageError, match=r"time: .*expected more than 3600 s, .* found 1:00:00 \(3600 s\)"):
        submission.prepare(dataclasses.replace(HOUR, warn_s=1800))


@pytest.mark.parametrize(
    ("save_s", "step_s", "warn_s"),
    [(None, None, 120), (None, 3.0, 120), (0.1, 0.1, 71), (100.0, 4.2, 275), (0.0, None, 70)],
)
def test_the_warning_goes_by_what_was_measured(
    slurm: Slurm, save_s: float | None, step_s: float | None, warn_s: int
) -> None:
    """A step, two saves and ten seconds; and a minute, by which SLURM may be off."""
    state = State("waiting", "preempted", "1.0", save_s=save_s, step_s=step_s)
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/state.json").write_text(json.dumps(dataclasses.asdict(state)))
    assert submission.warn_time_s(HOUR) == warn_s
    assert submission.warn_time_s(dataclasses.replace(HOUR, warn_s=33)) == 33
    assert f"#SBATCH --signal=B:USR1@{warn_s}\n" in submission.prepare(HOUR).script


def test_a_new_run_is_told_two_minutes_before() -> None:
    assert submission.warn_time_s(HOUR) == 120


def test_the_site_s_variables_must_be_there(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("site.env").write_text(
        "export SBATCH_PARTITION=low\n  export SBATCH_ACCOUNT=x\n# export SBATCH_QOS=y\nexport OTHER=1\n"
    )
    config = dataclasses.replace(HOUR, env_file="site.env")
    with pytest.raises(UsageError, match=r"site.env: .*expected SBATCH_ACCOUNT, SBATCH_PARTITION .*source site.env"):
        submission.prepare(config)
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    monkeypatch.setenv("SBATCH_ACCOUNT", "")
    submission.prepare(config)


def test_what_the_run_says_comes_before_what_the_site_says(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """To sbatch, the environment comes before the script."""
    names = ("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_GPUS_PER_NODE", "SBATCH_NO_REQUEUE", "SBATCH_QOS")
    for name in names:
        monkeypatch.setenv(name, "x")
    config = dataclasses.replace(HOUR, partition="low", gpus_per_node="4")
    submission.submit(submission.prepare(config))
    wins = ["--time=1:00:00", "--partition=low", "--requeue", "--gpus-per-node=4"]
    assert slurm.submitted == [["sbatch", "--parsable", *wins, "runs/small/job.sbatch"]]
    assert slurm.asked[-2][:-1] == ["sbatch", "--test-only", *wins]
    with pytest.raises(UsageError, match="unset SBATCH_GPUS_PER_NODE"):
        submission.prepare(dataclasses.replace(HOUR, gpus_per_node="all"))


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/scratch tmpfs rw 0 0
beegfs /my\\040data beegfs rw 0 0
overlay /mnt overlay rw 0 0
lustre /mnt lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/opt/runs", "ext4"),
        ("/home/me/runs/x", "nfs4"),
        ("/home/me/scratch/x", "tmpfs"),
        ("/homestead", "ext4"),
        ("/my data/x", "beegfs"),
        ("/mnt/x", "lustre"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert submission.file_system(Path(path), MOUNTS) == kind


def test_where_no_mounts_are_told() -> None:
    assert submission.file_system(Path("/x"), "") == ""


def test_a_disk_of_one_machine_is_warned_of_when_there_may_be_several(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_mounts", lambda: "/dev/sda1 / xfs rw 0 0\n")
    (warning,) = submission.prepare(dataclasses.replace(HOUR, max_nodes=2)).warnings
    assert "runs/small" in warning and "xfs" in warning
    assert submission.prepare(HOUR).warnings == ()
    monkeypatch.setattr(submission, "_mounts", lambda: "fs / fuse.mountpoint rw 0 0\n")
    assert submission.prepare(dataclasses.replace(HOUR, max_nodes=2)).warnings == ()


def test_further_warnings(slurm: Slurm) -> None:
    (warning,) = submission.prepare(dataclasses.replace(HOUR, requeue=False)).warnings
    assert "--chain" in warning
    assert submission.prepare(dataclasses.replace(HOUR, requeue=False), chain=2).warnings == ()
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/DONE").touch()
    (warning,) = submission.prepare(HOUR).warnings
    assert "runs/small/DONE" in warning and "delete" in warning


def test_a_folder_that_cannot_be(slurm: Slurm) -> None:
    Path("runs").touch()
    with pytest.raises(UsageError, match=r"run: cannot be written: .*runs, a file"):
        submission.prepare(HOUR)


def test_a_state_that_is_not_ours(slurm: Slurm) -> None:
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/state.json").write_text("[]")
    with pytest.raises(Exception, match="not a file of reshard's"):
        submission.prepare(HOUR)


def test_what_slurm_has_against_the_script(slurm: Slurm) -> None:
    slurm.against = "sbatch: error: Invalid directive found in batch script: b"
    with pytest.raises(SchedulerError, match=r"SLURM would not take this job: .*Invalid directive"):
        submission.prepare(HOUR)
    # So it says of nodes that are only drained, too.
    slurm.against = "allocation failure: Requested node configuration is not available"
    (warning,) = submission.prepare(HOUR).warnings
    assert "Requested node configuration" in warning


def test_one_job(slurm: Slurm) -> None:
    prepared = submission.prepare(HOUR)
    assert not Path("runs").exists(), "nothing is written before it is submitted"
    assert submission.submit(prepared) == ["101"]
    assert slurm.submitted == [["sbatch", "--parsable", "runs/small/job.sbatch"]]
    assert Path("runs/small/job.sbatch").read_text() == prepared.script
    assert Path("runs/small/logs").is_dir()


def test_a_chain_waits_for_the_one_before_and_is_of_one_name(slurm: Slurm) -> None:
    prepared = submission.prepare(HOUR, chain=3)
    assert submission.submit(prepared) == ["101", "102", "103"]
    export = f"--export=ALL,RESHARD_CHAIN={prepared.chain}"
    assert slurm.submitted == [
        ["sbatch", "--parsable", export, "runs/small/job.sbatch"],
        ["sbatch", "--parsable", "--dependency=singleton,afterany:101", export, "runs/small/job.sbatch"],
        ["sbatch", "--parsable", "--dependency=singleton,afterany:102", export, "runs/small/job.sbatch"],
    ]
    assert submission.prepare(HOUR, chain=3).chain != prepared.chain


def test_a_chain_that_is_cut_short_says_what_is_in_the_queue(slurm: Slurm) -> None:
    slurm.full_after = 2
    with pytest.raises(SchedulerError, match=r"(?s)QOS policy.*scancel 101 102"):
        submission.submit(submission.prepare(HOUR, chain=4))


def test_a_folder_that_is_full(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("cannot write: no space left")

    monkeypatch.setattr(submission, "write_atomic", refuse)
    with pytest.raises(StorageError):
        submission.submit(submission.prepare(HOUR))
    assert slurm.submitted == []


@pytest.fixture
def config(slurm: Slurm) -> Path:
    path = Path("run.yaml")
    path.write_text("name: small\ncommand: train\ntime: 1:00:00\n")
    return path


def test_submit_as_it_is_typed(slurm: Slurm, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "submit", "--config", str(config), "--chain", "2"]) == 0
    out, err = capsys.readouterr()
    assert (
        out == ("submitted jobs 101 102 (small): told 120 s before the time limit; see runs/small/events.jsonl\n")
        and not err
    )


def test_submit_as_json(slurm: Slurm, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "submit", "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "small",
        "run": "runs/small",
        "script": "runs/small/job.sbatch",
        "warn_s": 120,
        "chain": None,
        "jobs": ["101"],
        "dry_run": False,
        "warnings": [],
    }


def test_a_dry_run_prints_the_script_and_what_would_be(
    slurm: Slurm, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "submit", "--config", str(config), "--dry-run", "--chain", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n") and "nothing was submitted" in err
    assert "sbatch --parsable --dependency=singleton,afterany:JOB" in err
    assert slurm.submitted == [] and not Path("runs").exists()
    assert main(["slurm", "render", "--config", str(config)]) == 0
    rendered, err = capsys.readouterr()
    assert rendered == out and err == "before sbatch: mkdir -p runs/small/logs (reshard slurm submit makes it)\n"


def test_faults_as_they_are_told(slurm: Slurm, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("1:00:00", "2:00:00"))
    assert main(["slurm", "submit", "--config", str(config), "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "time: over the limit of partition low: expected at most 01:00:00" in err
    for arguments in (["slurm"], ["slurm", "submit"], ["slurm", "submit", "--config", "x", "--chain", "0"]):
        assert main(arguments) == 2
