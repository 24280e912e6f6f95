"""A job as `scontrol show job` describes it: read, not asked for."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from reshard.errors import UsageError

# Values hold blanks and equals signs (`GRES=gpu:2(IDX:0-1)`, a script's name), so a field begins at a known shape only.
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:.]*)=")
_ABSENT = frozenset({"", "(null)", "None", "N/A", "Unknown", "UNLIMITED"})
_ENDING = frozenset(
    {
        *("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE"),
        *("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"),
    }
)


@dataclass(frozen=True)
class Job:
    """What the policy goes by.

    Attributes:
        job_id: as SLURM counts.
        state: `RUNNING`, `COMPLETING`, `PENDING`, ...
        reason: `TimeLimit`, `None`, ...
        restarts: how often it was requeued.
        may_requeue: whether `scontrol requeue` is allowed for it.
        preempt_time_s: when it was chosen for preemption (Unix time); None if it was not.
        end_time_s: when it will be ended (Unix time); None if never.
        nodes: as SLURM abbreviates them, `n[1-3]`.
        node_count: how many these are.
        gpus: of all its nodes together; None where that is not told.
        fields: everything, as text.
    """

    job_id: str
    state: str
    reason: str
    restarts: int
    may_requeue: bool
    preempt_time_s: float | None
    end_time_s: float | None
    nodes: str
    node_count: int
    gpus: int | None = None
    fields: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def is_ending(self) -> bool:
        """Whether SLURM is taking the job's processes away, or has."""
        return self.state in _ENDING

    @property
    def hit_time_limit(self) -> bool:
        return self.state == "TIMEOUT" or (self.is_ending and self.reason == "TimeLimit")


def parse_job(text: str) -> Job:
    """From the output of `scontrol show job ID`, on one line or on many, of any version seen (20.11 to 24.05).

    Raises:
        UsageError: it does not describe a job.
    """
    fields = parse_fields(text)
    try:
        nodes = _present(fields.get("NodeList", "")) or ""
        return Job(
            job_id=fields["JobId"],
            state=fields["JobState"].split(",")[0].split()[0],
            reason=fields.get("Reason", "None"),
            restarts=int(fields.get("Restarts", "0")),
            may_requeue=fields.get("Requeue", "0") == "1",
            preempt_time_s=_time_s(fields.get("PreemptTime", "")),
            end_time_s=_time_s(fields.get("EndTime", "")),
            nodes=nodes,
            node_count=int(fields.get("NumNodes", "0").split("-")[0]),
            gpus=_gpus(text),
            fields=fields,
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            "not the description of a job",
            key="scontrol show job",
            found=repr(text[:80]),
            hint="is scontrol SLURM's own?",
        ) from error


def parse_fields(text: str) -> dict[str, str]:
    """`Name=value` pairs as scontrol prints them; the first of a name wins."""
    fields: dict[str, str] = {}
    starts = list(_FIELD.finditer(text))
    for here, after in zip(starts, [*starts[1:], None], strict=False):
        value = text[here.end() : after.start() if after is not None else len(text)].strip()
        fields.setdefault(here[1], value)
    return fields


def duration_s(text: str) -> float | None:
    """SLURM's ways to write a duration (`30`, minutes; `30:00`; `1:30:00`; `2-12`; `2-12:30:00`); None for none.

    Raises:
        UsageError: it is none of these.
    """
    if text in _ABSENT or text.lower() in ("infinite", "unlimited"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UsageError(
            "not a time", expected="minutes, [HH:]MM:SS, or D-HH[:MM[:SS]]", found=repr(text), hint="such as 2-12:00:00"
        )
    days, *rest = (None if part is None else int(part) for part in match.groups())
    first, second, third = rest
    if days is not None or third is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    return float((days or 0) * 86400 + (hours or 0) * 3600 + (minutes or 0) * 60 + (seconds or 0))


def _present(text: str) -> str | None:
    return None if text in _ABSENT else text


def _time_s(text: str) -> float | None:
    """Of a time that scontrol printed: Unix time where it was asked for it, else local time."""
    if _present(text) is None:
        return None
    if text.isdigit():
        return float(text)
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def _gpus(text: str) -> int | None:
    """From the lines that `scontrol show job -d` has a node, or, where it has none, from what was allocated in all."""
    a_node = re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", text)
    counts = [
        _host_count(nodes) * sum(int(count) for count in re.findall(r"gpu(?::[^:(,]+)?:(\d+)", gres))
        for nodes, gres in a_node
    ]
    if sum(counts):
        return sum(counts)
    total = re.search(r"\b(?:AllocTRES|TRES)=\S*?gres/gpu=(\d+)", text)
    return int(total[1]) if total else None


def _host_count(nodes: str) -> int:
    """How many nodes `n[1-3,7],m1` are."""
    count = 0
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", nodes):
        inside = re.search(r"\[([^\]]*)\]", name)
        for part in inside[1].split(",") if inside else [""]:
            first, _, last = part.partition("-")
            count += int(last) - int(first) + 1 if last else 1
    return count
