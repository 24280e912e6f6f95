"""From a run's settings to jobs in the queue: what is looked at before, and what is then asked of SLURM."""

from __future__ import annotations

import math
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.cluster import scheduler
from reshard.cluster.job import duration_s
from reshard.cluster.render import LOG_FOLDER, render, sbatch_options
from reshard.cluster.run_config import ALL_GPUS, RunConfig
from reshard.environment import sbatch_variables
from reshard.errors import ReshardError, UsageError
from reshard.storage.durable import make_folder, write_atomic
from reshard.storage.run_files import DONE_FILE, lead_time_s, read_state

SCRIPT = "job.sbatch"

_UNKNOWN_WARN_S = 120
_LEAST_WARN_S = 60
# SLURM looks at the clock now and then: its signal may be off by as much.
_SIGNAL_SLACK_S = 60
_MOUNTS = Path("/proc/self/mounts")
_OWN_DISK = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")
_SITE_VARIABLE = re.compile(r"^\s*export\s+(SBATCH_[A-Z_]+)=", re.MULTILINE)


@dataclass(frozen=True)
class Submission:
    """Jobs that could be submitted.

    Attributes:
        config: what they are to be.
        script: the text of their batch script.
        warn_s: how long before their time limit they are told.
        chain: what the jobs of a chain have in common; None for a single job.
        jobs: how many there are.
        overrides: options for sbatch's command line, where the site's environment would win over the script.
        warnings: what may go wrong.
    """

    config: RunConfig
    script: str
    warn_s: int
    overrides: tuple[str, ...]
    chain: str | None
    jobs: int
    warnings: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where the script goes."""
        return Path(self.config.run, SCRIPT)

    def command(self, previous: str | None) -> list[str]:
        """What submits a job that comes after another."""
        command = ["sbatch", "--parsable", *self.overrides]
        if previous is not None:
            # An option here takes the place of the script's, so that one is named again.
            command.append(f"--dependency=singleton,afterany:{previous}")
        if self.chain is not None:
            command.append(f"--export=ALL,RESHARD_CHAIN={self.chain}")
        return [*command, str(self.path)]


def warn_time_s(config: RunConfig) -> int:
    """How long before its time limit the job is told: as configured, or by what earlier attempts have measured.

    Raises:
        CheckpointUnsound, StorageError: what the run is at cannot be read.
    """
    if config.warn_s is not None:
        return config.warn_s
    state = read_state(Path(config.run))
    if state is None or state.save_s is None:
        return _UNKNOWN_WARN_S
    return max(_LEAST_WARN_S, math.ceil(lead_time_s(state.save_s, state.step_s)) + _SIGNAL_SLACK_S)


def prepare(config: RunConfig, *, chain: int | None = None) -> Submission:
    """Looks at everything that would make the jobs fail later, and writes nothing.

    Args:
        config: what the job is to be.
        chain: how many jobs to submit, each after the one before; None for a single one.

    Raises:
        UsageError: the settings do not fit the cluster or each other, or the run's folder cannot be written.
        SchedulerError: SLURM does not take the script, or does not answer.
    """
    _require_folder(Path(config.run))
    warn_s = warn_time_s(config)
    script = render(config, warn_s=warn_s)
    require_time_to_save(config, warn_s)
    variables = sbatch_variables()
    require_site_settings(config, variables)
    _require_partition(config, variables)
    overrides = overriding_options(sbatch_options(config, warn_s), variables)
    warnings = (*_try_out(script, overrides), *_warnings(config, chain))
    name = None if chain is None else secrets.token_hex(6)
    return Submission(config, script, warn_s, tuple(overrides), name, chain or 1, warnings)


def submit(submission: Submission) -> list[str]:
    """Writes the script into the run's folder and submits it; the jobs' ids.

    Raises:
        SchedulerError, UsageError: as `reshard.cluster.scheduler.call`; which jobs of a chain are in the queue by then
            is in the details.
        StorageError: the run's folder cannot be written.
    """
    # sbatch does not make the folder of a job's log, and without it the job ends without a word.
    make_folder(Path(submission.config.run, LOG_FOLDER))
    write_atomic(submission.path, submission.script.encode())
    jobs: list[str] = []
    for _ in range(submission.jobs):
        try:
            jobs.append(scheduler.submit(submission.command(jobs[-1] if jobs else None)))
        except ReshardError as error:
            if jobs:
                error.details = (*error.details, f"submitted before: take them back with `scancel {' '.join(jobs)}`")
            raise
    return jobs


def require_time_to_save(config: RunConfig, warn_s: int) -> None:
    """Passes where a job has more than half its time before it is told to stop.

    Raises:
        UsageError: it has not.
    """
    if config.time_s <= 2 * warn_s:
        raise UsageError(
            "the time limit leaves no time to train",
            key="time",
            expected=f"more than {2 * warn_s} s, twice the {warn_s} s in which the job is told to save",
            found=f"{config.time} ({config.time_s:.0f} s)",
            hint="raise time, or lower warn_s",
        )


def require_site_settings(config: RunConfig, variables: Mapping[str, str]) -> None:
    """Passes where what the site's file exports for sbatch is set here, and does not contradict the settings.

    Raises:
        UsageError: sbatch would not see it, or a number of GPUs is set where all of a node are wanted.
    """
    if config.gpus_per_node == ALL_GPUS and "SBATCH_GPUS_PER_NODE" in variables:
        raise UsageError(
            "set, and gpus_per_node is all",
            key="SBATCH_GPUS_PER_NODE",
            found=variables["SBATCH_GPUS_PER_NODE"],
            hint="first: unset SBATCH_GPUS_PER_NODE",
        )
    if config.env_file is None:
        return
    try:
        text = Path(config.env_file).read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", path=config.env_file, key="env_file") from error
    missing = sorted(set(_SITE_VARIABLE.findall(text)) - variables.keys())
    if missing:
        raise UsageError(
            "exports what sbatch reads, and is not sourced here",
            path=config.env_file,
            expected=f"{', '.join(missing)} in the environment",
            found="none of it" if len(missing) > 1 else "not",
            hint=f"first: source {config.env_file}",
        )


def overriding_options(options: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Those of a script's options that a variable stands against: to sbatch, the environment comes before the script,
    and its command line before both.
    """
    return [option for option in options if any(name in variables for name in _variables_of(option))]


def _variables_of(option: str) -> list[str]:
    name = option.split("=")[0].lstrip("-").removeprefix("no-").replace("-", "_").upper()
    return [f"SBATCH_{name}", f"SBATCH_NO_{name}", *(["SBATCH_TIMELIMIT"] if name == "TIME" else [])]


def partition_fault(config: RunConfig, name: str, fields: Mapping[str, str]) -> UsageError | None:
    """Why a partition would not run the job; None where nothing is seen that keeps it from doing so.

    Args:
        config: what the job is to be.
        name: of the partition.
        fields: what `scontrol show partition` says of it.
    """

    def fault(what: str, key: str, expected: str, found: str, hint: str) -> UsageError:
        return UsageError(f"{what} partition {name}", key=key, expected=expected, found=found, hint=hint)

    state = fields.get("State", "UP")
    if state != "UP":
        return fault("closed:", "partition", "UP", state, "use another, or wait; `sinfo` lists them")
    limit_s = duration_s(fields.get("MaxTime", "UNLIMITED"))
    if limit_s is not None and config.time_s > limit_s:
        hint = "lower time (the job goes on after it), or use another partition"
        return fault("over the limit of", "time", f"at most {fields['MaxTime']}", config.time, hint)
    for field in ("MaxNodes", "TotalNodes"):
        most = fields.get(field, "UNLIMITED")
        if most.isdigit() and config.min_nodes > int(most):
            hint = "lower nodes, or use another partition"
            return fault("more nodes than in a job of", "nodes", f"at most {most}", str(config.min_nodes), hint)
    return None


def file_system(path: Path, mounts: str) -> str:
    """The type of file system that holds a path, which need not exist; empty where that is not told.

    Args:
        path: absolute, with links resolved.
        mounts: the text of /proc/self/mounts.
    """
    found = (-1, "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        # Blanks and the like are in octal there.
        place = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point))
        # Of two mounts on one point, the later hides the earlier.
        if path.is_relative_to(place) and len(place.parts) >= found[0]:
            found = (len(place.parts), kind)
    return found[1]


def _require_folder(run: Path) -> None:
    folder = run.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            "cannot be written",
            path=run,
            key="run",
            found=f"{folder}, " + ("read-only for you" if folder.is_dir() else "a file"),
            hint="name a folder of yours on a file system that all nodes share",
        )


def _require_partition(config: RunConfig, variables: Mapping[str, str]) -> None:
    """One of several will do, as for SLURM."""
    names = config.partition or variables.get("SBATCH_PARTITION") or scheduler.default_partition()
    if names is None:
        return
    faults = [partition_fault(config, name, scheduler.show_partition(name)) for name in names.split(",")]
    if all(faults):
        assert faults[0] is not None
        raise faults[0]


def _try_out(script: str, overrides: Sequence[str]) -> list[str]:
    """What SLURM has against a script for now, without submitting it.

    Raises:
        SchedulerError: it would not take it at all.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        try:
            scheduler.call(["sbatch", "--test-only", *overrides, file.name])
        except scheduler.SchedulerError as error:
            # Said of nodes that are drained or down, too, and such a job is taken and waits for them.
            if "not available" in str(error.found):
                return [f"there is nowhere to run it now: {error.found}"]
            raise scheduler.SchedulerError(
                "SLURM would not take this job",
                found=error.found,
                hint="see `sinfo`, and `reshard slurm render` for the script",
            ) from error
    return []


def _warnings(config: RunConfig, chain: int | None) -> list[str]:
    warnings = []
    run = Path(config.run)
    kind = file_system(run.resolve(), _mounts())
    if config.max_nodes > 1 and kind in _OWN_DISK:
        warnings.append(
            f"{run}: its file system ({kind}) may be this machine's own; all nodes must see it under the same path"
        )
    if not config.requeue and chain is None:
        warnings.append("requeue is false: after a preemption or the time limit nothing goes on by itself; see --chain")
    if (run / DONE_FILE).exists():
        warnings.append(f"{run / DONE_FILE}: the run is done, so the job will end at once; delete the file to go on")
    return warnings


def _mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="replace")
    except OSError:
        return ""
