"""Questions to SLURM and requests of it, by its own commands."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from reshard.cluster.job import Job, parse_fields, parse_job
from reshard.errors import ReshardError, UsageError
from reshard.processes import run

_TIMEOUT_S = 30.0
_GONE_NODE = re.compile(r"\*|DOWN|FAIL|NOT_RESPONDING|POWER", re.IGNORECASE)


class SchedulerError(ReshardError):
    """SLURM refused, or did not answer."""

    exit_code = 2
    usual_hint = "run that by hand, on a machine of the cluster; is its controller up (`sinfo`)?"


def call(command: Sequence[str]) -> str:
    """Runs one of SLURM's commands; what it printed.

    Raises:
        SchedulerError: it failed, in SLURM's own words.
        UsageError: it is not there.
    """
    # Times as Unix time: as local time they would be ambiguous when clocks are set back.
    output = run(command, timeout_s=_TIMEOUT_S, variables={"SLURM_TIME_FORMAT": "%s"})
    if output.status:
        said = " ".join((output.errors or output.text).split())
        raise SchedulerError(
            "SLURM refused", path=" ".join(command), found=said[:500] or f"exit status {output.status}"
        )
    return output.text


def show_job(job_id: str) -> Job:
    """A job's state.

    Raises:
        SchedulerError, UsageError: as `call`, or it is not known.
    """
    return parse_job(call(["scontrol", "--details", "--oneliner", "show", "job", job_id]))


def find_job(job_id: str, *, tries: int = 1, pause_s: float = 2.0) -> Job | None:
    """A job's state; None where SLURM does not answer, as a busy controller may for a while."""
    for turn in range(tries):
        try:
            return show_job(job_id)
        except ReshardError:
            if turn + 1 < tries:
                time.sleep(pause_s)
    return None


def requeue(job_id: str) -> None:
    """Puts a job back into the queue; SLURM ends its processes, this one included.

    Raises:
        SchedulerError, UsageError: as `call`.
    """
    call(["scontrol", "requeue", job_id])


def lost_nodes(nodes: str) -> list[str]:
    """Those of some nodes (`n[1-3]`) that SLURM has lost, or does not hear from.

    Raises:
        SchedulerError, UsageError: as `call`.
    """
    lines = call(["sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %T"]).splitlines()
    return sorted({line.split()[0] for line in lines if line.split()[1:] and _GONE_NODE.search(line.split()[1])})


def host_names(nodes: str) -> list[str]:
    """`n[1-3]`, spelt out.

    Raises:
        SchedulerError, UsageError: as `call`.
    """
    return call(["scontrol", "show", "hostnames", nodes]).split()


def show_partition(name: str) -> dict[str, str]:
    """What `scontrol show partition` says of one.

    Raises:
        UsageError: there is none of that name.
        SchedulerError: as `call`.
    """
    try:
        return parse_fields(call(["scontrol", "--oneliner", "show", "partition", name]))
    except SchedulerError as error:
        names = [line.strip() for line in call(["sinfo", "--noheader", "--format", "%R"]).splitlines()]
        raise UsageError(
            "no such partition", key="partition", expected=f"one of {', '.join(sorted(set(names)))}", found=name
        ) from error


def show_config() -> dict[str, str]:
    """What `scontrol show config` says of the cluster.

    Raises:
        SchedulerError, UsageError: as `call`.
    """
    pairs = (line.partition("=") for line in call(["scontrol", "show", "config"]).splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def submit(command: Sequence[str]) -> str:
    """Runs `sbatch --parsable ...`; the new job's id.

    Raises:
        SchedulerError, UsageError: as `call`.
    """
    # With several clusters: "id;cluster".
    return call(command).strip().partition(";")[0]


def default_partition() -> str | None:
    """The partition of jobs that name none; None where there is none.

    Raises:
        SchedulerError, UsageError: as `call`.
    """
    for line in call(["scontrol", "--oneliner", "show", "partition"]).splitlines():
        fields = parse_fields(line)
        if fields.get("Default") == "YES":
            return fields["PartitionName"]
    return None
