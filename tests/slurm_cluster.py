"""A real SLURM of a few emulated nodes for tests, and runs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAB = ROOT / "tests" / "cluster" / "slurm_lab.sh"
PROGRAM = ROOT / "tests" / "data" / "slurm_run.py"
STEPS = 40
NODES = 10
SETTINGS = {
    "KILLWAIT": "6",
    "SLURMD_TIMEOUT": "6",
    "CRED_EXPIRE": "3",
    "GRACE": "30",
    # Other numbers than those of another cluster on this machine, whose control groups have the same names.
    "EXTRA_CONF": f"FirstJobId={os.getpid() % 50000 + 1000}",
}


def why_not() -> str | None:
    """Why there can be no SLURM here; None where there can."""
    if os.geteuid() != 0:
        return "a SLURM of our own needs root"
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter") if not shutil.which(name)]
    return f"SLURM is not installed: no {', '.join(missing)}" if missing else None


def wait_until(what: str, is_true: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    until_s = time.monotonic() + timeout_s
    while not (value := is_true()):
        assert time.monotonic() < until_s, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.2)
    return value


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RESHARD"))},
            **SETTINGS,
            "SLURMLAB": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.submitted: list[str] = []
        self._held_since_s: dict[str, float] = {}

    def lab(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            [str(LAB), *words], env=self.environment, capture_output=True, text=True, timeout=60, cwd=self.folder
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def call(self, *command: str, check: bool = True) -> str:
        return self.lab("exec", *command, check=check)

    def clear(self, jobs: Sequence[str]) -> None:
        """These jobs gone."""
        for job in jobs:
            self.call("scancel", job, check=False)
        wait_until("these jobs are gone", lambda: not set(jobs) & set(self.call("squeue", "-h", "-o%i").split()))

    def hurry(self) -> None:
        """SLURM holds requeued jobs back for a while; most of it teaches nothing here."""
        pending = self.call("squeue", "-h", "-tPD", "-o%i %r").splitlines()
        held = {line.split()[0] for line in pending if line.endswith("BeginTime")}
        now_s = time.monotonic()
        self._held_since_s = {job: self._held_since_s.get(job, now_s) for job in held}
        for job, since_s in self._held_since_s.items():
            if now_s - since_s > 2:
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def occupy(self, node: str) -> str:
        """Takes a node away from whoever has it, as a job of higher priority would; its job's id."""
        return self.sbatch(["--partition=high", f"--nodelist={node}", "--exclusive", "--wrap=sleep 300"])

    def sbatch(self, words: Sequence[str]) -> str:
        self.submitted.append(self.call("sbatch", "--parsable", *words).strip())
        return self.submitted[-1]


def start(
    cluster: Cluster,
    folder: Path,
    *sbatch: str,
    wrap: Sequence[str] = ("--poll-s=1",),
    launch: str = "srun --ntasks-per-node=1 reshard slurm wrap --ranks -- python {arguments}",
    options: Sequence[str] = (),
    slow_s: float = 0.2,
) -> Job:
    """Submits a run of `slurm_run.py` under `reshard slurm wrap`; by default each task is a rank."""
    folder.mkdir(exist_ok=True)
    (folder / "slow").write_text(str(slow_s))
    line = launch.format(arguments=" ".join([f"'{PROGRAM}'", f"'{folder}'", str(STEPS), *options]))
    (folder / "job.sh").write_text(
        f"#!/usr/bin/env bash\nset -eu\nexec reshard slurm wrap --run '{folder}' {' '.join(wrap)} -- {line}\n"
    )
    usual = ["--requeue", "--open-mode=append", f"--output={folder}/log", f"--job-name={folder.parent.name}"]
    return Job(cluster, folder, cluster.sbatch([*usual, *sbatch, str(folder / "job.sh")]))


class Job:
    """A run of `slurm_run.py`, as its user sees it."""

    def __init__(self, cluster: Cluster, folder: Path, job_id: str) -> None:
        self.cluster, self.folder, self.id = cluster, folder, job_id

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in [*self.folder.glob("log"), *sorted(self.folder.glob("logs/*"))])

    @property
    def state(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line["event"] == event]

    @property
    def trace(self) -> list[dict[str, Any]]:
        path = self.folder / "trace.jsonl"
        # The last line may be in the making.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def show(self, name: str) -> str:
        """A field as scontrol tells it."""
        text = self.cluster.call("scontrol", "-o", "show", "job", self.id, check=False)
        return next((word.partition("=")[2] for word in text.split() if word.startswith(f"{name}=")), "")

    def trains(self, attempt: int, steps: int = 3) -> Job:
        """Waits until an attempt has trained some steps."""

        def has_trained() -> bool:
            return sum(row["attempt"].startswith(f"{self.id}.{attempt}") for row in self.trace) >= steps

        self._wait(f"attempt {attempt} trains", has_trained)
        return self

    def finishes(self, state: str) -> Job:
        """Lets the run go at full speed, and waits until the job has ended."""
        (self.folder / "slow").unlink(missing_ok=True)
        self.ends(state)
        return self

    def ends(self, state: str) -> Job:
        def has_ended() -> bool:
            return self.show("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        self._wait("the job ends", has_ended)
        assert self.show("JobState") == state, self.log
        return self

    def _wait(self, what: str, is_true: Callable[[], Any]) -> None:
        def ask() -> Any:
            self.cluster.hurry()
            return is_true()

        try:
            wait_until(what, ask, 90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}\n{self.show('JobState')} {self.show('Reason')}") from None
