"""What the surroundings say: the one place where environment variables are read."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from reshard.errors import UsageError

DEFAULT_TIMEOUT_S = 7200.0


def attempt_token() -> str:
    """A name for this attempt at the run, the same for all its ranks once rank 0 has handed it on.

    ``RESHARD_ATTEMPT`` if set; under SLURM the job, its restart count and a random part; else a random name. A process
    keeps its name: what it saves by hand is not fenced off by its own Checkpointer.
    """
    if (token := os.environ.get("RESHARD_ATTEMPT")) and not is_wrapped_elsewhere():
        return token
    if job := os.environ.get("SLURM_JOB_ID"):
        # The random part, because torchrun restarts workers within one job: with one name, no fence between them.
        return f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.{_random_name()[:6]}"
    return _random_name()


@functools.cache
def _random_name() -> str:
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Orders:
    """What whoever started a run wants otherwise than its configuration says; None where nothing is said.

    Attributes:
        checkpoints: ``RESHARD_CHECKPOINTS``, the folder to save in and to resume from.
        trace: ``RESHARD_TRACE``, the file for the trace.
        steps: ``RESHARD_STEPS``, how many optimizer steps to train in all.
        interval: ``RESHARD_INTERVAL``, steps between saves.
        attempt_folder: ``RESHARD_ATTEMPT_FOLDER``, where the run and ``reshard slurm wrap`` leave each other messages;
            not if that is another job's, whose environment came along when this one was submitted from it.
        end_time_s: ``SLURM_JOB_END_TIME``, which recent SLURM sets: when the job will be ended, in Unix time.
    """

    checkpoints: str | None = None
    trace: str | None = None
    steps: int | None = None
    interval: int | None = None
    attempt_folder: str | None = None
    end_time_s: int | None = None

    @classmethod
    def given(cls) -> Orders:
        """From this process's environment.

        Raises:
            UsageError: a variable that should hold a count does not.
        """
        checkpoints, trace, attempt_folder = (
            os.environ.get(f"RESHARD_{name}") or None for name in ("CHECKPOINTS", "TRACE", "ATTEMPT_FOLDER")
        )
        end_time_s = os.environ.get("SLURM_JOB_END_TIME", "")
        return cls(
            checkpoints,
            trace,
            _count("RESHARD_STEPS"),
            _count("RESHARD_INTERVAL"),
            None if is_wrapped_elsewhere() else attempt_folder,
            int(end_time_s) if end_time_s.isdigit() else None,
        )

    def variables(self) -> dict[str, str]:
        """What ``reshard prove`` orders, for the environment of a process that is to follow it; what is not said is
        taken out, as an empty text.
        """
        values = {"CHECKPOINTS": self.checkpoints, "TRACE": self.trace, "STEPS": self.steps, "INTERVAL": self.interval}
        return {f"RESHARD_{name}": "" if value is None else str(value) for name, value in values.items()}


def is_wrapped_elsewhere() -> bool:
    """Whether what ``reshard slurm wrap`` left in the environment is meant for another job, from which this one was
    submitted: sbatch hands its caller's environment on.
    """
    wrapped, job = os.environ.get("RESHARD_ATTEMPT_JOB"), os.environ.get("SLURM_JOB_ID")
    return bool(wrapped and job and wrapped != job)


@dataclass(frozen=True)
class SlurmPlace:
    """Where in a SLURM job this process runs.

    Attributes:
        job_id: of the job, the same after a requeue.
        address: what SLURM's commands take for this job alone: of a task of a job array, not the job's own number,
            which may stand for all of them.
        restarts: how often it was requeued, if the environment is this job's.
        job_name: as given at submission.
        in_task: whether srun started this process, rather than SLURM as the batch script.
        rank, ranks: of the task among those of its step.
        local_rank, local_ranks: the same on this node.
        node: the node's number in the step.
    """

    job_id: str
    address: str
    restarts: int
    job_name: str
    in_task: bool
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    node: int = 0

    @property
    def attempt(self) -> str:
        """The attempt's name, the same for all its processes."""
        return f"{self.address}.{self.restarts}"

    @classmethod
    def given(cls, step: str | None = None) -> SlurmPlace | None:
        """From this process's environment; None outside of SLURM.

        Args:
            step: ``batch`` or a step's number, if that is known otherwise: a job that was submitted from a step has
                that step's variables.
        """
        job_id = os.environ.get("SLURM_JOB_ID")
        if not job_id:
            return None
        numbers = {
            field: int(text)
            for field, name in (
                ("restarts", "SLURM_RESTART_COUNT"),
                ("rank", "SLURM_PROCID"),
                ("ranks", "SLURM_STEP_NUM_TASKS"),
                ("local_rank", "SLURM_LOCALID"),
                ("node", "SLURM_NODEID"),
            )
            if (text := os.environ.get(name, "")).isdigit()
        }
        in_task = (step or os.environ.get("SLURM_STEP_ID", "")).isdigit()
        array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
        tasks = _expanded(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")) if in_task else []
        node = numbers.get("node", 0)
        return cls(
            job_id,
            f"{array}_{task}" if array and task else job_id,
            numbers.pop("restarts", 0),
            os.environ.get("SLURM_JOB_NAME", job_id),
            in_task,
            **(numbers if in_task else {}),
            local_ranks=tasks[node] if node < len(tasks) else 1,
        )

    def torch_variables(self) -> dict[str, str]:
        """What torchrun would tell a rank, of a task that is one; what is set already wins."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_ranks,
        }
        return {name: os.environ.get(name) or str(value) for name, value in values.items()}


def _expanded(counts: str) -> list[int]:
    """``2(x3),1`` as SLURM writes it: 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of some variables that this process's environment does not have, or has from another job."""
    return {name: value for name, value in variables.items() if is_wrapped_elsewhere() or not os.environ.get(name)}


def sbatch_variables() -> dict[str, str]:
    """What sbatch would read: each ``SBATCH_`` variable is one of its options."""
    return {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}


def chain_name() -> str | None:
    """``RESHARD_CHAIN``: what the jobs of one dependency chain have in common."""
    return os.environ.get("RESHARD_CHAIN") or None


def _count(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UsageError("not a count", key=name, expected="a whole number above 0", found=repr(text))
    return int(text)


def inherited(variables: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """The environment for a child process: this process's own, less some, and these."""
    return {**{name: value for name, value in os.environ.items() if name not in without}, **variables}


def control_timeout_s() -> float:
    """How long ranks wait for each other around a save or a load: ``RESHARD_TIMEOUT_S``, else two hours.

    Raises:
        UsageError: the variable is not a number of seconds.
    """
    text = os.environ.get("RESHARD_TIMEOUT_S")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < 1e9:
        raise UsageError(
            "not a time", key="RESHARD_TIMEOUT_S", expected="a number of seconds above 0", found=repr(text)
        )
    return timeout_s


def ranks_per_node(world_size: int) -> int:
    """Ranks on this node, as torchrun says; all of them where nothing says otherwise."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() and int(value) > 0 else world_size


def local_processes() -> int:
    """How many processes of this launch run on this machine, as torchrun says; 1 where nothing says otherwise."""
    return ranks_per_node(1)


def launched_as() -> tuple[int, int, str]:
    """Rank, number of ranks and a name of the launch that they have in common, as torchrun says; (0, 1, ...) without.

    RANK alone does not make a launch: schedulers set it for every pod of a job, whatever runs there.

    Raises:
        UsageError: the variables contradict each other.
    """
    names = ("RANK", "WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    if not os.environ.get("TORCHELASTIC_RUN_ID"):
        return 0, 1, _random_name()
    if not all(value.isdigit() for value in values) or not int(values[0]) < int(values[1]):
        raise UsageError("not a rank of a launch", key=" ".join(names), found=" ".join(map(repr, values)))
    # The restart count, because the ranks that torchrun restarts must not go by what the ones before left.
    parts = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT")
    name = hashlib.sha256("\n".join(os.environ.get(part, "") for part in parts).encode()).hexdigest()
    return int(values[0]), int(values[1]), name[:12]


def is_follower() -> bool:
    """Whether another process of the same launch, rank 0, speaks for this one."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID")) and os.environ.get("RANK", "0") != "0"


def want_one_numpy_thread() -> None:
    """Asks numpy not to start threads for linear algebra, of which there is none: they take a fifth of a short verb."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def want_deterministic_cublas() -> None:
    """Asks cuBLAS for repeatable results; it reads the variable when it is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
